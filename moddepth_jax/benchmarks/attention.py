"""How long attention takes, with depth slots and without, ours and the fastest public ones.

Each implementation is compared with the equation first, and timed if it is right.
"""

import concurrent.futures
import os
import time

import jax
import jax.numpy as jnp
import numpy as np

from moddepth_jax.benchmarks import attention_cases, attention_check
from moddepth_jax.benchmarks.attention_cases import Case
from moddepth_jax.benchmarks.attention_forms import (
    ALONE,
    PLAIN,
    RIVALS,
    SUMS,
    Form,
    forms,
    lower,
    make_sums,
)
from moddepth_jax.benchmarks.timing import describe_error, time_interleaved, try_run

BASELINES = ('cudnn', 'pallas_triton', 'xla')  # without slots: what the others are divided by
SCORE_BYTES = 5e9  # forms that hold more scores than this are omitted
SAMPLE_SECONDS = 5e-3  # shorter calls are repeated
MOST_CALLS = 20
REPEATS = (3, 25)  # least and most rounds


class _Timed:
    """Repeated calls of one compiled form; `sums` are shared by the forms of one direction."""

    def __init__(self, form: Form, case: Case, run, inputs, sums: dict):
        self.form, self.case, self.run, self.inputs, self.sums = form, case, run, inputs, sums
        self.calls = 1

    def __call__(self):
        results = []
        for _ in range(self.calls):
            # Donated: a call that failed has destroyed its sums.
            sums = self.sums.pop(self.form.direction, None)
            sums = make_sums(self.form, self.case) if sums is None else sums
            arrays, self.sums[self.form.direction] = self.run(self.inputs, sums)
            results.append(arrays)
        return results


def device_ceilings(with_cudnn: bool) -> dict:
    """What the device can do at most, measured.

    Args:
      with_cudnn: on a GPU, also run cuDNN's backward pass several times.

    Returns:
      `ceilings`: `copy_bytes_per_second` (read and written) and `matmul_flops_per_second` (bf16);
      `platform_version`; `hopper`; `cudnn_backward_by_deterministic_flag`, whether reruns of
      cuDNN's backward pass have equal bits, by XLA's deterministic flag.
    """
    on_gpu, device = jax.default_backend() == 'gpu', jax.devices()[0]
    size, side = (2**30, 8192) if on_gpu else (2**22, 256)
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
        facts['cudnn_backward_by_deterministic_flag'] = _cudnn_reruns(Case(2048))
    return facts


def _cudnn_reruns(case):
    form, inputs, found = Form('cudnn', PLAIN, 'fresh'), attention_cases.make_inputs(case), {}
    for flag in (False, True):
        try:
            options = {'xla_gpu_deterministic_ops': flag}
            run = lower(form, inputs, case).compile(compiler_options=options)
        except Exception as error:  # as in `try_run`
            found[str(flag)] = describe_error(error)
            continue
        runs = [jax.device_get(run(inputs, None)[0]) for _ in range(5)]
        differing = sum(
            any((a != b).any() for a, b in zip(runs[0], other, strict=True)) for other in runs[1:]
        )
        found[str(flag)] = f'{differing} of 4 reruns differ'
    return found


def _compile(wanted, inputs, case):
    """Compiled forms, and why others failed. Lowered in turn, compiled at the same time."""
    programs, failed, lowered = {}, {}, {}
    for form in wanted:
        score_bytes = attention_cases.score_bytes(case, form.implementation)
        try:
            if score_bytes > SCORE_BYTES:
                raise ValueError(f'its scores take {score_bytes / 1e9:.0f} GB')
            lowered[form] = lower(form, inputs, case)
        except Exception as error:  # as in `try_run`
            failed[form] = describe_error(error)
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        futures = {form: pool.submit(program.compile) for form, program in lowered.items()}
        for form, future in futures.items():
            if error := future.exception():
                failed[form] = describe_error(error)
            else:
                programs[form] = future.result()
    return programs, failed


