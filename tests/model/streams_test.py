"""Depth streams: what they read and write, their parameters, and the memory of their slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.model.attention import DepthSlots
from moddepth_jax.model.stack import Stack, unstack_layers
from moddepth_jax.model.streams import STREAMS, LayerKind, layer_kinds
from moddepth_jax.model.transformer import Transformer
from tests.model.cases import (
    ATTENTION,
    ATTENTION_SLOT,
    AVERAGE,
    BLOCK_SLOT,
    DENSE,
    MASKED,
    MODA,
    OWN_SLOT,
    ROUTED,
    UNROTATED,
    parameters,
    random_variables,
    small_hparams,
)

RESIDUAL = {'model.depth.stream': 'residual'}


def like(kinds, of):
    """Of each layer kind one attribute."""
    return [getattr(kind, of) for kind in kinds]


def test_kinds_of_layers(tiny_config):
    """What each layer reads and writes: three layers of which the second is routed."""

    def kinds(*knobs):
        three = {'model.num_layers': 3, 'model.windows': (7, 5, 4)}
        return layer_kinds(small_hparams(tiny_config, three, ROUTED, *knobs).model)

    for knobs, slots in (
        ([RESIDUAL], 0),
        ([MODA], 2),
        ([MODA, ATTENTION_SLOT], 1),
        ([MODA, BLOCK_SLOT], 1),
        ([MODA, OWN_SLOT], 2),
    ):
        found = kinds(*knobs)
        assert like(found, 'slots') == [slots, slots, 0]
        assert like(found, 'window') == [7, 5, 4] and like(found, 'part') == ['block'] * 3
        assert like(found, 'routed') == [False, True, False]
    one_by_one = [0, 1, 2, 3, 4]
    for stream, inputs in (
        (ATTENTION, [0] * 5),
        (AVERAGE, one_by_one),
        (DENSE, one_by_one),
    ):
        found = kinds(stream)
        assert like(found, 'part') == ['entry', 'block', 'block', 'block', 'exit']
        assert like(found, 'slots') == [1, 1, 1, 1, 0] and like(found, 'inputs') == inputs
        assert like(found, 'window') == [0, 7, 5, 4, 0]
        assert like(found, 'routed') == [False, False, True, False, False]


@pytest.mark.parametrize(('routing', 'kv_heads'), [({}, 1), (ROUTED, 2)])
def test_streams_add_parameters_by_formula(routing, kv_heads, tiny_config):
    """D = 16, L = 4, H = 4, K heads of keys, G = 4 / K: none that nothing reads."""

    def count(*knobs):
        shape = {'model.num_kv_heads': kv_heads}
        hparams = small_hparams(tiny_config, routing, shape, *knobs)
        tokens = jnp.zeros((1, 8), jnp.int32)
        params = jax.eval_shape(Transformer(hparams).init, jax.random.key(0), tokens)['params']
        return sum(leaf.size for leaf in jax.tree.leaves(params))

    plain, width, layers, group = count(), 16, 4, 4 // kv_heads
    slot = 2 * width * kv_heads * 4
    assert count(DENSE) - plain == sum(layer * width**2 for layer in range(1, layers + 2))
    assert count(AVERAGE) - plain == (layers + 1) * (layers + 2) / 2
    of_attention = (layers + 1) * (width**2 + 2 * width**2 // group)
    assert count(ATTENTION) - plain == of_attention
    assert count(MODA) - plain == (layers - 1) * slot
    assert count(MODA, OWN_SLOT) - plain == 2 * (layers - 1) * slot
    assert count(MODA, ATTENTION_SLOT) == plain
    assert count(MODA, BLOCK_SLOT) - plain == (layers - 1) * slot
    assert count(MODA, UNROTATED) == count(MODA)


@pytest.mark.parametrize(
    'stream',
    [
        pytest.param(DENSE, id='dense'),
        pytest.param(AVERAGE, id='average', marks=pytest.mark.slow),
    ],
)
def test_reads_of_all_outputs_start_as_the_residual_stream(stream, tiny_config):
    """At initialisation the logits are those of the residual model with the same blocks."""
    rng, shape = np.random.default_rng(0), {'model.num_layers': 3}
    tokens_BT = rng.integers(0, 32, (2, 8))
    hparams = small_hparams(tiny_config, shape, ROUTED, stream)
    model, residual = Transformer(hparams), Transformer(small_hparams(tiny_config, shape, ROUTED))
    at_first = jax.jit(model.init)(jax.random.key(0), tokens_BT)['params']

    def bolder(path, leaf, other):
        return leaf if path[-2:][0].key == 'stream' else other

    params = random_variables(hparams, tokens_BT)['params']
    params = jax.tree_util.tree_map_with_path(bolder, at_first, params)
    plain = {}  # the middle one is routed: no two layers of the residual model share a run
    for kind, mine in unstack_layers(Stack(hparams.model, 'top_c'), params['stack']):
        if kind.part == 'block':
            block = {name: jax.tree.map(lambda x: x[None], mine[name]) for name in mine}
            plain[f'run_{len(plain)}'] = {'layer_0': {n: block[n] for n in block if n != 'stream'}}
    run, expect = (
        jax.jit(lambda p, m=m: m.apply({'params': p}, tokens_BT)[0]) for m in (model, residual)
    )
    expected = expect({**params, 'stack': plain})
    assert 0.3 < np.std(expected)
    np.testing.assert_allclose(run(params), expected, rtol=0, atol=1e-5)
    middle = params['stack']['run_2']['layer_0']
    middle['stream'] = jax.tree.map(lambda read: read + 0.1, middle['stream'])
    assert np.abs(run(params) - expected).max() > 0.1


def _average(hparams, x_LBTD, params):
    stream = STREAMS['average'](hparams, LayerKind(False, 0, 1, len(x_LBTD)))
    given = (x_LBTD[-1], DepthSlots(x_LBTD))
    if params is None:
        params = stream.init(jax.random.key(0), *given, method='read')['params']
    return stream.apply({'params': params}, *given, method='read')[0]


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_average_starts_as_its_newest_input_bit_for_bit(dtype, tiny_config):
    """In their dtype; and a weight of 1.003, which bfloat16 would round to 1, shows in both."""
    hparams = small_hparams(tiny_config, AVERAGE, {'model.dtype': dtype}).model
    x_LBTD = jnp.asarray(np.random.default_rng(3).normal(size=(4, 2, 5, 16)), dtype)
    read_BTD = _average(hparams, x_LBTD, None)
    assert read_BTD.dtype == dtype
    np.testing.assert_array_equal(read_BTD, x_LBTD[-1])
    finer = {'weights': jnp.array([0, 0, 0, 1.003])}
    assert np.any(_average(hparams, x_LBTD, finer) != x_LBTD[-1])


# The memory of training grows as the number of layers, not its square: slots are stored once.
# Programs are compiled, not run; what a layer keeps is read off the function that jax.vjp returns.
BATCH, LENGTH = 1, 128
WIDE = {
    'model.d_model': 64,
    'model.d_ff': 128,
    'model.num_kv_heads': 4,
    'model.head_dim': 16,
    'data.sequence_length': LENGTH,
}


def loss_of(make_config, num_layers, *knobs):
    """(loss of the parameters, the parameters' shapes, hparams)."""
    hparams = small_hparams(make_config, WIDE, {'model.num_layers': num_layers}, *knobs)
    model, tokens_BT = Transformer(hparams), jnp.zeros((BATCH, LENGTH), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens_BT)['params']
    return lambda params: jnp.sum(model.apply({'params': params}, tokens_BT)[0]), params, hparams


def temporary_bytes(make_config, num_layers, remat, loop='scan'):
    how = {'model.remat': remat, 'model.layer_loop': loop}
    loss, params, _ = loss_of(make_config, num_layers, MODA, how)
    compiled = jax.jit(jax.grad(loss)).lower(params).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize('remat', ['block', pytest.param('none', marks=pytest.mark.slow)])
def test_memory_is_linear_in_depth(remat, tiny_config):
    """64 layers take at most 2.2 times what 32 take."""
    at_64, at_32 = (temporary_bytes(tiny_config, layers, remat) for layers in (64, 32))
    assert 1.5 * at_32 < at_64 < 2.2 * at_32


@pytest.mark.slow
def test_memory_against_the_unrolled_form(tiny_config):
    """At 32 layers a third of what plain differentiation takes, and without recomputing 0.6."""
    unrolled = temporary_bytes(tiny_config, 32, 'none', 'unrolled')
    assert temporary_bytes(tiny_config, 32, 'block') < unrolled / 3
    assert temporary_bytes(tiny_config, 32, 'none') < 0.6 * unrolled


KEPT = {
    'moda': MODA,
    'bfloat16': MODA | {'model.dtype': 'bfloat16'},  # with sums of another dtype
    'projected': MODA | ROUTED,
    'masked': MODA | ROUTED | MASKED,
}


@pytest.mark.parametrize('remat', parameters(('none',), ('none', 'block')))
@pytest.mark.parametrize('name', parameters(('masked', 'bfloat16'), KEPT))
def test_no_layer_keeps_the_slots(name, remat, tiny_config):
    """Of what a gradient keeps, the slots are there once: two arrays, and nothing larger.

    An array that some layer of a scan kept of its buffer would be larger by the scan's length.
    """
    kept = {}
    for num_layers in (20, 40):
        loss, params, hparams = loss_of(tiny_config, num_layers, {'model.remat': remat}, KEPT[name])
        _, vjp = jax.eval_shape(lambda params, loss=loss: jax.vjp(loss, params), params)
        model, slots = hparams.model, 2 * (num_layers - 1)
        buffer = (slots, BATCH, LENGTH, model.num_kv_heads, model.head_dim)
        mine = [leaf for leaf in jax.tree.leaves(vjp) if LENGTH in leaf.shape]
        assert sum(leaf.shape == buffer for leaf in mine) == 2
        assert max(leaf.size for leaf in mine) == np.prod(buffer)
        kept[num_layers] = sum(leaf.size for leaf in mine)
    assert kept[40] < 2.2 * kept[20]
