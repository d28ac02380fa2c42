"""A model with adapters equals the model with the matrices W + (alpha / r) A B."""

import functools

import jax
import numpy as np
import pytest
from flax import traverse_util

from moddepth_jax.hparams import from_config
from moddepth_jax.model.adapters import has_adapters, merge_adapters
from moddepth_jax.model.decoding import unroll
from moddepth_jax.model.sharding import axis_names
from moddepth_jax.model.stack import Stack
from moddepth_jax.model.transformer import Transformer
from moddepth_jax.training.train_step import init_state, train_step
from moddepth_jax.training.trainable import check_trainable, split_params
from tests.model.cases import ADAPTERS, CASES, TOKENS_BT, build, parameters, small_hparams
from tests.training.toy_steps import NUM_STEPS, ROUTED, make_batch

NAMES = [name for name in CASES if name.startswith('adapters')]
ONLY_ADAPTERS = {'optimizer.trainable': ('*/adapter/*',), 'optimizer.weight_decay': 0.5}


def flat(params):
    return traverse_util.flatten_dict(jax.device_get(params), sep='/')


@pytest.mark.parametrize('name', parameters(('adapters',), NAMES))
def test_merging_adapters_keeps_the_logits(name, tiny_config):
    """A plain model with the merged matrices has the same logits to 1e-5."""
    model = build(tiny_config, name)
    params = model.variables['params']
    merged = params | {'stack': merge_adapters(params['stack'], model.hparams.model)}
    assert has_adapters(params) and not has_adapters(merged)
    plain = Transformer(model.hparams.without_adapters)
    apply = jax.jit(functools.partial(plain.apply, routing=model.routing))
    logits_BTV, _ = apply(model.variables | {'params': merged}, TOKENS_BT)
    np.testing.assert_allclose(model()[0], logits_BTV, rtol=0, atol=1e-5)
    b_is_0 = traverse_util.path_aware_map(
        lambda path, leaf: leaf * (path[-2:] != ('adapter', 'b')), params
    )
    base_BTV, _ = model.apply(
        model.variables | {'params': b_is_0}, TOKENS_BT, np.ones_like(TOKENS_BT)
    )
    assert np.abs(base_BTV - logits_BTV).max() > 0.1


def test_merging_is_the_product_of_its_matrices(tiny_config):
    """Merging adds 2 / 3 A B for each layer, head and expert, whatever the axes of the matrix."""
    for name in ('adapters', 'adapters, experts'):
        model = build(tiny_config, name)
        before = flat(model.variables['params'])
        merged = flat(merge_adapters(model.variables['params'], model.hparams.model))
        assert merged.keys() == {path for path in before if '/adapter/' not in path}
        for path, kernel in merged.items():
            stem = path.removesuffix('kernel') + 'adapter'
            if f'{stem}/a' not in before:
                np.testing.assert_array_equal(kernel, before[path])
                assert not path.endswith(('w1/kernel', 'w2/kernel', 'w3/kernel'))
                continue
            a, b = (np.float64(before[f'{stem}/{side}']) for side in 'ab')
            experts = a.shape[:2] if kernel.ndim == 4 and '/mlp/' in path else a.shape[:1]
            inputs = int(np.prod(a.shape[len(experts) : -1]))
            a, b = a.reshape(*experts, inputs, 3), b.reshape(*experts, 3, -1)
            expected = before[path] + (2 / 3 * a @ b).reshape(kernel.shape)
            np.testing.assert_allclose(kernel, expected, rtol=1e-5, atol=1e-6)


def test_new_adapters_change_nothing(tiny_config):
    """All other leaves and all logits are bit-equal to those of the model without adapters."""
    layers = {'model.num_layers': 2, 'model.routing.layers': 'every:1'}
    pair = [small_hparams(tiny_config, ROUTED, layers, some) for some in ({}, ADAPTERS)]
    tokens_BT = np.arange(16, dtype=np.int32)[None]
    plain, adapted = (jax.jit(Transformer(of).init)(jax.random.key(5), tokens_BT) for of in pair)
    before, after = flat(plain['params']), flat(adapted['params'])
    new = after.keys() - before.keys()
    assert before.keys() < after.keys() and {path.split('/')[-2] for path in new} == {'adapter'}
    assert all(np.array_equal(before[path], after[path]) for path in before)
    for path in new:
        assert np.any(after[path]) == path.endswith('/a')
    of_layers = [tuple(a.flat[:3]) for path in new if path.endswith('/a') for a in after[path]]
    assert len({*of_layers}) == len(of_layers)
    a_RDr = after['stack/run_0/layer_0/block/mlp/w1/adapter/a']
    assert a_RDr.shape == (2, 16, 3) and 0.5 < a_RDr.std() * np.sqrt(3 * 16) < 1.5
    logits_BTV, same_BTV = (
        Transformer(of).apply(variables, tokens_BT)[0]
        for of, variables in zip(pair, (plain, adapted), strict=True)
    )
    np.testing.assert_array_equal(logits_BTV, same_BTV)


