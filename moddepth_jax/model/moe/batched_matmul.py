"""Blocks of rows times the matrix of each block's expert, in a few batched products.

Letters: E experts, R rows in M blocks of C, X and Y sides of a matrix. Every block gets its own
copy of its expert's matrix, an eighth of them at a time, and no loop goes over single blocks.
"""

import jax
import jax.numpy as jnp

from moddepth_jax.model.moe.blocked_matmul import first_places, held, in_blocks, wide

PARTS = 8  # of the blocks; each is a product by itself, skipped where it has no expert


def _blocks(x_RX, expert_M, num_experts):
    """[M, C, X], zeros in blocks without an expert."""
    filled_M11 = (expert_M < num_experts)[:, None, None]
    return jnp.where(filled_M11, in_blocks(x_RX, expert_M), 0).astype(held(x_RX.dtype))


def _matrices(w_EXY, expert_M, dtype):
    return w_EXY.astype(dtype).astype(held(dtype)).at[expert_M].get(mode='clip')


def _products(equation, x_MCX, w_EXY, expert_M, dtype):
    """The product of every block with its matrix; none in a part whose blocks have no expert."""
    num_experts, size = w_EXY.shape[0], -(-expert_M.shape[0] // PARTS)

    def multiply(x_PCX, expert_P):
        return _sums(equation, x_PCX, _matrices(w_EXY, expert_P, dtype), dtype=dtype).astype(dtype)

    def nothing(x_PCX, expert_P):
        return jnp.zeros_like(jax.eval_shape(multiply, x_PCX, expert_P))

    parts = []
    for first in range(0, expert_M.shape[0], size):
        part = (side[first : first + size] for side in (x_MCX, expert_M))
        # Ascending: where the first has no expert, none has.
        parts.append(jax.lax.cond(expert_M[first] < num_experts, multiply, nothing, *part))
    return jnp.concatenate(parts)


def _sums(equation, *factors, dtype):
    return jnp.einsum(equation, *factors, preferred_element_type=wide(dtype))


@jax.custom_vjp
def batched_matmul(x_RX, w_EXY, expert_M):
    """[R, Y]: each row times the matrix of its block's expert, in x's dtype.

    Args:
      x_RX: float [R, X], R a multiple of M.
      w_EXY: float [E, X, Y], rounded to x's dtype; sums are float32 at least.
      expert_M: int32 [M]; E for a block that has none: it gives zeros.
    """
    dtype = x_RX.dtype
    x_MCX = _blocks(x_RX, expert_M, w_EXY.shape[0])
    y_MCY = _products('mcx,mxy->mcy', x_MCX, w_EXY, expert_M, dtype)
    return y_MCY.reshape(x_RX.shape[0], -1)


def _forward(x_RX, w_EXY, expert_M):
    return batched_matmul(x_RX, w_EXY, expert_M), (x_RX, w_EXY, expert_M)


def _backward(residuals, dy_RY):
    x_RX, w_EXY, expert_M = residuals
    dtype, num_experts = x_RX.dtype, w_EXY.shape[0]
    x_MCX = _blocks(x_RX, expert_M, num_experts)
    dy_MCY = _blocks(dy_RY, expert_M, num_experts)
    dx_MCX = _products('mcy,mxy->mcx', dy_MCY, w_EXY, expert_M, dtype)
    dw_EXY = _sum_of_blocks(x_MCX, dy_MCY, expert_M, num_experts)
    return dx_MCX.reshape(x_RX.shape), dw_EXY.astype(w_EXY.dtype), None


def _sum_of_blocks(x_MCX, dy_MCY, expert_M, num_experts):
    """[E, X, Y]: x^T dy over each expert's blocks: the first of all experts, the second of all ..

    A sum over equal indices would not repeat bit for bit on GPUs, and needs all M at once.
    """
    first_E = first_places(expert_M, num_experts)
    count_E = jnp.diff(first_E)

    def add(j, dw_EXY):
        at_E = jnp.where(j < count_E, first_E[:-1] + j, expert_M.shape[0])
        x_ECX, dy_ECY = (side.at[at_E].get(mode='fill', fill_value=0) for side in (x_MCX, dy_MCY))
        return dw_EXY + _sums('ecx,ecy->exy', x_ECX, dy_ECY, dtype=x_MCX.dtype)

    shape = (num_experts, x_MCX.shape[2], dy_MCY.shape[2])
    nothing_EXY = jnp.zeros(shape, wide(x_MCX.dtype))
    return jax.lax.fori_loop(0, jnp.max(count_E), add, nothing_EXY)


batched_matmul.defvjp(_forward, _backward)
