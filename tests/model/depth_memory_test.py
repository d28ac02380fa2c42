"""Slots are stored once: the memory of training grows as the number of layers, not its square.

Programs are compiled, not run. The residual of a layer is read off the function that `jax.vjp`
returns.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.model.transformer import Transformer
from tests.model.cases import FAST, MODA, ROUTED, small_hparams

BATCH, LENGTH = 1, 128
WIDE = {
    'model.d_model': 64,
    'model.d_ff': 128,
    'model.num_kv_heads': 4,
    'model.head_dim': 16,
    'data.sequence_length': LENGTH,
}
MASKED = {'model.depth.skipped_slots': 'masked'}


def loss_of(make_config, num_layers, *knobs):
    """(loss of the parameters, the parameters' shapes, hparams)."""
    hparams = small_hparams(make_config, WIDE, {'model.num_layers': num_layers}, *knobs)
    model, tokens_BT = Transformer(hparams), jnp.zeros((BATCH, LENGTH), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens_BT)['params']
    return lambda params: jnp.sum(model.apply({'params': params}, tokens_BT)[0]), params, hparams


def temporary_bytes(make_config, num_layers, remat, loop='scan'):
    how = {'model.remat': remat, 'model.layer_loop': loop}
    loss, params, _ = loss_of(make_config, num_layers, MODA, how)
    compiled = jax.jit(jax.grad(loss)).lower(params).compile(compiler_options=FAST)
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize('remat', ['block', pytest.param('none', marks=pytest.mark.slow)])
def test_memory_is_linear_in_depth(remat, tiny_config):
    """64 layers take at most 2.2 times what 32 take."""
    at_64, at_32 = (temporary_bytes(tiny_config, layers, remat) for layers in (64, 32))
    assert 1.5 * at_32 < at_64 < 2.2 * at_32


@pytest.mark.slow
def test_memory_beside_the_unrolled_form(tiny_config):
    """At 32 layers a third of what plain differentiation takes, and without recomputing 0.6."""
    unrolled = temporary_bytes(tiny_config, 32, 'none', 'unrolled')
    assert temporary_bytes(tiny_config, 32, 'block') < unrolled / 3
    assert temporary_bytes(tiny_config, 32, 'none') < 0.6 * unrolled


@pytest.mark.parametrize(
    ('name', 'remat'),
    [
        ('moda', 'none'),
        ('masked', 'none'),
        ('bfloat16', 'none'),
        pytest.param('bfloat16', 'block', marks=pytest.mark.slow),
        pytest.param('projected', 'none', marks=pytest.mark.slow),
        pytest.param('projected', 'block', marks=pytest.mark.slow),
        pytest.param('masked', 'block', marks=pytest.mark.slow),
    ],
)
def test_no_layer_keeps_the_slots(name, remat, tiny_config):
    """Of what a gradient keeps, the slots are there once: two arrays, and nothing larger.

    An array that some layer of a scan kept of its buffer would be larger by the scan's length.
    """
    knobs = {
        'moda': [MODA],
        'bfloat16': [MODA, {'model.dtype': 'bfloat16'}],  # with sums of another dtype
        'projected': [MODA, ROUTED],
        'masked': [MODA, ROUTED, MASKED],
    }[name]
    kept = {}
    for num_layers in (20, 40):
        loss, params, hparams = loss_of(tiny_config, num_layers, {'model.remat': remat}, *knobs)
        _, vjp = jax.eval_shape(lambda params, loss=loss: jax.vjp(loss, params), params)
        model, slots = hparams.model, 2 * (num_layers - 1)
        buffer = (slots, BATCH, LENGTH, model.num_kv_heads, model.head_dim)
        mine = [leaf for leaf in jax.tree.leaves(vjp) if LENGTH in leaf.shape]
        assert sum(leaf.shape == buffer for leaf in mine) == 2
        assert max(leaf.size for leaf in mine) == np.prod(buffer)
        kept[num_layers] = sum(leaf.size for leaf in mine)
    assert kept[40] < 2.2 * kept[20]
