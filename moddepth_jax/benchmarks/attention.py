"""Cases of launch.gpu on attention: the machine's ceilings, times at one shape, memory."""

import jax

from moddepth_jax.benchmarks import attention_cases, bench_attention
from moddepth_jax.benchmarks.attention_cases import Case
from moddepth_jax.benchmarks.attention_forms import BOTH, PLAIN, RIVALS, Form, lower
from moddepth_jax.benchmarks.worker import SkippedError, WrongError

BASELINE = 'cudnn'
TOY = Case(24, heads=4, kv_heads=2, width=8, slots=3)


def ceilings() -> dict:
    """What the device can do at most, measured: see bench_attention.device_facts."""
    return bench_attention.device_facts(with_cudnn=True)


def _toy(case):
    written = None if case.written is None else 2
    slots, documents = min(case.slots, TOY.slots), min(case.documents, 3)
    return TOY._replace(slots=slots, written=written, documents=documents)


def time_attention(implementation: str, sizes: dict, brief: bool, toy: bool = False) -> dict:
    """Checks and times one implementation at one shape, in turn with plain cuDNN.

    Args:
      implementation: of attention_forms.RIVALS or of kernels_pallas.
      sizes: fields of attention_cases.Case.
      brief: as in attention_forms.forms.
      toy: at toy size; the baseline is XLA.

    Returns:
      The result of bench_attention.bench_case.

    Raises:
      WrongError: some result is wrong.
      SkippedError: the device cannot do it.
      ValueError: nothing could be timed.
    """
    case = Case(**sizes)
    names = dict.fromkeys(['xla' if toy else BASELINE, implementation])
    result = bench_attention.bench_case(_toy(case) if toy else case, list(names), 1.5, brief)
    if 'skipped' in result:
        raise ValueError(result['skipped'])
    own = [row for row in result['rows'] if row['implementation'] == implementation]
    failed = [row['failed'] for row in own if 'failed' in row]
    if wrong := [why for why in failed if why.startswith('wrong')]:
        raise WrongError(wrong[0])
    if len(failed) == len(own):
        if toy and implementation in RIVALS or 'cannot:' in failed[0]:
            raise SkippedError(failed[0])
        raise ValueError(failed[0])
    return result


def attention_memory(implementation: str, lengths: list[int], slots: int, toy: bool = False):
    """Temporary memory of one attention over packed documents, both passes, compiled and not run.

    Args:
      implementation: of kernels_pallas.
      lengths: sequence lengths, B=1, N=64, K=8, H=64.
      slots: L; 0: the sequence alone.
      toy: at toy size.

    Returns:
      `temp_bytes` by length.
    """
    found = {}
    for length in lengths:
        case = Case(length, slots=slots, documents=16)
        case = _toy(case)._replace(length=length // 256) if toy else case
        inputs = jax.eval_shape(lambda case=case: attention_cases.make_inputs(case))
        form = Form(implementation, BOTH if slots else PLAIN, 'fresh')
        compiled = lower(form, inputs, case).compile()
        found[str(case.length)] = compiled.memory_analysis().temp_size_in_bytes
    return {'temp_bytes': found, 'slots': slots}
