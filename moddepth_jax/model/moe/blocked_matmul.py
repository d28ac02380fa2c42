"""Blocks of rows times the matrix of each block's expert, in a scan over blocks.

Letters: E experts, R rows in M blocks of C, X and Y sides of a matrix.
"""

import jax
import jax.numpy as jnp


def wide(dtype):
    """What sums of products of `dtype` are held in: float32 at least."""
    return jnp.promote_types(dtype, jnp.float32)


def held(dtype):
    """What factors of `dtype` are held in: on CPUs float32 at least.

    XLA on CPU cannot run some bfloat16 products with a float32 result, and converts the whole of
    the bfloat16 arrays that a loop reads or writes in parts, there and back at every step.
    """
    return wide(dtype) if jax.default_backend() == 'cpu' else dtype


def first_places(expert_P, num_experts):
    """int32 [E + 1]: where the numbers of each expert begin in an ascending array, and end."""
    expert_E = jnp.arange(num_experts + 1, dtype=jnp.int32)
    return jnp.searchsorted(expert_P, expert_E).astype(jnp.int32)


def in_blocks(x_RX, expert_M):
    """[M, C, X]."""
    blocks = expert_M.shape[0]
    return x_RX.reshape(blocks, x_RX.shape[0] // blocks, x_RX.shape[1])


def _products(x_RX, w_EXY, expert_M, axis):
    """Each block of x times its expert's matrix, over `axis` of that: 0, or 1 for the transposed.

    The matrix is carried along, as blocks in a row mostly share it, and replaced where they do not.
    """
    num_experts, *sides = w_EXY.shape
    dtype, factor, width = x_RX.dtype, held(x_RX.dtype), sides[1 - axis]
    changes_M = (expert_M < num_experts) & (jnp.diff(expert_M, prepend=-1) != 0)

    def step(w_XY, block):
        x_CX, expert, changes = block

        def take():
            w_XY = jax.lax.dynamic_index_in_dim(w_EXY, expert, keepdims=False)
            return w_XY.astype(dtype).astype(factor)

        def multiply():
            return _multiply(x_CX, w_XY, (1, axis)).astype(factor)

        def nothing():
            return jnp.zeros((x_CX.shape[0], width), factor)

        w_XY = jax.lax.cond(changes, take, lambda: w_XY)
        return w_XY, jax.lax.cond(expert < num_experts, multiply, nothing)

    blocks = (in_blocks(x_RX.astype(factor), expert_M), expert_M, changes_M)
    y_MCY = jax.lax.scan(step, jnp.zeros(sides, factor), blocks)[1]
    return y_MCY.reshape(-1, width).astype(dtype)


def _multiply(a, b, axes):
    """Sums over one axis of each, in float32 at least."""
    axes = tuple((axis,) for axis in axes)
    return jax.lax.dot_general(a, b, (axes, ((), ())), preferred_element_type=wide(a.dtype))


def _sum_products(x_RX, dy_RY, expert_M, num_experts):
    """[E, X, Y]: x^T dy over each expert's blocks, in float32 at least, added in place."""

    def step(dw_EXY, block):
        x_CX, dy_CY, expert = block

        def add(dw_EXY):
            dw_XY = jax.lax.dynamic_index_in_dim(dw_EXY, expert, keepdims=False)
            dw_XY += _multiply(x_CX, dy_CY, (0, 0))
            return jax.lax.dynamic_update_index_in_dim(dw_EXY, dw_XY, expert, 0)

        return jax.lax.cond(expert < num_experts, add, lambda dw_EXY: dw_EXY, dw_EXY), None

    shape = (num_experts, x_RX.shape[1], dy_RY.shape[1])
    factor = held(x_RX.dtype)
    factors = (in_blocks(rows.astype(factor), expert_M) for rows in (x_RX, dy_RY))
    blocks = (*factors, expert_M)
    return jax.lax.scan(step, jnp.zeros(shape, wide(x_RX.dtype)), blocks)[0]


@jax.custom_vjp
def blocked_matmul(x_RX, w_EXY, expert_M):
    """[R, Y]: each row times the matrix of its block's expert, in x's dtype.

    Args:
      x_RX: float [R, X], R a multiple of M.
      w_EXY: float [E, X, Y], rounded to x's dtype; sums are float32 at least.
      expert_M: int32 [M]; E for a block that has none: it costs nothing, and gives zeros.
    """
    return _products(x_RX, w_EXY, expert_M, 0)


def _blocked_forward(x_RX, w_EXY, expert_M):
    return _products(x_RX, w_EXY, expert_M, 0), (x_RX, w_EXY, expert_M)


def _blocked_backward(residuals, dy_RY):
    x_RX, w_EXY, expert_M = residuals
    dx_RX = _products(dy_RY, w_EXY, expert_M, 1)
    dw_EXY = _sum_products(x_RX, dy_RY, expert_M, w_EXY.shape[0])
    return dx_RX, dw_EXY.astype(w_EXY.dtype), None


blocked_matmul.defvjp(_blocked_forward, _blocked_backward)
