"""Every GPU kernel lowers for CUDA on a machine without a GPU."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from kernels_pallas.backends import Parts
from kernels_pallas.joint_softmax import SequenceMask, Slots, Static, joint_attention
from tests.kernels.hopper import (
    decode_call,
    depth_call,
    fused_call,
    lower,
    sequence_call,
    shape,
)

# Deprecated in JAX, but it is the only form of the kernels for GPUs older than Hopper.
pytestmark = pytest.mark.filterwarnings(
    'ignore:The Pallas Triton backend is deprecated:DeprecationWarning'
)
MASK = SequenceMask(*(np.arange(200)[None],) * 2)  # for one batch row


def lower_depth(backend, ways=('forward', 'backward'), **sizes):
    """Return the lowered text of a depth part's passes, with a window."""
    calls = (depth_call(backend, way, window=3, **sizes) for way in ways)
    return [lower(function, *arrays) for function, arrays in calls]


TRITON = [
    *({'B': 2, 'T': 200, 'G': G, 'H': H, 'L': L} for H, G, L in ((64, 1, 64), (128, 8, 70))),
    {'T': 1, 'G': 1, 'H': 8, 'L': 1},
    {'T': 97, 'G': 5, 'H': 56, 'L': 7, 'R': 101, 'mask': True},
    {'T': 1025, 'G': 7, 'H': 96, 'L': 7, 'mask': True, 'dtype': jnp.float32},
    {'T': 33, 'G': 64, 'H': 256, 'L': 3, 'R': 30, 'dtype': jnp.float16},
]
MOSAIC = [
    {'B': 2, 'T': 200, 'G': 8, 'H': 64, 'L': 64},
    {'B': 2, 'T': 97, 'G': 3, 'H': 128, 'L': 70},
    {'T': 1025, 'K': 1, 'G': 1, 'H': 56, 'L': 7, 'R': 1024, 'mask': True},
    {'T': 33, 'G': 32, 'H': 96, 'L': 67, 'R': 40, 'mask': True, 'dtype': jnp.float16},
]


@pytest.mark.parametrize(
    ('backend', 'sizes'),
    [('pallas', sizes) for sizes in TRITON] + [('mosaic_gpu', sizes) for sizes in MOSAIC],
)
def test_depth_lowers(backend, sizes):
    """Each pass becomes one kernel, and the sums are updated in place.

    Sides that are no powers of two, every kind of slots, and the largest tile allowed. Where 8
    divides G and L, XLA computes and copies nothing around the Hopper kernels.
    """
    forward, backward = lower_depth(backend, **{'B': 3, 'K': 2} | sizes)
    call = {'pallas': '@__gpu\\$xla.gpu.triton', 'mosaic_gpu': '@mosaic_gpu'}[backend]
    assert len(re.findall(call, forward)) == len(re.findall(call, backward)) == 1
    aliases = r'output_tuple_indices = \[(\d)\],\s*operand_index = (\d+)'
    operands = {'pallas': '45', 'mosaic_gpu': ('10', '11')}[backend]
    assert re.findall(aliases, backward) == [('1', operands[0]), ('2', operands[1])]
    assert not re.findall(aliases, forward)
    if sizes is MOSAIC[0]:
        operations = set(re.findall(r'= "?stablehlo\.(\w+)', forward + backward))
        assert operations == {'constant', 'broadcast_in_dim', 'reshape', 'custom_call'}


@pytest.mark.parametrize(('length', 'bits'), [(2**30, 64), (2**10, 32)])
def test_offsets_beyond_31_bits(length, bits, monkeypatch, capsys):
    """In arrays of more than 2^31 elements Triton offsets have 64 bits before they are multiplied.

    The mask is the narrow case: of 3 * 2^30 elements, fewer than 2^32 bytes were they of one byte.
    The look-up of rows stays within 2^30 elements.
    """
    monkeypatch.setattr(pl, 'pallas_call', functools.partial(pl.pallas_call, debug=True))
    lower_depth('pallas', B=1, T=length, K=1, G=2, H=64, L=3, R=length, mask=True)
    # The types of array and offset of each memory access.
    text = capsys.readouterr().out
    address = r'tt\.addptr .*tensor<[\dx]*!tt\.ptr<(\w+)>>, tensor<[\dx]*x(i\d+)>'
    accesses = re.findall(address, text)
    assert {array for array, _ in accesses} == {'bf16', 'f32', 'i16', 'i32'}
    assert {offset for array, offset in accesses if array != 'i32'} == {f'i{bits}'}
    # Integer tensors are multiplied only by strides.
    products = re.findall(r'arith\.muli .*: tensor<[\dx]*x(i\d+)> ', text)
    assert products.count(f'i{bits}') > len(accesses)
    assert products.count('i32') == (4 if bits == 64 else len(products))


def lower_fused(*sizes, **options):
    function, arrays = fused_call(*sizes, windows=(50, 5), **options)
    return lower(function, *arrays)


