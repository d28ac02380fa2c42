"""How long attention takes, with depth slots and without, ours and the fastest public ones.

Each implementation is compared with the equation first, and timed if it is right.
"""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from moddepth_jax.benchmarks import attention_cases, attention_check
from moddepth_jax.benchmarks.attention_cases import Case
from moddepth_jax.benchmarks.attention_forms import (
    ALONE,
    BOTH,
    PLAIN,
    RIVALS,
    SUMS,
    Form,
    forms,
    lower,
    make_sums,
)
from moddepth_jax.benchmarks.timing import time_interleaved, try_run
from moddepth_jax.benchmarks.worker import SkippedError, WrongError

BASELINES = ('cudnn', 'pallas_triton', 'xla')  # without slots: what the others are divided by
SCORE_BYTES = 5e9  # the reference is omitted where its scores take more
SAMPLE_SECONDS = 5e-3  # shorter calls are repeated
MOST_CALLS = 20
REPEATS = (3, 25)  # least and most rounds


def device_ceilings(with_cudnn: bool = True, toy: bool = False) -> dict:
    """What the device can do at most, measured: bytes read and written, bf16 FLOPs.

    `with_cudnn`: on a GPU, also whether reruns of cuDNN's backward pass have equal bits, by XLA's
    deterministic flag. `toy`: with small arrays.
    """
    on_gpu, device = jax.default_backend() == 'gpu', jax.devices()[0]
    size, side = (2**22, 256) if toy else (2**30, 8192)
    x = jax.random.normal(jax.random.key(0), (size,), jnp.bfloat16)
    y = jax.random.normal(jax.random.key(1), (side, side), jnp.bfloat16)
    negative, product = jax.jit(jnp.negative), jax.jit(jnp.dot)
    calls = {'copy': lambda: negative(x), 'matmul': lambda: product(y, y)}
    seconds = {n: float(np.median(values)) for n, values in time_interleaved(calls, 11).items()}
    facts = {
        'ceilings': {
            'copy_bytes_per_second': 4 * size / seconds['copy'],
            'matmul_flops_per_second': 2 * side**3 / seconds['matmul'],
        },
        'platform_version': device.client.platform_version,
        'hopper': on_gpu and str(device.compute_capability).startswith('9.'),
    }
    if on_gpu and with_cudnn:
        flags = {str(flag): try_run(_cudnn_reruns, flag) for flag in (False, True)}
        facts['cudnn_backward_by_deterministic_flag'] = {
            flag: why or f'{differing} of 4 reruns differ'
            for flag, (differing, why) in flags.items()
        }
    return facts


def _cudnn_reruns(flag):
    """How many of four reruns of cuDNN's backward pass differ, by XLA's deterministic flag."""
    case, form = Case(2048), Form('cudnn', PLAIN, 'fresh')
    inputs = attention_cases.make_inputs(case)
    options = {'xla_gpu_deterministic_ops': flag}
    run = lower(form, inputs, case).compile(compiler_options=options)
    first, *others = [jax.device_get(run(inputs, None)[0]) for _ in range(5)]
    return sum(any((a != b).any() for a, b in zip(first, o, strict=True)) for o in others)


def _compile_and_check(form, case, inputs, expected):
    """(the compiled form, None), or (None, why it is not timed); `expected` is filled."""
    # The reference holds all scores, and its gradient keeps several such arrays.
    score_bytes = 16 * case.batch * case.heads * case.length**2
    if form.implementation == 'reference' and score_bytes > SCORE_BYTES:
        return None, f'its scores take {score_bytes / 1e9:.0f} GB'
    run, why = try_run(lambda: lower(form, inputs, case).compile())
    if why:
        return None, why
    chosen_C = attention_check.checked_queries(case.length)
    key = form.over, form.implementation in RIVALS  # which know no documents
    if key not in expected:
        seen = inputs._replace(options={}) if key[1] else inputs
        expected[key] = try_run(attention_check.compute_expected, seen, chosen_C, form.over)
    values, why = expected[key]
    if why:
        return None, f'not checked, so not timed: the equation is {why}'
    kept_T = jnp.zeros(case.length, bool).at[chosen_C].set(True)
    masked = inputs._replace(do_BTNH=jnp.where(kept_T[:, None, None], inputs.do_BTNH, 0))
    results, why = try_run(attention_check.run_checked, form, case, run, masked)
    why = why or attention_check.find_wrong(results, values, chosen_C)
    return (None, why) if why else (run, None)


def _repeated(form, case, run, inputs, sums):
    """f(count) that runs a form so often; `sums` are shared by the forms of one direction."""

    def call(count):
        results = []
        for _ in range(count):
            # Donated: a call that failed has destroyed its sums.
            held = sums.pop(form.direction, None)
            held = make_sums(form, case) if held is None else held
            arrays, sums[form.direction] = run(inputs, held)
            results.append(arrays)
        return results

    return call


def _time(programs, inputs, case, seconds):
    """(seconds of each form by round, why others failed, rounds that take `seconds` together)."""
    runs, sums, failed = {}, {}, {}
    for form, run in programs.items():
        runs[form] = _repeated(form, case, run, inputs, sums)
        if why := try_run(runs[form], 1)[1]:
            failed[form] = why
            del runs[form]
    once = {form: functools.partial(run, 1) for form, run in runs.items()}
    once = {form: float(values[0]) for form, values in time_interleaved(once, 1, 1).items()}
    counts = {f: int(np.clip(np.ceil(SAMPLE_SECONDS / s), 1, MOST_CALLS)) for f, s in once.items()}
    round_seconds = sum(counts[form] * once[form] for form in runs)
    repeats = int(np.clip(seconds / max(round_seconds, 1e-9), *REPEATS))
    calls = {form: functools.partial(run, counts[form]) for form, run in runs.items()}
    measured = time_interleaved(calls, repeats, warmup=0)
    return {form: values / counts[form] for form, values in measured.items()}, failed, repeats


