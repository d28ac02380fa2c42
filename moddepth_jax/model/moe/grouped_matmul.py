"""Grouped matmul: sort tokens by expert, multiply them by its matrix, and restore their order.

Letters: N tokens, k experts per token, E experts, R places in the sorted layout, M blocks of
C = R / M places with one expert each, X and Y the sides of a matrix.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moddepth_jax.hparams.checks import positive
from moddepth_jax.hparams.registry import EXPERT_PRODUCTS
from moddepth_jax.model.layers import wide_dtype

PRODUCT = 'grouped product'  # checkpoint name: `model.remat=elementwise` keeps the products
BATCHED_PARTS = 8  # `batched` splits its blocks into so many batched products


class Layout(NamedTuple):
    """The places of (token, expert) pairs, sorted by expert."""

    source_R: jax.Array  # int32, the token in each place; N: the place is empty
    place_Nk: jax.Array  # int32, the place of each pair; R: the pair has no place
    expert_M: jax.Array  # int32, the expert of each block, ascending; E: no expert


def resolve(product: str) -> str:
    """Return the implementation that `model.experts.product` names. Raises ValueError if none."""
    if product == 'auto':
        # On CPUs and in programs for Hopper GPUs, XLA's ragged_dot multiplies every row by every
        # expert's matrix: E times the work. A loop suits a CPU, where blocks are small.
        return 'blocked' if jax.default_backend() == 'cpu' else 'batched'
    if product not in EXPERT_PRODUCTS:
        raise ValueError(f'product={product!r}: must be one of auto, {", ".join(EXPERT_PRODUCTS)}')
    return product


def block_rows(num_pairs: int, num_experts: int, implementation: str) -> int:
    """Return the rows per block of `make_layout`: a power of two, or 1 for `ragged_dot`.

    A block has at most half of an expert's mean pairs, and at most an eighth if that is above 32
    rows (128 for `batched`).
    """
    implementation = resolve(implementation)
    if implementation == 'ragged_dot':
        return 1
    mean = num_pairs // num_experts
    low = 128 if implementation == 'batched' else 32
    rows = min(128, max(1, min(low, mean // 2), mean // 8))
    return 1 << (rows.bit_length() - 1)


def num_blocks(num_pairs: int, num_experts: int, block: int) -> int:
    """Return M, the most blocks that `num_pairs` pairs can need."""
    nonempty = min(num_experts, num_pairs)
    return nonempty + (num_pairs - nonempty) // block


def make_layout(expert_Nk, num_experts: int, block: int, most: int | None = None) -> Layout:
    """Sort pairs by expert, stably. Each expert begins at a multiple of `block` places.

    At most `most` pairs (None: N k) may have an expert in [0, E). Raises ValueError if E or `block`
    is below 1.
    """
    positive('num_experts', num_experts)
    positive('block', block)
    num_tokens, per_token = expert_Nk.shape
    most = expert_Nk.size if most is None else most
    blocks = num_blocks(most, num_experts, block)
    places = blocks * block
    inside_Nk = (expert_Nk >= 0) & (expert_Nk < num_experts)
    expert_P = jnp.where(inside_Nk, expert_Nk, num_experts).reshape(-1).astype(jnp.int32)
    rank_P = jnp.arange(expert_P.size, dtype=jnp.int32)
    sorted_P, order_P = jax.lax.sort_key_val(expert_P, rank_P)

    first_E = first_places(sorted_P, num_experts)
    blocks_E = -(-jnp.diff(first_E) // block)
    end_E = jnp.cumsum(blocks_E)
    expert_M = jnp.sum(jnp.arange(blocks)[:, None] >= end_E[None, :], axis=1, dtype=jnp.int32)
    # The place of a pair is its rank among the sorted pairs plus the shift of its expert.
    shift_E = jnp.append((end_E - blocks_E) * block - first_E[:-1], 0).astype(jnp.int32)

    place_P = jnp.where(sorted_P < num_experts, rank_P + shift_E[sorted_P], places)
    place_P = jnp.zeros_like(place_P).at[order_P].set(place_P, unique_indices=True)
    expert_R = jnp.broadcast_to(expert_M[:, None], (blocks, block)).reshape(-1)
    rank_R = jnp.arange(places, dtype=jnp.int32) - shift_E[expert_R]
    last_R = first_E[jnp.minimum(expert_R + 1, num_experts)]
    pair_R = order_P.at[rank_R].get(mode='clip')
    holds_R = (expert_R < num_experts) & (rank_R < last_R)
    source_R = jnp.where(holds_R, pair_R // per_token, num_tokens)
    return Layout(source_R, place_P.reshape(expert_Nk.shape), expert_M)


@jax.custom_vjp
def dispatch(x_ND, layout: Layout):
    """Return the token in each place, [R, D], and zeros in empty places.

    Reruns are bit-equal, also in the backward pass.
    """
    return _rows(x_ND, layout.source_R)


@jax.custom_vjp
def combine(y_RD, weight_Nk, layout: Layout):
    """Return sum_k weight y[place], [N, D], summed in float32; a pair without a place adds 0."""
    return _add_places(y_RD, weight_Nk, layout.place_Nk).astype(y_RD.dtype)


def grouped_matmul(x_RX, w_EXY, layout: Layout, implementation: str):
    """Multiply each row by the matrix of its block's expert, [R, Y]; zeros without an expert."""
    multiply = EXPERT_PRODUCTS[resolve(implementation)]
    return checkpoint_name(multiply(x_RX, w_EXY, layout.expert_M), PRODUCT)


