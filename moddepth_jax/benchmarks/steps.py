"""Times training steps of several models, each interleaved with the first model."""

import dataclasses
import itertools
import time

import jax
import numpy as np

from kernels_pallas.backends import log_lines
from moddepth_jax.benchmarks.models import (
    NAMED_SIZES,
    TITLES,
    Dtype,
    check_variants,
    make_model,
)
from moddepth_jax.benchmarks.timing import time_interleaved, try_run
from moddepth_jax.data.pipeline import make_dataset
from moddepth_jax.hparams import Hparams
from moddepth_jax.model.flops import train_step_flops
from moddepth_jax.training.mesh import make_mesh, shard_batch
from moddepth_jax.training.summary import num_parameters, versions
from moddepth_jax.training.tables import column_per_row, fixed
from moddepth_jax.training.train_step import compile_step, init_state, train_step

NUM_STEPS = 1000  # of the learning-rate schedule of the timed steps


class CompiledStep:
    """A train step on one batch, compiled ahead of time.

    `temp_bytes` is the peak of temporary memory, without arguments and results. `instructions` is
    the number of HLO instructions of the optimized program.
    """

    def __init__(self, hparams: Hparams):
        data = make_dataset(hparams.data, hparams.seed)
        self.batch = shard_batch(make_mesh(), data.train_batch(0))
        self.state = jax.jit(lambda: init_state(hparams, NUM_STEPS))()
        begin = time.perf_counter()
        lowered = jax.jit(train_step, donate_argnums=0).lower(self.state, self.batch)
        lowered_at = time.perf_counter()
        self.step = compile_step(lowered)
        self.compile_seconds = time.perf_counter() - lowered_at
        self.trace_seconds = lowered_at - begin
        self.temp_bytes = self.step.memory_analysis().temp_size_in_bytes
        self.instructions = self.step.as_text().count(' = ')

    def __call__(self):
        self.state, metrics = self.step(self.state, self.batch)
        return metrics['loss']


def with_model(hparams: Hparams, **knobs) -> Hparams:
    """Return `hparams` with some knobs of its model changed."""
    return dataclasses.replace(hparams, model=dataclasses.replace(hparams.model, **knobs))


def compare_steps(models: dict[str, Hparams], repeats: int) -> dict:
    """Time a training step of each model, interleaved with the first model, the baseline.

    At most two models are in memory. Each of `rows` has the name of the model and either `failed`,
    one line, or the fields of `step_row` and `compare`. Raises ValueError if the baseline fails.
    """
    first, baseline, rows = next(iter(models)), None, []
    for name, hparams in models.items():
        step = None  # frees the previous model
        step, failed = try_run(CompiledStep, hparams)
        failed = failed or try_run(step)[1]
        if failed and baseline is None:
            raise ValueError(f'the {first} model cannot run: {failed}')
        if failed:
            rows.append({'model': name, 'failed': failed})
            continue
        baseline = baseline or step
        seconds = time_interleaved({first: baseline, name: step}, repeats)
        row = {'model': name} | step_row(hparams, step, seconds[name])
        dense_flops = train_step_flops(models[first])
        row |= compare(seconds[name], row['flops'], seconds[first], dense_flops)
        rows.append(row)
    hparams = models[first]
    return {
        'versions': versions(),
        'length': hparams.data.sequence_length,
        'batch': hparams.data.batch_size,
        'dtype': hparams.model.dtype,
        'attention': hparams.model.attention,
        'attention_backends': log_lines(),
        'repeats': repeats,
        'rows': rows,
    }


def step_row(hparams: Hparams, step: CompiledStep, seconds) -> dict:
    """Return the measurements of a model's step: median seconds, rates, memory, compile time."""
    flops, median = train_step_flops(hparams), float(np.median(seconds))
    return {
        'step_seconds': median,
        'tokens_per_second': hparams.data.batch_size * hparams.data.sequence_length / median,
        'flops': flops,
        'flops_per_second': flops / median,
        'parameters': num_parameters(step.state.params),
        'temp_bytes': step.temp_bytes,
        'instructions': step.instructions,
        'trace_seconds': step.trace_seconds,
        'compile_seconds': step.compile_seconds,
    }


