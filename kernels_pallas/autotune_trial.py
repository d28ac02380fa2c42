"""Checks and times one candidate for an attention, in the child process that autotune.py starts.

stdin: one line of JSON, and then nothing until the parent ends. stdout: lines of JSON, {"ready": 1}
once the device is found, then {"milliseconds": ...} or {"failed": ...}.

The candidate is checked on few queries, against the equation in float32, and then timed at full
size. It is called as it was where it was asked for: the same window, slots, masks and dtypes.
"""

import functools
import json
import math
import os
import signal
import statistics
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.autotune import OUT_OF_MEMORY
from kernels_pallas.backends import Parts, Shapes
from kernels_pallas.depth_attention import depth_attention
from kernels_pallas.reference import allowed_error, slot_visibility

START = 0.5  # initial value of the sums to which the slots' gradients are added
SAMPLES = 5
SAMPLE_SECONDS = 0.02  # several calls, so that the clock and the launches do not count
DOCUMENTS = 8  # of a row of packed documents
# The process that measures holds most of a GPU's memory, and may leave a tenth of it.
TIMED_BYTES = 4 << 30


def check_shapes(shapes: Shapes) -> Shapes:
    """The shapes of the check: few rows, heads and tokens; blocks end as those of `shapes` do."""
    most = 256
    length, keys, rows = (
        size if size <= most + 128 else most + size % 128
        for size in (shapes.q[1], shapes.k[1], shapes.slot_rows)
    )
    batch, kv_heads = min(2, shapes.q[0]), min(2, shapes.k[2])
    heads, width = shapes.q[2] // shapes.k[2] * kv_heads, shapes.q[3]
    return shapes._replace(
        q=(batch, length, heads, width),
        k=(batch, keys, kv_heads, width),
        slot_rows=max(rows, length) if rows else 0,
        window=min(shapes.window, 50),
    )