@pytest.mark.parametrize(
    'sizes',
    [
        {'T': 200, 'K': 2, 'G': 8, 'H': 64, 'L': 64},
        {'T': 97, 'K': 2, 'G': 2, 'H': 128, 'L': 70, 'kind': 'documents', 'B': 3},
        {'T': 1025, 'K': 1, 'G': 12, 'H': 56, 'L': 7, 'R': 1024, 'kind': 'general'},
        {'T': 3, 'K': 1, 'G': 3, 'H': 96, 'L': 1, 'dtype': jnp.float16},
        {'T': 8, 'K': 1, 'G': 1, 'H': 128, 'L': 9},
        {'T': 200, 'K': 1, 'G': 12, 'H': 80, 'L': 7, 'kind': 'documents'},
    ],
)
def test_fused_lowers(sizes):
    """Sequence and slots become one kernel forward and two backward, at any length and width.

    Regression: a kernel of dq was refused where H is from 65 to 127 and G is not from 5 to 8.
    """
    for wide, kernels in ((None, 1), ('fresh', 2), (jnp.float32, 2)):
        assert len(re.findall('@mosaic_gpu', lower_fused(**sizes, wide=wide))) == kernels


@pytest.mark.parametrize(
    ('group', 'width', 'documents'),
    [(3, 128, False), (3, 128, True), (1, 96, False), (12, 80, True)],
)
def test_sequence_lowers(group, width, documents):
    """One kernel forward, two backward, at a length that is no multiple of a block."""
    for way, kernels in (('forward', 1), ('backward', 2)):
        function, arrays = sequence_call(way, 97, 2, group, width, documents, B=3)
        assert len(re.findall('@mosaic_gpu', lower(function, *arrays))) == kernels


@pytest.mark.parametrize(('tokens', 'slots'), [(1, 7), (3, 0)])
def test_decoding_lowers(tokens, slots):
    """It is one kernel, and no array holds gathered rows of the cache."""
    function, arrays = decode_call(3, 112, 2, 3, 96, slots, tokens, dtype=jnp.float16)
    cache = shape(5, *arrays[6].shape[1:], dtype=jnp.float16)
    text = lower(function, *arrays[:6], cache, cache, *arrays[8:])
    assert len(re.findall('@mosaic_gpu', text)) == 1
    assert 'tensor<5x2x96x112xf16>' in text and 'tensor<3x2x96x112xf16>' not in text


def test_hopper_reaches_beyond_31_bits():
    """TMA takes one coordinate per dimension: each fits 31 bits, their product has 37."""
    for text in lower_depth('mosaic_gpu', B=1, T=2**20 + 1, K=8, G=1, H=128, L=64):
        assert re.search(r'@mosaic_gpu.*tensor<64x8388616x128xbf16>', text)
    assert 'tensor<64x1x131072x8x8x128xbf16>' in lower_fused(2**20, 8, 2, 128, 64)


@pytest.mark.parametrize('dlse', [False, True])
@pytest.mark.parametrize('depth', ['pallas', 'mosaic_gpu', 'mosaic_gpu_fused'])
def test_parts_for_gpus_lower_together(depth, dlse):
    """A step by cuDNN and each depth part has each kernel once a pass; only XLA takes dlse."""
    static = Static(0, True, 0, 1.0, dlse, Parts('cudnn', depth))

    def loss(q, k, v, *sides):
        o, lse, *_ = joint_attention(static, q, k, v, MASK, None, Slots(*sides, 5), None)
        return jnp.sum(o.astype(jnp.float32)) + dlse * jnp.sum(lse)

    k, slot = shape(1, 200, 1, 64), shape(7, 1, 200, 1, 64)
    step = jax.grad(loss, argnums=tuple(range(5)))
    text = lower(step, shape(1, 200, 8, 64), k, k, slot, slot)
    assert text.count('cudnn$fmhaSoftmax(') == (depth != 'mosaic_gpu_fused')
    assert text.count('cudnn$fmhaSoftmaxBackward(') == (not dlse)
    assert text.count('@mosaic_gpu') + text.count('@__gpu$xla.gpu.triton') == 2


@pytest.mark.parametrize('threads', [False, True])
@pytest.mark.parametrize('parts', [('cudnn', 'mosaic_gpu'), ('mosaic_gpu', 'mosaic_gpu_fused')])
def test_fresh_gradients_are_results_that_nobody_fills(parts, threads):
    """No array of zeros has their shape, unless the slots are returned: then it is added to."""
    static = Static(0, True, 0, 1.0, False, Parts(*parts), threads)

    def loss(q, k, v, *sides):
        o, *_ = joint_attention(static, q, k, v, MASK, None, Slots(*sides, 5), None)
        return jnp.sum(o.astype(jnp.float32))

    k, slot = shape(1, 200, 1, 64), shape(8, 1, 200, 1, 64)
    text = lower(jax.grad(loss, argnums=(3, 4)), shape(1, 200, 8, 64), k, k, slot, slot)
    filled = re.findall('stablehlo.broadcast_in_dim.*-> tensor<8x1x200x1x64xbf16>', text)
    assert bool(filled) == ('output_operand_aliases = [#' in text) == threads
