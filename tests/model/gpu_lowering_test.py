"""A training step of the whole model becomes a program for a Hopper GPU, by the kernels meant."""

import re

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import choice, cudnn
from moddepth_jax.model.transformer import Transformer
from tests.kernels import hopper
from tests.kernels.lowering_test import lower
from tests.model.depth_models import ATTENTION, MODA, ROUTED, small

WIDE = {
    'model.num_layers': 4,
    'model.dtype': 'bfloat16',
    'model.d_model': 128,
    'model.head_dim': 64,
    'model.num_heads': 8,
    'model.num_kv_heads': 1,
}
ACROSS = {'model.across_documents': True}
MASKED = {'model.depth.skipped_slots': 'masked'}


@pytest.fixture
def at_hopper(monkeypatch):
    """As on a machine with an H200 and cuDNN."""
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
    monkeypatch.setattr(choice, '_capability', lambda: '9.0')
    monkeypatch.setattr(cudnn.fused, 'check_cudnn_version', lambda: 91000)


def gradient_of(hparams, rows=2, length=64):
    """The gradient of a loss, and the shapes of the parameters."""
    model, tokens_BT = Transformer(hparams), jnp.zeros((rows, length), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens_BT)['params']

    def loss(params):
        return jnp.sum(model.apply({'params': params}, tokens_BT)[0])

    return jax.grad(loss), params


@pytest.mark.parametrize('remat', ['block', pytest.param('none', marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ('knobs', 'by_cudnn'),
    [
        (MODA | ACROSS, True),
        (MODA | ACROSS | {'model.windows': (16,)}, True),
        (MODA, False),
        (MODA | ROUTED | MASKED | ACROSS, True),
        pytest.param(ATTENTION | ACROSS | {'model.d_model': 512}, True, marks=pytest.mark.slow),
    ],
    ids=['moda', 'window', 'documents apart', 'mod and moda', 'attention stream'],
)
def test_step_lowers(at_hopper, knobs, by_cudnn, remat, tiny_config):
    """Depth by the Hopper kernels; the sequence by cuDNN where documents are not kept apart."""
    hparams = small(tiny_config, WIDE, {'model.remat': remat}, knobs)
    text = lower(*gradient_of(hparams))
    assert '@mosaic_gpu' in text and 'triton' not in text
    # Room for six slots, or five, and as many more as make whole octets.
    assert 'tensor<8x2x64x1x64xbf16>' in text
    for name in ('fmhaSoftmax(', 'fmhaSoftmaxBackward('):
        assert (f'cudnn${name}' in text) == by_cudnn


@pytest.mark.aot
@pytest.mark.parametrize('documents', [ACROSS, {}], ids=['cudnn', 'xla'])
def test_slots_are_stored_once_on_a_gpu(at_hopper, documents, tiny_config):
    """Compiled for an H200: memory is linear in depth; no loop copies the slots or their sums."""
    if reason := hopper.missing():
        pytest.skip(reason)
    rows, length, temporary = 8, 1024, {}
    for layers in (12, 24):
        hparams = small(tiny_config, WIDE, {'model.num_layers': layers}, MODA | documents)
        function, params = gradient_of(hparams, rows, length)
        with hopper.an_h200():
            lowered = jax.jit(function).lower(*hopper.on_hopper((params,)))
        compiled = lowered.compile()
        temporary[layers] = compiled.memory_analysis().temp_size_in_bytes
        # Of zeros alone, which no layer has written to.
        slots = {12: 24, 24: 48}[layers]
        copy = rf'= \w+\[{slots},{rows},{length},1,64\]\S* copy(-start)?\((?!%broadcast)'
        assert not re.findall(copy, compiled.as_text())
    assert temporary[12] < temporary[24] < 2.2 * temporary[12]
