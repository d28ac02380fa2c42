"""The bytes in kernels_pallas/mosaic/traffic.py are those that the interpreter moves."""

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas.backends import Parts
from kernels_pallas.joint_softmax import SequenceMask, Slots, Static
from kernels_pallas.mosaic import (
    decode,
    depth,
    fused,
    fused_backward,
    sequence,
    slot_loader,
    traffic,
)
from tests.kernels.depth_backends_test import interpreted


@pytest.fixture
def moved(monkeypatch):
    """Return {number: [shape, dtype, bytes read, bytes written]} of arrays in global memory."""
    from jax._src.pallas.mosaic_gpu.interpret import shared_memory
    from jax.experimental.pallas import mosaic_gpu as plgpu

    memory, found = shared_memory.GPUSharedMemory, {}
    read = memory.get_buffer_content
    space = shared_memory.get_memory_space_idx(plgpu.GMEM)

    def count(key, access, result, which, size):
        if key.memory_space_id == space and access.shape:  # without the few scalars of a block
            row = found.setdefault(key.buffer_id, [tuple(result[1].shape), result[1].dtype, 0, 0])
            row[which] += size
        return result

    def counted_read(self, key, access, *args, **kwargs):
        result = read(self, key, access, *args, **kwargs)
        by_a_kernel = args and args[0] is not None and result[0] is not None
        return count(key, access, result, 2, result[0].nbytes if by_a_kernel else 0)

    monkeypatch.setattr(memory, 'get_buffer_content', counted_read)
    for store in (memory.store_buffer_content, memory.swap_buffer_content):

        def counted(self, key, access, value, *args, store=store, **kwargs):
            result = store(self, key, access, value, *args, **kwargs)
            return count(key, access, result, 3, value.nbytes)

        monkeypatch.setattr(memory, store.__name__, counted)
    return found


def arrays(T, K, G, H, L=0, B=1):
    """Return (q, k, lse, one side of the slots) of ones."""
    side = jnp.ones((L, B, T, K, H), jnp.bfloat16)
    q, k = (jnp.ones((B, T, heads, H), jnp.bfloat16) for heads in (K * G, K))
    return q, k, jnp.zeros((B, K * G, T)), side


def totals(moved, kind):
    """Return bytes read and written, by kind(shape, dtype, bytes written) of the array."""
    found = {}
    for shape, dtype, read, written in moved.values():
        name = kind(shape, dtype, written)
        found[name] = found.get(name, 0) + read + written
    moved.clear()
    return found


# T, K, G, H, slots held, num_slots, slot_window, B
DEPTH = [
    (3, 2, 2, 64, 9, 5, 0, 1),
    (2, 1, 8, 128, 70, 66, 0, 1),
    (2, 2, 3, 64, 72, 40, 33, 2),
    (2, 1, 12, 64, 24, 24, 0, 1),
]


@interpreted
@pytest.mark.parametrize(('T', 'K', 'G', 'H', 'L', 'num', 'window', 'B'), DEPTH)
def test_depth_moves_what_is_said(moved, T, K, G, H, L, num, window, B):
    """Visible slots and sums move in eights; queries, outputs and logsumexps once."""
    wide = jnp.bfloat16 if G == 2 else jnp.float32  # of the sequence's output and of the sums
    q, _, lse, side = arrays(T, K, G, H, L, B)
    slots, bytes_of = Slots(side, side, jnp.int32(num)), jnp.dtype(wide).itemsize
    sizes = slot_loader.Sizes.of(q, slots, window)

    def kind(shape, dtype, written):
        by_slot = len(shape) == 3 and shape[1] == B * T * K and shape[0] == sizes.slots
        return ('sums' if written else 'slots') if by_slot else 'own'

    jax.block_until_ready(
        depth.depth_forward(q, q.astype(wide), lse, slots, window, 1.0, interpret=True)
    )
    said = traffic.depth_forward(sizes, num, bytes_of)
    assert totals(moved, kind) == {'slots': said.slots, 'own': said.own}
    sums = (side.astype(wide),) * 2
    jax.block_until_ready(
        depth.depth_backward(q, q, q, lse, None, slots, sums, q, window, 1.0, interpret=True)
    )
    said = traffic.depth_backward(sizes, num, bytes_of)
    assert totals(moved, kind) == {'slots': said.slots, 'sums': said.sums, 'own': said.own}
    jax.block_until_ready(
        depth.depth_backward(q, q, q, lse, None, slots, None, q, window, 1.0, interpret=True)
    )
    said = traffic.depth_backward(sizes, num)
    assert totals(moved, kind) == {'slots': said.slots, 'sums': said.sums, 'own': said.own}


