"""Times training steps and held-out batches of trained runs, interleaved."""

import functools
import pathlib

import jax
import numpy as np

from moddepth_jax.benchmarks.timing import median_and_range, time_interleaved
from moddepth_jax.data.pipeline import make_dataset
from moddepth_jax.data.tokenizers.tokenizer import tokenizer_of
from moddepth_jax.hparams.rules import causal_routing
from moddepth_jax.model.flops import forward_flops
from moddepth_jax.training.evaluate import eval_step
from moddepth_jax.training.mesh import make_mesh, shard_batch
from moddepth_jax.training.saved_run import load_run, load_teacher
from moddepth_jax.training.summary import versions
from moddepth_jax.training.tables import column_per_row, fixed
from moddepth_jax.training.teacher import step_flops
from moddepth_jax.training.train_step import train_step

KINDS = ('train', 'held_out')


class _Run:
    """A run with callable training steps and evaluation steps under its causal rule."""

    def __init__(self, workdir):
        run, mesh = load_run(workdir), make_mesh()
        self.name, self.state, hparams = workdir, run.state, run.hparams
        data = make_dataset(
            hparams.data, hparams.seed, tokenizer=tokenizer_of(hparams.data, workdir)
        )
        batch, held_out = (
            shard_batch(mesh, one) for one in (data.train_batch(0), data.held_out_batch(0))
        )
        size = hparams.data.batch_size, hparams.data.sequence_length
        rule, self.tokens = causal_routing(hparams), size[0] * size[1]
        self.flops = step_flops(hparams), forward_flops(hparams, *size, rule)
        step = functools.partial(train_step, teacher=load_teacher(hparams, mesh, {}))
        self._step, self._batch = jax.jit(step, donate_argnums=0), batch
        variables = jax.tree.map(np.asarray, run.state.variables)  # the state is donated
        layers_R = np.ones(len(hparams.model.routed_layers), bool)
        how = {'hparams': hparams, 'routing': rule, 'mesh': mesh}
        self.held_out = functools.partial(
            eval_step, jax.device_put(variables), held_out, layers_R, **how
        )

    def train(self):
        self.state, metrics = self._step(self.state, self._batch)
        return metrics['loss']


def runs(*, workdirs: list[str] = (), repeats: int = 25):
    """Training steps and held-out batches of trained runs, at their own batch sizes.

    Each run keeps its trainable parameters and its teacher, and has the capacity of its last stage.

    Args:
      workdirs: directories of runs. The first run is the baseline.
      repeats: timed rounds.
    """
    if not workdirs:
        raise ValueError('--workdirs: must name the directories of one run or more: DIR,DIR')
    compared = [_Run(workdir) for workdir in dict.fromkeys(workdirs)]
    rows = [{'run': run.name, 'tokens': run.tokens} for run in compared]
    for number, kind in enumerate(KINDS):
        calls = {run.name: getattr(run, kind) for run in compared}
        seconds = time_interleaved(calls, repeats)
        first = compared[0]
        for run, row in zip(compared, rows, strict=True):
            own = run.tokens / seconds[run.name]
            flops = run.flops[number] / run.tokens * first.tokens / first.flops[number]
            row[f'{kind}_tokens_per_second'] = float(np.median(own))
            row |= median_and_range(f'{kind}_ratio', own * seconds[first.name] / first.tokens)
            row[f'{kind}_flops_ratio'] = flops
    heads = ['', *(pathlib.Path(run.name).name for run in compared)]
    tables = [column_per_row('steps of runs', heads, _lines(), rows)]
    yield {'versions': versions(), 'repeats': repeats, 'rows': rows}, tables


def _lines():
    spread, lines = '{0[0]:.2f} to {0[1]:.2f}'.format, {}
    for kind, what in zip(KINDS, ('training', 'held out'), strict=True):
        lines |= {
            f'{what}, tokens/s': (f'{kind}_tokens_per_second', fixed(0)),
            f'{what}, of the first': (f'{kind}_ratio', fixed(2)),
            f'{what}, range': (f'{kind}_ratio_range', spread),
            f'{what}, FLOPs of the first': (f'{kind}_flops_ratio', fixed(2)),
        }
    return lines
