"""The child process of autotune.py: checks and times one candidate for an attention.

It reads one line of JSON, and prints lines of JSON: {"ready": 1} when it has found the device, then
{"milliseconds": ...} or {"failed": ...}. It checks a small case, and times the full size.
"""

import ctypes
import functools
import json
import math
import signal
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels_pallas.autotune import OUT_OF_MEMORY
from kernels_pallas.backends import Parts, Shapes
from kernels_pallas.depth_attention import depth_attention
from kernels_pallas.reference import allowed_error, slot_visibility

START = 0.5  # initial value of the sums, to which the slots' gradients are added
SAMPLES = 5
SAMPLE_SECONDS = 0.02  # of a sample: several calls, so that clock and launch overheads are small
DOCUMENTS = 8  # in a row of packed documents
# The parent process holds most of a GPU's memory, and may leave only a tenth.
TIMED_BYTES = 4 << 30
# Compiler options for programs that are only compared: XLA would time many forms of each product.
UNTUNED = {'xla_gpu_autotune_level': 0}
# Calls that read few bytes take turns with copies of these: several times the L2 cache of a GPU,
# because in a model each layer reads its own.
COLD_BYTES, COPIES, ROUNDS = 256 << 20, 16, 8


def check_shapes(shapes: Shapes) -> Shapes:
    """Return the shapes of the check: few rows, heads and tokens, with equal remainders of 128."""
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
    """Return the shapes that are timed, with the batch rows that fit TIMED_BYTES, at least one."""
    sizes = {name: math.prod(shape) for name, shape in array_shapes(shapes).items()}
    # Each is an input and a gradient; the output and its cotangent have q's size.
    needed = (sum(sizes.values()) + sizes['q']) * 2 * jnp.dtype(shapes.dtypes[0]).itemsize
    if shapes.sums:
        needed += 4 * sizes.get('k_depth', 0) * jnp.dtype(shapes.sums).itemsize
    rows = min(shapes.q[0], max(1, TIMED_BYTES * shapes.q[0] // needed))
    return shapes._replace(q=(rows, *shapes.q[1:]), k=(rows, *shapes.k[1:]))


def array_shapes(shapes: Shapes) -> dict:
    """Return the shapes of the differentiated arrays, by name."""
    found = {'q': shapes.q, 'k': shapes.k, 'v': shapes.k}
    if shapes.slot_queries:
        found['q_depth'] = shapes.q
    if shapes.num_slots:
        tokens = shapes.slot_rows or shapes.q[1]
        slots = shapes.num_slots, shapes.q[0], tokens, *shapes.k[2:]
        found |= {'k_depth': slots, 'v_depth': slots}
    return found


def make_sums(shapes: Shapes, value: float, dtype: str = ''):
    """Return two arrays to which the slots' gradients are added, or None for fresh gradients.

    dtype '': `shapes.sums`.
    """
    if not shapes.sums:
        return None
    shape = array_shapes(shapes)['k_depth']
    return tuple(jnp.full(shape, value, dtype or shapes.sums) for _ in range(2))


def make_masks(shapes: Shapes, count: int) -> dict:
    """Return the arguments without gradients, by name; count: long documents in a row."""
    (batch, length), tokens = shapes.q[:2], shapes.slot_rows
    index, step = np.arange(length), 1 if shapes.consecutive else 2  # gaps, as in a routed block
    keys, by_token = np.arange(shapes.k[1]) * length // max(1, shapes.k[1]), {}
    if shapes.segments:
        starts = np.linspace(0, length, count + 1)[1:-1].astype(int)
        starts = np.unique([*starts, *(starts[:1] + 1)])  # the second document has one token
        by_token['segment_ids_BT'] = 1 + np.searchsorted(starts, index, 'right')
    if not shapes.consecutive or not shapes.ordered:
        by_token['positions_BT'] = step * index
    if not shapes.ordered:
        by_token['key_positions_BS'] = step * keys
        if shapes.segments:
            by_token['key_segment_ids_BS'] = by_token['segment_ids_BT'][keys]
    if tokens:
        by_token['slot_rows_BT'] = index * tokens // length
    masks = {name: np.tile(x, (batch, 1)).astype(np.int32) for name, x in by_token.items()}
    if shapes.slot_mask:
        size = shapes.num_slots, batch, tokens or length
        masks['slot_mask_LBR'] = np.random.default_rng(0).random(size) < 0.8
    return masks


def program(implementation: str | Parts, shapes: Shapes):
    """Return f(arrays, cotangents, sums, masks, num_slots) -> (results by name, new sums)."""

    def attend(masks, num_slots, arrays, slot_sums):
        slots = {}
        if shapes.num_slots:
            slots = {'num_slots': num_slots, 'slot_window': shapes.slot_window}
        results = depth_attention(
            *(arrays.get(name) for name in ('q', 'k', 'v', 'k_depth', 'v_depth')),
            q_depth_BTNH=arrays.get('q_depth'),
            window=shapes.window,
            scale=shapes.scale,
            implementation=implementation,
            return_lse=shapes.lse,
            thread_slots=bool(shapes.sums),
            slot_sums=slot_sums,
            **slots,
            **masks,
        )
        (o, *rest), lse = results if isinstance(results, tuple) else [results], None
        if shapes.lse:
            lse = rest.pop(0)
            lse = jnp.where(jnp.isfinite(lse), lse, 0)
        return o, lse, rest[:2], rest[2:]

    def run(arrays, cotangents, sums, masks, num_slots):
        attention = functools.partial(attend, masks, num_slots)
        (o, lse, passed, _), pull = jax.vjp(attention, arrays, sums)
        nothing = jax.tree.map(jnp.zeros_like, passed)
        gradients, sums = pull((*cotangents, nothing, list(sums or ())))
        if sums is not None:
            del gradients['k_depth'], gradients['v_depth']  # only passed on: the sums have them
        results = {'o': o, 'lse': lse, **{f'd{name}': x for name, x in gradients.items()}}
        return {name: x for name, x in results.items() if x is not None}, sums

    return run


def check(parts: Parts, shapes: Shapes) -> str | None:
    """Return what is wrong with a candidate on a small case, in one line, or None."""
    shapes = check_shapes(shapes)
    random, masks = np.random.default_rng(1), make_masks(shapes, 4)
    num_slots = min(shapes.num_slots, shapes.num_slots // 2 + 1)
    sizes, dtype, slots = array_shapes(shapes), shapes.dtypes[0], ()
    arrays = {name: random.normal(size=size) for name, size in (sizes | {'do': shapes.q}).items()}
    dlse, hidden = random.normal(size=(shapes.q[0], shapes.q[2], shapes.q[1])), None
    if shapes.num_slots:
        slots = 'k_depth', 'v_depth'
        seen = num_slots, shapes.slot_window, masks.get('slot_mask_LBR'), None
        hidden = ~np.moveaxis(slot_visibility(sizes['k_depth'][:3], *seen), 2, 0)
        for name in slots:
            arrays[name][hidden] = np.nan

    def results(implementation, dtype, sums_dtype='', times=1):
        # Rounded to the candidate's dtype first, so that all forms have the same inputs.
        given = {n: jnp.asarray(x, shapes.dtypes[0]).astype(dtype) for n, x in arrays.items()}
        cotangents = given.pop('do'), jnp.asarray(dlse, 'float32') if shapes.lse else None
        run = jax.jit(program(implementation, shapes), compiler_options=UNTUNED)
        for _ in range(times):
            sums = make_sums(shapes, START, sums_dtype)
            found, sums = run(given, cotangents, sums, masks, num_slots)
            found |= {f'd{name}': x for name, x in zip(slots, sums or (), strict=False)}
            yield {name: np.asarray(x) for name, x in found.items()}

    return find_wrong(
        *results('reference', 'float32', 'float32'),
        # Kernels round the weights to `dtype`, and XLA with float32 sums does not.
        *results('xla', dtype, dtype),
        *results(parts, dtype, times=2),
        hidden={f'd{name}': hidden for name in slots},
        dtype=dtype,
        # cuDNN's sums have no fixed order.
        unordered=('dq', 'dk', 'dv') if parts.sequence == 'cudnn' else (),
    )


def find_wrong(right, plain, first, second, hidden, dtype, unordered) -> str | None:
    """Return what is wrong with two runs of a candidate, in one line, or None.

    Args:
      right: exact results by name; gradients are d....
      plain: results of XLA in the candidate's dtype.
      first, second: results of the candidate's two runs.
      hidden: by name, bool arrays of the places where results must equal the exact ones.
      dtype: of the candidate.
      unordered: names of results that may differ between runs.
    """
    for name, value in right.items():
        mine, largest = first[name], float(np.max(np.abs(value), initial=0))
        error, plain_error = (
            float(np.max(np.abs(found[name].astype(np.float32) - value), initial=0))
            for found in (first, plain)
        )
        allowed = allowed_error(dtype, name.startswith('d'), plain_error, largest)
        if not error <= allowed:  # also true for NaN
            return f'wrong: {name} is off by {error:.3g}, allowed {allowed:.3g}'
        if name in hidden and (mine[hidden[name]] != value[hidden[name]]).any():
            return f'wrong: {name} changes at hidden slots'
        if name not in unordered and mine.tobytes() != second[name].tobytes():
            return f'wrong: {name} differs in a second run'
    return None


def on_cold_copies(run, given):
    """Return a function that calls run(given) with copies in turn, and how often it does.

    There are as many copies as hold COLD_BYTES together: one of large arguments, at most COPIES.
    All calls are one program, like the layers of a model: to start a short kernel alone takes
    longer than the kernel.
    """
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(given))
    copies = [given] + [
        jax.tree.map(jnp.copy, given) for _ in range(1, min(COPIES, -(-COLD_BYTES // size)))
    ]
    result = jax.eval_shape(run, given)
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), [result] * len(copies))

    @jax.jit
    def run_all(copies, results):
        def one_round(_, results):
            for i, one in enumerate(copies):
                # One after the other; XLA may neither join them nor move them out of the loop.
                one, results = lax.optimization_barrier((one, results))
                results[i] = run(one)
            return results

        return lax.fori_loop(0, ROUNDS, one_round, results)

    return lambda: run_all(copies, empty), ROUNDS * len(copies)


def median_milliseconds(call, parts: int = 1) -> float:
    """Return the median time of one of the `parts` of a call, over samples of several calls."""

    def seconds_of(calls):
        begin = time.perf_counter()
        for _ in range(calls):
            result = call()
        jax.block_until_ready(result)
        return (time.perf_counter() - begin) / calls / parts

    seconds_of(1)  # compiles
    calls = max(1, min(100, int(SAMPLE_SECONDS / (parts * seconds_of(1)))))
    return 1e3 * statistics.median(seconds_of(calls) for _ in range(SAMPLES))


def milliseconds(parts: Parts, shapes: Shapes) -> float:
    """Return the median time of both passes; with segments the mean for one and more documents."""
    shapes = timed_shapes(shapes)

    def filled(shape, dtype=shapes.dtypes[0]):
        # The same random numbers for all rows and slots; more would take memory to draw.
        one = jax.random.normal(jax.random.key(0), shape[-3:] if len(shape) > 3 else shape[-2:])
        return jnp.broadcast_to(one.astype(dtype), shape)

    arrays = {name: filled(shape) for name, shape in array_shapes(shapes).items()}
    dlse = filled((shapes.q[0], shapes.q[2], shapes.q[1]), 'float32') if shapes.lse else None
    do, sums, medians = filled(shapes.q), make_sums(shapes, 0.0), []
    # Donated, as in a model: the sums are updated in place.
    run = jax.jit(program(parts, shapes), donate_argnums=2)
    for count in (1, DOCUMENTS) if shapes.segments else (1,):
        masks = jax.device_put(make_masks(shapes, count))

        def call(masks=masks):
            nonlocal sums
            half = -(-shapes.num_slots // 2)
            result, sums = run(arrays, (do, dlse), sums, masks, half)
            return result, sums

        medians.append(median_milliseconds(call))
    return statistics.mean(medians)


def describe_error(error: Exception) -> str:
    """Return an error as one line, for the log."""
    text = str(error)
    if 'RESOURCE_EXHAUSTED' in text or 'OUT_OF_MEMORY' in text:
        return OUT_OF_MEMORY
    return ': '.join([type(error).__name__, *text.strip().splitlines()[:1]])[:240].rstrip('.')


def _answer(request):
    try:
        found = jax.devices()[0].device_kind
    except RuntimeError as error:  # JAX raises it if a platform cannot be used
        found = describe_error(error)
    if found != request['kind']:
        return {'unavailable': f'a child process finds {found}, not {request["kind"]}'}
    print('{"ready": 1}', flush=True)
    try:
        parts, shapes = Parts(**request['parts']), Shapes(**request['shapes'])
        from kernels_pallas import autotune_decoding  # which imports this module

        trial = autotune_decoding if shapes.places else sys.modules[__name__]
        wrong = trial.check(parts, shapes)
        return {'failed': wrong} if wrong else {'milliseconds': trial.milliseconds(parts, shapes)}
    except Exception as error:  # a compiler may raise anything; other candidates are tried
        return {'failed': describe_error(error)}


def main():
    request = json.loads(sys.stdin.readline())
    # It is in a session of its own, and would use the device after its parent was killed.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    # Ends this process also in a call that never returns.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(request['limit']) + 1)
    print(json.dumps(_answer(request)), flush=True)


if __name__ == '__main__':
    main()
