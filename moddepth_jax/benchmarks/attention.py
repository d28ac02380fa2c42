"""Times attention with and without depth slots: our implementations and public baselines.

Each implementation is first compared with the reference and is timed only if it is correct.
"""

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.backends import choose, recorded
from kernels_pallas.cudnn import packed_sizes
from moddepth_jax.benchmarks import attention_cases, attention_check
from moddepth_jax.benchmarks.attention_cases import Case
from moddepth_jax.benchmarks.attention_forms import (
    ALONE,
    PLAIN,
    RIVALS,
    Form,
    chosen,
    forms,
    lower,
    make_sums,
)
from moddepth_jax.benchmarks.timing import time_interleaved, try_run
from moddepth_jax.benchmarks.worker import SkippedError, WrongError

BASELINES = ('cudnn', 'xla')  # times are relative to these without slots
SAMPLE_SECONDS = 5e-3  # shorter calls are repeated
MOST_CALLS = 20  # in one sample
REPEATS = (3, 25)  # minimum and maximum number of rounds


def device_ceilings(toy: bool = False) -> dict:
    """Measure the copy bandwidth and the bf16 matmul rate of the device."""
    size, side = (2**22, 256) if toy else (2**30, 8192)
    x = jax.random.normal(jax.random.key(0), (size,), jnp.bfloat16)
    y = jax.random.normal(jax.random.key(1), (side, side), jnp.bfloat16)
    negative, product = jax.jit(jnp.negative), jax.jit(jnp.dot)
    calls = {'copy': lambda: negative(x), 'matmul': lambda: product(y, y)}
    counts = {'copy': 8, 'matmul': 20}  # starting a sample takes no share of it; 8 copies fit
    samples = time_interleaved(calls, 11, counts=counts)
    seconds = {name: float(np.median(values)) for name, values in samples.items()}
    return {
        'ceilings': {
            'copy_bytes_per_second': 4 * size / seconds['copy'],
            'matmul_flops_per_second': 2 * side**3 / seconds['matmul'],
        }
    }


def _backends(form, case, calls):
    """The label of the backends.Parts that compute our form; `calls`: the Shapes of its trace."""
    found = []
    for shapes in calls:
        parts = choose(chosen(form.implementation), shapes)
        if parts.sequence == 'cudnn' and case.documents > packed_sizes(*shapes.q)[0]:
            parts = parts._replace(sequence='xla')  # as the device decides
        found.append(parts.label(shapes))
    return ', '.join(dict.fromkeys(found))


def _compile_and_check(form, case, inputs, expected):
    """Compile and check a form.

    Returns ((compiled form, label of its backends), None), or (None, reason why it is not timed).
    `expected` caches the values of the reference.
    """
    with recorded() as calls:
        run, why = try_run(lambda: lower(form, inputs).compile())
    if why:
        return None, why
    chosen_C = attention_check.checked_queries(case.length)
    key = form.over, form.implementation in RIVALS  # rivals ignore documents
    if key not in expected:
        seen = inputs._replace(options={}) if key[1] else inputs
        expected[key] = try_run(attention_check.compute_expected, seen, chosen_C, form.over)
    values, why = expected[key]
    if why:
        return None, f'not checked, so not timed; the reference failed: {why}'
    kept_T = jnp.zeros(case.length, bool).at[chosen_C].set(True)
    masked = inputs._replace(do_BTNH=jnp.where(kept_T[:, None, None], inputs.do_BTNH, 0))
    results, why = try_run(run, masked, make_sums(form.direction, masked))
    why = why or attention_check.find_wrong(results, values, chosen_C)
    return (None, why) if why else ((run, _backends(form, case, calls)), None)


def _repeatable(form, run, inputs):
    """A function without arguments that runs a form, each time with the sums of the last call."""
    sums = make_sums(form.direction, inputs)

    def call():
        nonlocal sums
        results = run(inputs, sums)
        if sums is None:
            return results
        sums = results[4:6]
        return results[0]  # the next call overwrites the sums

    return call


