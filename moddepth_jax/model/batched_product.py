"""Blocks of rows times the matrix of each block's expert, in one batched product.

Letters: E experts, R rows in M blocks of C, X and Y sides of a matrix. Every block gets its own
copy of its expert's matrix: M X Y numbers, and no loop over blocks.
"""

import jax
import jax.numpy as jnp

from moddepth_jax.model.blocked_product import held, wide


def _blocks(x_RX, expert_M, num_experts):
    """[M, C, X], zeros in blocks without an expert."""
    blocks = expert_M.shape[0]
    x_MCX = x_RX.reshape(blocks, x_RX.shape[0] // blocks, x_RX.shape[1])
    return jnp.where((expert_M < num_experts)[:, None, None], x_MCX, 0).astype(held(x_RX.dtype))


def _matrices(w_EXY, expert_M, dtype):
    return w_EXY.astype(dtype).astype(held(dtype)).at[expert_M].get(mode='clip')


def _sums(equation, *factors, dtype):
    return jnp.einsum(equation, *factors, preferred_element_type=wide(dtype))


@jax.custom_vjp
def batched_product(x_RX, w_EXY, expert_M):
    """[R, Y]: each row times the matrix of its block's expert, in x's dtype.

    Args:
      x_RX: float [R, X], R a multiple of M.
      w_EXY: float [E, X, Y], rounded to x's dtype; sums are float32 at least.
      expert_M: int32 [M]; E for a block that has none: it gives zeros.
    """
    dtype = x_RX.dtype
    x_MCX = _blocks(x_RX, expert_M, w_EXY.shape[0])
    y_MCY = _sums('mcx,mxy->mcy', x_MCX, _matrices(w_EXY, expert_M, dtype), dtype=dtype)
    return y_MCY.reshape(x_RX.shape[0], -1).astype(dtype)


def _forward(x_RX, w_EXY, expert_M):
    return batched_product(x_RX, w_EXY, expert_M), (x_RX, w_EXY, expert_M)


def _backward(residuals, dy_RY):
    x_RX, w_EXY, expert_M = residuals
    dtype, num_experts = x_RX.dtype, w_EXY.shape[0]
    x_MCX = _blocks(x_RX, expert_M, num_experts)
    dy_MCY = _blocks(dy_RY, expert_M, num_experts)
    dx_MCX = _sums('mcy,mxy->mcx', dy_MCY, _matrices(w_EXY, expert_M, dtype), dtype=dtype)
    dw_EXY = _sum_of_blocks(x_MCX, dy_MCY, expert_M, num_experts)
    return dx_MCX.reshape(x_RX.shape).astype(dtype), dw_EXY.astype(w_EXY.dtype), None


def _sum_of_blocks(x_MCX, dy_MCY, expert_M, num_experts):
    """[E, X, Y]: x^T dy over each expert's blocks: the first of all experts, the second of all ..

    A sum over equal indices would not repeat bit for bit on GPUs, and needs all M at once.
    """
    expert_E = jnp.arange(num_experts + 1, dtype=expert_M.dtype)
    first_E = jnp.searchsorted(expert_M, expert_E, method='scan_unrolled').astype(jnp.int32)
    count_E = jnp.diff(first_E)

    def add(j, dw_EXY):
        at_E = jnp.where(j < count_E, first_E[:-1] + j, expert_M.shape[0])
        x_ECX, dy_ECY = (side.at[at_E].get(mode='fill', fill_value=0) for side in (x_MCX, dy_MCY))
        return dw_EXY + _sums('ecx,ecy->exy', x_ECX, dy_ECY, dtype=x_MCX.dtype)

    shape = (num_experts, x_MCX.shape[2], dy_MCY.shape[2])
    nothing_EXY = jnp.zeros(shape, wide(x_MCX.dtype))
    return jax.lax.fori_loop(0, jnp.max(count_E), add, nothing_EXY)


batched_product.defvjp(_forward, _backward)