def _row(form, seconds, run, case, baseline):
    """What was measured of a form, and what follows from it."""
    values = seconds[form]
    row = {**form._asdict(), 'seconds': float(np.median(values))}
    row['temp_bytes'] = run.memory_analysis().temp_size_in_bytes
    if form.over == ALONE:
        return row | _depth_bandwidth(form, seconds, case)
    forward = form.direction == 'forward'
    slots = 0 if form.over == PLAIN else case.visible
    computed = case._replace(documents=0) if form.implementation in RIVALS else case
    flops = attention_cases.flops(computed, slots, backward=not forward)
    row['flops_per_second'] = flops / row['seconds']
    against = Form(baseline, PLAIN, 'forward' if forward else 'fresh')
    if against in seconds:
        row['over_plain'] = float(np.median(values / seconds[against]))
    return row


def _depth_bandwidth(form, seconds, case):
    """Bytes a second of the slots alone, in the forward pass or in the backward pass without it."""
    values, amount = seconds[form], attention_cases.depth_bytes(case, 'forward')
    if form.direction != 'forward':
        forward = form._replace(direction='forward')
        if forward not in seconds:
            return {}
        values = values - seconds[forward]
        dtype = jnp.dtype(SUMS.get(form.direction) or case.dtype)
        way = form.direction.split()[0]
        amount = attention_cases.depth_bytes(case, way, dtype.itemsize)
    median = float(np.median(values))
    return {'bytes_per_second': amount / median} if median > 0 else {}


def bench_case(case: Case, names, seconds: float, brief: bool = False) -> dict:
    """Checks and times every form of some implementations at one shape, for about `seconds`.

    `names` are of attention_forms.RIVALS and of kernels_pallas's implementations, `brief` is as in
    attention_forms.forms.

    Returns:
      The shape, `baseline` (the first of BASELINES that is right) and `rows`: of each Form its
      fields and either `failed`, one line, or the median `seconds` of a call; `flops_per_second`,
      of the visible pairs; `over_plain`, the median over rounds of its time over the baseline's
      without slots and documents. Of the slots alone `bytes_per_second` instead: of the forward
      pass, or of the backward pass alone if the form has one. Or `skipped`, a line.

    Raises:
      DeviceLostError: nothing more can run in this process.
    """
    inputs, why = try_run(attention_cases.make_inputs, case)
    if why:
        return {**case._asdict(), 'skipped': why}
    begin, right, failed, expected = time.perf_counter(), {}, {}, {}
    for form in (form for name in names for form in forms(name, case, brief)):
        run, why = _compile_and_check(form, case, inputs, expected)
        if why:
            failed[form] = why
        else:
            right[form] = run
    del expected
    compiled = time.perf_counter() - begin
    measured, not_run, repeats = _time(right, inputs, case, seconds)
    failed |= not_run
    plain = [name for name in BASELINES if Form(name, PLAIN, 'fresh') in measured]
    baseline = plain[0] if plain else None
    rows = [_row(form, measured, right[form], case, baseline) for form in measured]
    return {
        **case._asdict(),
        'baseline': baseline,
        'repeats': repeats,
        'compile_and_check_seconds': compiled,
        'rows': rows + [{**form._asdict(), 'failed': why} for form, why in failed.items()],
    }


def time_one(implementation: str, sizes: dict, brief: bool, toy: bool = False) -> dict:
    """`bench_case` of one implementation, in turn with plain cuDNN; of a toy with XLA.

    `sizes` are fields of attention_cases.Case.

    Raises:
      WrongError: some result is wrong.
      SkippedError: the device cannot do it.
      ValueError: nothing could be timed.
    """
    case, baseline = Case(**sizes), 'cudnn'
    if toy:
        case, baseline = attention_cases.toy(case), 'xla'
    result = bench_case(case, list(dict.fromkeys([baseline, implementation])), 1.5, brief)
    if 'skipped' in result:
        raise ValueError(result['skipped'])
    rows = [row for row in result['rows'] if row['implementation'] == implementation]
    failed = [row['failed'] for row in rows if 'failed' in row]
    if wrong := [why for why in failed if why.startswith('wrong')]:
        raise WrongError(wrong[0])
    if len(failed) == len(rows):
        unable = toy and implementation in RIVALS or 'cannot:' in failed[0]
        raise (SkippedError if unable else ValueError)(failed[0])
    return result


def memory_by_length(implementation: str, lengths: list[int], slots: int, toy: bool = False):
    """`temp_bytes` by length of one attention over packed documents, both passes.

    It is compiled and not run: B=1, N=64, K=8, H=64; `slots` is L, 0: the sequence alone.
    """
    found = {}
    for length in lengths:
        case = Case(length, slots=slots, documents=16)
        case = attention_cases.toy(case)._replace(length=length // 256) if toy else case
        inputs = jax.eval_shape(functools.partial(attention_cases.make_inputs, case))
        form = Form(implementation, BOTH if slots else PLAIN, 'fresh')
        compiled = lower(form, inputs, case).compile()
        found[str(case.length)] = compiled.memory_analysis().temp_size_in_bytes
    return {'temp_bytes': found, 'slots': slots}
