"""A stack is a list of runs, which expand to its layers."""

import numpy as np
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.model.stack import Run, find_runs
from moddepth_jax.model.streams import layer_kinds


def expand(runs):
    return [kind for run in runs for _ in range(run.repeats) for kind in run.group]


def pattern(letters):
    """Parse 'd r*3 x' into a Run for each word: letters of the group, repeats after the star."""
    words = [word.partition('*') for word in letters.split()]
    return tuple(Run(tuple(group), int(repeats or 1)) for group, _, repeats in words)


@pytest.mark.parametrize(
    ('layers', 'runs'),
    [
        ('', ''),
        ('dddd', 'd*4'),
        ('drdrd', 'dr*2 d'),
        ('dddrrrrrrd', 'd*3 r*6 d'),
        ('ddrddrddrd', 'ddr*3 d'),
        ('rrdrrdddd', 'rrd*2 d*3'),
        ('abcd', 'a b c d'),
    ],
)
def test_runs_of_known_patterns(layers, runs):
    assert find_runs(list(layers)) == pattern(runs)


@pytest.mark.parametrize('kinds', ['ab', 'abc'])
def test_expanded_runs_are_the_pattern(kinds):
    rng = np.random.default_rng(len(kinds))
    repeated = 0
    for _ in range(300):
        layers = list(rng.choice(list(kinds), rng.integers(1, 15)))
        runs = find_runs(layers)
        assert expand(runs) == layers
        assert all(run.repeats >= 1 and run.group for run in runs)
        repeated += any(run.repeats > 1 for run in runs)
    assert repeated > 200


@pytest.mark.parametrize(
    ('routed', 'windows', 'num_runs', 'with_slots'),
    [
        ('every:2', (0,), 1, 3),
        ('every:2', (8, 0, 0, 0), 1, 5),
        ('every:2', (0, 0, 4), 1, 12),
        ('middle:5:1', (0,), 3, 3),
        ('1,2,7', (0,), 5, 6),
    ],
)
def test_model_is_few_runs(routed, windows, num_runs, with_slots, tiny_config):
    """A model's runs give, layer by layer, whether it is routed and its window.

    MoDA's last layer writes no slot, so it ends its run. This splits a group that has only two
    repeats.
    """
    knobs = {'model.num_layers': 12, 'model.windows': windows}
    knobs |= {'model.routing.router': 'learned', 'model.routing.layers': routed}
    for stream, expected in (('residual', num_runs), ('moda', with_slots)):
        model = from_config(tiny_config(**knobs, **{'model.depth.stream': stream})).model
        runs = find_runs(layer_kinds(model))
        assert len(runs) == expected
        for layer, kind in enumerate(expand(runs)):
            assert kind.routed == (layer in model.routed_layers)
            assert kind.window == windows[layer % len(windows)]
