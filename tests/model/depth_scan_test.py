"""A stack is a list of runs: they give the layers back, and depth costs no program size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.model.depth_scan import Run, find_runs, scan_run
from moddepth_jax.model.transformer import Transformer, layer_kinds


def expand(runs):
    return [kind for run in runs for _ in range(run.repeats) for kind in run.group]


def pattern(letters):
    """'d r*3 x' -> the Run of each word: letters of the group, repeats after the star."""
    words = [word.partition('*') for word in letters.split()]
    return tuple(Run(tuple(group), int(repeats or 1)) for group, _, repeats in words)


@pytest.mark.parametrize(
    ('layers', 'runs'),
    [
        ('', ''),
        ('d', 'd'),
        ('dr', 'd r'),
        ('dddddddddddd', 'd*12'),
        ('drdrdrdrdrdr', 'dr*6'),
        ('drdrd', 'dr*2 d'),
        ('dddrrrrrrd', 'd*3 r*6 d'),
        ('ddrddrddrd', 'ddr*3 d'),
        ('rrdrrdddd', 'rrd*2 d*3'),
        ('abcdabcdabcd', 'abcd*3'),
        ('abcde', 'a b c d e'),
    ],
)
def test_runs_of_known_patterns(layers, runs):
    """Groups that repeat are found: dense, every second, middle, a list, alternating windows."""
    assert find_runs(list(layers)) == pattern(runs)


@pytest.mark.parametrize('kinds', ['ab', 'abc'])
def test_expanded_runs_are_the_pattern(kinds):
    """Whatever the pattern of layers, its runs written out again are that pattern."""
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
    ('routed', 'windows', 'num_layers', 'num_runs'),
    [
        ('every:2', (0,), 12, 1),
        ('every:1', (0,), 12, 1),
        ('every:3', (0,), 12, 1),
        ('every:2', (8, 0, 0, 0), 12, 1),
        ('every:2', (0, 0, 4), 12, 1),
        ('middle:5:1', (0,), 12, 3),
        ('1,2,7', (0,), 12, 5),
    ],
)
def test_model_is_few_runs(routed, windows, num_layers, num_runs, tiny_config):
    """A model's runs give back, layer by layer, who is routed and which window it has."""
    knobs = {'model.num_layers': num_layers, 'model.windows': windows}
    routing = {'model.routing.router': 'learned', 'model.routing.layers': routed}
    model = from_config(tiny_config(**knobs, **routing)).model
    runs = find_runs(layer_kinds(model))
    assert len(runs) == num_runs
    for layer, kind in enumerate(expand(runs)):
        assert kind.routed == (layer in model.routed_layers)
        assert kind.window == windows[layer % len(windows)]


def test_scanned_run_is_the_loop():
    """A scanned run applies its repeats in order and stacks their records, as a loop does."""
    params = {'w': jnp.array([2.0, 3.0, 5.0]), 'b': jnp.array([1.0, 10.0, 100.0])}

    def apply(params, x):
        return params['w'] * x + params['b'], {'seen': x, 'product': params['w'] * params['b']}

    for loop in ('scan', 'unrolled'):
        x, records = scan_run(apply, params, jnp.float32(1), loop)
        assert x == ((2 + 1) * 3 + 10) * 5 + 100
        np.testing.assert_array_equal(records['seen'], [1, 3, 19])
        np.testing.assert_array_equal(records['product'], [2, 30, 500])


def equations(jaxpr):
    """Equations of a jaxpr and of every one inside it."""
    total = len(jaxpr.eqns)
    for eqn in jaxpr.eqns:
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, 'eqns')):
            if hasattr(value, 'eqns'):
                total += equations(getattr(value, 'jaxpr', value))
    return total


@pytest.mark.parametrize('remat', ['block', 'none'])
def test_program_does_not_grow_with_depth(remat, tiny_config):
    """The gradient of a scanned model has as many equations at 16 layers as at 4."""

    def count(num_layers, loop):
        knobs = {'model.num_layers': num_layers, 'model.layer_loop': loop, 'model.remat': remat}
        model = Transformer(
            from_config(tiny_config(**knobs, **{'model.routing.router': 'learned'}))
        )
        tokens_BT = jnp.zeros((1, 16), jnp.int32)

        def loss(params):
            return jnp.sum(model.apply({'params': params}, tokens_BT)[0])

        params = jax.eval_shape(model.init, jax.random.key(0), tokens_BT)['params']
        return equations(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)

    assert count(4, 'scan') == count(16, 'scan')
    assert count(4, 'unrolled') > 1.4 * count(4, 'scan')


def test_initialisation_does_not_grow_with_depth(tiny_config):
    """Drawing the parameters of 16 layers takes as many equations as of 4."""

    def count(num_layers):
        knobs = {'model.num_layers': num_layers, 'model.routing.router': 'learned'}
        model = Transformer(from_config(tiny_config(**knobs)))
        tokens_BT = jnp.zeros((1, 16), jnp.int32)
        return equations(jax.make_jaxpr(model.init)(jax.random.key(0), tokens_BT).jaxpr)

    assert count(4) == count(16)