def timed_shapes(shapes: Shapes) -> Shapes:
    """The shapes that are timed: with as many of the rows as fit into TIMED_BYTES, or one.

    All candidates are timed with the same number: the times are only compared with each other.
    """
    needed = 0
    for name, shape in array_shapes(shapes).items():
        width = jnp.dtype(shapes.dtypes[0]).itemsize
        if name.endswith('_depth') and shapes.sums:
            width += jnp.dtype(shapes.sums).itemsize
        # As an input, a gradient, and, of the queries, an output and its cotangent.
        needed += math.prod(shape) * width * (4 if name == 'q' else 2)
    rows = shapes.q[0]
    while rows > 1 and needed * rows > TIMED_BYTES * shapes.q[0]:
        rows = -(-rows // 2)
    return shapes._replace(q=(rows, *shapes.q[1:]), k=(rows, *shapes.k[1:]))


def array_shapes(shapes: Shapes) -> dict:
    """Shapes of the arrays that are differentiated, by name; those of the slots come last."""
    batch, length = shapes.q[:2]
    found = {'q': shapes.q, 'k': shapes.k, 'v': shapes.k}
    if shapes.num_slots:
        if shapes.slot_queries:
            found['q_depth'] = shapes.q
        slot = (shapes.num_slots, batch, shapes.slot_rows or length, *shapes.k[2:])
        found |= {'k_depth': slot, 'v_depth': slot}
    return found


def sums_of(shapes: Shapes):
    """Names of the arrays whose gradients are those of the slots, and their dtype."""
    if not shapes.num_slots:
        return (), ''
    if shapes.sums:
        return ('k_sums', 'v_sums'), shapes.sums
    return ('k_depth', 'v_depth'), shapes.dtypes[0]


def visible_slots(shapes: Shapes, num_slots: int, mask_LBR, rows_BT) -> np.ndarray:
    """bool [L, B, R]: the slots that are visible to some query."""
    places = shapes.num_slots, shapes.q[0], shapes.slot_rows or shapes.q[1]
    seen_BTL = slot_visibility(places, num_slots, shapes.slot_window, mask_LBR, rows_BT)
    if rows_BT is None:
        return np.moveaxis(np.asarray(seen_BTL), 2, 0)
    found_LBR = np.zeros(places, bool)
    for b, rows_T in enumerate(rows_BT):
        found_LBR[:, b, rows_T] = np.asarray(seen_BTL[b]).T
    return found_LBR


def documents(shapes: Shapes, count: int) -> np.ndarray:
    """int32 [B, T]: ids of `count` documents in a row; of several the second has one token."""
    batch, length = shapes.q[:2]
    ends = np.linspace(0, length, count + 1)[1:-1].astype(int)
    ids_T = 1 + np.searchsorted(np.unique([*ends, *(ends[:1] + 1)]), np.arange(length), 'right')
    return np.tile(ids_T, (batch, 1)).astype(np.int32)


def make_masks(shapes: Shapes, count: int) -> dict:
    """The arguments that are not differentiated, as arrays by name; `count` documents in a row."""
    (batch, length), tokens = shapes.q[:2], shapes.slot_rows
    random, masks = np.random.default_rng(0), {}
    step = 1 if shapes.consecutive else 2  # with gaps, as in a routed block
    if shapes.segments:
        masks['segment_ids_BT'] = documents(shapes, count)
    if not shapes.consecutive or not shapes.ordered:
        masks['positions_BT'] = np.tile(step * np.arange(length), (batch, 1)).astype(np.int32)
    if not shapes.ordered:
        keys = np.arange(shapes.k[1]) * length // max(1, shapes.k[1])
        masks['key_positions_BS'] = np.tile(step * keys, (batch, 1)).astype(np.int32)
        if shapes.segments:
            masks['key_segment_ids_BS'] = masks['segment_ids_BT'][:, keys]
    if tokens:
        rows = np.arange(length) * tokens // length
        masks['slot_rows_BT'] = np.tile(rows, (batch, 1)).astype(np.int32)
    if shapes.slot_mask:
        size = (shapes.num_slots, batch, tokens or length)
        masks['slot_mask_LBR'] = random.random(size) < 0.8
    return masks


def program(implementation: str | Parts, shapes: Shapes):
    """f(arrays, cotangents, sums, masks, num_slots) -> (outputs, gradients, sums), each by name.

    `sums` are the arrays to which the gradients of the slots are added.
    """
    sum_names, _ = sums_of(shapes)

    def attend(masks, num_slots, arrays):
        slots = {}
        if shapes.num_slots:
            slots = {'num_slots': num_slots, 'slot_window': shapes.slot_window}
        if shapes.sums:
            slots['slot_sums'] = arrays['k_sums'], arrays['v_sums']
        found = depth_attention(
            *(arrays.get(name) for name in ('q', 'k', 'v', 'k_depth', 'v_depth')),
            q_depth_BTNH=arrays.get('q_depth'),
            window=shapes.window,
            scale=shapes.scale,
            implementation=implementation,
            return_lse=shapes.lse,
            thread_slots=shapes.num_slots > 0,
            **slots,
            **masks,
        )
        found = found if isinstance(found, tuple) else (found,)
        names = ['o'] + ['lse'] * shapes.lse + ['k_depth', 'v_depth'] * (shapes.num_slots > 0)
        outputs = dict(zip(names + ['k_sums', 'v_sums'] * bool(shapes.sums), found, strict=True))
        if shapes.lse:
            outputs['lse'] = jnp.where(jnp.isfinite(outputs['lse']), outputs['lse'], 0)
        return outputs

    def run(arrays, cotangents, sums, masks, num_slots):
        # The values of `slot_sums` do not matter.
        wide = {name: array for name, array in sums.items() if name not in arrays}
        outputs, pull = jax.vjp(functools.partial(attend, masks, num_slots), arrays | wide)
        zeros = {name: jnp.zeros_like(x) for name, x in outputs.items()}
        (gradients,) = pull({name: (zeros | sums | cotangents)[name] for name in outputs})
        kept = {name: outputs[name] for name in outputs.keys() & {'o', 'lse'}}
        return kept, gradients, {name: gradients.pop(name) for name in sum_names}

    return run


def check(parts: Parts, shapes: Shapes) -> str | None:
    """Returns what is wrong with a candidate on a small case, in one line; None: nothing."""
    shapes = check_shapes(shapes)
    random, masks = np.random.default_rng(1), make_masks(shapes, 4)
    num_slots = min(shapes.num_slots, shapes.num_slots // 2 + 1)
    arrays = {name: random.normal(size=size) for name, size in array_shapes(shapes).items()}
    cotangents = {'o': random.normal(size=shapes.q)}
    if shapes.lse:
        cotangents['lse'] = random.normal(size=(shapes.q[0], shapes.q[2], shapes.q[1]))
    hidden, (names, sums_dtype) = None, sums_of(shapes)
    if shapes.num_slots:
        mask_LBR, rows_BT = masks.get('slot_mask_LBR'), masks.get('slot_rows_BT')
        hidden = ~visible_slots(shapes, num_slots, mask_LBR, rows_BT)
        for name in ('k_depth', 'v_depth'):
            arrays[name][hidden] = np.nan

    def caller(implementation, dtype, sums_dtype):
        """A function that returns outputs and gradients, by name."""
        # Rounded to the candidate's dtype first: the equation has the same inputs.
        rounded = {
            name: jnp.asarray(x, shapes.dtypes[0]).astype(dtype)
            for name, x in (arrays | {'do': cotangents['o']}).items()
        }
        given_do = cotangents | {'o': rounded.pop('do')}
        if shapes.lse:
            given_do['lse'] = jnp.asarray(cotangents['lse'], 'float32')
        run = jax.jit(program(implementation, shapes))

        def call():
            sums = {n: jnp.full(array_shapes(shapes)['k_depth'], START, sums_dtype) for n in names}
            outputs, gradients, sums = run(rounded, given_do, sums, masks, num_slots)
            outputs |= {f'd{name}': x for name, x in (gradients | sums).items()}
            return {name: np.asarray(x) for name, x in outputs.items()}

        return call

    dtype = shapes.dtypes[0]
    candidate = caller(parts, dtype, sums_dtype)
    return find_wrong(
        right=caller('reference', 'float32', 'float32')(),
        plain=caller('xla', dtype, sums_dtype)(),
        first=candidate(),
        second=candidate(),
        hidden={f'd{name}': hidden for name in names},
        dtype=dtype,
        # cuDNN sums dq in any order.
        unordered=('dq', 'dk', 'dv') if parts.sequence == 'cudnn' else (),
    )


def find_wrong(right, plain, first, second, hidden, dtype, unordered) -> str | None:
    """Returns what is wrong with results, in one line; None: nothing.

    Args:
      right: arrays by name, exact; names of gradients begin with d.
      plain: the same by XLA in the candidate's dtype; its error is the measure.
      first, second: of two runs of the candidate.
      hidden: by name, where nothing may be added to START.
      dtype: of the candidate's inputs.
      unordered: names of results that may differ in a second run.
    """
    for name, value in right.items():
        mine, largest = first[name], float(np.max(np.abs(value), initial=0))
        error, plain_error = (
            float(np.max(np.abs(found[name].astype(np.float32) - value), initial=0))
            for found in (first, plain)
        )
        allowed = allowed_error(dtype, name.startswith('d'), plain_error, largest)
        if not error <= allowed:  # nor is NaN
            return f'wrong: {name} is off by {error:.3g}, allowed {allowed:.3g}'
        if name in hidden and (mine[hidden[name]] != START).any():
            return f'wrong: {name} changes at hidden slots'
        if name not in unordered and mine.tobytes() != second[name].tobytes():
            return f'wrong: {name} differs in a second run'
    return None


def milliseconds(parts: Parts, shapes: Shapes) -> float:
    """Median time of forward and backward; with segments the mean of one and several documents."""
    shapes = timed_shapes(shapes)

    def filled(shape, dtype):
        # The same random numbers for all rows and slots: to draw more takes memory.
        one = jax.random.normal(jax.random.key(0), shape[-3:] if len(shape) > 3 else shape[-2:])
        return jnp.broadcast_to(one.astype(dtype), shape)

    dtype = shapes.dtypes[0]
    arrays = {name: filled(shape, dtype) for name, shape in array_shapes(shapes).items()}
    cotangents = {'o': filled(shapes.q, dtype)}
    if shapes.lse:
        cotangents['lse'] = filled((shapes.q[0], shapes.q[2], shapes.q[1]), 'float32')
    names, wide = sums_of(shapes)
    sums = {name: jnp.zeros(array_shapes(shapes)['k_depth'], wide) for name in names}
    # In a model the sums are added to in place.
    run = jax.jit(program(parts, shapes), donate_argnums=2)
    medians = []
    for count in (1, DOCUMENTS) if shapes.segments else (1,):
        masks = jax.device_put(make_masks(shapes, count))

        def seconds_of(calls, masks=masks):
            nonlocal sums
            begin = time.perf_counter()
            for _ in range(calls):
                result = run(arrays, cotangents, sums, masks, -(-shapes.num_slots // 2))
                sums = result[2]
            jax.block_until_ready(result)
            return (time.perf_counter() - begin) / calls

        seconds_of(1)  # compiles
        calls = max(1, min(100, int(SAMPLE_SECONDS / seconds_of(1))))
        medians.append(1e3 * statistics.median(seconds_of(calls) for _ in range(SAMPLES)))
    return statistics.mean(medians)


def _end_with_parent():
    sys.stdin.read()
    os._exit(1)


def _say(**what):
    print(json.dumps(what), flush=True)


def _tuples(value):
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _reason(error):
    text = str(error)
    if 'RESOURCE_EXHAUSTED' in text or 'OUT_OF_MEMORY' in text:
        return OUT_OF_MEMORY
    return ': '.join([type(error).__name__, *text.strip().splitlines()[:1]])[:240].rstrip('.')


def main():
    """Answers the one request of stdin."""
    request = json.loads(sys.stdin.readline())
    # The default action ends the process even inside a call that never returns.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(request['limit']) + 1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    parts = Parts(**request['parts'])
    shapes = Shapes(**{name: _tuples(value) for name, value in request['shapes'].items()})
    try:
        found = jax.devices()[0].device_kind
    except RuntimeError as error:  # what JAX raises if a platform cannot be used
        return _say(unavailable=_reason(error))
    if found != request['kind']:
        return _say(unavailable=f'a child process runs on {found}, not on {request["kind"]}')
    _say(ready=1)
    try:
        if wrong := check(parts, shapes):
            return _say(failed=wrong)
        return _say(milliseconds=milliseconds(parts, shapes))
    except Exception as error:  # a compiler may raise anything, and another candidate is tried
        return _say(failed=_reason(error))


if __name__ == '__main__':
    main()
