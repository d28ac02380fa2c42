"""Parameters outside optimizer.trainable do not change and have no moments."""

import types

import jax
import numpy as np
import optax
import pytest
from flax import traverse_util

from moddepth_jax.hparams import from_config
from moddepth_jax.training.summary import describe, num_parameters
from moddepth_jax.training.train_step import init_state, train_step
from moddepth_jax.training.trainable import check_trainable, merge_params, split_params
from tests.data.prepared_text import refusal
from tests.training.toy_steps import NUM_STEPS, ROUTED, make_batch, step

ROUTERS = ('*/router/*',)
SOME = ('*/router/*', 'stack/*_norm/scale', 'embedding')
DECAYED = {'optimizer.weight_decay': 0.5}


def some_hparams(tiny_config, patterns, **changes):
    knobs = ROUTED | DECAYED | {'optimizer.trainable': patterns} | changes
    return from_config(tiny_config(**knobs))


def flat(params):
    return {
        '/'.join(path): np.asarray(leaf)
        for path, leaf in traverse_util.flatten_dict(params).items()
    }


def trained(hparams, num_steps=3):
    """Return the state before and after some steps, and the metrics of each."""
    state, rows = jax.jit(lambda: init_state(hparams, NUM_STEPS))(), []
    negative = state.params['final_norm']['scale'].at[0].set(-0.0)
    state = state.replace(params=state.params | {'final_norm': {'scale': negative}})
    before = state
    for seed in range(num_steps):
        state, metrics = step(state, make_batch(seed))
        rows.append(metrics)
    assert not state.skipped
    return before, state, rows


SLOW = [('adamw', 1), ('lion', 1), ('lion', 2), ('muon', 1), ('muon', 2)]


@pytest.mark.parametrize(
    ('name', 'parts'),
    [
        ('adamw', 2),
        *(pytest.param(*both, marks=pytest.mark.slow) for both in SLOW),
    ],
)
def test_frozen_parameters_keep_their_bits(name, parts, tiny_config):
    """Also a negative zero, and under weight decay. All trainable parameters change."""
    changes = {'optimizer.name': name, 'training.accumulate_steps': parts}
    before, after, _ = trained(some_hparams(tiny_config, SOME, **changes))
    before, after = flat(before.params), flat(after.params)
    changed = {path for path in before if before[path].tobytes() != after[path].tobytes()}
    named = {p for p in before if '/router/' in p or p.endswith('_norm/scale') or p == 'embedding'}
    assert changed == named - {'final_norm/scale'}
    assert np.signbit(after['final_norm/scale'][0])


@pytest.mark.parametrize(
    ('pattern', 'name', 'moments'), [('*/router/*', 'adamw', 2), ('*/mlp/w?/kernel', 'lion', 1)]
)
def test_only_trainable_parameters_have_moments(pattern, name, moments, tiny_config):
    """The optimizer's state has their numbers and its counters only."""
    hparams = some_hparams(tiny_config, (pattern,), **{'optimizer.name': name})
    state = jax.eval_shape(lambda: init_state(hparams, NUM_STEPS))
    trainable, frozen = split_params(state.params, hparams.optimizer.trainable)
    counters = [leaf for leaf in jax.tree.leaves(state.optimizer_state) if not leaf.ndim]
    assert num_parameters(state.optimizer_state) - len(counters) == moments * num_parameters(
        trainable
    )
    assert 0 < num_parameters(trainable) < num_parameters(state.params) / 2
    assert num_parameters(trainable) + num_parameters(frozen) == num_parameters(state.params)


