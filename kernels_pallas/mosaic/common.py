"""What the Hopper kernels share: tiles, products, and differences of JAX 0.10.2 to 0.12."""

import inspect
import math
import types

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

CHUNK = 64  # rows of a Hopper matrix product
OCTET = 8  # rows of a swizzled tile of shared memory
LOG2E = math.log2(math.e)
LAYOUT = plgpu.Layout.WGMMA
TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED

_LOAD_INDEX = inspect.signature(plgpu.load).parameters.get('idx')
# plgpu.load requires `idx` on 0.10.2; later it has a default and is deprecated, then removed.
_LOAD_NEEDS_INDEX = _LOAD_INDEX is not None and _LOAD_INDEX.default is inspect.Parameter.empty

# The interpreter of 0.10.2 is private, and supports neither loads with a layout, nor layout casts,
# nor copies past the end of an array.
_INTERPRETER = getattr(plgpu, 'InterpretGPUParams', None)
CAN_INTERPRET = _INTERPRETER is not None


def load(ref, layout, optimized=True):
    """Load a whole reference in a layout. From global memory `optimized` must be False."""
    index = ((),) if _LOAD_NEEDS_INDEX else ()
    return plgpu.load(ref, *index, layout=layout, optimized=optimized)


def store_scattered(ref, x):
    """Write to a reference in global memory whose numbers are not contiguous."""
    if hasattr(plgpu, 'store'):  # JAX 0.12: an assignment must fill sectors of 32 bytes
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


def interpret_params(interpret: bool, detect_races: bool = False):
    """Return the `interpret` argument of pl.kernel. Memory that was never written reads as NaN."""
    if not interpret:
        return None
    if not CAN_INTERPRET:
        raise ValueError('interpret=True needs the Mosaic GPU interpreter of JAX 0.11.2 or newer')
    return _INTERPRETER(detect_races=detect_races)


def run_by_name(name, body, operands, results, mesh, interpret, **params):
    """Run a Hopper kernel.

    Args:
      name: by which profilers list the kernel.
      body: function of the references of operands and results, by name.
      operands: arrays and mutable references by name; None: the body gets None.
      results: jax.ShapeDtypeStruct by name.
      mesh: plgpu.Mesh, the grid.
      interpret: whether to run in the interpreter.
      **params: of plgpu.CompilerParams.

    Returns:
      The results, in their order.
    """
    given = {key: x for key, x in operands.items() if x is not None}
    names = [*given, *results]

    def kernel(*refs):
        by_name = dict.fromkeys(operands) | dict(zip(names, refs, strict=True))
        body(types.SimpleNamespace(**by_name))

    return pl.kernel(
        kernel,
        out_type=[*results.values()],
        mesh=mesh,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,  # the default only on 0.10.2
            **params,
        ),
        interpret=interpret_params(interpret),
        name=name,
    )(*given.values())


def run_one_warpgroup(
    name, body, operands, results, scratch, blocks, interpret, reduction_bytes=2048
):
    """Run a Hopper kernel whose blocks are one warpgroup each, along the axis 'block'.

    Args:
      name, operands, results, interpret: as in `run_by_name`.
      body: function of (references of operands and results by name, scratch memory by name).
      scratch: shared memory and barriers by name.
      blocks: number of blocks of the grid.
      reduction_bytes: shared memory for maxima and sums over rows.
    """

    def scoped(refs):
        pl.run_scoped(lambda **shared: body(refs, types.SimpleNamespace(**shared)), **scratch)

    mesh = plgpu.Mesh(grid=(blocks,), grid_names=('block',))
    return run_by_name(
        name, scoped, operands, results, mesh, interpret, reduction_scratch_bytes=reduction_bytes
    )


def round_up(number, multiple):
    """Round a number up to a multiple."""
    return -(-number // multiple) * multiple


def pad(x, axis, size, fill=0):
    """Pad an array with `fill` at the end of an axis, up to a size."""
    if x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths, constant_values=fill)