def _check(programs, inputs, case):
    """(forms that are right, why others are not)."""
    chosen_C = attention_check.checked_queries(case.length)
    masked = attention_check.mask_cotangent(inputs, chosen_C)
    expected, right, failed = {}, {}, {}
    for form, run in programs.items():
        one_text = form.implementation in RIVALS  # which know no documents
        key = form.over, one_text and case.documents > 0
        if key not in expected:
            seen = inputs._replace(options={}) if one_text else inputs
            expected[key] = try_run(attention_check.compute_expected, seen, chosen_C, form.over)
        values, why = expected[key]
        if values is None:
            failed[form] = f'not checked, so not timed: the equation is {why}'
            continue
        results, why = try_run(attention_check.run_checked, form, case, run, masked)
        why = why or attention_check.find_wrong(results, values, chosen_C)
        if why:
            failed[form] = why
        else:
            right[form] = run
        results = None
    return right, failed


def _time(programs, inputs, case, seconds):
    """(seconds of each form by round, why others failed, rounds that take `seconds` together)."""
    calls, sums, failed = {}, {}, {}
    for form, run in programs.items():
        timed = _Timed(form, case, run, inputs, sums)
        if why := try_run(timed)[1]:
            failed[form] = why
        else:
            calls[form] = timed
    for form, values in time_interleaved(calls, 1, warmup=1).items():
        calls[form].calls = int(np.clip(np.ceil(SAMPLE_SECONDS / values[0]), 1, MOST_CALLS))
    round_seconds = sum(float(v[0]) for v in time_interleaved(calls, 1, warmup=0).values())
    repeats = int(np.clip(seconds / max(round_seconds, 1e-9), *REPEATS))
    measured = time_interleaved(calls, repeats, warmup=0)
    return {form: values / calls[form].calls for form, values in measured.items()}, failed, repeats


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
        forward = Form(form.implementation, ALONE, 'forward')
        if forward not in seconds:
            return {}
        values = values - seconds[forward]
        dtype = jnp.dtype(SUMS.get(form.direction) or case.dtype)
        way = form.direction.split()[0]
        amount = attention_cases.depth_bytes(case, way, dtype.itemsize)
    median = float(np.median(values))
    return {'bytes_per_second': amount / median} if median > 0 else {}


def bench_case(case: Case, names, seconds: float, brief: bool = False) -> dict:
    """Checks and times every form of some implementations at one shape.

    Args:
      case: the shape.
      names: of attention_forms.RIVALS and of kernels_pallas's implementations.
      seconds: of timing, about.
      brief: as in attention_forms.forms.

    Returns:
      dict with the shape, `baseline` (the first of BASELINES that is right), `repeats`,
      `compile_and_check_seconds` and `rows`: of each Form its fields and either `failed`, one line,
      or the median `seconds` of a call; `temp_bytes`; `flops_per_second`, of the visible pairs;
      `over_plain`, the median over rounds of its time over the baseline's without slots and
      documents. Of the slots alone `bytes_per_second` instead: of the forward pass, or of the
      backward pass if the form has one (both passes minus the forward pass). Or `skipped`, a line.

    Raises:
      DeviceLostError: nothing more can run in this process.
    """
    inputs, why = try_run(attention_cases.make_inputs, case)
    if why:
        return {**case._asdict(), 'skipped': why}
    begin, right, failed = time.perf_counter(), {}, {}
    for name in names:
        programs, not_compiled = _compile(forms([name], case, brief), inputs, case)
        checked, wrong = _check(programs, inputs, case)
        right, failed = right | checked, failed | not_compiled | wrong
    compiled = time.perf_counter() - begin
    measured, repeats = {}, 0
    if right:
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


def bench_attention(cases, names, budget: float):
    """Yields what the device can do, then the result of `bench_case` for each case.

    Args:
      cases: in order of importance.
      names: implementations, rivals among them.
      budget: seconds after which no further case is begun.
    """
    # Not above: launch.gpu times kernels where packages of the training loop are missing.
    from moddepth_jax.training.summary import versions

    begin, share = time.perf_counter(), 0.3 * budget / max(1, len(cases))
    facts = device_ceilings(with_cudnn='cudnn' in names)
    yield {'versions': versions(), **facts, 'budget_seconds': budget}
    for case in cases:
        if time.perf_counter() - begin > budget:
            yield {**case._asdict(), 'skipped': f'the budget of {budget:g} s is spent'}
        else:
            yield bench_case(case, names, share)
