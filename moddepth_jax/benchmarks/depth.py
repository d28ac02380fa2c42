"""What the slots of a depth stream cost a training step: memory, compilation and time, by depth."""

import dataclasses
import time
from typing import NamedTuple

import jax
import numpy as np

from moddepth_jax.benchmarks.timing import time_interleaved
from moddepth_jax.data.pipeline import make_dataset
from moddepth_jax.hparams import Hparams
from moddepth_jax.model.flops import train_step_flops
from moddepth_jax.training.mesh import make_mesh, shard_batch
from moddepth_jax.training.summary import versions
from moddepth_jax.training.train_step import init_state, train_step

NUM_STEPS = 1000  # of the schedule that the timed steps belong to


class Form(NamedTuple):
    """One way to run a model: `dense` or `moda`, and its knobs layer_loop and remat."""

    model: str
    layer_loop: str
    remat: str


BASELINE = Form('dense', 'scan', 'block')
FORMS = (
    BASELINE,
    Form('dense', 'unrolled', 'block'),
    Form('moda', 'scan', 'block'),
    Form('moda', 'scan', 'none'),
    Form('moda', 'unrolled', 'block'),
    Form('moda', 'unrolled', 'none'),
)


def with_model(hparams: Hparams, **knobs) -> Hparams:
    """`hparams` with some knobs of its model changed."""
    return dataclasses.replace(hparams, model=dataclasses.replace(hparams.model, **knobs))


class CompiledStep:
    """A train step on one batch, compiled apart from running it.

    Attributes:
      temp_bytes: peak of what a step allocates beside its arguments and results.
      trace_seconds: from Python to what XLA is given.
      compile_seconds: of XLA, anew unless JAX's persistent cache is on.
    """

    def __init__(self, hparams: Hparams):
        mesh = make_mesh()
        self.batch = shard_batch(mesh, make_dataset(hparams.data, hparams.seed).train_batch(0))
        self.state = jax.jit(lambda: init_state(hparams, NUM_STEPS))()
        begin = time.perf_counter()
        lowered = jax.jit(train_step, donate_argnums=0).lower(self.state, self.batch)
        between = time.perf_counter()
        self.step = lowered.compile()
        self.compile_seconds = time.perf_counter() - between
        self.trace_seconds = between - begin
        self.temp_bytes = self.step.memory_analysis().temp_size_in_bytes

    def __call__(self):
        self.state, metrics = self.step(self.state, self.batch)
        return metrics['loss']


def bench_depth(dense: Hparams, moda: Hparams, depths, unrolled_up_to: int, repeats: int) -> dict:
    """Memory, compile time and step time of every form at every depth.

    Args:
      dense, moda: two models of the same shape; their numbers of layers do not count.
      depths: numbers of layers.
      unrolled_up_to: unrolled forms are left out of deeper ones: their programs grow with depth.
      repeats: rounds that are timed.

    Returns:
      dict with `versions`, `length`, `batch`, `repeats`, and `rows`: one for each depth and form,
      with `depth`, `model`, `layer_loop`, `remat`, `temp_bytes`, `trace_seconds`,
      `compile_seconds`, the median `step_seconds`, and `over_baseline`, the median over rounds of
      this form's time over that of the dense model, scanned with recomputation.
    """
    models, rows = {'dense': dense, 'moda': moda}, []
    for depth in depths:
        steps = {}
        for form in FORMS:
            if form.layer_loop == 'scan' or depth <= unrolled_up_to:
                knobs = {'num_layers': depth, 'layer_loop': form.layer_loop, 'remat': form.remat}
                steps[form] = CompiledStep(with_model(models[form.model], **knobs))
        seconds = time_interleaved(steps, repeats)
        for form, step in steps.items():
            row = {'depth': depth, **form._asdict(), 'temp_bytes': step.temp_bytes}
            row |= {'trace_seconds': step.trace_seconds, 'compile_seconds': step.compile_seconds}
            row['step_seconds'] = float(np.median(seconds[form]))
            row['over_baseline'] = float(np.median(seconds[form] / seconds[BASELINE]))
            rows.append(row)
    shape = {'length': dense.data.sequence_length, 'batch': dense.data.batch_size}
    return {'versions': versions(), **shape, 'repeats': repeats, 'rows': rows}


def bench_cost(dense: Hparams, moda: Hparams, repeats: int) -> dict:
    """The time of a MoDA step over that of a dense one, beside the ratio of their counted FLOPs.

    Args:
      dense, moda: two models of the same shape, compared as `model.remat` block and none.
      repeats: rounds that are timed.

    Returns:
      dict with `versions`, `depth`, `length`, `batch`, `repeats`, `flops` of both, `flops_ratio`
      (moda / dense), and `rows`: one for each `remat`, with median `seconds` of both, `time_ratio`
      (the median over rounds of moda / dense) and `time_over_flops`, the quotient of the ratios.
    """
    models, remats = {'dense': dense, 'moda': moda}, ('block', 'none')
    steps = {
        (name, remat): CompiledStep(with_model(hparams, remat=remat))
        for remat in remats
        for name, hparams in models.items()
    }
    seconds = time_interleaved(steps, repeats)
    flops = {name: train_step_flops(hparams) for name, hparams in models.items()}
    flops_ratio, rows = flops['moda'] / flops['dense'], []
    for remat in remats:
        time_ratio = float(np.median(seconds['moda', remat] / seconds['dense', remat]))
        median = {name: float(np.median(seconds[name, remat])) for name in models}
        row = {'remat': remat, 'seconds': median, 'time_ratio': time_ratio}
        rows.append(row | {'time_over_flops': time_ratio / flops_ratio})
    return {
        'versions': versions(),
        'depth': dense.model.num_layers,
        'length': dense.data.sequence_length,
        'batch': dense.data.batch_size,
        'repeats': repeats,
        'flops': flops,
        'flops_ratio': flops_ratio,
        'rows': rows,
    }
