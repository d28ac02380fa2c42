"""Tiles of shared memory, and matrix products of them, as the kernels for Hopper use them."""

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

CHUNK = 64  # rows of a Hopper matrix product
OCTET = 8  # rows of a swizzled tile
LOG2E = math.log2(math.e)
LAYOUT = plgpu.Layout.WGMMA
TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED


def round_up(number, multiple):
    """The least multiple that is no less than the number."""
    return -(-number // multiple) * multiple


def swizzle_of(width, dtype):
    """Bytes of the widest swizzle whose tiles divide a row of that many numbers, or 0."""
    for swizzle in (128, 64, 32):
        minor = swizzle // jnp.dtype(dtype).itemsize
        if width % minor == 0 or width < minor:
            return swizzle
    return 0


def tiled(shape, dtype, swizzle):
    """Shared memory that matrix products read, and that TMA clips to each dimension's end."""
    minor = swizzle // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((OCTET, minor)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def whole(size):
    """A slice from a traced 0, which may reach past the end: TMA fills with zeros, or drops."""
    return pl.ds(jnp.int32(0), size)


def product(shape, a, b):
    """a @ b, float32."""

    def run(total):
        plgpu.wgmma(total, a, b)
        return total[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def columns(x, shape):
    """One number per column, as an array of that shape."""
    return lax.broadcast_in_dim(x, shape, [1])