def test_only_adapters_train(tiny_config):
    """Frozen matrices keep their bits under weight decay. A starts to change after B."""
    hparams = from_config(tiny_config(**ROUTED | ADAPTERS | ONLY_ADAPTERS))
    state = jax.jit(lambda: init_state(hparams, NUM_STEPS))()
    trainable, _ = split_params(state.params, hparams.optimizer.trainable)
    step, before, losses = jax.jit(train_step), flat(state.params), []
    for seed in (0, 0, 0, 0):
        state, metrics = step(state, make_batch(seed))
        losses.append(float(metrics['loss']))
        after = flat(state.params)
        changed = {path for path in before if not np.array_equal(before[path], after[path])}
        of_b = {path for path in flat(trainable) if path.endswith('/b')}
        assert changed == (of_b if len(losses) == 1 else set(flat(trainable)))
    assert losses[-1] < losses[0]


def test_decoding_merges_once(tiny_config):
    """The parameters of a decoding step have no adapters."""
    model = build(tiny_config, 'adapters')
    unrolled = unroll(model.variables, model.hparams, model.routing)
    assert not any(has_adapters(layer) for layer in unrolled['layers'])


def test_adapters_are_sharded_like_their_matrices(tiny_config):
    """A and B have the axes of the matrix and a replicated rank."""
    stem = 'params/stack/run_0/layer_0'
    expected = {
        'attention/query/adapter/a': (None, 'embed', None),
        'attention/query/adapter/b': (None, None, 'heads', None),
        'attention/out/adapter/a': (None, 'heads', None, None),
        'attention/out/adapter/b': (None, None, 'embed'),
        'mlp/w1/adapter/a': (None, 'embed', None),
        'mlp/w2/adapter/a': (None, 'ffn', None),
        'block/mlp/w2/adapter/b': (None, None, 'embed'),
    }
    for path, names in expected.items():
        assert axis_names(f'{stem}/{path}', len(names)) == names
    of_experts = (None, 'experts', 'embed', None)
    assert axis_names(f'{stem}/mlp/w1/adapter/a', 4) == of_experts


@pytest.mark.parametrize('pattern', ['*/atention/*', '*/router/*', 'head/*'])
def test_a_pattern_without_matrices_is_refused(pattern, tiny_config):
    knobs = ADAPTERS | {'model.adapters.params': ('*/mlp/*', pattern)}
    with pytest.raises(ValueError) as caught:
        check_trainable(from_config(tiny_config(**ROUTED | knobs)))
    message = str(caught.value)
    assert message.startswith(f'model.adapters.params={pattern!r}: no matrix has such a name')
    assert 'block/mlp/w1/kernel' in message and '\n' not in message


@pytest.mark.slow
def test_layer_numbers_decide_the_draw(tiny_config):
    """A layer gets the same initial adapter wherever it is stored, so scans change nothing."""
    knobs = ADAPTERS | {'model.num_layers': 4, 'model.windows': (0,)}
    apart = knobs | {'model.windows': (0, 3, 0, 0)}
    drawn = []
    for some in (knobs, apart):
        hparams = small_hparams(tiny_config, some)
        init = jax.jit(Transformer(hparams).init)
        params = init(jax.random.key(0), np.zeros((1, 8), int))['params']
        stack, layers = Stack(hparams.model, 'top_c'), {}
        for (run, layer), numbers in stack.layer_numbers.items():
            leaf = params['stack'][run][layer]['mlp']['w1']['adapter']['a']
            layers |= zip(numbers.tolist(), leaf, strict=True)
        drawn.append(layers)
    assert drawn[0].keys() == drawn[1].keys() == set(range(4))
    for number, leaf in drawn[0].items():
        np.testing.assert_array_equal(leaf, drawn[1][number])
