"""What is timed of an attention: plain rivals and our implementations, as programs of arrays."""

import functools
import importlib
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas import depth_attention
from kernels_pallas.depth_attention import IMPLEMENTATIONS
from moddepth_jax.benchmarks.attention_cases import Case, Inputs

RIVALS = ('cudnn', 'pallas_triton', 'flash_attention_2')
# What is attended to: the sequence, both, or the slots (a sequence of no keys).
PLAIN, BOTH, ALONE = 'no slots', 'slots', 'slots alone'


class Form(NamedTuple):
    """One program.

    Attributes:
      implementation: one of RIVALS or IMPLEMENTATIONS.
      over: PLAIN, BOTH or ALONE.
      direction: `forward`; `fresh`, both passes with gradients of their own; `accumulate` and
        `accumulate float32`, both with the slots' gradients added in place to sums of the slots'
        dtype or in float32.
    """

    implementation: str
    over: str
    direction: str


SUMS = {'accumulate': None, 'accumulate float32': 'float32'}


def forms(names, case: Case, brief: bool = False) -> list[Form]:
    """All programs of these implementations, rivals without slots only.

    Args:
      names: of RIVALS and IMPLEMENTATIONS.
      case: the shape.
      brief: of ours with slots only both parts together, gradients of their own.
    """
    found = []
    for name in names:
        with_slots = name not in RIVALS and case.slots
        if not (brief and with_slots):
            found += [Form(name, PLAIN, direction) for direction in ('forward', 'fresh')]
        if not with_slots:
            continue
        if brief:
            found += [Form(name, BOTH, direction) for direction in ('forward', 'fresh')]
            continue
        ways = ('forward', 'fresh', *SUMS)
        # In float32 both ways of accumulation are one.
        ways = ways[: 3 if case.dtype == 'float32' else None]
        # The equation is a ruler: it has nothing of its own to add in place.
        ways = ways[:2] if name == 'reference' else ways
        found += [Form(name, over, way) for over in (BOTH, ALONE) for way in ways]
    return found


def _cudnn(q_BTNH, k_BTKH, v_BTKH):
    attend = functools.partial(jax.nn.dot_product_attention, implementation='cudnn')
    return attend(q_BTNH, k_BTKH, v_BTKH, is_causal=True)


def _repeated(q_BTNH, *shared):
    """Keys and values once for each query head, for kernels that know of no groups."""
    return [jnp.repeat(x, q_BTNH.shape[2] // x.shape[2], axis=2) for x in shared]


def _pallas_triton(q_BTNH, k_BTKH, v_BTKH):
    module = importlib.import_module('jax.experimental.pallas.ops.gpu.attention')
    sides, scale = _repeated(q_BTNH, k_BTKH, v_BTKH), q_BTNH.shape[-1] ** -0.5
    return module.mha(q_BTNH, *sides, segment_ids=None, sm_scale=scale, causal=True)


def _flash_attention_2(q_BTNH, k_BTKH, v_BTKH):
    module = importlib.import_module('moddepth_jax.benchmarks.triton_baseline')
    return module.flash_attention(q_BTNH, *_repeated(q_BTNH, k_BTKH, v_BTKH))


_RIVALS = dict(zip(RIVALS, (_cudnn, _pallas_triton, _flash_attention_2), strict=True))


def attend(form: Form):
    """f(q, k, v) or f(q, k, v, k_depth, v_depth, **options) -> o, or (o, ...) as depth_attention.

    Raises:
      ValueError: an implementation that nobody knows.
    """
    if form.implementation in _RIVALS:
        return _RIVALS[form.implementation]
    if form.implementation not in IMPLEMENTATIONS:
        known = ', '.join((*RIVALS, *IMPLEMENTATIONS))
        raise ValueError(f'implementation={form.implementation!r}: must be one of {known}')
    return functools.partial(depth_attention, implementation=form.implementation)


def _read(form: Form, inputs: Inputs):
    """The arrays that a form attends to; a sequence without keys for the slots alone."""
    q_BTNH, k_BTKH, v_BTKH, *slots = inputs[:5]
    if form.over == ALONE:
        return q_BTNH, k_BTKH[:, :0], v_BTKH[:, :0], *slots
    return (q_BTNH, k_BTKH, v_BTKH, *(slots if form.over == BOTH else ()))


def _options(form: Form, inputs: Inputs) -> dict:
    """Further arguments; rivals know neither slots nor documents."""
    if form.implementation in _RIVALS:
        return {}
    options = inputs.options(form.over != PLAIN)
    if form.over == ALONE:
        options.pop('segment_ids_BT', None)
    return options


def program(form: Form):
    """f(inputs, sums) -> (o and gradients of what is attended to, sums).

    `sums` is None but for forms that accumulate: there it takes the place of the slots' gradients.
    """
    function = attend(form)

    def forward(inputs, sums):
        return (function(*_read(form, inputs), **_options(form, inputs)),), sums

    def fresh(inputs, sums):
        call = functools.partial(function, **_options(form, inputs))
        o_BTNH, pull = jax.vjp(call, *_read(form, inputs))
        return (o_BTNH, *pull(inputs.do_BTNH)), sums

    def accumulate(inputs, sums):
        q, k, v, k_depth, v_depth = _read(form, inputs)
        options = _options(form, inputs)
        apart = SUMS[form.direction] is not None
        # Only the cotangents of the sums matter, not what they hold.
        threads = jax.tree.map(jnp.zeros_like, sums) if apart else (k_depth, v_depth)

        def threaded(q, k, v, threads):
            if apart:
                o_BTNH, *threads = function(q, k, v, k_depth, v_depth, slot_sums=threads, **options)
            else:
                k_slots, v_slots = threads
                o_BTNH, *threads = function(q, k, v, k_slots, v_slots, thread_slots=True, **options)
            return o_BTNH, tuple(threads)

        (o_BTNH, _), pull = jax.vjp(threaded, q, k, v, threads)
        *gradients, sums = pull((inputs.do_BTNH, sums))
        return (o_BTNH, *gradients), sums

    ways = {'forward': forward, 'fresh': fresh}
    return ways.get(form.direction, accumulate)


def make_sums(form: Form, case: Case):
    """Zeros to add to, or None for forms that do not accumulate."""
    if form.direction not in SUMS:
        return None
    shape = (case.slots, case.batch, case.length, case.kv_heads, case.width)
    dtype = SUMS[form.direction] or case.dtype
    return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)


def lower(form: Form, inputs: Inputs, case: Case):
    """The program of a form for such inputs, lowered; sums are donated.

    Raises:
      Exception: of any kind, where this JAX or this device cannot do it.
    """
    sums = jax.eval_shape(lambda: make_sums(form, case))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)
    with warnings.catch_warnings():
        # JAX 0.11 and newer deprecate its own flash attention, and the compiler under it.
        warnings.simplefilter('ignore', DeprecationWarning)
        return jax.jit(program(form), donate_argnums=1).lower(shapes, sums)
