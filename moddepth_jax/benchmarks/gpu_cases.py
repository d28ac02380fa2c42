"""What launch.gpu runs: a list of cases in order of value, for short visits to a GPU.

The second half of this file are the functions of the cases that are not kernel checks.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

from moddepth_jax.benchmarks.kernel_cases import CASES, PACKED_CASES, TOY_CASES
from moddepth_jax.benchmarks.runner import Case
from moddepth_jax.benchmarks.worker import SkippedError, WrongError

_HERE = 'moddepth_jax.benchmarks.gpu_cases'
_CHECKS = 'moddepth_jax.benchmarks.kernel_checks'
FUSED, CUDNN = 'mosaic_gpu_fused', 'cudnn'
_PLAIN = tuple(name for name in CASES if not name.startswith('fused_'))
_PACKED = tuple(name for name in PACKED_CASES if not name.startswith('fused_'))
# What an implementation is checked with; the fused kernel and cuDNN support only some cases.
_CHECKED = {
    FUSED: ('group_of_8', 'fused_rows', 'fused_window', 'fused_own_query', 'group_of_16')
    + ('masked', 'fused_one_slot', 'fused_octets_of_7'),
    CUDNN: ('group_of_8', 'group_of_2', 'masked', 'window', 'own_query', 'rows', 'group_of_1'),
    'pallas': ('group_of_8', 'group_of_2', 'masked', 'depth_alone', 'rows', 'own_query')
    + ('group_of_3',),
    'xla': ('group_of_8', 'group_of_2', 'masked', 'rows', 'own_query', 'float32'),
}
_FUSED_PACKED = ('edges', 'fused_three', 'fused_rows', 'fused_window')
# Lengths and shapes of docs/gpu.md. H=64, G=8, L=64 where nothing else is said.
_LENGTHS = {'4k': 4096, '16k': 16384, '64k': 65536}
_SHAPES = {
    **{f'slots_{slots}_': {'slots': slots} for slots in (16, 24, 48)},
    'written_33_of_64_': {'written': 33},
    'group_of_2_': {'kv_heads': 32},
    'width_128_': {'width': 128},
    'group_of_2_width_128_': {'heads': 8, 'kv_heads': 4, 'width': 128, 'slots': 72, 'batch': 4},
}
_NO_SLOTS, _PACKED_ROWS = {'slots': 0}, {'documents': 16}
# At T = 16k too, before training steps.
_LONGER = ('written_33_of_64_', 'width_128_', 'group_of_2_width_128_')
_TOY_TIMES = ('xla/packed_no_slots_4k', 'pallas/slots_24_4k', 'flash_attention_2/4k')
# Length and rows of a batch that fit one large GPU.
_BATCHES = {'124m': (2048, 16), '700m': (4096, 4)}
# Expected seconds of a training step's case: compilation, and what `auto` measures before it.
_STEPS = {'dense': 60.0, 'moda': 85.0, 'mod': 60.0, 'both': 110.0}
STEPS, TOY_SIZE = 10, '2x64'


def cases(toy: bool = False) -> list[Case]:
    """All cases, the most valuable first.

    Args:
      toy: those of a rehearsal on a CPU: some of each kind, cut down.
    """
    first = Case('machine/ceilings', 'machine', 20.0, 120.0, f'{_HERE}:ceilings')
    found = [first, *_correctness(toy), *_times(toy), *_models(toy), *_more_times(toy)]
    if not toy:  # odd shapes, which nothing above waits for
        rest = [name for name in _PLAIN if name not in _CHECKED['pallas']]
        found += _checks('pallas', rest, (), 4.0, toy)
    found += _runs(toy)
    if toy:  # a busy CPU, and nobody waits for the clock
        found = [case._replace(expected=min(case.expected, 15.0), limit=300.0) for case in found]
    return found


def _case(name, group, expected, limit, function, needs=(), **arguments):
    run = function if ':' in function else f'{_HERE}:{function}'
    return Case(name, group, expected, limit, run, arguments, needs)


def _checks(implementation, names, packed, expected, toy, sums=False):
    """Correctness of an implementation: its own cases, packed ones, sums of gradients."""
    chosen = [('right', name, name) for name in names]
    chosen += [('packed', name, f'packed/{name}') for name in packed]
    found = [
        _case(
            f'{kind}/{implementation}/{name}',
            implementation,
            expected,
            75.0,
            f'{_CHECKS}:check',
            implementation=implementation,
            case=case,
            toy=toy,
        )
        for kind, name, case in chosen
        if not toy or name in TOY_CASES
    ]
    for dtype in ('bfloat16', 'float32') if sums else ():
        name, run = f'right/{implementation}/sums_{dtype}', f'{_CHECKS}:check_sums'
        arguments = {'implementation': implementation, 'dtype': dtype, 'toy': toy}
        found.append(_case(name, implementation, 5.0, 75.0, run, **arguments))
    return found


def _correctness(toy):
    if toy:  # interpreted, it takes half a minute a case
        found = _checks('mosaic_gpu', ['depth_alone'], (), 30.0, toy)
    else:
        found = _checks('mosaic_gpu', _PLAIN, _PACKED, 5.0, toy, sums=True)
    for name in ('pallas', 'xla'):
        found += _checks(name, (), _PACKED, 4.0, toy)
    packed = [name for name in _PACKED if name != 'window']
    found += _checks(CUDNN, _CHECKED[CUDNN], packed, 4.0, toy)
    if not toy:
        found += _checks(FUSED, _CHECKED[FUSED], _FUSED_PACKED, 5.0, toy, sums=True)
    for batch, length, slots in ((8, 4096, 72), (64, 2048, 0), (1, 16384, 24)):
        name = f'right/decode/{batch}_rows_of_{length}_slots_{slots}'
        arguments = {'batch': batch, 'length': length, 'slots': slots, 'toy': toy}
        found.append(_case(name, 'decode', 5.0, 75.0, f'{_CHECKS}:check_decode', **arguments))
    found += _checks('pallas', _CHECKED['pallas'], (), 4.0, toy, sums=True)
    return found + _checks('xla', _CHECKED['xla'], (), 3.0, toy)


def _at_lengths(implementation, prefix, sizes, lengths, expected, toy, brief=True):
    """Times of one shape at each length; of a rehearsal one for each kind."""
    needs = (f'right/{implementation}/',)
    needs += (f'packed/{implementation}/',) if 'documents' in sizes else ()
    return [
        _case(
            f'time/{implementation}/{prefix}{length}',
            f'time/{implementation}',
            expected + _LENGTHS[length] / 16384,
            120.0,
            'time_attention',
            needs,
            implementation=implementation,
            sizes=sizes | {'length': _LENGTHS[length]},
            brief=brief,
            toy=toy,
        )
        for length in lengths
        if not toy or f'{implementation}/{prefix}{length}' in _TOY_TIMES
    ]


def _times(toy):
    """Of the shapes of the targets first; then packed ones; then one thing at a time."""
    found = []
    for name in ('mosaic_gpu', FUSED):
        found += _at_lengths(name, '', {}, _LENGTHS, 15.0, toy, brief=False)
    found += _at_lengths('flash_attention_2', '', _NO_SLOTS, _LENGTHS, 6.0, toy)
    packed = _PACKED_ROWS | {'slots': 64}
    for name, prefix, sizes in (
        ('mosaic_gpu', 'packed_', packed),
        ('mosaic_gpu', 'packed_no_slots_', _PACKED_ROWS | _NO_SLOTS),
        (FUSED, 'packed_', packed),
    ):
        found += _at_lengths(name, prefix, sizes, _LENGTHS, 9.0, toy)
    for shape, sizes in _SHAPES.items():
        lengths = ('4k', '16k') if shape in _LONGER else ('4k',)
        found += _at_lengths('mosaic_gpu', shape, sizes, lengths, 8.0, toy)
    return found


def _more_times(toy):
    """What can wait until training steps have been timed."""
    found = _at_lengths('pallas', '', {}, _LENGTHS, 15.0, toy, brief=False)
    found += _at_lengths('pallas_triton', '', _NO_SLOTS, _LENGTHS, 6.0, toy)
    packed = _PACKED_ROWS | _NO_SLOTS
    found += _at_lengths('xla', 'packed_no_slots_', packed, _LENGTHS, 9.0, toy)
    for name, length, shapes in (
        ('mosaic_gpu', '16k', [shape for shape in _SHAPES if shape not in _LONGER]),
        (FUSED, '4k', ('slots_24_', 'written_33_of_64_', 'width_128_')),
        ('pallas', '4k', ('slots_24_', 'group_of_2_width_128_')),
    ):
        for shape in shapes:
            found += _at_lengths(name, shape, _SHAPES[shape], (length,), 8.0, toy)
    return found


def _step(model, size, toy, expected=90.0):
    length, rows = _BATCHES[size]
    name, sizes = f'step/{size}/{model}', {'size': size, 'length': length, 'rows': rows}
    return _case(name, name, expected, 420.0, 'train_step', model=model, **sizes, toy=toy)


def _models(toy):
    """Training steps, each in a process of its own: the peak of memory is the process's."""
    found = []
    for size in ('124m',) if toy else ('124m', '700m'):
        found += [_step(model, size, toy, expected) for model, expected in _STEPS.items()]
    for model in ('mod', 'moda'):
        arguments = {'model': model, 'batches': [1, 8, 64], 'kv_heads': 4, 'toy': toy}
        name = f'decode/124m/{model}'
        found.append(_case(name, name, 70.0, 200.0, 'decoding', **arguments))
    measured = [('pallas', 64), ('xla', 64), ('xla', 0)]
    for implementation, slots in measured if toy else [('mosaic_gpu', 64), *measured]:
        name = f'memory/packed/{implementation}' + ('' if slots else '_no_slots')
        lengths = list(_LENGTHS.values())
        arguments = {'implementation': implementation, 'lengths': lengths, 'slots': slots}
        found.append(_case(name, 'memory', 15.0, 120.0, 'attention_memory', **arguments, toy=toy))
    for shape in ([16384, 768, 512, 8, 2], [4096, 2048, 704, 64, 6]):
        name = 'experts/' + 'x'.join(map(str, shape))
        found.append(_case(name, 'experts', 40.0, 150.0, 'experts', shape=shape, toy=toy))
    rest = ('moe',) if toy else ('moe', 'staged', 'integrated')
    return found + [_step(model, '124m', toy) for model in rest]


