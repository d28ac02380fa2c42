"""Depth streams: reads and writes, parameters, and the memory of slots."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.model.attention import DepthSlots
from moddepth_jax.model.stack_scan import empty_slots
from moddepth_jax.model.streams import STREAMS, LayerKind
from moddepth_jax.model.transformer import Transformer
from tests.model.cases import (
    ALL_LOOKED_UP,
    ATTENTION,
    ATTENTION_SLOT,
    AVERAGE,
    BLOCK_SLOT,
    CONSTRAINED,
    DENSE,
    EMBEDDED,
    HYPER,
    LOOKED_UP,
    MASKED,
    MIXED,
    MODA,
    MUDD,
    OWN_SLOT,
    RECENT,
    ROUTED,
    SHARED,
    SOURCES,
    SOURCES_OF_3,
    SPARSE,
    STATIC,
    STATIC_WAYS,
    UNROTATED,
    VALUES,
    equations,
    parameters,
    small_hparams,
)


@pytest.mark.parametrize(
    ('routing', 'kv_heads'), [({}, 1), pytest.param(ROUTED, 2, marks=pytest.mark.slow)]
)
def test_streams_add_parameters_by_formula(routing, kv_heads, tiny_config):
    """D = 16, L = 4, H = 4, K key heads, G = 4 / K. Layers have only parameters that are used."""

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
    moda = count(MODA)
    assert moda - plain == (layers - 1) * slot
    assert count(MODA, OWN_SLOT) - plain == 2 * (layers - 1) * slot
    assert count(MODA, ATTENTION_SLOT) == plain
    assert count(MODA, BLOCK_SLOT) - plain == (layers - 1) * slot
    assert count(MODA, UNROTATED) == moda
    assert count(VALUES) - plain == 2 * (layers - 1)
    assert count(EMBEDDED) - plain == 2 * layers
    table = 32 * kv_heads * 4 + 12 * kv_heads
    assert count(LOOKED_UP) - plain == layers // 2 * table
    assert count(ALL_LOOKED_UP) - plain == layers * table
    assert count(SPARSE) == count(MIXED) == count(RECENT) == plain
    assert count(SOURCES) - plain == count(SOURCES_OF_3) - plain == 2 * width * (2 * layers + 1)
    if not routing:
        ages = layers + 1
        assert count(STATIC_WAYS) - plain == (4 * layers + 1) * ages
        dynamic = ages * 4 * ages * width + 4 * ages * (4 * layers + 1) * ages
        assert count(MUDD) - plain == (4 * layers + 1) * ages + dynamic
        assert plain - count(SHARED) == (layers - 1) * slot / 2


def read(name, hparams, x_LBTD, params=None):
    """Return what layer 2 of a stream of outputs reads, with initial or given parameters."""
    stream = STREAMS[name](hparams, LayerKind(False, 0, 1, len(x_LBTD)))
    inputs = (x_LBTD[-1], DepthSlots(x_LBTD))
    if params is None:
        params = stream.init(jax.random.key(0), *inputs, method='read')['params']
    return stream.apply({'params': params}, *inputs, method='read')[0]


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_reads_start_as_the_newest_output_bit_for_bit(dtype, tiny_config):
    """So the model starts as the residual one.

    A weight of 1.003, which bfloat16 rounds to 1, has an effect in both dtypes.
    """
    hparams = small_hparams(tiny_config, AVERAGE, {'model.dtype': dtype}).model
    x_LBTD = jnp.asarray(np.random.default_rng(3).normal(size=(4, 2, 5, 16)), dtype)
    for name in ('average', 'dense'):
        read_BTD = read(name, hparams, x_LBTD)
        assert read_BTD.dtype == dtype
        np.testing.assert_array_equal(read_BTD, x_LBTD[-1])
    finer = {'weights': jnp.array([0, 0, 0, 1.003])}
    assert np.any(read('average', hparams, x_LBTD, finer) != x_LBTD[-1])


# Training memory is linear in the number of layers, because slots are stored once. Programs are
# compiled, not run. The function that jax.vjp returns shows what a layer saves.
BATCH, LENGTH = 1, 128
WIDE = {
    'model.d_model': 64,
    'model.d_ff': 128,
    'model.num_kv_heads': 4,
    'model.head_dim': 16,
    'data.sequence_length': LENGTH,
}


def loss_of(make_config, num_layers, *knobs):
    """Return (loss of the parameters, the parameters' shapes, hparams)."""
    hparams = small_hparams(make_config, WIDE, {'model.num_layers': num_layers}, *knobs)
    model, tokens_BT = Transformer(hparams), jnp.zeros((BATCH, LENGTH), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens_BT)['params']
    return lambda params: jnp.sum(model.apply({'params': params}, tokens_BT)[0]), params, hparams


ALL_MIXED = MIXED | {'model.depth.value_stride': 1}
SCANNED = {
    'residual': {},
    'attention stream': ATTENTION,
    'moda': MODA,
    'value residual': VALUES,
    'value residual, sparse': SPARSE,
    'shared values': SHARED,
    'value attention': ALL_MIXED,
    'value attention, recent': RECENT,
    'attention residual': SOURCES,
    'attention residual, blocks of 3': SOURCES_OF_3,
    'hyper-connections': HYPER,
    'hyper-connections, static': STATIC,
    'hyper-connections, constrained': CONSTRAINED,
    'mudd': MUDD,
    'mudd, static': STATIC_WAYS,
    'embedding residual': EMBEDDED,
    'value embeddings': LOOKED_UP,
}


def forms(names):
    """Return (name, remat) of each case.

    Without `block` dynamic MUDD saves the weights of each token: in each layer as many as there
    are layers.
    """
    both = itertools.product(names, ('block', 'elementwise', 'none'))
    return [(name, remat) for name, remat in both if remat == 'block' or name != 'mudd']


@pytest.mark.parametrize(('name', 'remat'), parameters((('moda', 'elementwise'),), forms(SCANNED)))
def test_memory_is_linear_in_depth_and_the_program_does_not_grow(name, remat, tiny_config):
    """64 layers take at most 2.1 times the memory of 32, and 1.01 times the instructions.

    They take at least 1.3 times the memory: the constant part matters most where one slot is all
    there is. XLA fuses a few instructions differently at another length: 3,127 and 3,125 in JAX
    0.11.2.
    """

    def compiled(num_layers):
        loss, params, _ = loss_of(tiny_config, num_layers, SCANNED[name], {'model.remat': remat})
        program = jax.jit(jax.grad(loss)).lower(params).compile()
        return program.memory_analysis().temp_size_in_bytes, program.as_text().count(' = ')

    (half, instructions), (whole, of_whole) = compiled(32), compiled(64)
    assert 1.3 * half < whole < 2.1 * half
    assert of_whole <= 1.01 * instructions


KEPT = {
    'moda': MODA,
    'bfloat16': MODA | {'model.dtype': 'bfloat16'},  # with sums of another dtype
    'projected': MODA | ROUTED,
    'masked': MODA | ROUTED | MASKED,
    # The hidden layer of the mlp is saved too. Here it is smaller than a slot.
    'value attention': RECENT | {'model.d_ff': 64},
    'value attention, bfloat16': RECENT | ROUTED | {'model.dtype': 'bfloat16', 'model.d_ff': 64},
    'attention residual': SOURCES,
    'mudd, static, bfloat16': STATIC_WAYS | {'model.dtype': 'bfloat16', 'model.d_ff': 32},
    'attention residual, bfloat16': SOURCES | ROUTED | {'model.dtype': 'bfloat16'},
    'attention residual, blocks of 3': SOURCES_OF_3,
    'attention stream': ATTENTION | {'model.d_ff': 64},
    'mudd': MUDD,
}
FAST = (
    ('moda', 'elementwise'),
    ('masked', 'none'),
    ('bfloat16', 'none'),
    ('value attention', 'none'),
)


@pytest.mark.parametrize(('name', 'remat'), parameters(FAST, forms(KEPT)))
def test_no_layer_keeps_the_slots(name, remat, tiny_config):
    """A gradient saves the slots once, and nothing larger.

    An array that each layer of a scan saves from the buffer would be larger by the scan's length.
    """
    kept = {}
    for num_layers in (20, 40):
        loss, params, hparams = loss_of(tiny_config, num_layers, {'model.remat': remat}, KEPT[name])
        _, vjp = jax.eval_shape(lambda params, loss=loss: jax.vjp(loss, params), params)
        slots, _ = empty_slots(hparams.model, jnp.zeros((BATCH, LENGTH, 1)))
        buffer, arrays = jax.tree.leaves(slots)[0].shape, len(jax.tree.leaves(slots))
        mine = [leaf for leaf in jax.tree.leaves(vjp) if LENGTH in leaf.shape]
        assert sum(leaf.shape == buffer for leaf in mine) == arrays
        assert max(leaf.size for leaf in mine) == np.prod(buffer)
        kept[num_layers] = sum(leaf.size for leaf in mine)
    assert kept[40] < 2.2 * kept[20]


@pytest.mark.parametrize('mix', [VALUES, SPARSE, SHARED], ids=['learned', 'sparse', 'shared'])
def test_the_first_values_are_kept_once(mix, tiny_config):
    """With rematerialization, layers save only their input, and not also the values of the first.

    Both have the same size here.
    """
    knobs = {'model.d_ff': 48, 'model.remat': 'block'}
    loss, params, hparams = loss_of(tiny_config, 20, mix, knobs)
    _, vjp = jax.eval_shape(lambda params: jax.vjp(loss, params), params)
    slots, _ = empty_slots(hparams.model, jnp.zeros((BATCH, LENGTH, 1)))
    mine = [leaf for leaf in jax.tree.leaves(vjp) if LENGTH in leaf.shape]
    assert sum(leaf.shape == slots.shape for leaf in mine) == 1
    per_layer = [leaf for leaf in mine if leaf.size > 10 * slots.size]
    assert len(per_layer) == 1 and per_layer[0].shape[1:] == (BATCH, LENGTH, 64)


@pytest.mark.parametrize('stream', [DENSE, AVERAGE], ids=['dense', 'average'])
def test_gradients_of_outputs_are_summed_in_the_chosen_dtype(stream, tiny_config):
    """Four layers and the exit read 1 to 5 outputs: 1 + 2 + 3 + 4 sums of the size of an output."""

    def count(gradient_dtype, dtype):
        knobs = {'model.dtype': 'bfloat16', 'model.depth.gradient_dtype': gradient_dtype}
        model = Transformer(small_hparams(tiny_config, stream, knobs))
        tokens = jnp.zeros((1, 12), jnp.int32)
        variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
        gradient = jax.grad(lambda variables: jnp.sum(model.apply(variables, tokens)[0]))
        sums = [
            eqn.outvars[0].aval
            for eqn in equations(jax.make_jaxpr(gradient)(variables).jaxpr)
            if eqn.primitive.name == 'add_any'
        ]
        return sum(one.shape == (1, 12, 16) and one.dtype == dtype for one in sums)

    for dtype, more in (jnp.float32, 10), (jnp.bfloat16, -10):
        assert count('float32', dtype) - count('model', dtype) == more
