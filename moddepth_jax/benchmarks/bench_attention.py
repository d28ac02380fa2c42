"""How long attention takes, with depth slots and without: ours beside the fastest there is.

Each implementation is compared with the equation first, and timed where it is right.
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
from moddepth_jax.benchmarks.timing import reason, time_interleaved, try_run

BASELINES = ('cudnn', 'pallas_triton', 'xla')  # without slots: what the others are divided by
SCORE_BYTES = 5e9  # forms that hold more scores than this are left out
SPAN = 5e-3  # seconds that are timed at once: shorter calls are repeated
MOST_CALLS = 20
REPEATS = (3, 25)  # least and most rounds


class Timed:
    """Calls of one compiled form. Results are let go; sums are lent by `held`, and grow."""

    def __init__(self, form: Form, case: Case, run, inputs, held: dict):
        self.form, self.case, self.run, self.inputs, self.held = form, case, run, inputs, held
        self.calls = 1

    def __call__(self):
        results = []
        for _ in range(self.calls):
            # A call that failed has taken its sums with it.
            sums = self.held.pop(self.form.direction, None)
            sums = make_sums(self.form, self.case) if sums is None else sums
            arrays, self.held[self.form.direction] = self.run(self.inputs, sums)
            results.append(arrays)
        return results


def ceilings() -> dict[str, float]:
    """Measured: `copy_bytes_per_second` (read and written), `matmul_flops_per_second` (bf16)."""
    on_cpu = jax.default_backend() == 'cpu'
    size, side = (2**22, 256) if on_cpu else (2**30, 8192)
    x = jax.random.normal(jax.random.key(0), (size,), jnp.bfloat16)
    y = jax.random.normal(jax.random.key(1), (side, side), jnp.bfloat16)
    negative, product = jax.jit(jnp.negative), jax.jit(jnp.dot)
    calls = {'copy': lambda: negative(x), 'matmul': lambda: product(y, y)}
    seconds = {name: np.median(values) for name, values in time_interleaved(calls, 11).items()}
    return {
        'copy_bytes_per_second': float(4 * size / seconds['copy']),
        'matmul_flops_per_second': float(2 * side**3 / seconds['matmul']),
    }


def cudnn_reruns(case: Case) -> dict[str, str]:
    """Whether 5 runs of cuDNN's backward pass give equal bits, by XLA's deterministic flag."""
    form, inputs, said = Form('cudnn', PLAIN, 'fresh'), attention_cases.make_inputs(case), {}
    for flag in (False, True):
        try:
            options = {'xla_gpu_deterministic_ops': flag}
            run = lower(form, inputs, case).compile(compiler_options=options)
        except Exception as error:  # as in `attempt`
            said[str(flag)] = reason(error)
            continue
        runs = [jax.device_get(run(inputs, None)[0]) for _ in range(5)]
        differing = sum(
            any((a != b).any() for a, b in zip(runs[0], other, strict=True)) for other in runs[1:]
        )
        said[str(flag)] = f'{differing} of 4 reruns differ'
    return said


def _compile(wanted, inputs, case):
    """Compiled forms, and why others are not. Lowered in turn, compiled at the same time."""
    programs, failed, lowered = {}, {}, {}
    for form in wanted:
        held = attention_cases.score_bytes(case, form.implementation)
        try:
            if held > SCORE_BYTES:
                raise ValueError(f'its scores take {held / 1e9:.0f} GB')
            lowered[form] = lower(form, inputs, case)
        except Exception as error:  # as in `attempt`
            failed[form] = reason(error)
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        coming = {form: pool.submit(program.compile) for form, program in lowered.items()}
        for form, future in coming.items():
            if error := future.exception():
                failed[form] = reason(error)
            else:
                programs[form] = future.result()
    return programs, failed


def _check(programs, failed, inputs, case):
    """The forms that are right; why others are not goes into `failed`."""
    chosen_C = attention_check.checked_queries(case.length)
    sparse, rulers, right = attention_check.only_checked(inputs, chosen_C), {}, {}
    for form, run in programs.items():
        # Rivals know no documents: to them a row is one text.
        apart = form.implementation in RIVALS and case.documents > 0
        if (form.over, apart) not in rulers:
            read = inputs._replace(segment_ids_BT=None) if apart else inputs
            made = try_run(attention_check.make_right, read, chosen_C, form.over)
            rulers[form.over, apart] = made
        ruler, why = rulers[form.over, apart]
        if ruler is not None:
            results, why = try_run(attention_check.results_of, form, case, run, sparse)
        else:
            why = f'not checked, so not timed: the equation is {why}'
        why = why or attention_check.find_wrong(results, ruler, chosen_C)
        if why:
            failed[form] = why
        else:
            right[form] = run
        results = None
    return right


def _time(programs, failed, inputs, case, seconds):
    """Median seconds of each form, by rounds that take `seconds` together."""
    calls, held = {}, {}
    for form, run in programs.items():
        timed = Timed(form, case, run, inputs, held)
        if why := try_run(timed)[1]:
            failed[form] = why
        else:
            calls[form] = timed
    for form, values in time_interleaved(calls, 1, settle=1).items():
        calls[form].calls = int(np.clip(np.ceil(SPAN / values[0]), 1, MOST_CALLS))
    once = sum(float(v[0]) for v in time_interleaved(calls, 1, settle=0).values())
    repeats = int(np.clip(seconds / max(once, 1e-9), *REPEATS))
    measured = time_interleaved(calls, repeats, settle=0)
    return {form: values / calls[form].calls for form, values in measured.items()}, repeats


def _rows(seconds, programs, failed, case, baseline):
    """One dict a form: what was measured and what follows from it."""
    rows = []
    for form, values in seconds.items():
        row = {**form._asdict(), 'seconds': float(np.median(values))}
        row['temp_bytes'] = programs[form].memory_analysis().temp_size_in_bytes
        forward = form.direction == 'forward'
        slots = 0 if form.over == PLAIN else case.seen
        if form.over != ALONE:
            computed = case._replace(documents=0) if form.implementation in RIVALS else case
            row['flops_per_second'] = attention_cases.flops(computed, slots, not forward)
            row['flops_per_second'] /= row['seconds']
            against = Form(baseline, PLAIN, 'forward' if forward else 'fresh')
            if against in seconds:
                row['over_plain'] = float(np.median(values / seconds[against]))
        else:
            row |= _depth_phase(form, values, seconds, case)
        rows.append(row)
    return rows + [{**form._asdict(), 'failed': why} for form, why in failed.items()]


def _depth_phase(form, values, seconds, case):
    """Bytes a second of the slots alone; of the backward pass by what it adds to the forward's."""
    moved, alone = attention_cases.depth_bytes, values
    amount = moved(case, 'forward')
    if form.direction != 'forward':
        before = Form(form.implementation, ALONE, 'forward')
        if before not in seconds:
            return {}
        alone = values - seconds[before]
        dtype = jnp.dtype(SUMS.get(form.direction) or case.dtype)
        amount = moved(case, form.direction.split()[0], dtype.itemsize)
    taken = float(np.median(alone))
    return {'bytes_per_second': amount / taken} if taken > 0 else {}