def swizzle_of(width, dtype):
    """Return the bytes of the widest swizzle whose tiles divide a row of `width` numbers, or 0."""
    for swizzle in (128, 64, 32):
        minor = swizzle // jnp.dtype(dtype).itemsize
        if width % minor == 0 or width < minor:
            return swizzle
    return 0


def tiled(shape, dtype, swizzle):
    """Return shared memory in the tiles that matrix products read; TMA clips each dimension."""
    minor = swizzle // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((OCTET, minor)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def full_slice(size):
    """Return a slice from a traced 0. It may exceed the array: TMA reads zeros, drops writes."""
    return pl.ds(jnp.int32(0), size)


def product(shape, a, b):
    """Return a @ b in float32."""
    return sum_products(shape, [(a, b)])


def sum_products(shape, pairs):
    """Return the sum of a @ b over pairs, in float32."""

    def run(total):
        for a, b in pairs:
            plgpu.wgmma(total, a, b)
        return total[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def by_column(x, shape):
    """Broadcasts one number per column."""
    return lax.broadcast_in_dim(x, shape, [1])


def by_row(x, shape):
    """Broadcasts one number per row."""
    return lax.broadcast_in_dim(x, shape, [0])


def matrix(ref, sizes):
    """Views octets of rows of shared memory as a matrix; if interpreted, loads reshape instead."""
    return ref if sizes.interpret else ref.reshape(ref.shape[0] * OCTET, ref.shape[-1])


def accumulate(initial, shape, add_products, sizes):
    """Return `initial` (None: zeros) plus products, float32 of `shape`.

    add_products(add) calls add(a, b, transpose) for each product a @ b, or a @ b.T.
    """
    if sizes.interpret:
        # The interpreter's wgmma cannot take its left side from registers.
        total = [jnp.zeros(shape, jnp.float32) if initial is None else initial]

        def add(a, b, transpose=False):
            a = a if isinstance(a, jax.Array) else a[...].reshape(-1, a.shape[-1])
            b = b[...].reshape(-1, b.shape[-1]).astype(jnp.float32)
            total[0] = total[0] + jnp.dot(a.astype(jnp.float32), b.T if transpose else b)
            # The interpreter would let a copy overtake these reads, unlike those of wgmma.
            plgpu.commit_smem()

        add_products(add)
        return total[0]

    def run(sum_ref):
        def add(a, b, transpose=False):
            plgpu.wgmma(sum_ref, a, b.T if transpose else b)

        add_products(add)
        return sum_ref[...] if initial is None else None

    if initial is None:
        return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))
    return pl.run_state(run)(plgpu.ACC.init(initial))


def add_product(total, a, b, sizes, shape=None, transpose=False):
    """Return total + a @ b, or total + a @ b.T, in float32; total None: zeros of `shape`."""
    shape = total.shape if shape is None else shape
    return accumulate(total, shape, lambda add: add(a, b, transpose), sizes)


def soften_columns(scores, highest):
    """Does one step of the online softmax down the columns, in base 2.

    Returns (weights, factor on earlier sums [columns], new highest scores [columns]).
    """
    new = jnp.maximum(highest, scores.max(axis=0))
    finite = jnp.where(new == -jnp.inf, 0.0, new)
    weights = jnp.exp2(scores - by_column(finite, scores.shape))
    return weights, jnp.exp2(highest - finite), new


def zeros(shape, dtype=jnp.float32):
    """Return zeros in the layout of products."""
    return plgpu.layout_cast(jnp.zeros(shape, dtype), LAYOUT)


def iota(shape, dimension, layout=LAYOUT):
    """Return the index along a dimension, int32."""
    if len(shape) == 1:
        return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=layout)
    # In two dimensions Mosaic computes the index of each element, and the compiler does not see
    # that a thread has only 2 rows: their indices would take up to 16 registers.
    line = iota(shape[dimension : dimension + 1], 0, layout.reduce(1 - dimension))
    return lax.broadcast_in_dim(line, shape, [dimension])