def _rows(x, index):
    return x.at[index].get(mode='fill', fill_value=0)


def _over_choices(step, carry, place_Nk, weight_Nk):
    """Scan over the k choices. A single gather [N, k, D] would be stored, which is slower."""
    choices = (place_Nk.T, weight_Nk.T)
    return jax.lax.scan(step, carry, choices, unroll=min(8, place_Nk.shape[1]))


def _add_places(y_RD, weight_Nk, place_Nk):
    dtype = wide_dtype(y_RD.dtype)

    def add(sum_ND, choice):
        place_N, weight_N = choice
        # A pair without a place reads 0, which an infinite weight must not turn into NaN.
        weight_N1 = jnp.where(place_N < y_RD.shape[0], weight_N, 0)[:, None].astype(dtype)
        return sum_ND + weight_N1 * _rows(y_RD, place_N).astype(dtype), None

    zeros_ND = jnp.zeros((place_Nk.shape[0], y_RD.shape[1]), dtype)
    return _over_choices(add, zeros_ND, place_Nk, weight_Nk)[0]


def _dispatch_backward(layout, dx_RD):
    ones_Nk = jnp.ones(layout.place_Nk.shape, jnp.float32)
    return _add_places(dx_RD, ones_Nk, layout.place_Nk).astype(dx_RD.dtype), None


def _combine_backward(residuals, dy_ND):
    y_RD, weight_Nk, layout = residuals
    dtype = wide_dtype(y_RD.dtype)
    dy_ND = dy_ND.astype(dtype)
    place_R = jnp.arange(y_RD.shape[0], dtype=jnp.int32)
    mine_Rk = _rows(layout.place_Nk, layout.source_R) == place_R[:, None]
    mine_Rk &= (layout.source_R < weight_Nk.shape[0])[:, None]
    weight_R = jnp.sum(jnp.where(mine_Rk, _rows(weight_Nk, layout.source_R), 0), axis=1)
    dy_RD = _rows(dy_ND, layout.source_R) * weight_R.astype(dtype)[:, None]

    def gradient(_, choice):
        place_N, _ = choice
        dweight_N = jnp.sum(_rows(y_RD, place_N).astype(dtype) * dy_ND, axis=1)
        return None, jnp.where(place_N < y_RD.shape[0], dweight_N, 0)

    dweight_Nk = _over_choices(gradient, None, layout.place_Nk, weight_Nk)[1].T
    return dy_RD.astype(y_RD.dtype), dweight_Nk.astype(weight_Nk.dtype), None