def _runs(toy):
    """Commands, which use the device themselves."""
    study = {'variants': ['dense', 'mod', 'random'], 'toy': toy}
    train = {'steps': 800, 'toy': toy}
    return [
        Case('run/train', 'run/train', 150.0, 420.0, f'{_HERE}:training_run', train, (), False),
        Case('run/study', 'run/study', 240.0, 500.0, f'{_HERE}:small_study', study, (), False),
    ]


def ceilings() -> dict:
    """What the device can do at most, measured: see attention.device_ceilings."""
    from moddepth_jax.benchmarks.attention import device_ceilings

    return device_ceilings(with_cudnn=True)


def _toy_sizes(case):
    written = None if case.written is None else 2
    slots, documents = min(case.slots, 3), min(case.documents, 3)
    sizes = {'length': 24, 'heads': 4, 'kv_heads': 2, 'width': 8, 'batch': 1}
    return case._replace(**sizes, slots=slots, written=written, documents=documents)


def time_attention(implementation: str, sizes: dict, brief: bool, toy: bool = False) -> dict:
    """Checks and times one implementation at one shape, in turn with plain cuDNN.

    Args:
      implementation: of attention_forms.RIVALS or of kernels_pallas.
      sizes: fields of attention_cases.Case.
      brief: as in attention_forms.forms.
      toy: at toy size; the baseline is XLA.

    Returns:
      The result of attention.bench_case.

    Raises:
      WrongError: some result is wrong.
      SkippedError: the device cannot do it.
      ValueError: nothing could be timed.
    """
    from moddepth_jax.benchmarks import attention, attention_cases, attention_forms

    case = attention_cases.Case(**sizes)
    names = dict.fromkeys(['xla' if toy else CUDNN, implementation])
    result = attention.bench_case(_toy_sizes(case) if toy else case, list(names), 1.5, brief)
    if 'skipped' in result:
        raise ValueError(result['skipped'])
    rows = [row for row in result['rows'] if row['implementation'] == implementation]
    failed = [row['failed'] for row in rows if 'failed' in row]
    if wrong := [why for why in failed if why.startswith('wrong')]:
        raise WrongError(wrong[0])
    if len(failed) == len(rows):
        if toy and implementation in attention_forms.RIVALS or 'cannot:' in failed[0]:
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
    import jax

    from moddepth_jax.benchmarks import attention_cases, attention_forms

    found = {}
    for length in lengths:
        case = attention_cases.Case(length, slots=slots, documents=16)
        case = _toy_sizes(case)._replace(length=length // 256) if toy else case
        inputs = jax.eval_shape(lambda case=case: attention_cases.make_inputs(case))
        over = attention_forms.BOTH if slots else attention_forms.PLAIN
        form = attention_forms.Form(implementation, over, 'fresh')
        compiled = attention_forms.lower(form, inputs, case).compile()
        found[str(case.length)] = compiled.memory_analysis().temp_size_in_bytes
    return {'temp_bytes': found, 'slots': slots}


def train_step(model: str, size: str, length: int, rows: int, toy: bool = False) -> dict:
    """Times the training step of one model in bfloat16, with the settings of its config.

    Args:
      model: of models.TITLES.
      size: as in models.make_model.
      length, rows: of a batch.
      toy: at toy size.

    Returns:
      What steps.step_row returns; `step_range`, `loss`, `peak_bytes` of the process, the settings
      that decide what runs, `attention_backends` (a line for each choice) and the `measurements`
      behind them.
    """
    import jax

    from kernels_pallas.backends import log_lines
    from moddepth_jax.benchmarks.models import make_model
    from moddepth_jax.benchmarks.results import collect_measurements
    from moddepth_jax.benchmarks.steps import CompiledStep, step_row
    from moddepth_jax.benchmarks.timing import time_interleaved

    if toy:
        size, length, rows = TOY_SIZE, 32, 2
    hparams = make_model(model, size, length, rows, dtype='bfloat16')
    step = CompiledStep(hparams)
    times = time_interleaved({model: step}, 2 if toy else STEPS, warmup=1 if toy else 3)[model]
    memory = jax.devices()[0].memory_stats() or {}
    return {
        'model': model,
        'size': size,
        'length': length,
        'rows': rows,
        'attention': hparams.model.attention,
        'across_documents': hparams.model.across_documents,
        'remat': hparams.model.remat,
        **step_row(hparams, step, times),
        'step_range': [float(times.min()), float(times.max())],
        'peak_bytes': memory.get('peak_bytes_in_use'),
        'loss': float(step()),
        'attention_backends': log_lines(),
        'measurements': {} if toy else collect_measurements(),
    }


def decoding(model: str, batches: list[int], kv_heads: int, toy: bool = False) -> dict:
    """Times decoding steps at a nearly full cache: a model in turn with the dense one of its size.

    Args:
      model: mod (an eighth of the tokens by random routing, which needs no training) or moda.
      batches: rows that decode together.
      kv_heads: key/value heads of 12.
      toy: at toy size.

    Returns:
      The result of bench_decoding.
    """
    from moddepth_jax.benchmarks.decoding import bench_decoding
    from moddepth_jax.benchmarks.models import make_model

    size, context, prompt, repeats = '12x768', 2048, 1024, 31
    if toy:
        size, context, prompt, repeats, kv_heads, batches = TOY_SIZE, 64, 8, 2, 1, [1, 2]
    knobs = {'router': 'random', 'num_kv_heads': kv_heads, 'dtype': 'bfloat16'}
    dense, other = (make_model(name, size, context, 1, **knobs) for name in ('dense', model))
    return {'model': model, **bench_decoding(dense, other, batches, prompt, repeats)}


def experts(shape: list[int], toy: bool = False) -> dict:
    """Times the routed experts of one layer by each grouped matmul: see bench_experts.

    Args:
      shape: fields of experts.Shape.
      toy: at toy size.
    """
    from moddepth_jax.benchmarks.experts import Shape, bench_experts

    sizes = Shape(*([64, 16, 8, 4, 2] if toy else shape))
    return bench_experts([sizes], 1 if toy else 5, 'bfloat16')


def _run_command(name, config, workdir, flags, knobs):
    """Runs a command to its end; raises ValueError with its last line if it failed."""
    words = [sys.executable, '-m', f'launch.{name}', f'--config={config}', f'--workdir={workdir}']
    words += [*flags, *(f'--config.{knob}={value}' for knob, value in knobs.items())]
    done = subprocess.run(words, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    print(done.stderr, file=sys.stderr, flush=True)
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        raise ValueError(': '.join([f'exit status {done.returncode}', *last]))


_TOY_KNOBS = {'data.source': 'synthetic', 'data.sequence_length': 32, 'data.batch_size': 2}
_TOY_KNOBS |= {'evaluation.final_batches': 1, 'training.log_every': 1}


def training_run(steps: int, toy: bool = False) -> dict:
    """Trains MoD with MoDA in bfloat16 and keeps numbers of its summary and its median speeds.

    Args:
      steps: of 32 rows of 1,024 tokens.
      toy: 4 steps at toy size.
    """
    knobs = {'model.dtype': 'bfloat16', 'data.sequence_length': 1024, 'data.batch_size': 32}
    knobs |= {'optimizer.learning_rate': 1e-3, 'training.num_steps': 4 if toy else steps}
    if toy:
        knobs |= _TOY_KNOBS | {'report.sample_tokens': 8, 'report.prompt': ''}
    with tempfile.TemporaryDirectory() as folder:
        config = f'configs/mod_moda.py:size={TOY_SIZE if toy else "12x768"}'
        _run_command('train', config, folder, [], knobs)
        summary = json.loads(pathlib.Path(folder, 'summary.json').read_text())
        metrics = pathlib.Path(folder, 'metrics.jsonl').read_text()
    rows = [json.loads(line) for line in metrics.splitlines()]
    names = ('final_step', 'parameters', 'train_loss', 'flops_per_step', 'eval')
    kept = {name: summary[name] for name in names} | {'run_seconds': summary['seconds']}
    for name in ('tokens_per_second', 'flops_per_second'):
        values = [row[name] for row in rows if row.get(name) is not None]
        kept[name] = float(np.median(values)) if values else None
    return kept


def small_study(variants: list[str], toy: bool = False) -> dict:
    """The first comparison of the GPU study: one size, one budget, one seed.

    Args:
      variants: of launch.isoflop.
      toy: 2 steps at toy size.

    Returns:
      `rows`: of each run its variant, size, steps and bits a byte held out.
    """
    flags = ['--seeds=0', f'--variants={",".join(variants[:1] if toy else variants)}']
    flags += ['--budgets=4e8', '--sizes=2x64'] if toy else ['--budgets=1e15', '--sizes=8x256']
    with tempfile.TemporaryDirectory() as folder:
        config = 'configs/mod_isoflop_gpu.py'
        _run_command('isoflop', config, folder, flags, _TOY_KNOBS if toy else {})
        study = json.loads(pathlib.Path(folder, 'study.json').read_text())
    names = ('variant', 'size', 'seed', 'steps', 'total_flops', 'bits_per_byte')
    return {'rows': [{name: run[name] for name in names} for run in study['runs']]}
