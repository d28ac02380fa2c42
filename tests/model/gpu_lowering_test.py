"""A training step lowers for a Hopper GPU with the intended kernels."""

import json
import math
import re

import jax
import jax.numpy as jnp
import pytest
from ml_collections import ConfigDict

from kernels_pallas import backends, cudnn
from kernels_pallas.backends import Device
from moddepth_jax.hparams import from_config
from moddepth_jax.model.moe.experts import routed_mlp
from moddepth_jax.model.transformer import Transformer
from moddepth_jax.training.mesh import make_mesh, state_shardings
from tests.devices import on_devices
from tests.kernels import hopper
from tests.kernels.hopper import lower
from tests.model.cases import (
    ATTENTION,
    CONSTRAINED,
    HYPER,
    MODA,
    MUDD,
    ROUTED,
    SOURCES,
    VALUES,
    parameters,
    small_hparams,
)

WIDE = {
    'model.num_layers': 3,
    'model.dtype': 'bfloat16',
    'model.d_model': 128,
    'model.head_dim': 64,
    'model.num_heads': 8,
    'model.num_kv_heads': 1,
    'model.attention': 'mosaic_gpu',
}
ACROSS = {'model.across_documents': True}
MASKED = {'model.depth.skipped_slots': 'masked'}


def pretend_hopper(setattr):
    """Behave as on a machine with an H200 and cuDNN."""
    setattr(jax, 'default_backend', lambda: 'gpu')
    setattr(backends, 'this_device', lambda: Device('gpu', 'NVIDIA H200', (9, 0)))
    setattr(cudnn.fused, 'check_cudnn_version', lambda: 91000)


@pytest.fixture
def at_hopper(monkeypatch):
    pretend_hopper(monkeypatch.setattr)


def gradient_of(hparams, rows=2, length=64):
    """Return the gradient of a loss, and the shapes of the parameters."""
    model, tokens_BT = Transformer(hparams), jnp.zeros((rows, length), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens_BT)['params']

    def loss(params):
        return jnp.sum(model.apply({'params': params}, tokens_BT)[0])

    return jax.grad(loss), params


@pytest.mark.parametrize('remat', parameters(('elementwise',), ('elementwise', 'block', 'none')))
@pytest.mark.parametrize(
    ('knobs', 'by_cudnn'),
    [
        pytest.param(MODA | ACROSS, True, marks=pytest.mark.slow),
        pytest.param(MODA | ACROSS | {'model.windows': (16,)}, True, marks=pytest.mark.slow),
        # Grouped keys of packed documents: see kernels_pallas/cudnn.py.
        (MODA, jax.__version_info__ >= (0, 11, 2)),
        (MODA | ROUTED | MASKED | ACROSS, True),
        pytest.param(ATTENTION | ACROSS | {'model.d_model': 512}, True, marks=pytest.mark.slow),
    ],
    ids=['moda', 'window', 'documents apart', 'mod and moda', 'attention stream'],
)
def test_step_lowers(at_hopper, knobs, by_cudnn, remat, tiny_config):
    """Depth slots use the Hopper kernels and the sequence cuDNN, with and without documents."""
    hparams = small_hparams(tiny_config, WIDE, {'model.remat': remat}, knobs)
    text = lower(*gradient_of(hparams))
    assert '@mosaic_gpu' in text and 'triton' not in text
    # Four or three slots, rounded up to a multiple of eight.
    assert 'tensor<8x2x64x1x64xbf16>' in text
    for name in ('fmhaSoftmax(', 'fmhaSoftmaxBackward('):
        assert (f'cudnn${name}' in text) == by_cudnn


@pytest.mark.parametrize(
    'stream',
    [VALUES, SOURCES, HYPER, pytest.param(CONSTRAINED, marks=pytest.mark.slow), MUDD],
    ids=['value residual', 'attention residual', 'hyper-connections', 'mhc', 'mudd'],
)
def test_streams_without_depth_attention_lower(at_hopper, stream, tiny_config):
    """They use cuDNN for the sequence and no kernel for slots."""
    hparams = small_hparams(tiny_config, WIDE, {'model.attention': 'auto'}, stream, ACROSS)
    text = lower(*gradient_of(hparams))
    assert all(f'cudnn${name}' in text for name in ('fmhaSoftmax(', 'fmhaSoftmaxBackward('))
    assert '@mosaic_gpu' not in text and 'triton' not in text


