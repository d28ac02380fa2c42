"""The cases of launch.gpu that run models: training steps, decoding, experts and a command.

`toy` reduces each of them to a size for CPUs.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import jax
import numpy as np

from kernels_pallas.backends import log_lines
from moddepth_jax.benchmarks.decoding import bench_decoding
from moddepth_jax.benchmarks.experts import Shape, bench_experts
from moddepth_jax.benchmarks.models import make_model
from moddepth_jax.benchmarks.steps import CompiledStep, step_row
from moddepth_jax.benchmarks.timing import time_interleaved

STEPS, TOY_SIZE = 10, '2x64'


def train_step(model: str, size: str, length: int, rows: int, toy: bool = False) -> dict:
    """Time the training step of one model in bfloat16 with the settings of its config.

    Returns the fields of steps.step_row, the relevant settings, `peak_bytes` of the process, and
    `attention_backends`, a line for each choice of a backend.
    """
    if toy:
        size, length, rows = TOY_SIZE, 32, 2
    hparams = make_model(model, size, length, rows, dtype='bfloat16')
    step = CompiledStep(hparams)
    times = time_interleaved({model: step}, 2 if toy else STEPS, warmup=1 if toy else 3)[model]
    memory = jax.devices()[0].memory_stats() or {}
    settings = ('attention', 'across_documents', 'remat')
    return {
        **{'model': model, 'size': size, 'length': length, 'rows': rows},
        **{name: getattr(hparams.model, name) for name in settings},
        **step_row(hparams, step, times),
        'step_range': [float(times.min()), float(times.max())],
        'peak_bytes': memory.get('peak_bytes_in_use'),
        'loss': float(step()),
        'attention_backends': log_lines(),
    }


def decoding(model: str, batches: list[int], kv_heads: int, toy: bool = False) -> dict:
    """Run `bench_decoding` for the dense model of size 124m and another model.

    `model` is mod (random routing of an eighth of the tokens, which needs no training) or moda.
    """
    size, context, prompt, repeats = '12x768', 2048, 1024, 31
    if toy:
        size, context, prompt, repeats, kv_heads, batches = TOY_SIZE, 64, 8, 2, 1, [1, 2]
    knobs = {'router': 'random', 'num_kv_heads': kv_heads, 'dtype': 'bfloat16'}
    dense, other = (make_model(name, size, context, 1, **knobs) for name in ('dense', model))
    return {'model': model, **bench_decoding(dense, other, batches, prompt, repeats)}


def experts(shape: list[int], toy: bool = False) -> dict:
    """Run `bench_experts` for one layer; `shape` has the fields of experts.Shape."""
    sizes = Shape(*([64, 16, 8, 4, 2] if toy else shape))
    return bench_experts([sizes], 1 if toy else 5, 'bfloat16')


def training_run(steps: int, toy: bool = False) -> dict:
    """Train MoD with MoDA in bfloat16. Returns numbers of its summary and its median speeds.

    Raises ValueError with the last line of launch.train if it fails.
    """
    knobs = {'model.dtype': 'bfloat16', 'data.sequence_length': 1024, 'data.batch_size': 32}
    knobs |= {'optimizer.learning_rate': 1e-3, 'training.num_steps': 4 if toy else steps}
    if toy:
        knobs |= {'data.source': 'synthetic', 'data.sequence_length': 32, 'data.batch_size': 2}
        knobs |= {'report.sample_tokens': 8, 'report.prompt': '', 'evaluation.final_batches': 1}
        knobs['training.log_every'] = 1
    config = f'configs/mod_moda.py:size={TOY_SIZE if toy else "12x768"}'
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, '-m', 'launch.train', f'--config={config}', f'--workdir={folder}']
        words += [f'--config.{knob}={value}' for knob, value in knobs.items()]
        done = subprocess.run(words, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
        print(done.stderr, file=sys.stderr, flush=True)
        if done.returncode:
            last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
            raise ValueError(': '.join([f'exit status {done.returncode}', *last]))
        summary = json.loads(pathlib.Path(folder, 'summary.json').read_text())
        metrics = pathlib.Path(folder, 'metrics.jsonl').read_text()
    rows = [json.loads(line) for line in metrics.splitlines()]
    names = ('final_step', 'parameters', 'train_loss', 'flops_per_step', 'eval')
    kept = {name: summary[name] for name in names} | {'run_seconds': summary['seconds']}
    for name in ('tokens_per_second', 'flops_per_second'):
        values = [row[name] for row in rows if row.get(name) is not None]
        kept[name] = float(np.median(values)) if values else None
    return kept
