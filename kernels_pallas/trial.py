"""Checks and times one candidate for an attention, in the child process that measure.py starts.

stdin: one line of JSON, and then nothing until the parent ends. stdout: lines of JSON, {"ready": 1}
once the device is found, then {"milliseconds": ...} or {"failed": ...}.

It is checked on few queries, against the equation in float32, and then timed at full size.
"""

import json
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
from kernels_pallas.candidates import Shapes
from kernels_pallas.joint_softmax import Parts
from kernels_pallas.reference import allowed_error
from kernels_pallas.trial_case import (
    make_masks,
    program,
    sides,
    small,
    sums_of,
    timed,
    visible_slots,
)

START = 0.5  # what the sums of the slots' gradients hold beforehand
SAMPLES = 5
SAMPLE_SECONDS = 0.02  # several calls, so that the clock and the launches do not count
DOCUMENTS = 8  # of a row of packed documents


def check(parts: Parts, shapes: Shapes) -> str | None:
    """What is wrong with a candidate on a small case, in one line; None: nothing."""
    shapes = small(shapes)
    random, masks = np.random.default_rng(1), make_masks(shapes, 4)
    num_slots = min(shapes.num_slots, shapes.num_slots // 2 + 1)
    arrays = {name: random.normal(size=side) for name, side in sides(shapes).items()}
    cotangents = {'o': random.normal(size=shapes.q)}
    if shapes.lse:
        cotangents['lse'] = random.normal(size=(shapes.q[0], shapes.q[2], shapes.q[1]))
    hidden = None
    if shapes.num_slots:
        seen = (masks.get('slot_mask_LBR'), masks.get('slot_rows_BT'))
        hidden = ~visible_slots(shapes, num_slots, *seen)
        for name in ('k_depth', 'v_depth'):
            arrays[name][hidden] = np.nan
    names, sums_dtype = sums_of(shapes)

    def results(implementation, wide):
        """Outputs and gradients, by name, of a function that can be called again."""
        dtype, of_sums = ('float32',) * 2 if wide else (shapes.dtypes[0], sums_dtype)
        # Rounded to the candidate's dtype first: the equation has the same inputs.
        given = {n: jnp.asarray(x, shapes.dtypes[0]).astype(dtype) for n, x in arrays.items()}
        given_do = dict(cotangents, o=jnp.asarray(cotangents['o'], shapes.dtypes[0]).astype(dtype))
        if shapes.lse:
            given_do['lse'] = jnp.asarray(cotangents['lse'], 'float32')
        run = jax.jit(program(implementation, shapes))

        def call():
            start = {n: jnp.full(sides(shapes)['k_depth'], START, of_sums) for n in names}
            outputs, gradients, sums = run(given, given_do, start, masks, num_slots)
            outputs |= {f'd{name}': x for name, x in (gradients | sums).items()}
            return {name: np.asarray(x) for name, x in outputs.items()}

        return call

    candidate = results(parts, wide=False)
    return find_wrong(
        right=results('reference', wide=True)(),
        plain=results('xla', wide=False)(),
        first=candidate(),
        second=candidate(),
        hidden={f'd{name}': hidden for name in names},
        dtype=shapes.dtypes[0],
        # cuDNN sums dq in any order.
        unordered=('dq', 'dk', 'dv') if parts.sequence == 'cudnn' else (),
    )


def find_wrong(right, plain, first, second, hidden, dtype, unordered) -> str | None:
    """What is wrong with results, in one line; None: nothing.

    Args:
      right: arrays by name, exact; gradients have names that begin with d.
      plain: the same of XLA's form in the candidate's dtype, whose error is the measure.
      first, second: of two runs of the candidate.
      hidden: by name, where nothing may be added to START.
      dtype: of the candidate's inputs.
      unordered: names of those that may differ in a second run.
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
            return f'wrong: {name} changes where nothing is seen'
        if name not in unordered and mine.tobytes() != second[name].tobytes():
            return f'wrong: {name} differs in a second run'
    return None


def milliseconds(parts: Parts, shapes: Shapes) -> float:
    """Median time of forward and backward; with segments the mean of one and several documents."""
    shapes = timed(shapes)

    def filled(side, dtype):
        # Random numbers of one row and slot for all: to draw more takes memory.
        one = jax.random.normal(jax.random.key(0), side[-3:] if len(side) > 3 else side[-2:])
        return jnp.broadcast_to(one.astype(dtype), side)

    dtype = shapes.dtypes[0]
    arrays = {name: filled(side, dtype) for name, side in sides(shapes).items()}
    cotangents = {'o': filled(shapes.q, dtype)}
    if shapes.lse:
        cotangents['lse'] = filled((shapes.q[0], shapes.q[2], shapes.q[1]), 'float32')
    names, wide = sums_of(shapes)
    sums = {name: jnp.zeros(sides(shapes)['k_depth'], wide) for name in names}
    # In a model the sums are added to in place.
    run = jax.jit(program(parts, shapes), donate_argnums=2)
    found = []
    for count in (1, DOCUMENTS) if shapes.segments else (1,):
        masks = jax.device_put(make_masks(shapes, count))

        def call(sums, times, masks=masks):
            begin = time.perf_counter()
            for _ in range(times):
                result = run(arrays, cotangents, sums, masks, -(-shapes.num_slots // 2))
                sums = result[2]
            jax.block_until_ready(result)
            return sums, (time.perf_counter() - begin) / times

        sums, _ = call(sums, 1)
        sums, once = call(sums, 1)
        samples, times = [], max(1, min(100, int(SAMPLE_SECONDS / once)))
        for _ in range(SAMPLES):
            sums, seconds = call(sums, times)
            samples.append(seconds)
        found.append(1e3 * statistics.median(samples))
    return statistics.mean(found)


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
    # Its default action ends the process even inside of a call that never returns.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(request['limit']) + 1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    parts = Parts(**request['parts'])
    shapes = Shapes(**{name: _tuples(value) for name, value in request['shapes'].items()})
    try:
        found = jax.devices()[0].device_kind
    except RuntimeError as error:  # what JAX raises where a platform cannot be used
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
