"""How long a training step of several models takes, each beside the dense one, in turn."""

import numpy as np

from kernels_pallas.choice import told
from moddepth_jax.analysis.attempt import attempt
from moddepth_jax.analysis.bench_depth import CompiledStep
from moddepth_jax.analysis.timing import in_turn
from moddepth_jax.hparams import Hparams
from moddepth_jax.model.flops import train_step_flops
from moddepth_jax.training.summary import num_parameters, versions


def _row(name, hparams, step, seconds, dense):
    """What a model's own times say, and what they say beside the dense model's of the same rounds.

    Args:
      dense: (hparams, seconds).
    """
    flops, dense_flops = train_step_flops(hparams), train_step_flops(dense[0])
    ratio = seconds / dense[1]
    tokens = hparams.data.batch_size * hparams.data.sequence_length
    median = float(np.median(seconds))
    return {
        'model': name,
        'seconds': median,
        'tokens_per_second': tokens / median,
        'flops': flops,
        'flops_per_second': flops / median,
        'over_dense': float(np.median(ratio)),
        'flops_over_dense': flops / dense_flops,
        'realised_saving': float(np.median(flops / dense_flops / ratio)),
        'parameters': num_parameters(step.state.params),
        'temp_bytes': step.temp_bytes,
        'compile_seconds': step.trace_seconds + step.compile_seconds,
    }


def bench_models(models: dict[str, Hparams], repeats: int) -> dict:
    """Times one training step of each model in turn with the dense one, two in memory at a time.

    Args:
      models: by name; the first is the dense one, that the others are compared with.
      repeats: rounds that are timed.

    Returns:
      dict with `versions`, `length`, `batch`, `dtype`, `repeats`, `chosen` (a line for each choice
      of attention backends so far), and `rows`: one for each model
      with its name and either `failed`, one line, or the median `seconds`, `tokens_per_second`,
      counted `flops` and `flops_per_second`, `over_dense` (the median over rounds of its time over
      the dense model's), `flops_over_dense`, `realised_saving` ((dense / its time) over
      (dense / its FLOPs)), `parameters`, `temp_bytes`, `compile_seconds`.

    Raises:
      ValueError: the dense model itself cannot be run.
    """
    first, *others = models
    dense, rows = models[first], []
    baseline = CompiledStep(dense)
    if why := attempt(baseline)[1]:
        raise ValueError(f'the {first} model cannot run: {why}')
    seconds = in_turn({first: baseline}, repeats, settle=1)[first]
    rows.append(_row(first, dense, baseline, seconds, (dense, seconds)))
    for name in others:
        step = None  # the one before makes room
        step, why = attempt(CompiledStep, models[name])
        why = why or attempt(step)[1]
        if why:
            rows.append({'model': name, 'failed': why})
            continue
        measured = in_turn({first: baseline, name: step}, repeats, settle=1)
        compared = (dense, measured[first])
        rows.append(_row(name, models[name], step, measured[name], compared))
    return {
        'versions': versions(),
        'length': dense.data.sequence_length,
        'batch': dense.data.batch_size,
        'dtype': dense.model.dtype,
        'attention': dense.model.attention,
        'chosen': told(),
        'repeats': repeats,
        'rows': rows,
    }
