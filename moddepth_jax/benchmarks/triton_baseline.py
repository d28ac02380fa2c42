"""FlashAttention-2 in Triton, called through jax-triton: the usual baseline, without slots.

Import it only to time it: jax-triton (extra `gpu`) raises on import if JAX has no GPU. A program
handles a block of queries of one head (forward, dQ) or a block of keys of one key/value head (dK,
dV). Only tiles on the diagonal are masked. Scores are in base 2, like the exponential of the
hardware. Source: Dao 2023, arXiv 2307.08691.
"""

import math

import jax
import jax.numpy as jnp
import jax_triton
import numpy as np
import triton
import triton.language as tl

BLOCK = 64  # queries and keys of a tile in the backward pass
FORWARD_BLOCKS = (128, 64)  # queries, keys; the second divides the first


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
def _head(T, N: tl.constexpr, K: tl.constexpr, H: tl.constexpr):
    """Offsets of a query head in [B, T, N, H], its keys in [B, T, K, H], its row in [B, N, T]."""
    place = tl.program_id(1).to(tl.int64)
    batch, head = place // N, place % N
    return (batch * T * N + head) * H, (batch * T * K + head // (N // K)) * H, place * T


@triton.jit
def _causal(scores, rows, keys, hidden, DIAGONAL: tl.constexpr):
    """Put `hidden` above the diagonal. Tiles below it have nothing to hide."""
    if DIAGONAL:
        scores = tl.where(rows[:, None] >= keys[None, :], scores, hidden)
    return scores


@triton.jit
def _add_keys(state, query, rows, first, last, k, v, T, scale, K: tl.constexpr, H: tl.constexpr,
              S: tl.constexpr, DIAGONAL: tl.constexpr):  # fmt: skip
    """Online softmax over the keys from `first` to `last`."""
    highest, total, output = state
    for start in range(first, last, S):
        keys = start + tl.arange(0, S)
        scores = tl.dot(query, tl.trans(_tile(k, keys, T, K, H))) * scale
        scores = _causal(scores, rows, keys, -float('inf'), DIAGONAL)
        new = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new[:, None])
        keep = tl.exp2(highest - new)
        total = total * keep + tl.sum(weights, 1)
        value = _tile(v, keys, T, K, H)
        output = output * keep[:, None] + tl.dot(weights.to(value.dtype), value)
        highest = new
    return highest, total, output


@triton.jit
def _forward_kernel(q, k, v, T, scale, o, lse, N: tl.constexpr, K: tl.constexpr, H: tl.constexpr,
                    M: tl.constexpr, S: tl.constexpr):  # fmt: skip
    at, at_keys, at_row = _head(T, N, K, H)
    first = tl.program_id(0) * M
    last = tl.minimum(first + M, T)
    rows = first + tl.arange(0, M)
    query = _tile(q + at, rows, T, N, H)
    state = (tl.full([M], -float('inf'), tl.float32), tl.zeros([M], tl.float32),
             tl.zeros([M, H], tl.float32))  # fmt: skip
    key, value = k + at_keys, v + at_keys
    state = _add_keys(state, query, rows, 0, first, key, value, T, scale, K, H, S, False)
    state = _add_keys(state, query, rows, first, last, key, value, T, scale, K, H, S, True)
    highest, total, output = state
    _put(o + at, rows, output / total[:, None], T, N, H)
    tl.store(lse + at_row + rows, highest + tl.log2(total), mask=rows < T)


@triton.jit
def _weights(query, key, rows, keys, lse, scale, DIAGONAL: tl.constexpr):
    """Softmax weights of a tile from the logsumexp of its rows; 0 above the diagonal."""
    scores = tl.dot(query, tl.trans(key)) * scale
    return _causal(tl.exp2(scores - lse[:, None]), rows, keys, 0.0, DIAGONAL)


@triton.jit
def _row(ptr, rows, T):
    return tl.load(ptr + rows, mask=rows < T, other=0.0)


@triton.jit
def _add_dq(gradient, query, cotangent, rows, first, last, k, v, lse, delta, T, scale,
            K: tl.constexpr, H: tl.constexpr, M: tl.constexpr, DIAGONAL: tl.constexpr):  # fmt: skip
    for start in range(first, last, M):
        keys = start + tl.arange(0, M)
        key = _tile(k, keys, T, K, H)
        weights = _weights(query, key, rows, keys, lse, scale, DIAGONAL)
        dweights = tl.dot(cotangent, tl.trans(_tile(v, keys, T, K, H)))
        gradient += tl.dot((weights * (dweights - delta[:, None])).to(key.dtype), key)
    return gradient


@triton.jit
def _dq_kernel(q, k, v, do, lse, delta, T, scale, dq, N: tl.constexpr, K: tl.constexpr,
               H: tl.constexpr, M: tl.constexpr):  # fmt: skip
    at, at_keys, at_row = _head(T, N, K, H)
    first = tl.program_id(0) * M
    rows = first + tl.arange(0, M)
    query, cotangent = _tile(q + at, rows, T, N, H), _tile(do + at, rows, T, N, H)
    row_lse, row_delta = _row(lse + at_row, rows, T), _row(delta + at_row, rows, T)
    gradient, key, value = tl.zeros([M, H], tl.float32), k + at_keys, v + at_keys
    gradient = _add_dq(gradient, query, cotangent, rows, 0, first, key, value, row_lse, row_delta,
                       T, scale, K, H, M, False)  # fmt: skip
    gradient = _add_dq(gradient, query, cotangent, rows, first, first + M, key, value, row_lse,
                       row_delta, T, scale, K, H, M, True)  # fmt: skip
    _put(dq + at, rows, gradient * scale * 0.6931471805599453, T, N, H)