def on_eight_devices(config):
    pretend_hopper(setattr)
    hparams, mesh = from_config(ConfigDict(config)), make_mesh('data=2,fsdp=2,tensor=2')
    with jax.set_mesh(mesh):
        gradient, params = gradient_of(hparams, rows=8)
        split = jax.tree.map(
            lambda leaf, to: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to),
            params,
            state_shardings(mesh, params),
        )
        text = jax.jit(gradient).trace(split).lower(lowering_platforms=('cuda',)).as_text()
    calls = re.findall(r'custom_call @([\w$]+)(.*)', text)
    ours = ' '.join(rest for name, rest in calls if name.startswith('mosaic_gpu'))
    slots = re.findall('tensor<8x([0-9]+x[0-9]+)xbf16>', ours)
    names = sorted({name for name, _ in calls})
    print(json.dumps([backends.log_lines(), names, slots]))


@pytest.mark.slow
def test_every_device_runs_the_kernels_on_its_own_rows_and_heads(tiny_config):
    """On 2 x 2 x 2 devices, each has a quarter of the rows and half of the heads."""
    changes = MODA | ACROSS | {'model.num_heads': 16, 'model.num_kv_heads': 2}
    config = tiny_config(**WIDE | changes).to_dict()
    code = 'from tests.model import gpu_lowering_test as test; import json, sys; '
    code += 'test.on_eight_devices(json.loads(sys.argv[1]))'
    lines, calls, slots = on_devices(8, code, json.dumps(config))
    assert lines == ['depth_attention on NVIDIA H200: sequence by cudnn, depth by mosaic_gpu']
    assert {'__cudnn$fmhaSoftmax', '__cudnn$fmhaSoftmaxBackward', 'mosaic_gpu_v2'} <= set(calls)
    assert set(slots) == {'128x64'}  # tokens of two rows, and the width of one head


@pytest.mark.aot
@pytest.mark.parametrize('documents', [ACROSS, {}], ids=['cudnn', 'xla'])
def test_slots_are_stored_once_on_a_gpu(at_hopper, documents, tiny_config):
    """Compiled for an H200, memory is linear in depth: no loop copies the slots or their sums."""
    if reason := hopper.missing():
        pytest.skip(reason)
    rows, length, temporary = 8, 1024, {}
    for layers in (12, 24):
        hparams = small_hparams(tiny_config, WIDE, {'model.num_layers': layers}, MODA | documents)
        function, params = gradient_of(hparams, rows, length)
        with hopper.an_h200():
            lowered = jax.jit(function).lower(*hopper.on_hopper((params,)))
        compiled = lowered.compile()
        temporary[layers] = compiled.memory_analysis().temp_size_in_bytes
        # A buffer of zeros, to which no layer has written.
        slots = {12: 24, 24: 48}[layers]
        copy = rf'= \w+\[{slots},{rows},{length},1,64\]\S* copy(-start)?\((?!%broadcast)'
        assert not re.findall(copy, compiled.as_text())
    assert temporary[12] < temporary[24] < 2.2 * temporary[12]


B, T, D, F, E, K = 4, 2048, 512, 256, 16, 4
INSTRUCTION = re.compile(r'\s*(?:ROOT )?%?([\w.\-]+) = \(?\w+\[([\d,]*)\]')
CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d",]*)[\]}]')


def sizes(text):
    return [int(size.strip('"')) for size in text.split(',') if size]


def product_flops(text):
    """Return FLOPs of all dots and cuBLAS calls in a compiled program; a loop body counts once."""
    shapes, total = {}, 0
    for line in text.splitlines():
        if not (found := INSTRUCTION.match(line)):
            continue
        shapes[found[1]] = sizes(found[2])
        if ' dot(' in line or '__cublas' in line:
            first = re.search(r'(?: dot|custom-call)\(.*?%([\w.\-]+)', line)[1]
            contracted = (shapes[first][axis] for axis in sizes(CONTRACTED.search(line)[1]))
            total += 2 * math.prod(shapes[found[1]]) * math.prod(contracted)
    return total


@pytest.mark.aot
@pytest.mark.parametrize(('product', 'times'), [('batched', 1), ('ragged_dot', E)])
def test_products_on_hopper(product, times, monkeypatch):
    """`batched` multiplies at most 15% more than the pairs need, including padding.

    XLA compiles ragged_dot to a product with every expert, which is why `auto` does not use it.
    """
    if reason := hopper.missing():
        pytest.skip(reason)
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
    of = jax.ShapeDtypeStruct
    matrices = (of((E, D, F), jnp.bfloat16), of((E, D, F), jnp.bfloat16))
    rows = (of((B, T, D), jnp.bfloat16), of((B, T, K), jnp.int32), of((B, T, K), jnp.float32))
    arrays = (*rows, *matrices, of((E, F, D), jnp.bfloat16))
    with hopper.an_h200():
        lowered = jax.jit(lambda *arrays: routed_mlp(*arrays, product, K * T)).lower(
            *hopper.on_hopper(arrays)
        )
    active = 3 * 2 * D * F * B * T * K
    assert times * active <= product_flops(lowered.compile().as_text()) < 1.15 * times * active