def _time(programs, inputs, seconds):
    """(seconds of each form by round, reasons of failed forms, number of rounds in `seconds`)."""
    once, failed = {}, {}
    for form, run in programs.items():
        once[form] = _repeatable(form, run, inputs)
        if why := try_run(once[form])[1]:
            failed[form] = why
            del once[form]
    first = {form: float(values[0]) for form, values in time_interleaved(once, 1, 1).items()}
    counts = {f: int(np.clip(np.ceil(SAMPLE_SECONDS / s), 1, MOST_CALLS)) for f, s in first.items()}
    round_seconds = sum(counts[form] * first[form] for form in once)
    repeats = int(np.clip(seconds / max(round_seconds, 1e-9), *REPEATS))
    return time_interleaved(once, repeats, warmup=0, counts=counts), failed, repeats


def _row(form, seconds, run, backends, case, baseline):
    """The measurements of a form, and rates and ratios that follow from them."""
    values, forward = seconds[form], form.direction == 'forward'
    row = {**form._asdict(), 'seconds': float(np.median(values))}
    row |= {'backends': backends} if backends else {}
    row['temp_bytes'] = run.memory_analysis().temp_size_in_bytes
    if form.over == ALONE:  # the bandwidth of the backward pass excludes the forward pass
        before = 0 if forward else seconds.get(form._replace(direction='forward'), np.inf)
        median = float(np.median(values - before))
        amount = attention_cases.depth_bytes(case, backward=not forward, alone=True)
        return row | ({'bytes_per_second': amount / median} if median > 0 else {})
    slots = 0 if form.over == PLAIN else case.visible
    computed = case._replace(documents=0) if form.implementation in RIVALS else case
    flops = attention_cases.flops(computed, slots, backward=not forward)
    row['flops_per_second'] = flops / row['seconds']
    against = Form(baseline, PLAIN, 'forward' if forward else 'fresh')
    if against in seconds:
        row['over_plain'] = float(np.median(values / seconds[against]))
    return row


def bench_case(case: Case, names, seconds: float, brief: bool = False) -> dict:
    """Check and time every form of some implementations at one shape, for about `seconds`.

    Returns:
      The shape, `baseline` (the first correct one of BASELINES) and `rows`. A row has the fields of
      a Form and either `failed`, one line, or the median `seconds` of a call, `flops_per_second`
      (of visible pairs) and `over_plain`, the median ratio to the baseline without slots and
      documents. For slots alone, it has `bytes_per_second` of the pass instead. Ours also have
      `backends`, such as cudnn+mosaic_gpu.

    Raises:
      DeviceLostError: the device does not respond.
      ValueError: the inputs do not fit the memory.
    """
    inputs, why = try_run(attention_cases.make_inputs, case)
    if why:
        raise ValueError(why)
    right, failed, expected = {}, {}, {}
    for form in (form for name in names for form in forms(name, case, brief)):
        found, why = _compile_and_check(form, case, inputs, expected)
        if why:
            failed[form] = why
        else:
            right[form] = found
    del expected
    programs = {form: run for form, (run, _) in right.items()}
    measured, not_run, repeats = _time(programs, inputs, seconds)
    failed |= not_run
    plain = [name for name in BASELINES if Form(name, PLAIN, 'fresh') in measured]
    baseline = plain[0] if plain else None
    rows = [_row(form, measured, *right[form], case, baseline) for form in measured]
    return {
        **case._asdict(),
        'baseline': baseline,
        'repeats': repeats,
        'rows': rows + [{**form._asdict(), 'failed': why} for form, why in failed.items()],
    }


def time_one(implementation: str, sizes: dict, brief: bool, toy: bool = False) -> dict:
    """Run `bench_case` for one implementation, interleaved with plain cuDNN (for a toy, XLA).

    `sizes` are fields of attention_cases.Case. Raises WrongError for a wrong result, SkippedError
    if the device does not support it, and ValueError if nothing could be timed.
    """
    case, baseline = Case(**sizes), 'cudnn'
    if toy:
        case, baseline = attention_cases.toy(case), 'xla'
    result = bench_case(case, list(dict.fromkeys([baseline, implementation])), 1.5, brief)
    rows = [row for row in result['rows'] if row['implementation'] == implementation]
    failed = [row['failed'] for row in rows if 'failed' in row]
    if wrong := [why for why in failed if why.startswith('wrong')]:
        raise WrongError(wrong[0])
    if len(failed) == len(rows):
        unable = toy and implementation in RIVALS or 'not supported here' in failed[0]
        raise (SkippedError if unable else ValueError)(failed[0])
    return result
