"""Cases of launch.gpu on models: a training step, decoding, experts, and runs of commands."""

import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

from moddepth_jax.benchmarks import models

STEPS = 10  # that are timed
TOY_SIZE = '2x64'


def train_step(model: str, size: str, length: int, rows: int, toy: bool = False) -> dict:
    """Times the training step of one model in bfloat16, with the settings of its config.

    Args:
      model: of bench_models.VARIANTS.
      size: as in bench_models.
      length, rows: of a batch.
      toy: at toy size.

    Returns:
      `seconds` of a step, `tokens_per_second`, counted `flops` and `flops_per_second`,
      `parameters`, `temp_bytes`, `peak_bytes` of the process, `compile_seconds`, `chosen`: a line
      for each choice of attention backends, what that was measured from (`measurements`), and the
      settings that decide what runs.
    """
    import jax

    from kernels_pallas.backends import log_lines
    from moddepth_jax.benchmarks.depth import CompiledStep
    from moddepth_jax.benchmarks.measurements import collect
    from moddepth_jax.benchmarks.timing import time_interleaved
    from moddepth_jax.model.flops import train_step_flops
    from moddepth_jax.training.summary import num_parameters

    if toy:
        size, length, rows = TOY_SIZE, 32, 2
    hparams = models.one_model(model, size, length, rows, dtype='bfloat16')
    step = CompiledStep(hparams)
    times = time_interleaved({model: step}, 2 if toy else STEPS, settle=1 if toy else 3)[model]
    seconds, flops = float(np.median(times)), train_step_flops(hparams)
    memory = jax.devices()[0].memory_stats() or {}
    return {
        'model': model,
        'size': size,
        'length': length,
        'rows': rows,
        'attention': hparams.model.attention,
        'across_documents': hparams.model.across_documents,
        'remat': hparams.model.remat,
        'step_seconds': seconds,
        'step_range': [float(times.min()), float(times.max())],
        'tokens_per_second': length * rows / seconds,
        'flops': flops,
        'flops_per_second': flops / seconds,
        'parameters': num_parameters(step.state.params),
        'temp_bytes': step.temp_bytes,
        'peak_bytes': memory.get('peak_bytes_in_use'),
        'compile_seconds': step.trace_seconds + step.compile_seconds,
        'loss': float(step()),
        'chosen': log_lines(),
        'measurements': {} if toy else collect(),
    }


def decoding(model: str, batches: list[int], kv_heads: int, toy: bool = False) -> dict:
    """Times decoding steps at a nearly full cache: a model in turn with the dense one of its size.

    Args:
      model: mod (an eighth of the tokens by random routing, which needs no training) or moda.
      batches: rows that decode together.
      kv_heads: key/value heads of 12.
      toy: at toy size.

    Returns:
      The result of bench_decode.
    """
    from moddepth_jax.benchmarks.decoding import bench_decode

    size, context, prompt, repeats = '12x768', 2048, 1024, 31
    if toy:
        size, context, prompt, repeats, kv_heads, batches = TOY_SIZE, 64, 8, 2, 1, [1, 2]
    pair = models.dense_and_compared(model, size, kv_heads, context)
    return {'model': model, **bench_decode(*pair, batches, prompt, repeats)}


def experts(shape: list[int], toy: bool = False) -> dict:
    """Times the routed experts of one layer by each grouped product.

    Args:
      shape: fields of bench_experts.Shape.
      toy: at toy size.

    Returns:
      The result of bench_experts.
    """
    from moddepth_jax.benchmarks import experts as bench_experts

    found = bench_experts.Shape(*([64, 16, 8, 4, 2] if toy else shape))
    return bench_experts.bench_experts([found], 1 if toy else 5, 'bfloat16')


def _command(arguments):
    """Runs python -m ARGUMENTS to its end; raises ValueError with its last line where it failed."""
    done = subprocess.run(
        [sys.executable, '-m', *arguments], stdout=sys.stderr, stderr=subprocess.PIPE, text=True
    )
    print(done.stderr, file=sys.stderr, flush=True)
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        raise ValueError(': '.join([f'exit status {done.returncode}', *last]))


def training_run(steps: int, toy: bool = False) -> dict:
    """Trains MoD with MoDA in bfloat16 and keeps what its summary says.

    Args:
      steps: of 32 rows of 1,024 tokens.
      toy: 4 steps at toy size.

    Returns:
      Medians of the run's speeds, and numbers of its summary.
    """
    config = 'configs/mod_moda.py:size=12x768'
    knobs = {'model.dtype': 'bfloat16', 'data.sequence_length': 1024, 'data.batch_size': 32}
    knobs |= {'optimizer.learning_rate': 1e-3, 'training.num_steps': 4 if toy else steps}
    if toy:
        config = f'configs/mod_moda.py:size={TOY_SIZE}'
        knobs |= {'data.source': 'synthetic', 'data.sequence_length': 32, 'data.batch_size': 2}
        knobs |= {'report.sample_tokens': 8, 'evaluation.final_batches': 1, 'report.prompt': ''}
        knobs |= {'training.log_every': 1}
    with tempfile.TemporaryDirectory() as workdir:
        arguments = ['launch.train', f'--config={config}', f'--workdir={workdir}']
        _command([*arguments, *(f'--config.{knob}={value}' for knob, value in knobs.items())])
        return _kept(pathlib.Path(workdir))


def _kept(workdir):
    """Numbers of a training run's files."""
    summary = json.loads((workdir / 'summary.json').read_text())
    rows = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
    names = ('final_step', 'parameters', 'train_loss', 'seconds', 'flops_per_step', 'eval')
    kept = {name: summary[name] for name in names}
    kept['run_seconds'] = kept.pop('seconds')
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
    arguments = ['launch.isoflop', '--config=configs/mod_isoflop_gpu.py', '--seeds=0']
    arguments.append(f'--variants={",".join(variants[:1] if toy else variants)}')
    arguments += ['--budgets=4e8' if toy else '--budgets=1e15']
    arguments.append('--sizes=2x64' if toy else '--sizes=8x256')
    if toy:
        knobs = {'data.source': 'synthetic', 'data.sequence_length': 32, 'data.batch_size': 2}
        knobs |= {'evaluation.final_batches': 1, 'training.log_every': 1}
        arguments += [f'--config.{knob}={value}' for knob, value in knobs.items()]
    with tempfile.TemporaryDirectory() as workdir:
        _command([*arguments, f'--workdir={workdir}'])
        study = json.loads((pathlib.Path(workdir) / 'study.json').read_text())
    names = ('variant', 'size', 'seed', 'steps', 'total_flops', 'bits_per_byte')
    return {'rows': [{name: run[name] for name in names} for run in study['runs']]}
