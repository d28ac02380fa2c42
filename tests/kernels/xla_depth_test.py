"""The depth part by XLA: slots pass through layers, only visible ones are read, none is copied."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from kernels_pallas import depth_attention
from kernels_pallas.xla import depth as xla

LAYERS, SHAPE, KV_HEADS = 5, (2, 16, 4, 8), 2


def layer(x, k_depth, v_depth, index):
    """One attention layer, which writes its keys and values to slot `index`."""
    own = x[:, :, :KV_HEADS], x[:, :, -KV_HEADS:]
    options = {'num_slots': index, 'thread_slots': True}
    o, *slots = depth_attention(x, *own, k_depth, v_depth, **options)
    return 0.5 * x + 0.5 * o, own, slots


def forward(x):
    """The last layer's output, every layer's input and the final slots, in one scan."""

    def step(carry, index):
        x, *slots = carry
        y, own, slots = layer(x, *slots, index)
        pairs = zip(slots, own, strict=True)
        return (y, *(lax.dynamic_update_index_in_dim(b, u, index, 0) for b, u in pairs)), x

    empty = jnp.zeros((LAYERS, *SHAPE[:2], KV_HEADS, SHAPE[3]))
    (y, *slots), inputs = lax.scan(step, (x, empty, empty), jnp.arange(LAYERS))
    return y, inputs, slots


def backward(x, dy):
    """Return the gradient of x by one reverse scan that passes the slots' cotangents on."""
    _, inputs, slots = forward(x)

    def step(carry, given):
        dx, *sums = carry
        x, index = given
        own = [total[index] for total in sums]
        own, sums = xla.order_before_writes((own, sums), index)
        _, pull = jax.vjp(lambda *given: layer(*given, index), x, *slots)
        return pull((dx, tuple(own), list(sums))), None

    zeros = [jnp.zeros_like(slot) for slot in slots]
    (dx, *_), _ = lax.scan(step, (dy, *zeros), (inputs, jnp.arange(LAYERS)), reverse=True)
    return dx


def normal(seed, shape=SHAPE):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize(
    ('run', 'tokens'),
    [(forward, 16), (forward, 6), (lambda x: backward(x, x), 16)],
    ids=['forward', 'forward in tiles', 'backward'],
)
def test_no_loop_copies_the_slots(run, tokens, monkeypatch):
    """Slots are written, and their gradients added, in place: no loop body has a copy of that size.

    A backward pass in tiles does copy the slots once a layer, where it recomputes the layer.
    """
    monkeypatch.setattr(xla, 'TILE_NUMBERS', tokens * 2 * 4 * 8)
    # A new function, since JAX remembers the trace of a known one, with other tiles.
    text = jax.jit(lambda x: run(x)).lower(normal(0)).compile().as_text()
    size = LAYERS * np.prod(SHAPE) * KV_HEADS // SHAPE[2]
    assert re.search(rf'\[{LAYERS},{SHAPE[0]},{SHAPE[1]}', text)
    inside = ''
    for line in text.splitlines():
        if line.endswith('{'):
            inside = line.split()[0]
        copied = re.search(r'= \w+\[([\d,]+)\]\S* copy\(', line)
        if inside != 'ENTRY' and copied:
            assert np.prod([int(n) for n in copied[1].split(',')]) < size, line


def test_buffers_are_residuals_as_given():
    """jax.vjp passes the slots on as arguments and keeps nothing else of their size."""
    x, slots = normal(0), [normal(seed, (40, 2, 16, 2, 8)) for seed in (1, 2)]

    def kept(x, k_depth, v_depth, index):
        _, pull = jax.vjp(layer, x, k_depth, v_depth, index)
        forwarded = [r for r in pull.args_res if r is k_depth or r is v_depth]
        sizes = [r.size for r in pull.opaque_residuals]
        assert len(forwarded) == 2 and max(sizes) < k_depth.size / 4
        return x

    jax.make_jaxpr(kept)(x, *slots, jnp.int32(3))


def test_invisible_slots_are_not_read(monkeypatch):
    """The loops read each visible slot once, and no other."""
    read, dynamic_slice = [], lax.dynamic_slice

    def counting(side, start, *args):
        jax.debug.callback(lambda slot: read.append(int(slot)), start[0])
        return dynamic_slice(side, start, *args)

    monkeypatch.setattr(xla.lax, 'dynamic_slice', counting)
    x, slots = normal(0), normal(1, (20, 2, 16, 2, 8))
    keys = x[:, :, :2]

    @jax.jit
    def run(num_slots):
        return depth_attention(x, keys, keys, slots, slots, num_slots=num_slots, slot_window=7)

    for num_slots, seen in {0: range(0), 3: range(3), 20: range(13, 20)}.items():
        read.clear()
        jax.block_until_ready(run(num_slots))
        jax.effects_barrier()
        assert sorted(read) == sorted([*seen] * 2)