dispatch.defvjp(lambda x_ND, layout: (dispatch(x_ND, layout), layout), _dispatch_backward)
combine.defvjp(lambda *arguments: (combine(*arguments), arguments), _combine_backward)


def factor_dtype(dtype):
    """Return the dtype of factors in a product: on CPUs XLA needs at least float32."""
    return wide_dtype(dtype) if jax.default_backend() == 'cpu' else dtype


def first_places(expert_P, num_experts):
    """Return where each expert begins in an ascending array, and the end, int32 [E + 1]."""
    expert_E = jnp.arange(num_experts + 1, dtype=jnp.int32)
    return jnp.searchsorted(expert_P, expert_E).astype(jnp.int32)


def in_blocks(x_RX, expert_M):
    """Reshape to [M, C, X]."""
    blocks = expert_M.shape[0]
    return x_RX.reshape(blocks, x_RX.shape[0] // blocks, x_RX.shape[1])


def _with_backward(products, sums):
    """Return matmul(x_RX, w_EXY, expert_M) -> [R, Y] whose backward pass also runs in blocks.

    Args:
      products: products(x, w_EXY, expert_M, axis) multiplies each block of x by its expert's
        matrix (axis 0) or its transpose (axis 1).
      sums: sums(x_RX, dy_RY, expert_M, num_experts) returns x^T dy [E, X, Y], summed over the
        blocks of each expert.
    """

    @jax.custom_vjp
    def matmul(x_RX, w_EXY, expert_M):
        return products(x_RX, w_EXY, expert_M, 0)

    def backward(residuals, dy_RY):
        x_RX, w_EXY, expert_M = residuals
        dx_RX = products(dy_RY, w_EXY, expert_M, 1)
        return dx_RX, sums(x_RX, dy_RY, expert_M, w_EXY.shape[0]).astype(w_EXY.dtype), None

    matmul.defvjp(lambda *arguments: (matmul(*arguments), arguments), backward)
    return matmul


def _blocked_products(x_RX, w_EXY, expert_M, axis):
    """Scan over blocks. The carry is the matrix, which consecutive blocks mostly share."""
    num_experts, *sides = w_EXY.shape
    dtype, factor, width = x_RX.dtype, factor_dtype(x_RX.dtype), sides[1 - axis]
    changes_M = (expert_M < num_experts) & (jnp.diff(expert_M, prepend=-1) != 0)

    def step(w_XY, block):
        x_CX, expert, changes = block

        def take():
            w_XY = jax.lax.dynamic_index_in_dim(w_EXY, expert, keepdims=False)
            return w_XY.astype(dtype).astype(factor)

        def multiply():
            return _multiply(x_CX, w_XY, (1, axis)).astype(factor)

        w_XY = jax.lax.cond(changes, take, lambda: w_XY)
        shape = (x_CX.shape[0], width)
        y_CY = jax.lax.cond(expert < num_experts, multiply, lambda: jnp.zeros(shape, factor))
        return w_XY, y_CY

    blocks = (in_blocks(x_RX.astype(factor), expert_M), expert_M, changes_M)
    y_MCY = jax.lax.scan(step, jnp.zeros(sides, factor), blocks)[1]
    return y_MCY.reshape(-1, width).astype(dtype)


def _multiply(a, b, axes):
    """Contract one axis of each, with sums in float32 at least."""
    contracted = ((axes[0],), (axes[1],)), ((), ())
    return jax.lax.dot_general(a, b, contracted, preferred_element_type=wide_dtype(a.dtype))


def _blocked_sums(x_RX, dy_RY, expert_M, num_experts):
    def step(dw_EXY, block):
        x_CX, dy_CY, expert = block

        def add(dw_EXY):
            dw_XY = jax.lax.dynamic_index_in_dim(dw_EXY, expert, keepdims=False)
            dw_XY += _multiply(x_CX, dy_CY, (0, 0))
            return jax.lax.dynamic_update_index_in_dim(dw_EXY, dw_XY, expert, 0)

        return jax.lax.cond(expert < num_experts, add, lambda dw_EXY: dw_EXY, dw_EXY), None

    shape = (num_experts, x_RX.shape[1], dy_RY.shape[1])
    factor = factor_dtype(x_RX.dtype)
    factors = (in_blocks(rows.astype(factor), expert_M) for rows in (x_RX, dy_RY))
    blocks = (*factors, expert_M)
    return jax.lax.scan(step, jnp.zeros(shape, wide_dtype(x_RX.dtype)), blocks)[0]


def _filled_blocks(x_RX, expert_M, num_experts):
    filled_M11 = (expert_M < num_experts)[:, None, None]
    return jnp.where(filled_M11, in_blocks(x_RX, expert_M), 0).astype(factor_dtype(x_RX.dtype))


def _batched_products(x_RX, w_EXY, expert_M, axis):
    """Compute a few batched products, in which every block has a copy of its expert's matrix."""
    num_experts, size, dtype = w_EXY.shape[0], -(-expert_M.shape[0] // BATCHED_PARTS), x_RX.dtype
    equation = 'mcy,mxy->mcx' if axis else 'mcx,mxy->mcy'
    x_MCX = _filled_blocks(x_RX, expert_M, num_experts)

    def multiply(x_PCX, expert_P):
        w_PXY = w_EXY.astype(dtype).astype(factor_dtype(dtype)).at[expert_P].get(mode='clip')
        wide = wide_dtype(dtype)
        return jnp.einsum(equation, x_PCX, w_PXY, preferred_element_type=wide).astype(dtype)

    def nothing(x_PCX, expert_P):
        return jnp.zeros_like(jax.eval_shape(multiply, x_PCX, expert_P))

    parts = []
    for first in range(0, expert_M.shape[0], size):
        part = (side[first : first + size] for side in (x_MCX, expert_M))
        # Experts ascend: if the first block of a part has none, no block has one.
        parts.append(jax.lax.cond(expert_M[first] < num_experts, multiply, nothing, *part))
    return jnp.concatenate(parts).reshape(x_RX.shape[0], -1)


def _batched_sums(x_RX, dy_RY, expert_M, num_experts):
    """Add the first block of every expert, then the second, and so on: bit-equal reruns on GPUs."""
    x_MCX, dy_MCY = (_filled_blocks(side, expert_M, num_experts) for side in (x_RX, dy_RY))
    first_E = first_places(expert_M, num_experts)
    count_E = jnp.diff(first_E)

    def add(j, dw_EXY):
        at_E = jnp.where(j < count_E, first_E[:-1] + j, expert_M.shape[0])
        factors = _rows(x_MCX, at_E), _rows(dy_MCY, at_E)
        return dw_EXY + jnp.einsum('ecx,ecy->exy', *factors, preferred_element_type=wide)

    wide = wide_dtype(x_MCX.dtype)
    zeros_EXY = jnp.zeros((num_experts, x_MCX.shape[2], dy_MCY.shape[2]), wide)
    return jax.lax.fori_loop(0, jnp.max(count_E), add, zeros_EXY)


EXPERT_PRODUCTS.register('blocked')(_with_backward(_blocked_products, _blocked_sums))
EXPERT_PRODUCTS.register('batched')(_with_backward(_batched_products, _batched_sums))


@EXPERT_PRODUCTS.register('ragged_dot')
def ragged_matmul(x_RX, w_EXY, expert_M):
    """Compute the product by jax.lax.ragged_dot."""
    num_experts, dtype = w_EXY.shape[0], x_RX.dtype
    rows = x_RX.shape[0] // expert_M.shape[0]
    sizes_E = rows * jnp.diff(first_places(expert_M, num_experts))
    x_RX, w_EXY = (factor.astype(dtype).astype(factor_dtype(dtype)) for factor in (x_RX, w_EXY))
    # A wider result would widen the factors of the backward pass.
    return jax.lax.ragged_dot(x_RX, w_EXY, sizes_E).astype(dtype)
