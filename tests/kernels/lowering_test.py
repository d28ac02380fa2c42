"""Every kernel for GPUs lowers for CUDA on a machine that has none, and what cannot is caught."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from kernels_pallas import (
    mosaic_depth,
    mosaic_depth_backward,
    mosaic_fused,
    mosaic_walk,
    pallas_depth,
)
from tests.kernels.hopper import an_h200

# JAX means to remove it; until then it is what runs on GPUs older than Hopper.
pytestmark = pytest.mark.filterwarnings(
    'ignore:The Pallas Triton backend is deprecated:DeprecationWarning'
)

# Depth parts by name: (depth_forward, depth_backward).
DEPTH = {'pallas': (pallas_depth.depth_forward, pallas_depth.depth_backward)}
HOPPER = (mosaic_depth.depth_forward, mosaic_depth_backward.depth_backward)


def lower(function, *arguments):
    """The StableHLO text of a function of shapes, for CUDA."""
    with an_h200():
        traced = jax.jit(function).trace(*arguments)
        return traced.lower(lowering_platforms=('cuda',)).as_text()


def lower_depth(kernels, B, T, K, G, H, L, R=None, mask=False, dtype=jnp.bfloat16):
    """Both passes of a depth part, in text; num_slots traced, sums as wide as the slots."""

    def shape(*sides, dtype=dtype):
        return jax.ShapeDtypeStruct(sides, dtype)

    q, lse = shape(B, T, K * G, H), shape(B, K * G, T, dtype=jnp.float32)
    pair = (shape(L, B, R or T, K, H),) * 2
    slots = [shape(dtype=jnp.int32)]
    slots += [shape(L, B, R or T, dtype=jnp.bool_) if mask else None]
    slots += [shape(B, T, dtype=jnp.int32) if R else None]
    static = {'window': 3, 'scale': 1.0, 'interpret': False}
    forward, backward = (functools.partial(kernel, **static) for kernel in kernels)
    text = lower(forward, q, q, lse, pair, *slots)
    return text, lower(backward, q, q, lse, lse, pair, pair, *slots)


@pytest.mark.parametrize('L', [64, 70])
@pytest.mark.parametrize('G', [1, 3, 8])
@pytest.mark.parametrize('H', [64, 128])
@pytest.mark.parametrize('name', DEPTH)
def test_depth_lowers(name, H, G, L):
    """Each pass becomes one kernel; the sums are written where they are given."""
    forward, backward = lower_depth(DEPTH[name], 2, 200, 2, G, H, L)
    assert len(re.findall('custom_call', forward)) == len(re.findall('custom_call', backward)) == 1
    aliases = r'output_tuple_indices = \[(\d)\],\s*operand_index = (\d)'
    assert re.findall(aliases, backward) == [('1', '4'), ('2', '5')]
    assert not re.findall(aliases, forward)


@pytest.mark.parametrize(
    'sizes',
    [
        {'T': 1, 'G': 1, 'H': 8, 'L': 1},
        {'T': 97, 'G': 5, 'H': 56, 'L': 7, 'R': 101, 'mask': True},
        {'T': 1025, 'G': 7, 'H': 96, 'L': 7, 'mask': True, 'dtype': jnp.float32},
        {'T': 33, 'G': 64, 'H': 256, 'L': 3, 'R': 30, 'dtype': jnp.float16},
    ],
)
def test_odd_sizes_lower_in_pallas(sizes):
    """Sides that are no powers of two, every kind of slots, and the largest tile allowed."""
    lower_depth(DEPTH['pallas'], B=3, K=2, **sizes)


def test_a_bad_tile_is_caught(monkeypatch):
    """Lowering is a check: a tile of three tokens, which Triton has none of, does not pass."""
    monkeypatch.setattr(pallas_depth._Sizes, 'tile', (3, 1, 64))
    with pytest.raises(ValueError, match='power of 2'):
        lower_depth(DEPTH['pallas'], 1, 12, 1, 1, 64, 4)


@pytest.mark.parametrize(('length', 'bits'), [(2**30, 64), (2**10, 32)])
def test_offsets_beyond_31_bits(length, bits, monkeypatch, capsys):
    """In arrays of more than 2^31 elements a Triton offset is of 64 bits before it is multiplied.

    The mask is the narrow case: of 3 * 2^30 elements, fewer than 2^32 bytes were they of one byte.
    The look-up of rows stays within 2^30 elements.
    """
    monkeypatch.setattr(pl, 'pallas_call', functools.partial(pl.pallas_call, debug=True))
    lower_depth(DEPTH['pallas'], 1, length, 1, 2, 64, 3, R=length, mask=True)
    # Of each memory access, the array's type and the offset's.
    text = capsys.readouterr().out
    address = r'tt\.addptr .*tensor<[\dx]*!tt\.ptr<(\w+)>>, tensor<[\dx]*x(i\d+)>'
    accesses = re.findall(address, text)
    assert {array for array, _ in accesses} == {'bf16', 'f32', 'i16', 'i32'}
    assert {offset for array, offset in accesses if array != 'i32'} == {f'i{bits}'}
    # Tensors are multiplied by strides, of integers, and by nothing else.
    products = re.findall(r'arith\.muli .*: tensor<[\dx]*x(i\d+)> ', text)
    assert products.count(f'i{bits}') > len(accesses)
    assert products.count('i32') == (4 if bits == 64 else len(products))


@pytest.mark.parametrize(
    ('name', 'value', 'error', 'message'),
    [
        ('STAGES', 16, ValueError, 'exceeds available shared memory'),
        ('CHUNK', 72, AssertionError, None),  # JAX has no words for it
    ],
)
def test_what_a_hopper_gpu_cannot_hold_is_caught(monkeypatch, name, value, error, message):
    """Too much shared memory, and a tile with a side of no whole swizzled tiles, do not lower."""

    def lower_forward():
        x = jax.ShapeDtypeStruct((1, 64, 8, 128), jnp.bfloat16)
        slot = jax.ShapeDtypeStruct((64, 1, 64, 1, 128), jnp.bfloat16)
        lse, num = jax.ShapeDtypeStruct((1, 8, 64), jnp.float32), jax.ShapeDtypeStruct((), 'int32')
        static = {'window': 0, 'scale': 1.0, 'mask_LBR': None, 'rows_BT': None}
        lower(functools.partial(mosaic_depth.depth_forward, **static), x, x, lse, (slot,) * 2, num)

    lower_forward()
    for module in (mosaic_depth, mosaic_walk):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, value)
    with pytest.raises(error, match=message):
        lower_forward()


@pytest.mark.parametrize(
    'sizes',
    [
        {'T': 200, 'K': 2, 'G': 8, 'H': 64, 'L': 64},
        {'T': 97, 'K': 2, 'G': 3, 'H': 128, 'L': 70},
        {'T': 1025, 'K': 1, 'G': 1, 'H': 56, 'L': 7, 'R': 1024, 'mask': True},
        {'T': 33, 'K': 3, 'G': 16, 'H': 96, 'L': 67, 'mask': True, 'dtype': jnp.float16},
        {'T': 33, 'K': 3, 'G': 32, 'H': 128, 'L': 1, 'R': 40},
    ],
)
def test_depth_lowers_for_hopper(sizes):
    """Each pass becomes one kernel; the sums are written where they are given."""
    forward, backward = lower_depth(HOPPER, 2, **sizes)
    assert len(re.findall('@mosaic_gpu', forward)) == len(re.findall('@mosaic_gpu', backward)) == 1
    aliases = r'output_tuple_indices = \[(\d)\],\s*operand_index = (\d+)'
    assert re.findall(aliases, backward) == [('1', '9'), ('2', '10')]
    assert not re.findall(aliases, forward)


def test_hopper_reaches_beyond_31_bits():
    """TMA takes a coordinate per dimension: each side fits 31 bits here, and their product 37."""
    for text in lower_depth(HOPPER, 1, 2**20 + 1, 8, 1, 128, 64):
        assert re.search(r'@mosaic_gpu.*tensor<64x8388616x128xbf16>', text)


def lower_fused(T, K, G, H, L, R=None, general=False, dtype=jnp.bfloat16):
    """The fused forward, in text; general: windows, segments, own queries, mask, look-up."""
    shape, rows = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((1, T), jnp.int32)
    q, key = shape((1, T, K * G, H), dtype), shape((1, T, K, H), dtype)
    slot, mask = shape((L, 1, R or T, K, H), dtype), shape((L, 1, R or T), bool)
    segments, own, mask, places = (rows, q, mask, rows) if general else (None,) * 4
    given = (q, key, key, segments, own, (slot, slot), shape((), jnp.int32), mask, places)
    windows = {'sequence_window': 50 * general, 'slot_window': 5 * general}
    options = {**windows, 'scale': 1.0, 'interpret': False}
    return lower(functools.partial(mosaic_fused.fused_forward, **options), *given)


@pytest.mark.parametrize(
    'sizes',
    [
        {'T': 200, 'K': 2, 'G': 8, 'H': 64, 'L': 64},
        {'T': 97, 'K': 2, 'G': 8, 'H': 128, 'L': 70, 'general': True},
        {'T': 1025, 'K': 1, 'G': 16, 'H': 56, 'L': 7, 'R': 1024, 'general': True},
        {'T': 3, 'K': 1, 'G': 24, 'H': 96, 'L': 1, 'dtype': jnp.float16},
    ],
)
def test_fused_lowers(sizes):
    """Sequence and slots become one kernel, whatever the lengths."""
    assert len(re.findall('@mosaic_gpu', lower_fused(**sizes))) == 1


def test_fused_reaches_beyond_31_bits():
    """Slots are copied by a coordinate per dimension, or for [B, R, K] together: 37 bits here."""
    assert 'tensor<64x1x1048577x8x128xbf16>' in lower_fused(2**20 + 1, 8, 8, 128, 64)


def test_a_fused_ring_too_large_is_caught(monkeypatch):
    monkeypatch.setattr(mosaic_fused, 'SHARED_BYTES', 256 * 1024)
    with pytest.raises(ValueError, match='exceeds available shared memory'):
        lower_fused(64, 1, 8, 128, 8)