def bench_case(case: Case, names, seconds: float, brief: bool = False) -> dict:
    """Checks and times every form of some implementations at one shape.

    Args:
      case: the shape.
      names: of attention_forms.RIVALS and of kernels_pallas's implementations.
      seconds: of timing, about.
      brief: as in attention_forms.forms.

    Returns:
      dict with the shape, `baseline` (the first of BASELINES that is right), `repeats`,
      `compile_and_check_seconds`, and `rows`: of each Form its fields and either `failed`, one
      line, or the median `seconds` of a call; `temp_bytes`; `flops_per_second` of counted FLOPs of
      the pairs that a query sees; `over_plain`, the median over rounds of its time over the
      baseline's without slots and documents. Of the slots alone `bytes_per_second` instead: of the
      forward pass, or of the backward pass where the form has one (both passes less the forward
      pass). Or `skipped`, one line.

    Raises:
      DeviceLostError: nothing more can run in this process.
    """
    inputs, why = try_run(attention_cases.make_inputs, case)
    if why:
        return {**case._asdict(), 'skipped': why}
    begin, right, failed = time.perf_counter(), {}, {}
    for name in names:
        programs, refused = _compile(forms([name], case, brief), inputs, case)
        failed |= refused
        right |= _check(programs, failed, inputs, case)
    compiled = time.perf_counter() - begin
    measured, repeats = _time(right, failed, inputs, case, seconds) if right else ({}, 0)
    plain = [name for name in BASELINES if Form(name, PLAIN, 'fresh') in measured]
    baseline = plain[0] if plain else None
    return {
        **case._asdict(),
        'baseline': baseline,
        'repeats': repeats,
        'compile_and_check_seconds': compiled,
        'rows': _rows(measured, right, failed, case, baseline),
    }


def bench_attention(cases, names, budget: float):
    """Yields what the device can do, then the result of `bench_case` for each case.

    Args:
      cases: in order of importance.
      names: implementations, rivals among them.
      budget: seconds after which no further case is begun.
    """
    from moddepth_jax.training.summary import versions

    begin, share = time.perf_counter(), 0.3 * budget / max(1, len(cases))
    yield {'versions': versions(), **device_facts('cudnn' in names), 'budget_seconds': budget}
    for case in cases:
        if time.perf_counter() - begin > budget:
            yield {**case._asdict(), 'skipped': f'the budget of {budget:g} s is spent'}
        else:
            yield bench_case(case, names, share)


def device_facts(with_cudnn: bool) -> dict:
    """`ceilings`, `platform_version`, `hopper`; of cuDNN whether its reruns are equal."""
    on_gpu, device = jax.default_backend() == 'gpu', jax.devices()[0]
    facts = {'ceilings': ceilings(), 'platform_version': device.client.platform_version}
    facts['hopper'] = on_gpu and str(device.compute_capability).startswith('9.')
    if on_gpu and with_cudnn:
        facts['cudnn_backward_by_deterministic_flag'] = cudnn_reruns(Case(2048))
    return facts
