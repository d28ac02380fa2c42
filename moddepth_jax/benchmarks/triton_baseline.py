"""FlashAttention-2 in Triton, called through jax-triton: the usual baseline, without slots.

Import it only to time it: jax-triton (extra `gpu`) raises on import if JAX has no GPU. A program
handles a block of queries of one head (forward, dQ) or a block of keys (dK, dV). Scores are in base
2, like the exponential of the hardware. Source: Dao 2023, arXiv 2307.08691.
"""

import functools
import math

import jax
import jax.numpy as jnp
import jax_triton
import numpy as np
import triton
import triton.language as tl

BLOCK = 64  # queries and keys of a tile in the backward pass
FORWARD_BLOCKS = (128, 64)  # queries, keys


@triton.jit
def _tile(ptr, rows, T, N: tl.constexpr, H: tl.constexpr):
    """Load rows [rows, H] of one head, 0 beyond T; `ptr` points to the first row of the head."""
    offsets = rows.to(tl.int64)[:, None] * (N * H) + tl.arange(0, H)[None, :]
    return tl.load(ptr + offsets, mask=(rows < T)[:, None], other=0.0)


@triton.jit
def _put(ptr, rows, values, T, N: tl.constexpr, H: tl.constexpr):
    offsets = rows.to(tl.int64)[:, None] * (N * H) + tl.arange(0, H)[None, :]
    tl.store(ptr + offsets, values.to(ptr.dtype.element_ty), mask=(rows < T)[:, None])


@triton.jit
def _head(T, N: tl.constexpr, H: tl.constexpr):
    """Offsets of the head of this program in [B, T, N, H] and in [B, N, T]."""
    place = tl.program_id(1).to(tl.int64)
    return (place // N) * T * N * H + (place % N) * H, place * T


@triton.jit
def _forward_kernel(q, k, v, T, scale, o, lse, N: tl.constexpr, H: tl.constexpr,
                    M: tl.constexpr, S: tl.constexpr):  # fmt: skip
    at, at_row = _head(T, N, H)
    rows = tl.program_id(0) * M + tl.arange(0, M)
    query = _tile(q + at, rows, T, N, H)
    highest = tl.full([M], -float('inf'), tl.float32)
    total = tl.zeros([M], tl.float32)
    output = tl.zeros([M, H], tl.float32)
    for start in range(0, tl.minimum((tl.program_id(0) + 1) * M, T), S):
        keys = start + tl.arange(0, S)
        scores = tl.dot(query, tl.trans(_tile(k + at, keys, T, N, H))) * scale
        scores = tl.where(rows[:, None] >= keys[None, :], scores, -float('inf'))
        new = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new[:, None])
        keep = tl.exp2(highest - new)
        total = total * keep + tl.sum(weights, 1)
        value = _tile(v + at, keys, T, N, H)
        output = output * keep[:, None] + tl.dot(weights.to(value.dtype), value)
        highest = new
    _put(o + at, rows, output / total[:, None], T, N, H)
    tl.store(lse + at_row + rows, highest + tl.log2(total), mask=rows < T)


@triton.jit
def _weights(query, key, rows, keys, lse, scale):
    """Softmax weights of a tile from the logsumexp of its rows; 0 above the diagonal."""
    scores = tl.dot(query, tl.trans(key)) * scale
    return tl.where(rows[:, None] >= keys[None, :], tl.exp2(scores - lse[:, None]), 0.0)


@triton.jit
def _dq_kernel(q, k, v, do, lse, delta, T, scale, dq, N: tl.constexpr, H: tl.constexpr,
               M: tl.constexpr):  # fmt: skip
    at, at_row = _head(T, N, H)
    rows = tl.program_id(0) * M + tl.arange(0, M)
    query, cotangent = _tile(q + at, rows, T, N, H), _tile(do + at, rows, T, N, H)
    row_lse = tl.load(lse + at_row + rows, mask=rows < T, other=0.0)
    row_delta = tl.load(delta + at_row + rows, mask=rows < T, other=0.0)
    gradient = tl.zeros([M, H], tl.float32)
    for start in range(0, tl.minimum((tl.program_id(0) + 1) * M, T), M):
        keys = start + tl.arange(0, M)
        key = _tile(k + at, keys, T, N, H)
        weights = _weights(query, key, rows, keys, row_lse, scale)
        dweights = tl.dot(cotangent, tl.trans(_tile(v + at, keys, T, N, H)))
        dscores = weights * (dweights - row_delta[:, None])
        gradient += tl.dot(dscores.to(key.dtype), key)
    _put(dq + at, rows, gradient * scale * 0.6931471805599453, T, N, H)