# T, K, G, H, slots held, num_slots, B
TILES = [
    (8, 1, 8, 64, 9, 5, 1),
    (17, 1, 3, 64, 24, 17, 1),
    (20, 1, 12, 128, 7, 7, 1),
    (150, 1, 1, 64, 8, 8, 1),
]


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize(('T', 'K', 'G', 'H', 'L', 'num', 'B'), TILES)
def test_tiles_move_what_is_said(moved, monkeypatch, T, K, G, H, L, num, B):
    """Fused forward, dq with and without slots, dk with dv, at odd T, L and G."""
    q, k, lse, side = arrays(T, K, G, H, L, B)
    static = Static(0, True, 0, 1.0, False, Parts('mosaic_gpu', 'mosaic_gpu_fused', interpret=True))
    slots, found, run_kernel = Slots(side, side, jnp.int32(num)), {}, fused.run_kernel

    def run(name, *arguments):
        def kind(shape, dtype, written):
            if name == 'sequence_backward_kv' and dtype == jnp.float32:
                return 'shared'
            return {5: 'shared', 6: 'sums' if written else 'slots'}.get(len(shape), 'own')

        results = jax.block_until_ready(run_kernel(name, *arguments))
        found[name] = totals(moved, kind)
        return results

    monkeypatch.setattr(fused, 'run_kernel', run)
    fused.fused_forward(q, k, k, None, None, slots, static)
    sequence.sequence_backward(q, k, k, SequenceMask(None, None), static, q, q, lse, None)
    sums = (side.astype(jnp.float32),) * 2 if G == 3 else (side,) * 2
    for given in (sums, None):
        own = q if given is None else None
        arguments = q, k, k, None, own, slots, given, static, q, q, lse, None
        fused_backward.fused_backward(*arguments)
        found['fresh' if given is None else 'added'] = found.pop('fused_backward_q')
    sizes = [fused.make_sizes(q, k, None, *rest, static) for rest in ((None, slots), (q, None))]
    wide = sums[0].dtype
    with_slots, _ = fused_backward.make_sizes(q, k, None, q, slots, static, wide)
    said = {
        'fused_forward': traffic.fused_forward(sizes[0], B, L, num),
        'sequence_backward_q': traffic.sequence_backward_q(sizes[1], B),
        'sequence_backward_kv': traffic.sequence_backward_kv(sizes[1], B),
        'added': traffic.fused_backward_q(with_slots, B, L, num, wide.itemsize),
        'fresh': traffic.fused_backward_q(with_slots, B, L, num, own_query=True),
    }
    assert set(found) == set(said)
    for name, bytes_ in said.items():
        kinds = {key: size for key, size in bytes_._asdict().items() if size}
        assert found[name] == kinds, name


# Rows, new tokens, K, G, H, places, length, slots held
DECODING = [
    (2, 1, 2, 1, 64, 80, 70, 0),
    (1, 3, 1, 5, 64, 576, 513, 9),
    (2, 1, 1, 12, 128, 64, 64, 70),
]


@interpreted
@pytest.mark.parametrize(('C', 'T', 'K', 'G', 'H', 'S', 'length', 'L'), DECODING)
def test_decoding_moves_what_is_said(moved, C, T, K, G, H, S, length, L):
    """The cache is read once, up to the last visible chunk; each split writes a tile of results."""
    q, k, _, side = arrays(T, K, G, H, L, C)
    cache, own_query = jnp.ones((C, K, H, S), jnp.bfloat16), L == 9
    sees = jnp.broadcast_to(jnp.arange(S) < length, (C, T, S)), jnp.ones((C, T, T), bool)
    slots = {'slots': (side, side, None)} if L else {}
    slots |= {'q_depth_CTNH': q} if own_query else {}
    o = decode.decode_forward(q, k, k, cache, cache, *sees, interpret=True, **slots)
    jax.block_until_ready(o)
    sizes = decode.Sizes(C, T, K, G, H, S, -(-L // 8) * 8, q.dtype, own_query)

    def kind(shape, dtype, written):
        return 'slots' if len(shape) == 3 and L and shape[0] == sizes.slots else 'own'

    said = traffic.decode_forward(sizes, length)._asdict()
    assert totals(moved, kind) == {name: size for name, size in said.items() if size}
