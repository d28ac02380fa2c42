"""What differs between the versions of JAX that the Mosaic GPU kernels run on: 0.10.2 to 0.12."""

import functools
import inspect

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_LOAD_INDEX = inspect.signature(plgpu.load).parameters.get('idx')
# Required on 0.10.2, deprecated where it has a default, gone later.
_LOAD_NEEDS_INDEX = _LOAD_INDEX is not None and _LOAD_INDEX.default is inspect.Parameter.empty

# The interpreter of 0.10.2 is private, and cannot run loads with a layout, layout casts or copies
# past the end of an array.
_INTERPRETER = getattr(plgpu, 'InterpretGPUParams', None)

CAN_INTERPRET = _INTERPRETER is not None


def load(ref, layout, optimized=True):
    """The whole of a reference, as an array of that layout; from global memory not `optimized`."""
    index = ((),) if _LOAD_NEEDS_INDEX else ()
    return plgpu.load(ref, *index, layout=layout, optimized=optimized)


def compiler_params(**options):
    """plgpu.CompilerParams whose kernels name their layouts, as is the default on 0.10.2 only."""
    return plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, **options)


def interpret_params(interpret: bool, detect_races: bool = False):
    """What plgpu.kernel takes as `interpret`: memory that was never written reads as NaN.

    Raises:
      ValueError: this JAX has no interpreter that can run the kernels.
    """
    if not interpret:
        return None
    if not CAN_INTERPRET:
        raise ValueError('interpret=True needs the Mosaic GPU interpreter of JAX 0.11.2 or newer')
    return _INTERPRETER(detect_races=detect_races)


def one_warpgroup_kernel(body, name, runs, out_type, scratch_types, interpret=None):
    """A Hopper kernel of `runs` blocks of one warpgroup, numbered by the axis 'run'.

    Args:
      body: takes references to operands and results, and by name those to shared memory.
      name: of the kernel, in profiles.
      runs: blocks.
      out_type: shapes and dtypes of the results.
      scratch_types: shared memory by name.
      interpret: of `interpreter`; None: compiled.

    Returns:
      A function of the operands, some of which may be mutable references (jax.new_ref), written in
      place: what plgpu.kernel takes from 0.11 on.
    """

    def scoped(*refs):
        pl.run_scoped(functools.partial(body, *refs), **scratch_types)

    return pl.kernel(
        scoped,
        out_type=out_type,
        mesh=plgpu.Mesh(grid=(runs,), grid_names=('run',)),
        compiler_params=compiler_params(approx_math=True),
        interpret=interpret,
        name=name,
    )
