"""The schedule ends with the run, decay is for matrices, the predictor changes nothing else."""

import jax
import numpy as np
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.training.optimizer import learning_rate_schedule, make_optimizer
from moddepth_jax.training.train_step import init_state
from tests.training.toy_steps import ROUTED, initial, make_batch, step


def schedule(tiny_config, num_steps, **changes):
    at = learning_rate_schedule(from_config(tiny_config(**changes)), num_steps)
    return np.array([float(at(step)) for step in range(num_steps)])


def is_predictor(path):
    return any(getattr(key, 'key', None) == 'predictor' for key in path)


def test_schedule_warms_up_from_zero_and_ends_at_its_fraction(tiny_config):
    changes = {
        'optimizer.learning_rate': 0.02,
        'optimizer.warmup_fraction': 0.1,
        'optimizer.final_fraction': 0.25,
    }
    rate = schedule(tiny_config, 100, **changes)
    np.testing.assert_allclose(rate[:11], 0.02 * np.arange(11) / 10, rtol=1e-5, atol=1e-12)
    assert rate.argmax() == 10
    phase = np.arange(90) / 89
    cosine = 0.02 * (0.25 + 0.75 * (1 + np.cos(np.pi * phase)) / 2)
    np.testing.assert_allclose(rate[-1], 0.25 * 0.02, rtol=1e-4)
    np.testing.assert_allclose(rate[10:], cosine, rtol=1e-4)


@pytest.mark.parametrize(('num_steps', 'warmup'), [(1, 0.0), (1, 1.0), (2, 0.03), (10, 1.0)])
def test_schedule_of_short_runs_is_sound(tiny_config, num_steps, warmup):
    """For any length of run and warm-up, rates are in [0, peak] and some step has one above 0."""
    rate = schedule(tiny_config, num_steps, **{'optimizer.warmup_fraction': warmup})
    assert np.isfinite(rate).all() and rate.min() >= 0 and rate.max() > 0
    assert rate.max() <= 3e-3 * (1 + 1e-6)
    if not warmup:
        assert rate[0] == rate.max()


AVERAGE = {'model.depth.stream': 'average', 'model.layer_loop': 'unrolled'}
EMBEDDED = {'model.embedding_residual': 'learned', 'model.value_embeddings': 'alternate'}
OF_EACH_LOOP = {'model.looped_layers': 'all', 'model.loops': 2, 'model.loop_norms': 'own'}
OF_EACH_LOOP |= {'model.loop_embeddings': 'learned'}
HYPER = {'model.depth.stream': 'hyper_connections'}
OF_STREAMS = [f'{part}_{leaf}' for part in ('read', 'mix', 'add') for leaf in ('bias', 'scale')]
MUDD = {'model.depth.stream': 'mudd', 'model.routing.router': 'none'}


def updates_of(hparams, slope):
    """Return the first updates of parameters that are all 2, whose gradients are all `slope`."""
    shapes = jax.eval_shape(lambda: init_state(hparams, 10)).params
    params = jax.tree.map(lambda leaf: np.full(leaf.shape, 2, np.float32), shapes)
    gradients = jax.tree.map(lambda leaf: np.full_like(leaf, slope), params)
    optimizer = make_optimizer(hparams, 10)
    return jax.jit(optimizer.update)(gradients, optimizer.init(params), params)[0]


