"""The steps of a run: dispatched ahead, looked at as they end, saved and evaluated on the way."""

import collections
import concurrent.futures
import time
from typing import Any

import jax
import numpy as np

from moddepth_jax.data.compression_baselines import describe_measured_text, measure_baselines
from moddepth_jax.model.flops import train_step_flops
from moddepth_jax.training import multihost
from moddepth_jax.training.evaluate import evaluate_causal
from moddepth_jax.training.losses import IGNORED, masked_labels
from moddepth_jax.training.mesh import local_rows, replicated, shard_rows, state_shardings
from moddepth_jax.training.progress import Stopwatch, format_seconds
from moddepth_jax.training.stages import stage_at
from moddepth_jax.training.summary import by_layer
from moddepth_jax.training.train_step import TrainState, train_step

STEPS_IN_FLIGHT = 2  # more would hide a NaN, and abort on many fake CPU devices


class DivergedError(ValueError):
    """A run ended: `training.max_nan_steps` steps in a row were not finite."""


class Trainer:
    """The steps of one start of a run, at most STEPS_IN_FLIGHT of them dispatched at a time.

    Args:
      state, metadata: of `start`; they move on, and are what checkpoints hold.
      hparams, num_steps, dataset, mesh: of the run.
      writer: MetricsWriter; None on a process that writes none.
      progress: Progress.
      log: WindowLog or None.
      profile: Profile.
    """

    def __init__(
        self, state, metadata, hparams, num_steps, dataset, mesh, writer, progress, log, profile
    ):
        self.state, self.metadata = state, metadata
        self.hparams, self.num_steps = hparams, num_steps
        self.dataset, self.mesh = dataset, mesh
        self.writer, self.log, self.progress, self.profile = writer, log, progress, profile
        self.in_flight = collections.deque()
        self.stopwatch = Stopwatch()

    def run(self, interruption, checkpoints) -> TrainState:
        """Steps until the last, or until a signal; saves `state` and `metadata` on the way."""
        first_step = int(self.state.step)
        if first_step == self.num_steps:
            return self.state
        self.rows = local_rows(self.mesh, self.hparams.data.batch_size)
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
            if self.profile.begins(step):
                self._collect(leave=0)
                self.profile.start()
            with jax.transfer_guard('disallow'), self.profile.step(step):
                self._dispatch(step_fn, step)
            done = step + 1
            stops = done == self.num_steps or interruption.asked(done)
            if self.profile.ends(done) or stops:
                self._end_profile()
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

    def _end_profile(self):
        self._collect(leave=0)
        with self.stopwatch.pause():
            if line := self.profile.stop():
                self.progress.note(line)

    def _evaluation_is_due(self, step):
        every = self.hparams.evaluation.every
        if not step or not every or step % every:
            return False
        return not multihost.broadcast_from_leader(lambda: self.writer.has(step, 'eval/loss'))

    def _compile(self, stage, first) -> Any:
        begin, first = time.monotonic(), first and multihost.is_leader()
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            marks = thread.submit(measure_baselines, self.dataset.corpus) if first else None
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
            return shard_rows(self.mesh, batch, self.rows, self.hparams.data.batch_size)

    def _note_landmarks(self, marks):
        text = ', '.join(f'{name} {bits:.2f}' for name, bits in marks.items())
        where = describe_measured_text(self.dataset.corpus)
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
            multihost.broadcast_from_leader(lambda: _give_up(in_a_row, step))

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
        """Metrics of the whole, and those of a layer or domain under names such as a/layer_01/b."""
        model = self.hparams.model
        groups = {'routing': model.routed_layers, 'experts': model.expert_layers}
        parts = {name: by_layer(groups[name], metrics.get(name, {})) for name in groups}
        parts['domains'] = metrics.get('domains', {})
        scalars = {name: value for name, value in metrics.items() if name not in parts}
        named = {
            f'{group}/{part}/{name}': value
            for group in parts
            for part, values in parts[group].items()
            for name, value in values.items()
        }
        return scalars, named

    def evaluate(self, step, num_batches) -> dict:
        """Held-out evaluation of the state, as a row of metrics and a line for the user.

        At the capacity of its last step; at the end also what each routed block's rule costs.
        """
        hparams = self.hparams.at(stage_at(self.hparams, self.num_steps, step - 1))
        given = (self.state.variables, hparams, self.dataset, self.mesh, num_batches)
        few = hparams.evaluation.num_batches if step == self.num_steps else 0
        result = evaluate_causal(*given, batches_per_layer=few)
        scalars, layers = self._named(result)
        row = {f'eval/{name}': value for name, value in (scalars | layers).items()}
        self._write(step, row)
        gap = f', routing gap {result["routing_gap"]:+.4f} nats' if 'routing_gap' in result else ''
        domains = ''.join(
            f', {name} {values["bits_per_byte"]:.3f}'
            for name, values in result.get('domains', {}).items()
        )
        bits = f'{result["bits_per_byte"]:.3f} bits/byte{domains}'
        self.progress.note(f'held-out  step {step}: {bits}{gap}')
        return result


def _give_up(in_a_row, step):
    raise DivergedError(
        f'training.max_nan_steps={in_a_row}: so many steps in a row, up to {step}, gave no '
        f'finite loss and gradient; lower optimizer.learning_rate in another --workdir'
    )
