"""The train loop, from hyper-parameters and a directory to a trained state and its summary."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import pathlib
import time
from typing import Any

import jax
import numpy as np

from moddepth_jax.data.landmarks import MAX_BYTES, landmarks
from moddepth_jax.data.pipeline import Dataset
from moddepth_jax.hparams import Hparams
from moddepth_jax.model.flops import train_step_flops
from moddepth_jax.training import agreement, processes
from moddepth_jax.training.checkpoint import Checkpoints
from moddepth_jax.training.evaluate import evaluate_honestly
from moddepth_jax.training.interruption import Interruption
from moddepth_jax.training.losses import IGNORED, masked_labels
from moddepth_jax.training.metrics import MetricsWriter
from moddepth_jax.training.plan import describe, prepare
from moddepth_jax.training.progress import Progress, format_seconds
from moddepth_jax.training.sharding import own_rows, put_rows, replicated, state_shardings
from moddepth_jax.training.sharding_table import mesh_lines
from moddepth_jax.training.stages import stage_at
from moddepth_jax.training.start import start
from moddepth_jax.training.stopwatch import Stopwatch
from moddepth_jax.training.summary import by_layer, summarise, write_summary
from moddepth_jax.training.train_step import TrainState, train_step
from moddepth_jax.training.window_log import WindowLog
from moddepth_jax.training.workdir import CONFIG_FILE, WorkdirLock, open_workdir, update_config

STEPS_IN_FLIGHT = 2  # more would hide a NaN, and abort on many fake CPU devices
MAY_CHANGE = (  # on resuming: knobs that no trained bit depends on
    'evaluation',
    'report',
    'data.log_windows',
    'training.log_every',
    'training.checkpoint_every',
    'training.keep_checkpoints',
    'training.max_unsharded',
    'training.compilation_cache',
)
INFERENCE_ONLY = ('model.routing.cache_capacity', 'model.routing.overflow')  # where top-C trains


class Diverged(ValueError):
    """A run ended: `training.max_nan_steps` steps in a row were not finite."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What `train` leaves.

    Attributes:
      summary: the content of summary.json; None where a signal ended the run early.
      signal: the name of that signal, or None.
    """

    hparams: Hparams
    workdir: pathlib.Path
    state: TrainState
    dataset: Dataset
    summary: dict | None
    signal: str | None = None


def train(hparams: Hparams, workdir, mesh_spec: str = '') -> Run:
    """Trains to the last step, or goes on where an earlier call in the same workdir stopped.

    On CPUs two calls with equal hyper-parameters, versions, devices and threads end bit-equal,
    however often they were killed in between. Where several processes have joined, each of them
    calls this; process 0 alone prints and writes, but for its share of checkpoints.

    Args:
      hparams: of the run.
      workdir: its directory; made if it is not there.
      mesh_spec: see `make_mesh`.

    Raises:
      ValueError: one line, before anything is compiled or written, for a budget, corpus, mesh or
        workdir that does not fit; where a checkpoint could not be written.
      Diverged: a ValueError, after `training.max_nan_steps` non-finite steps in a row.
    """
    num_steps, dataset, mesh = agreement.together(lambda: prepare(hparams, mesh_spec))
    config = dataclasses.asdict(hparams)
    agreement.check_alike({'--mesh': mesh_spec, **config, 'text': dataset.fingerprint})
    may_change = MAY_CHANGE
    if hparams.model.routing.train_rule == 'top_c':
        may_change += INFERENCE_ONLY
    older = agreement.from_first(lambda: open_workdir(workdir, config, may_change, False))
    workdir, first = pathlib.Path(workdir), processes.is_first()
    with contextlib.ExitStack() as held:
        agreement.on_first(lambda: held.enter_context(WorkdirLock(workdir)))
        agreement.check_shared(workdir / CONFIG_FILE)
        keep = hparams.training.keep_checkpoints
        checkpoints = held.enter_context(Checkpoints(workdir / 'checkpoints', keep))
        held.enter_context(processes.ended_by_loss())
        state, metadata, news = start(hparams, num_steps, dataset, mesh, checkpoints)
        agreement.from_first(lambda: update_config(workdir, config))
        first_step, tokens = int(state.step), hparams.data.batch_size * hparams.data.sequence_length
        with (
            jax.set_mesh(mesh),
            contextlib.ExitStack() as files,
            Progress(num_steps, first_step, tokens, silent=not first) as progress,
        ):
            writer = agreement.on_first(
                lambda: files.enter_context(MetricsWriter(workdir, first_step))
            )
            log = None
            if hparams.data.log_windows:
                log = files.enter_context(WindowLog(workdir, first_step, jax.process_index()))
            lines = describe(hparams, num_steps, state.params, dataset)
            for line in (*lines, *mesh_lines(mesh, state), *older, *news):
                progress.note(line)
            loop = _Loop(state, metadata, hparams, num_steps, dataset, mesh, writer, progress, log)
            with Interruption() as interruption:
                state = loop.run(interruption, checkpoints)
            step = int(state.step)
            if step < num_steps:
                done = f'{interruption.requested}: stopped and saved at step {step} of {num_steps}'
                progress.note(f'{done}; the same command goes on from there')
                return Run(hparams, workdir, state, dataset, None, interruption.requested)
            progress.note('evaluating on held-out text, then counting the FLOPs of the traced step')
            evaluation = loop.evaluate(num_steps, hparams.evaluation.final_batches)
        summary = summarise(hparams, state, evaluation, dataset, loop.metadata)
        agreement.from_first(lambda: write_summary(workdir, summary))
    return Run(hparams, workdir, state, dataset, summary)


class _Loop:
    """The steps of one start of a run, at most STEPS_IN_FLIGHT of them dispatched at a time."""

    def __init__(
        self, state, metadata, hparams, num_steps, dataset, mesh, writer, progress, log=None
    ):
        self.state, self.metadata = state, metadata
        self.hparams, self.num_steps = hparams, num_steps
        self.dataset, self.mesh = dataset, mesh
        self.writer, self.log, self.progress = writer, log, progress
        self.in_flight = collections.deque()
        self.stopwatch = Stopwatch()

    def run(self, interruption, checkpoints) -> TrainState:
        """Steps until the last, or until a signal; saves `state` and `metadata` on the way."""
        first_step = int(self.state.step)
        if first_step == self.num_steps:
            return self.state
        self.rows = own_rows(self.mesh, self.hparams.data.batch_size)
        self.stopwatch, seconds_before = Stopwatch(), self.metadata['seconds']
        step_fn, stage = None, None
        for step in range(first_step, self.num_steps):
            # Before the step and not after the last one: a start that resumes here catches up.
            if self._evaluation_is_due(step):
                self._collect(leave=0)
                with self.stopwatch.pause():
                    self.evaluate(step, self.hparams.evaluation.num_batches)
            if stage != stage_at(self.hparams, self.num_steps, step):
                self._collect(leave=0)
                stage = stage_at(self.hparams, self.num_steps, step)
                with self.stopwatch.pause():
                    step_fn = self._compile(stage, first=step == first_step)
            with jax.transfer_guard('disallow'):
                self._dispatch(step_fn, step)
            done = step + 1
            stops = done == self.num_steps or interruption.asked(done)
            saves = stops or done % self.hparams.training.checkpoint_every == 0
            self._collect(leave=0 if saves else STEPS_IN_FLIGHT - 1)
            if saves:
                self.metadata['seconds'] = seconds_before + self.stopwatch.seconds()
                self.metadata['stage'] = stage._asdict()
                with self.stopwatch.pause():
                    checkpoints.save(done, self.state, self.metadata)
            if stops:
                break
        checkpoints.wait()
        return self.state

    def _evaluation_is_due(self, step):
        every = self.hparams.evaluation.every
        if not step or not every or step % every:
            return False
        return not agreement.from_first(lambda: self.writer.has(step, 'eval/loss'))

    def _compile(self, stage, first) -> Any:
        begin, first = time.monotonic(), first and processes.is_first()
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            marks = thread.submit(landmarks, self.dataset.corpus) if first else None
            batch = self._put(self.dataset.train_batch(0, self.rows))
            shardings = state_shardings(self.mesh, self.state), replicated(self.mesh)
            jitted = jax.jit(
                train_step, static_argnums=2, donate_argnums=0, out_shardings=shardings
            )
            step_fn = jitted.lower(self.state, batch, stage).compile()
            compiled = time.monotonic() - begin
            if first:
                self._note_landmarks(marks.result())
        self.progress.note(f'compiled  the train step in {format_seconds(compiled)}')
        return step_fn

    def _put(self, batch):
        with jax.transfer_guard('allow'):  # the one transfer that is meant, inside of the other
            return put_rows(self.mesh, batch, self.rows, self.hparams.data.batch_size)

    def _note_landmarks(self, marks):
        text = ', '.join(f'{name} {bits:.2f}' for name, bits in marks.items())
        whole = sum(map(len, self.dataset.corpus.train)) <= MAX_BYTES
        where = 'training text' if whole else f'first {MAX_BYTES >> 20} MiB of training text'
        self.progress.note(f'landmarks {text} bits/byte on the {where}')

    def _dispatch(self, step_fn, step):
        with self.stopwatch.waiting_for_data():
            if self.log is not None:
                self.log.write(step + 1, self.dataset.train_windows(step, self.rows))
            batch = self.dataset.train_batch(step, self.rows)
            labels_BT = masked_labels(batch)
            targets = labels_BT[labels_BT != IGNORED]
            targets_per_byte = targets.size / self.dataset.tokenizer.token_bytes_V[targets].sum()
            batch = self._put(batch)
        self.state, metrics = step_fn(self.state, batch)
        self.in_flight.append((step + 1, metrics, targets_per_byte))

    def _collect(self, leave):
        """Waits for steps until only `leave` are in flight, and reports them."""
        while len(self.in_flight) > leave:
            step, metrics, targets_per_byte = self.in_flight.popleft()
            metrics = jax.device_get(metrics)
            self.stopwatch.step_done()
            self.metadata['train_loss'] = float(metrics['loss'])
            self._check_finite(step, metrics)
            if step % self.hparams.training.log_every == 0 or step == self.num_steps:
                row = self._row(step, metrics)
                self._write(step, row)
                bits = row['loss'] / np.log(2) * targets_per_byte
                self.progress.update(step, row | {'bits_per_byte': bits})

    def _check_finite(self, step, metrics):
        in_a_row = int(metrics['skipped_in_a_row'])
        if not in_a_row:
            return
        self.progress.note(f'step {step}: loss or gradient is not finite; skipped')
        if in_a_row >= self.hparams.training.max_nan_steps:
            agreement.from_first(lambda: _give_up(in_a_row, step))

    def _write(self, step, row):
        if self.writer is not None:
            self.writer.write(step, row)

    def _row(self, step, metrics):
        scalars, layers = self._named(metrics)
        row = {name: value.item() for name, value in scalars.items()} | layers
        flops = train_step_flops(self.hparams, stage_at(self.hparams, self.num_steps, step - 1))
        tokens = self.hparams.data.batch_size * self.hparams.data.sequence_length
        return row | self.stopwatch.rates(tokens, flops)

    def _named(self, metrics):
        """Metrics of the whole model, and those of its layers under names such as a/layer_01/b."""
        model = self.hparams.model
        groups = {'routing': model.routed_layers, 'experts': model.expert_layers}
        scalars = {name: value for name, value in metrics.items() if name not in groups}
        layers = {
            f'{group}/{layer}/{name}': value
            for group in groups
            for layer, values in by_layer(groups[group], metrics.get(group, {})).items()
            for name, value in values.items()
        }
        return scalars, layers

    def evaluate(self, step, num_batches) -> dict:
        """Held-out evaluation of the state, as a row of metrics and a line for the user.

        At the capacity of its last step; at the end also what each routed block's rule costs.
        """
        hparams = self.hparams.at(stage_at(self.hparams, self.num_steps, step - 1))
        given = (self.state.variables, hparams, self.dataset, self.mesh, num_batches)
        few = hparams.evaluation.num_batches if step == self.num_steps else 0
        result = evaluate_honestly(*given, batches_per_layer=few)
        scalars, layers = self._named(result)
        row = {f'eval/{name}': value for name, value in (scalars | layers).items()}
        self._write(step, row)
        gap = f', routing gap {result["routing_gap"]:+.4f} nats' if 'routing_gap' in result else ''
        self.progress.note(f'held-out  step {step}: {result["bits_per_byte"]:.3f} bits/byte{gap}')
        return result


def _give_up(in_a_row, step):
    raise Diverged(
        f'training.max_nan_steps={in_a_row}: so many steps in a row, up to {step}, gave no '
        f'finite loss and gradient; lower optimizer.learning_rate in another --workdir'
    )