def compare(seconds, flops, dense_seconds, dense_flops) -> dict:
    """Return the ratios of time and FLOPs to the baseline, and `realised_saving`.

    `realised_saving` is the ratio of FLOPs over the ratio of time. Seconds may be arrays over the
    same rounds.
    """
    times, flops = float(np.median(seconds / dense_seconds)), flops / dense_flops
    return {'time_ratio': times, 'flops_ratio': flops, 'realised_saving': flops / times}


LINES = {
    'ms': ('step_seconds', fixed(1, 1e3)),
    'tokens/s': ('tokens_per_second', fixed(0)),
    'TFLOP/s, counted': ('flops_per_second', lambda rate: f'{rate / 1e12:.3g}'),
    'MFU': ('mfu', '{:.1%}'.format),
    'time / {first}': ('time_ratio', fixed(3)),
    'FLOPs / {first}': ('flops_ratio', fixed(3)),
    'realised saving (FLOP ratio / time ratio)': ('realised_saving', fixed(3)),
    'parameters, million': ('parameters', fixed(1, 1e-6)),
    'peak memory, GiB': ('peak_bytes', fixed(2, 2**-30)),
    'temporary memory, GiB': ('temp_bytes', fixed(3, 2**-30)),
    'tracing and lowering, s': ('trace_seconds', fixed(1)),
    'compilation, s': ('compile_seconds', fixed(1)),
}


def steps_table(title: str, rows: list[dict]):
    """Return a table with a column for each row of `compare_steps` or launch.gpu."""
    names = [TITLES.get(row['model'], row['model']) for row in rows]
    lines = {name.format(first=names[0]): line for name, line in LINES.items()}
    return column_per_row(title, ['', *names], lines, rows)


def step(
    *,
    size: str = '6x256',
    variants: list[str] = ('dense', 'mod'),
    lengths: list[int] | None = None,
    tokens: int | None = None,
    kv_heads: list[int] | None = None,
    dtype: Dtype | None = None,
    attention: str | None = None,
    repeats: int = 11,
):
    """One training step of the dense model and others at the same batch tokens.

    Each model is timed interleaved with the dense model.

    Args:
      size: LAYERSxWIDTH, 124m or 700m.
      variants: models, dense first: dense, mod, moda, mod_moda, moe, mode (staged and integrated),
        staged, integrated, or a depth stream by its name in the studies, such as attnres.
      lengths: sequence lengths. Default: 512,2048; of a named size, lengths that fit one GPU.
      tokens: tokens of a batch. Default: 4096; of a named size, as many as fit one GPU.
      kv_heads: key/value heads, each in a table. Default: those of the size.
      dtype: dtype of activations. Default: float32.
      attention: model.attention of the models. Default: auto.
      repeats: timed rounds.
    """
    fitting = NAMED_SIZES.get(size, ([512, 2048], 4096))
    lengths, tokens = lengths or fitting[0], tokens or fitting[1]
    names = check_variants(list(variants))
    for length in lengths:
        if tokens % length:
            raise ValueError(f'--tokens={tokens}: must be a multiple of the length {length}')
    compared = []
    for heads, length in itertools.product(kv_heads or [None], lengths):
        knobs = {'num_kv_heads': heads, 'dtype': dtype, 'attention': attention}
        rows = tokens // length
        compared.append({name: make_model(name, size, length, rows, **knobs) for name in names})
    for models in compared:
        result = compare_steps(models, repeats)
        shape = f'{size}, {result["batch"]} rows of {result["length"]}, {result["dtype"]}'
        title = f'train step, {shape}, attention {result["attention"]}'
        yield {'size': size} | result, [steps_table(title, result['rows'])]