@triton.jit
def _add_dkv(dkey, dvalue, key, value, keys, first, last, q, do, lse, delta, T, scale,
             N: tl.constexpr, H: tl.constexpr, M: tl.constexpr,
             DIAGONAL: tl.constexpr):  # fmt: skip
    for start in range(first, last, M):
        rows = start + tl.arange(0, M)
        query, cotangent = _tile(q, rows, T, N, H), _tile(do, rows, T, N, H)
        row_lse, row_delta = _row(lse, rows, T), _row(delta, rows, T)
        weights = _weights(query, key, rows, keys, row_lse, scale, DIAGONAL)
        dvalue += tl.dot(tl.trans(weights.to(value.dtype)), cotangent)
        dscores = weights * (tl.dot(cotangent, tl.trans(value)) - row_delta[:, None])
        dkey += tl.dot(tl.trans(dscores.to(key.dtype)), query)
    return dkey, dvalue


@triton.jit
def _dkv_kernel(q, k, v, do, lse, delta, T, scale, dk, dv, N: tl.constexpr, K: tl.constexpr,
                H: tl.constexpr, M: tl.constexpr):  # fmt: skip
    """Sum over the query heads of one key/value head."""
    place = tl.program_id(1).to(tl.int64)
    batch, head = place // K, place % K
    at_keys = (batch * T * K + head) * H
    first = tl.program_id(0) * M
    keys = first + tl.arange(0, M)
    key, value = _tile(k + at_keys, keys, T, K, H), _tile(v + at_keys, keys, T, K, H)
    dkey, dvalue = tl.zeros([M, H], tl.float32), tl.zeros([M, H], tl.float32)
    for query_head in range(N // K):
        own = head * (N // K) + query_head
        at, at_row = (batch * T * N + own) * H, (batch * N + own) * T
        dkey, dvalue = _add_dkv(dkey, dvalue, key, value, keys, first, first + M, q + at, do + at,
                                lse + at_row, delta + at_row, T, scale, N, H, M, True)  # fmt: skip
        dkey, dvalue = _add_dkv(dkey, dvalue, key, value, keys, first + M, T, q + at, do + at,
                                lse + at_row, delta + at_row, T, scale, N, H, M, False)  # fmt: skip
    _put(dk + at_keys, keys, dkey * scale * 0.6931471805599453, T, K, H)
    _put(dv + at_keys, keys, dvalue, T, K, H)


def _call(kernel, arrays, out, block, programs, **sizes):
    """Run `programs` (heads) of a kernel per block and row; T and the scale follow the inputs.

    Scores have base 2. The outputs come last.
    """
    batch, length, heads, width = arrays[0].shape
    warps = 4 if width <= 64 else 8
    return jax_triton.triton_call(
        *arrays,
        length,
        np.float32(width**-0.5 * math.log2(math.e)),  # jax-triton makes a Python float float64
        kernel=kernel,
        out_shape=out,
        grid=(triton.cdiv(length, block), batch * programs),
        num_warps=warps,
        num_stages=3,
        N=heads,
        K=arrays[1].shape[2],
        H=width,
        M=block,
        **sizes,
    )


@jax.custom_vjp
def flash_attention(q_BTNH, k_BTKH, v_BTKH):
    """Compute causal attention; K divides N.

    Raises ValueError unless the head width is 16, 32, 64 or 128.
    """
    return _forward(q_BTNH, k_BTKH, v_BTKH)[0]


def _forward(q_BTNH, k_BTKH, v_BTKH):
    batch, length, heads, width = q_BTNH.shape
    if width & (width - 1) or not 16 <= width <= 128:
        raise ValueError(f'head width {width} must be 16, 32, 64 or 128')
    queries, keys = FORWARD_BLOCKS
    lse = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    out = (jax.ShapeDtypeStruct(q_BTNH.shape, q_BTNH.dtype), lse)
    inputs = (q_BTNH, k_BTKH, v_BTKH)
    o_BTNH, lse_BNT = _call(_forward_kernel, inputs, out, queries, heads, S=keys)
    return o_BTNH, (*inputs, o_BTNH, lse_BNT)


def _backward(residuals, do_BTNH):
    q_BTNH, k_BTKH, v_BTKH, o_BTNH, lse_BNT = residuals
    product_BTN = jnp.sum(do_BTNH.astype(jnp.float32) * o_BTNH.astype(jnp.float32), axis=-1)
    inputs = (q_BTNH, k_BTKH, v_BTKH, do_BTNH, lse_BNT, jnp.swapaxes(product_BTN, 1, 2))
    like_q, like_k = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q_BTNH, k_BTKH))
    dq_BTNH = _call(_dq_kernel, inputs, like_q, BLOCK, q_BTNH.shape[2])
    return dq_BTNH, *_call(_dkv_kernel, inputs, (like_k, like_k), BLOCK, k_BTKH.shape[2])


flash_attention.defvjp(_forward, _backward)