@pytest.mark.parametrize(
    ('decay_embeddings', 'model', 'scalars'),
    [
        (True, AVERAGE, {'w', 'weights'}),
        (False, EMBEDDED, {'w', 'residual_scale', 'embedding_scale', 'gate'}),
        (True, OF_EACH_LOOP, {'w', 'loop_embeddings'}),
        (True, HYPER, {'w', *OF_STREAMS}),
        (True, HYPER | {'optimizer.name': 'lion'}, {'w', *OF_STREAMS}),
        (True, MUDD, {'inner', 'outer'}),
        (False, MUDD | {'optimizer.name': 'muon'}, {'inner', 'outer', 'kernel'}),  # of the head
    ],
)
def test_weight_decay_is_for_matrices_only(tiny_config, decay_embeddings, model, scalars):
    """Without a gradient, a step shrinks kernels by rate times decay, and the embedding by knob."""
    changes = {
        'model.routing.router': 'learned',
        'model.use_bias': True,
        'model.qk_norm': 'head',
        'optimizer.weight_decay': 0.5,
        'optimizer.learning_rate': 0.01,
        'optimizer.warmup_fraction': 0.0,
        'optimizer.decay_embeddings': decay_embeddings,
        **model,
    }
    updates = updates_of(from_config(tiny_config(**changes)), 0)
    decayed, kept = set(), set()
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        name = path[-1].key
        if np.any(update):
            np.testing.assert_allclose(update, -0.01 * 0.5 * 2.0, rtol=1e-6)
            decayed.add(name)
        else:
            kept.add(name)
    embedding = {'embedding'}
    assert decayed == {'kernel'} | (embedding if decay_embeddings else set())
    kept -= set() if decay_embeddings else embedding
    assert kept == {'scale', 'bias'} | scalars


def test_rates_and_decay_are_scaled_by_the_first_glob_that_fits(tiny_config):
    """As in nanochat: r of the sum at 1% of the rate of a; all others are as without factors."""
    factors = ('*/residual_scale:0.01', 'head/*:0.5', '*_scale:3')
    steps = []
    for given in ((), factors):
        changes = EMBEDDED | {'optimizer.warmup_fraction': 0.0, 'optimizer.rate_factors': given}
        steps.append(updates_of(from_config(tiny_config(**changes)), 1))

    def compare(path, plain, scaled):
        keys = [key.key for key in path]
        name = keys[0] if keys[0] == 'head' else keys[-1]
        factor = {'residual_scale': 0.01, 'head': 0.5, 'embedding_scale': 3}.get(name, 1)
        np.testing.assert_allclose(scaled, factor * plain, rtol=1e-6, err_msg=str(keys))
        assert np.all(plain)
        return factor

    found = jax.tree_util.tree_map_with_path(compare, *steps)
    assert {*jax.tree.leaves(found)} == {0.01, 0.5, 3, 1}


def run_steps(tiny_config, rule, num_steps=4, **changes):
    """Parameters before and after `num_steps` of a model whose one block is routed, and metrics."""
    changes = {'model.routing.causal_rule': rule, 'optimizer.clip_norm': 0.05} | changes
    state = initial(from_config(tiny_config(**ROUTED | changes)))
    before, rows = state.params, []
    for seed in range(num_steps):
        state, metrics = step(state, make_batch(seed))
        rows.append({name: float(metrics[name]) for name in ('grad_norm', 'rule_loss')})
    assert not state.skipped
    return before, state.params, rows


def split(params):
    leaves = jax.tree_util.tree_leaves_with_path(params)
    parts = ({}, {})
    for path, leaf in leaves:
        parts[is_predictor(path)][jax.tree_util.keystr(path)] = np.asarray(leaf)
    return parts


def test_the_predictor_changes_nothing_else(tiny_config):
    """Trunk and router are bit-identical, step by step, to those of a run without the predictor."""
    _, without, rows = run_steps(tiny_config, 'dense')
    assert min(row['grad_norm'] for row in rows) > 2 * 0.05
    changes = {'model.routing.predictor_loss_weight': 100.0}
    before, after, rows = run_steps(tiny_config, 'predictor', **changes)
    assert min(row['rule_loss'] for row in rows) > 10
    trunk, predictor = split(after)
    trunk_before, predictor_before = split(before)
    expected, none = split(without)
    assert not none and trunk.keys() == expected.keys()
    for path, values in expected.items():
        np.testing.assert_array_equal(trunk[path], values, err_msg=path)
        assert np.any(trunk[path] != trunk_before[path]), path
    assert len(predictor) == 4
    for path, values in predictor.items():
        assert np.any(values != predictor_before[path]), path


