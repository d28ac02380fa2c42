"""Words for a routing gap: up to 0.01 nats is negligible, 0.05 is large in either direction."""

import math

from moddepth_jax.analysis import routing_gap


def test_description_of_the_routing_gap():
    gaps = (0.0099, -0.0099, 0.02, -0.02, 0.05, -0.05, math.nan)
    words = [routing_gap.describe(gap).split(';')[0] for gap in gaps]
    costs, gains = 'the causal rule costs loss', 'the causal rule does better than top-C'
    assert words[:4] == ['negligible', 'negligible', costs, gains]
    assert words[4:6] == [f'large: {costs}', f'large: {gains}']
    assert words[6].startswith('undefined')
    assert [routing_gap.is_large(gap) for gap in (*gaps[:6], None)] == [False] * 4 + [True] * 2 + [
        False
    ]
