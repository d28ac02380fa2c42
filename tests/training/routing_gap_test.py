"""Words for a routing gap: up to 0.3% of the loss is negligible, 0.05 nats is large."""

import math

import pytest

from moddepth_jax.training import routing_gap

COSTS, GAINS = 'the causal rule costs loss', 'the causal rule does better than top-C'


@pytest.mark.parametrize(
    ('gap', 'loss', 'share', 'words'),
    [
        (0.0099, 3.4, '+0.29%', 'negligible'),
        (-0.0099, 3.4, '-0.29%', 'negligible'),
        (0.0099, 1.3, '+0.76%', COSTS),
        (-0.0499, 1.3, '-3.84%', GAINS),
        (0.05, 1.3, '+3.85%', f'large, 0.05 nats or more: {COSTS}; compare models by both losses'),
        (-0.05, 1.3, '-3.85%', f'large, 0.05 nats or more: {GAINS}; compare models by both losses'),
    ],
)
def test_description_of_the_routing_gap(gap, loss, share, words):
    line = f'routing gap {gap:+.4f} nats ({share} of the loss): {words}'
    assert routing_gap.describe(gap, loss) == line
    assert routing_gap.is_large(gap) == words.startswith('large')


def test_a_gap_that_is_not_finite_or_missing():
    assert 'undefined' in routing_gap.describe(math.nan, math.nan)
    assert not routing_gap.is_large(None)