@pytest.mark.slow
def test_gradients_are_those_of_training_all(tiny_config):
    """For the trainable parameters; only their norm is reported and clips."""
    moments, norms = [], []
    for patterns in (('*',), ROUTERS):
        before, after, rows = trained(some_hparams(tiny_config, patterns), 1)
        moments.append(flat(optax.tree_utils.tree_get(after.optimizer_state, 'mu')))
        norms.append(float(rows[0]['grad_norm']))
    everything, some = moments
    assert set(some) == {path for path in everything if '/router/' in path}
    for path, moment in some.items():
        np.testing.assert_allclose(moment, everything[path], rtol=1e-5, atol=1e-9)
    b1 = some_hparams(tiny_config, ROUTERS).optimizer.b1
    squares = sum(float(np.sum(np.square(moment))) for moment in some.values())
    np.testing.assert_allclose(norms[1], squares**0.5 / (1 - b1), rtol=1e-5)
    assert norms[1] < norms[0] / 2
    clipped = some_hparams(tiny_config, ROUTERS, **{'optimizer.clip_norm': norms[1] / 4})
    _, after, _ = trained(clipped, 1)
    for path, moment in flat(optax.tree_utils.tree_get(after.optimizer_state, 'mu')).items():
        np.testing.assert_allclose(moment, some[path] / 4, rtol=1e-5, atol=1e-9)


def test_merge_undoes_split(tiny_config):
    params = jax.eval_shape(lambda: init_state(some_hparams(tiny_config, SOME), 1)).params
    assert merge_params(*split_params(params, SOME)) == params
    for patterns in ((), ('*',)):
        trainable, frozen = split_params(params, patterns)
        assert trainable is params and frozen == {} and merge_params(trainable, frozen) is params


@pytest.mark.parametrize(
    ('pattern', 'near'),
    [('*/ruoter/*', '/router/w'), ('Head/*', 'head/k')],
)
def test_a_pattern_without_parameters_names_the_nearest(pattern, near, tiny_config):
    message = refusal(check_trainable, some_hparams(tiny_config, ('*/router/*', pattern)))
    assert message.startswith(f'optimizer.trainable={pattern!r}: matches no parameter')
    assert near in message.split(' the nearest are ')[1].split(',')[0]


def test_a_factor_of_a_frozen_parameter_is_refused(tiny_config):
    def with_factor(glob):
        return some_hparams(tiny_config, SOME, **{'optimizer.rate_factors': (f'{glob}:2',)})

    check_trainable(with_factor('*/router/*'))
    with pytest.raises(ValueError, match=r'^optimizer.rate_factors=.*: matches no parameter; .*$'):
        check_trainable(with_factor('*/mlp/*'))


def products(hparams):
    """Return the FLOPs of a step by XLA before optimization, which counts a loop once."""
    state = jax.eval_shape(lambda: init_state(hparams, NUM_STEPS))
    return jax.jit(train_step).lower(state, make_batch(0)).cost_analysis()['flops']


@pytest.mark.parametrize('layer_loop', ['scan', 'unrolled'])
def test_frozen_parameters_have_no_gradients(layer_loop, tiny_config):
    """A step that trains only the last norm costs a third, little more than a forward pass."""
    knobs = {
        'model.layer_loop': layer_loop,
        'model.num_layers': 4,
        'model.routing.layers': 'every:1',
    }
    knobs |= {'model.routing.router': 'none'}
    costs = [products(some_hparams(tiny_config, of, **knobs)) for of in (('*',), ('final_norm/*',))]
    assert costs[1] < 0.5 * costs[0]


def test_the_log_says_how_many_parameters_train(tiny_config):
    corpus = types.SimpleNamespace(description='text')
    dataset = types.SimpleNamespace(
        corpus=corpus, domain_epochs=lambda steps: {}, epochs=lambda steps: 1.0
    )

    def lines(patterns):
        hparams = some_hparams(tiny_config, patterns)
        params = jax.eval_shape(lambda: init_state(hparams, NUM_STEPS)).params
        return describe(hparams, NUM_STEPS, params, dataset)

    assert 'trainable 32 parameters: */router/*' in lines(ROUTERS)  # one router of width 32
    assert not any('trainable' in line for line in lines(('*',)))
