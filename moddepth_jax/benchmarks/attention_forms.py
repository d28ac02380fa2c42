"""The forms of attention that are checked and timed, ours and rival ones, as programs of arrays."""

import functools
import importlib
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas import depth_attention
from moddepth_jax.benchmarks.attention_cases import Case, Inputs

# What is attended to: the sequence, both, or the slots (a sequence without keys).
PLAIN, BOTH, ALONE = 'no slots', 'slots', 'slots alone'
# Dtype of the sums of the slots' gradients, None: that of the slots.
SUMS = {'accumulate': None, 'accumulate float32': 'float32'}


class Form(NamedTuple):
    """One program.

    Its direction is `forward`; `fresh`, both passes with new gradients; or one of SUMS, both passes
    with the slots' gradients added in place to sums.
    """

    implementation: str  # one of RIVALS or of kernels_pallas
    over: str  # PLAIN, BOTH or ALONE
    direction: str


def forms(name: str, case: Case, brief: bool = False) -> list[Form]:
    """All programs of an implementation; rivals have them without slots only.

    `brief`: of ours with slots only sequence and slots together, without sums.
    """
    with_slots = name not in RIVALS and case.slots
    over = [BOTH] if brief and with_slots else [PLAIN] + [BOTH, ALONE] * bool(with_slots)
    found = []
    for what in over:
        directions = ['forward', 'fresh']
        # The reference defines what is right, and has no sums of its own.
        if what != PLAIN and not brief and name != 'reference':
            # In float32 both ways to accumulate are one.
            directions += list(SUMS)[: 1 if case.dtype == 'float32' else None]
        found += [Form(name, what, direction) for direction in directions]
    return found


def _cudnn(q_BTNH, k_BTKH, v_BTKH, **_):
    attend = functools.partial(jax.nn.dot_product_attention, implementation='cudnn')
    return attend(q_BTNH, k_BTKH, v_BTKH, is_causal=True)


def _repeat_heads(q_BTNH, *arrays_BTKH):
    """Keys and values once for each query head, for kernels without grouped heads."""
    return [jnp.repeat(x, q_BTNH.shape[2] // x.shape[2], axis=2) for x in arrays_BTKH]


def _pallas_triton(q_BTNH, k_BTKH, v_BTKH, **_):
    module = importlib.import_module('jax.experimental.pallas.ops.gpu.attention')
    k_BTNH, v_BTNH = _repeat_heads(q_BTNH, k_BTKH, v_BTKH)
    scale = q_BTNH.shape[-1] ** -0.5
    return module.mha(q_BTNH, k_BTNH, v_BTNH, segment_ids=None, sm_scale=scale, causal=True)


def _flash_attention_2(q_BTNH, k_BTKH, v_BTKH, **_):
    module = importlib.import_module('moddepth_jax.benchmarks.triton_baseline')
    return module.flash_attention(q_BTNH, *_repeat_heads(q_BTNH, k_BTKH, v_BTKH))


# They know no documents: to them a row is one text.
RIVALS = {
    'cudnn': _cudnn,
    'pallas_triton': _pallas_triton,
    'flash_attention_2': _flash_attention_2,
}


def _arguments(over, inputs):
    """(arrays that are differentiated, options) of what a form attends to."""
    arrays, slots = inputs[:3], inputs[3:5]
    of_slots = {name: x for name, x in inputs.options.items() if 'slot' in name}
    if over == PLAIN:
        return arrays, {n: x for n, x in inputs.options.items() if n not in of_slots}
    slots += () if inputs.q_depth_BTNH is None else (inputs.q_depth_BTNH,)
    if over == ALONE:
        q_BTNH, k_BTKH, v_BTKH = arrays
        return (q_BTNH, k_BTKH[:, :0], v_BTKH[:, :0], *slots), of_slots
    return arrays + slots, inputs.options


def make_program(function, over: str, direction: str):
    """A Form of `function`, which is as depth_attention, as a function of arrays.

    Returns f(inputs, sums) -> ((o, *gradients of what is attended to), sums). In forms that
    accumulate, `sums` replaces the slots' gradients; else it is None.
    """

    def program(inputs, sums):
        arrays, options = _arguments(over, inputs)

        def attend(q, k, v, *slots, **more):
            if len(slots) == 3:
                more['q_depth_BTNH'] = slots[2]
            return function(q, k, v, *slots[:2], **more, **options)

        if direction == 'forward':
            return (attend(*arrays),), sums
        if direction == 'fresh':
            o_BTNH, pull = jax.vjp(attend, *arrays)
            return (o_BTNH, *pull(inputs.do_BTNH)), sums
        return _accumulate(attend, arrays, inputs.do_BTNH, sums, apart=SUMS[direction] is not None)

    return program


def _accumulate(attend, arrays, do_BTNH, sums, apart):
    """Both passes, with the slots' gradients added to `sums`; `apart`: of another dtype."""
    q, k, v, k_depth, v_depth = arrays
    # Only the cotangents of the sums matter, not what they hold.
    threads = jax.tree.map(jnp.zeros_like, sums) if apart else (k_depth, v_depth)

    def threaded(q, k, v, threads):
        if apart:
            o_BTNH, *threads = attend(q, k, v, k_depth, v_depth, slot_sums=threads)
        else:
            o_BTNH, *threads = attend(q, k, v, *threads, thread_slots=True)
        return o_BTNH, tuple(threads)

    (o_BTNH, _), pull = jax.vjp(threaded, q, k, v, threads)
    *gradients, sums = pull((do_BTNH, sums))
    return (o_BTNH, *gradients), sums


def make_sums(form: Form, case: Case):
    """Zeros to add to, or None for forms that do not accumulate."""
    if form.direction not in SUMS:
        return None
    shape = (case.slots, case.batch, case.length, case.kv_heads, case.width)
    dtype = SUMS[form.direction] or case.dtype
    return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)


def lower(form: Form, inputs: Inputs, case: Case):
    """The program of a form, lowered; its sums are donated. Raises anything if it cannot be."""
    ours = functools.partial(depth_attention, implementation=form.implementation)
    function = RIVALS.get(form.implementation, ours)
    sums = jax.eval_shape(lambda: make_sums(form, case))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)
    program = make_program(function, form.over, form.direction)
    with warnings.catch_warnings():
        # JAX 0.11 and newer deprecate their own flash attention, and the compiler under it.
        warnings.simplefilter('ignore', DeprecationWarning)
        return jax.jit(program, donate_argnums=1).lower(shapes, sums)