def test_wsd_is_flat_and_then_linear(tiny_config):
    """After the warm-up: the peak for 79 of 99 steps, then linear to the final rate."""
    changes = {
        'optimizer.schedule': 'wsd',
        'optimizer.learning_rate': 0.02,
        'optimizer.warmup_fraction': 0.1,
        'optimizer.decay_fraction': 0.2,
        'optimizer.final_fraction': 0.5,
    }
    rate = schedule(tiny_config, 111, **changes)
    np.testing.assert_allclose(rate[:12], 0.02 * np.minimum(np.arange(12) / 11, 1), atol=1e-8)
    np.testing.assert_allclose(rate[11:91], 0.02, rtol=1e-6)
    np.testing.assert_allclose(rate[90:], np.linspace(0.02, 0.01, 21), rtol=1e-5)


def test_constant_stays_at_the_peak(tiny_config):
    rate = schedule(tiny_config, 50, **{'optimizer.schedule': 'constant'})
    assert rate[0] == 0 and (rate[2:] == rate.max()).all()


def test_muon_orthogonalizes_each_matrix_of_a_block(tiny_config):
    """Of every layer and expert apart; an update has the root mean square of AdamW's, about 0.2."""
    changes = ROUTED | {
        'optimizer.name': 'muon',
        'optimizer.weight_decay': 0.0,
        'optimizer.clip_norm': 0.0,
        'optimizer.warmup_fraction': 0.0,
        'optimizer.learning_rate': 1.0,
        'model.experts.choice': 'token',
        'model.value_embeddings': 'alternate',
        'model.adapters.rank': 2,
    }
    hparams = from_config(tiny_config(**changes))
    shapes = jax.eval_shape(lambda: init_state(hparams, 10)).params
    optimizer, draw = make_optimizer(hparams, 10), np.random.default_rng(0)
    params, gradients = (
        jax.tree.map(lambda leaf: draw.normal(size=leaf.shape).astype('float32'), shapes)
        for _ in range(2)
    )
    update, _ = jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p))(gradients, params)
    found = jax.tree_util.tree_leaves_with_path(update)
    sizes = {jax.tree_util.keystr(path, simple=True, separator='/'): leaf for path, leaf in found}
    matrices = {
        'attention/query/kernel': lambda leaf: leaf.reshape(*leaf.shape[:2], -1),
        'attention/out/kernel': lambda leaf: leaf.reshape(leaf.shape[0], -1, leaf.shape[-1]),
        'mlp/w1/kernel': lambda leaf: leaf.reshape(-1, *leaf.shape[-2:]),
        'mlp/w2/kernel': lambda leaf: leaf.reshape(-1, *leaf.shape[-2:]),
    }
    for end, as_matrices in matrices.items():
        leaf = next(leaf for path, leaf in sizes.items() if path.endswith(end))
        for matrix in as_matrices(np.asarray(leaf)):
            values = np.linalg.svd(matrix, compute_uv=False)
            expected = 0.2 * max(matrix.shape) ** 0.5
            # Five iterations leave the very smallest value of a square matrix small.
            assert 0.6 * expected < values[-2] and values[0] < 1.3 * expected, end
    embeddings = [leaf for path, leaf in sizes.items() if path.endswith('embedding')]
    adapters = [leaf for path, leaf in sizes.items() if '/adapter/' in path]
    assert len(embeddings) == 2 and adapters  # one of values
    assert all(np.ptp(abs(leaf)) < 1e-2 for leaf in embeddings + adapters)  # as Adam's first step


@pytest.mark.parametrize('name', ['lion', 'muon'])
def test_optimizers_learn(tiny_config, name):
    """The loss on one batch falls."""
    changes = {'optimizer.name': name, 'optimizer.learning_rate': 4e-3}
    changes['model.routing.router'] = 'none'
    hparams = from_config(tiny_config(**(ROUTED | changes)))
    state, batch, losses = initial(hparams), make_batch(0), []
    for _ in range(10):
        state, metrics = step(state, batch)
        losses.append(float(metrics['loss']))
    assert losses[-1] < 0.9 * losses[0]
