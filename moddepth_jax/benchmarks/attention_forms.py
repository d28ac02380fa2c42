"""The attention programs that are checked and timed: ours and public baselines."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas import depth_attention
from kernels_pallas.backends import Parts
from moddepth_jax.benchmarks.attention_cases import Case

# What a query attends to: the sequence, the sequence and slots, or slots only (0 sequence keys).
PLAIN, BOTH, ALONE = 'no slots', 'slots', 'slots alone'


class Form(NamedTuple):
    """One program to time."""

    implementation: str  # key of RIVALS or PARTS, or an implementation of kernels_pallas
    over: str  # PLAIN, BOTH or ALONE
    # `forward`; for both passes `fresh`, or `sums` if the slots' gradients are added to float32
    # sums, as in a layer of a model with depth.gradient_dtype=float32.
    direction: str


def forms(name: str, case: Case, brief: bool = False) -> list[Form]:
    """Return the programs of an implementation. Rivals have none with slots.

    With `brief`, ours are only timed with slots and fresh gradients.
    """
    over = [PLAIN]
    if name not in RIVALS and case.slots:
        over = [BOTH] if brief else [PLAIN, BOTH, ALONE]
    found = [Form(name, what, direction) for what in over for direction in ('forward', 'fresh')]
    return found + [Form(name, BOTH, 'sums')] * (BOTH in over and not brief)


def _cudnn(q_BTNH, k_BTKH, v_BTKH, **_):
    attend = functools.partial(jax.nn.dot_product_attention, implementation='cudnn')
    return attend(q_BTNH, k_BTKH, v_BTKH, is_causal=True)


def _flash_attention_2(q_BTNH, k_BTKH, v_BTKH, **_):
    from moddepth_jax.benchmarks.triton_baseline import flash_attention

    return flash_attention(q_BTNH, k_BTKH, v_BTKH)


# Public implementations. They ignore documents and treat a row as one text.
RIVALS = {'cudnn': _cudnn, 'flash_attention_2': _flash_attention_2}
SEQUENCE, SPLIT = 'mosaic_gpu_sequence', 'mosaic_gpu_split'
# Two with XLA for the slots, and our kernels for both parts. The implementation mosaic_gpu takes
# its own sequence kernel only where cuDNN refuses.
PARTS = {
    'cudnn': Parts('cudnn', 'xla'),
    SEQUENCE: Parts('mosaic_gpu', 'xla'),
    SPLIT: Parts('mosaic_gpu', 'mosaic_gpu'),
}


def chosen(name: str) -> str | Parts:
    """Return the `implementation` of depth_attention for a key of PARTS or an implementation."""
    if name in PARTS:
        return PARTS[name]._replace(interpret=jax.default_backend() == 'cpu')
    return name


def _arguments(over, inputs):
    """(differentiated arrays, options) for what a form attends to."""
    arrays, slots = inputs[:3], inputs[3:5]
    of_slots = {name: x for name, x in inputs.options.items() if 'slot' in name}
    if over == PLAIN:
        return arrays, {n: x for n, x in inputs.options.items() if n not in of_slots}
    slots += () if inputs.q_depth_BTNH is None else (inputs.q_depth_BTNH,)
    if over == ALONE:
        q_BTNH, k_BTKH, v_BTKH = arrays
        return (q_BTNH, k_BTKH[:, :0], v_BTKH[:, :0], *slots), of_slots
    return arrays + slots, inputs.options


def make_sums(direction: str, inputs):
    """Return two arrays of zeros [L, B, T, K, H] for `sums`, in float32; else None."""
    if direction == 'sums':
        return tuple(jnp.zeros(inputs.k_depth_LBTKH.shape, 'float32') for _ in range(2))


def make_program(function, over: str, direction: str):
    """Return a function of Inputs and `make_sums`; `function` is like depth_attention.

    It returns (o, *gradients). The slots' gradients are those that were in the sums, and its own.
    """

    def program(inputs, sums=None):
        arrays, options = _arguments(over, inputs)

        def attend(sums, q, k, v, *slots):
            own = {'q_depth_BTNH': slots[2]} if len(slots) == 3 else {}
            own |= {} if sums is None else {'slot_sums': sums}
            results = function(q, k, v, *slots[:2], **own, **options)
            return (results, ()) if sums is None else (results[0], results[1:])

        if direction == 'forward':
            return (attend(None, *arrays)[0],)
        (o_BTNH, _), pull = jax.vjp(attend, sums, *arrays)
        sums, *gradients = pull((inputs.do_BTNH, sums or ()))
        if sums is not None:
            gradients[3:5] = sums
        return (o_BTNH, *gradients)

    return program


def lower(form: Form, inputs):
    """Lower the program of a form, which updates sums in place. Any exception may be raised."""
    ours = functools.partial(depth_attention, implementation=chosen(form.implementation))
    function = RIVALS.get(form.implementation, ours)
    program = jax.jit(make_program(function, form.over, form.direction), donate_argnums=1)
    return program.lower(inputs, make_sums(form.direction, inputs))
