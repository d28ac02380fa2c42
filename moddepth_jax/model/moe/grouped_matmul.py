"""Rows times the matrix of their group: tokens sorted by expert, multiplied, and put back.

Letters: N tokens, k experts of a token, E experts, R places of the sorted layout, M blocks of
R / M places, each of one expert.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moddepth_jax.hparams.experts import PRODUCTS
from moddepth_jax.model.moe.batched_matmul import batched_matmul
from moddepth_jax.model.moe.blocked_matmul import blocked_matmul, first_places, held, wide

IMPLEMENTATIONS = tuple(product for product in PRODUCTS if product != 'auto')


class Layout(NamedTuple):
    """Where each pair of token and expert stands once they are sorted by expert.

    Attributes:
      source_R: int32 [R], token of each place; N for a place that holds none.
      place_Nk: int32 [N, k], place of each pair; R for a pair that goes nowhere.
      expert_M: int32 [M], expert of each block of R / M places, ascending; E for a block that
        holds none.
    """

    source_R: jax.Array
    place_Nk: jax.Array
    expert_M: jax.Array


def resolve(product: str) -> str:
    """The implementation that `model.experts.product` names; `auto`: blocked on CPUs, else batched.

    XLA multiplies every row by every expert's matrix in a ragged_dot, E times the work, on CPUs
    and in programs for Hopper GPUs. A loop over blocks suits a CPU, whose blocks are small.

    Raises:
      ValueError: there is none of this name.
    """
    if product == 'auto':
        return 'blocked' if jax.default_backend() == 'cpu' else 'batched'
    if product not in IMPLEMENTATIONS:
        raise ValueError(f'product={product!r}: must be one of auto, {", ".join(IMPLEMENTATIONS)}')
    return product


def block_rows(num_pairs: int, num_experts: int, implementation: str) -> int:
    """Rows of a block of `lay_out`, a power of two; 1 for `ragged_dot`, which needs no padding.

    At most half of the pairs that an expert has on average, nor over 32 but where that is an eighth
    of them: a higher block wastes more in padding than it gains (measured on CPUs). `batched` has
    a copy of a matrix for each block, and so blocks of up to 128.
    """
    if resolve(implementation) == 'ragged_dot':
        return 1
    mean = num_pairs // num_experts
    low = 128 if resolve(implementation) == 'batched' else 32
    rows = min(128, max(1, min(low, mean // 2), mean // 8))
    return 1 << (rows.bit_length() - 1)


def num_blocks(num_pairs: int, num_experts: int, block: int) -> int:
    """M, the most blocks that `num_pairs` pairs can fill, however they are dealt out."""
    nonempty = min(num_experts, num_pairs)
    return nonempty + (num_pairs - nonempty) // block


def make_layout(expert_Nk, num_experts: int, block: int, most: int | None = None) -> Layout:
    """Sorts pairs by expert, stably; each expert's begin at a multiple of `block` places.

    Args:
      expert_Nk: int [N, k], the experts of each token; a number outside [0, E) names none.
      num_experts: E.
      block: rows of a block, as from `block_rows`.
      most: pairs that name an expert at most, which bounds R; None: N k.

    Raises:
      ValueError: E or block below 1.
    """
    for name, value in (('num_experts', num_experts), ('block', block)):
        if value < 1:
            raise ValueError(f'{name}={value}: must be 1 or more')
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
    # From the rank among the sorted to the place; none for what names no expert.
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
    """[R, D]: the token of each place, zeros in empty ones.

    Backward gathers too, and adds a token's k places in their order: reruns are bit-equal.
    """
    return _rows(x_ND, layout.source_R)


@jax.custom_vjp
def combine(y_RD, weight_Nk, layout: Layout):
    """[N, D]: sum_k weight y[place], added in float32 at least, returned in y's dtype.

    A pair that goes nowhere adds nothing, whatever its weight.
    """
    return _add_places(y_RD, weight_Nk, layout.place_Nk).astype(y_RD.dtype)


def grouped_matmul(x_RX, w_EXY, layout: Layout, implementation: str):
    """[R, Y]: each row times the matrix of its block's expert; zeros in blocks without one.

    Args:
      x_RX: float [R, X], as from `dispatch`.
      w_EXY: float [E, X, Y]; rounded to x's dtype, in which the result is; sums are float32 at
        least.
      layout: as from `lay_out`.
      implementation: `blocked`: a scan over blocks, in which one without an expert costs nothing;
        `batched`: an eighth of the blocks at a time; `ragged_dot`: jax.lax.ragged_dot.
    """
    expert_M = layout.expert_M
    if resolve(implementation) == 'blocked':
        return blocked_matmul(x_RX, w_EXY, expert_M)
    if resolve(implementation) == 'batched':
        return batched_matmul(x_RX, w_EXY, expert_M)
    return _ragged(x_RX, w_EXY, expert_M)


def _rows(x, index):
    """x[index], zeros for an index past the end."""
    return x.at[index].get(mode='fill', fill_value=0)


def _over_choices(step, carry, place_Nk, weight_Nk):
    """A scan over the k choices: a gather of [N, k, D] at once would be stored, and slower."""
    choices = (place_Nk.T, weight_Nk.T)
    return jax.lax.scan(step, carry, choices, unroll=min(8, place_Nk.shape[1]))


def _add_places(y_RD, weight_Nk, place_Nk):
    """sum_k weight y[place] in float32 at least."""
    dtype = wide(y_RD.dtype)

    def add(sum_ND, choice):
        place_N, weight_N = choice
        # Without a place no product: an infinite weight must not turn a zero into NaN.
        weight_N1 = jnp.where(place_N < y_RD.shape[0], weight_N, 0)[:, None].astype(dtype)
        return sum_ND + weight_N1 * _rows(y_RD, place_N).astype(dtype), None

    zeros_ND = jnp.zeros((place_Nk.shape[0], y_RD.shape[1]), dtype)
    return _over_choices(add, zeros_ND, place_Nk, weight_Nk)[0]


def _dispatch_backward(layout, dx_RD):
    ones_Nk = jnp.ones(layout.place_Nk.shape, jnp.float32)
    return _add_places(dx_RD, ones_Nk, layout.place_Nk).astype(dx_RD.dtype), None


dispatch.defvjp(lambda x_ND, layout: (dispatch(x_ND, layout), layout), _dispatch_backward)


def _combine_forward(y_RD, weight_Nk, layout):
    return combine(y_RD, weight_Nk, layout), (y_RD, weight_Nk, layout)


def _combine_backward(residuals, dy_ND):
    y_RD, weight_Nk, layout = residuals
    dtype = wide(y_RD.dtype)
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


combine.defvjp(_combine_forward, _combine_backward)


def _ragged(x_RX, w_EXY, expert_M):
    num_experts, dtype = w_EXY.shape[0], x_RX.dtype
    rows = x_RX.shape[0] // expert_M.shape[0]
    sizes_E = rows * jnp.diff(first_places(expert_M, num_experts))
    x_RX, w_EXY = (factor.astype(dtype).astype(held(dtype)) for factor in (x_RX, w_EXY))
    # A wider result would make the factors of the backward pass as wide.
    return jax.lax.ragged_dot(x_RX, w_EXY, sizes_E).astype(dtype)