@triton.jit
def _dkv_kernel(q, k, v, do, lse, delta, T, scale, dk, dv, N: tl.constexpr, H: tl.constexpr,
                M: tl.constexpr):  # fmt: skip
    at, at_row = _head(T, N, H)
    keys = tl.program_id(0) * M + tl.arange(0, M)
    key, value = _tile(k + at, keys, T, N, H), _tile(v + at, keys, T, N, H)
    dkey, dvalue = tl.zeros([M, H], tl.float32), tl.zeros([M, H], tl.float32)
    for start in range(tl.program_id(0) * M, T, M):
        rows = start + tl.arange(0, M)
        query, cotangent = _tile(q + at, rows, T, N, H), _tile(do + at, rows, T, N, H)
        row_lse = tl.load(lse + at_row + rows, mask=rows < T, other=0.0)
        row_delta = tl.load(delta + at_row + rows, mask=rows < T, other=0.0)
        weights = _weights(query, key, rows, keys, row_lse, scale)
        dvalue += tl.dot(tl.trans(weights.to(value.dtype)), cotangent)
        dscores = weights * (tl.dot(cotangent, tl.trans(value)) - row_delta[:, None])
        dkey += tl.dot(tl.trans(dscores.to(key.dtype)), query)
    _put(dk + at, keys, dkey * scale * 0.6931471805599453, T, N, H)
    _put(dv + at, keys, dvalue, T, N, H)


def _call(kernel, arrays, out, block, **sizes):
    """Run a kernel on the inputs, T and the scale of base-2 scores; outputs come last."""
    batch, length, heads, width = arrays[0].shape
    warps = 4 if width <= 64 else 8
    return jax_triton.triton_call(
        *arrays,
        length,
        np.float32(width**-0.5 * math.log2(math.e)),  # jax-triton makes a Python float float64
        kernel=kernel,
        out_shape=out,
        grid=(triton.cdiv(length, block), batch * heads),
        num_warps=warps,
        num_stages=3,
        N=heads,
        H=width,
        M=block,
        **sizes,
    )


@jax.custom_vjp
def flash_attention(q_BTNH, k_BTNH, v_BTNH):
    """Compute causal attention with one key/value head for each query head.

    Raises ValueError unless the head width is 16, 32, 64 or 128.
    """
    return _forward(q_BTNH, k_BTNH, v_BTNH)[0]


def _forward(q_BTNH, k_BTNH, v_BTNH):
    batch, length, heads, width = q_BTNH.shape
    if width & (width - 1) or not 16 <= width <= 128:
        raise ValueError(f'head width {width} must be 16, 32, 64 or 128')
    queries, keys = FORWARD_BLOCKS
    lse = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    out = (jax.ShapeDtypeStruct(q_BTNH.shape, q_BTNH.dtype), lse)
    inputs = (q_BTNH, k_BTNH, v_BTNH)
    o_BTNH, lse_BNT = _call(_forward_kernel, inputs, out, queries, S=keys)
    return o_BTNH, (*inputs, o_BTNH, lse_BNT)


def _backward(residuals, do_BTNH):
    q_BTNH, k_BTNH, v_BTNH, o_BTNH, lse_BNT = residuals
    product_BTN = jnp.sum(do_BTNH.astype(jnp.float32) * o_BTNH.astype(jnp.float32), axis=-1)
    inputs = (q_BTNH, k_BTNH, v_BTNH, do_BTNH, lse_BNT, jnp.swapaxes(product_BTN, 1, 2))
    like = functools.partial(jax.ShapeDtypeStruct, q_BTNH.shape, q_BTNH.dtype)
    dq_BTNH = _call(_dq_kernel, inputs, like(), BLOCK)
    return dq_BTNH, *_call(_dkv_kernel, inputs, (like(), like()), BLOCK)


flash_attention.defvjp(_forward, _backward)
