"""The loop over the steps of a run: dispatch, report, save and evaluate."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import numpy as np

from moddepth_jax.data.compression_baselines import describe_measured_text, measure_baselines
from moddepth_jax.data.pipeline import Dataset
from moddepth_jax.hparams.rules import causal_routing
from moddepth_jax.model import ahead
from moddepth_jax.training import devices, multihost, routing_gap
from moddepth_jax.training.evaluate import evaluate, evaluate_causal
from moddepth_jax.training.losses import IGNORED, masked_labels
from moddepth_jax.training.mesh import local_rows, replicated, shard_rows, state_shardings
from moddepth_jax.training.metrics import MetricsWriter, WindowLog
from moddepth_jax.training.plan import loops_at, run_flops, stage_at
from moddepth_jax.training.profile import Profile
from moddepth_jax.training.progress import Progress, Stopwatch, format_seconds
from moddepth_jax.training.summary import by_layer, step_flops_report
from moddepth_jax.training.teacher import Teacher
from moddepth_jax.training.train_step import TrainState, compile_step, train_step

STEPS_IN_FLIGHT = 2  # with more, a NaN shows late, and many fake CPU devices abort


class DivergedError(ValueError):
    """The loss or gradient was not finite in `training.max_nan_steps` steps in a row."""


@dataclasses.dataclass(eq=False)
class Trainer:
    """Trains from the step of `state` to the last step of the run.

    JAX runs asynchronously: at most STEPS_IN_FLIGHT steps are dispatched and not yet reported.
    """

    state: TrainState  # at first that of `restore_or_init`
    metadata: dict  # of `restore_or_init`, updated in place and saved with each checkpoint
    dataset: Dataset  # of the batches
    mesh: jax.sharding.Mesh  # of the context (`jax.set_mesh`)
    profile: Profile  # traces some steps
    progress: Progress  # prints
    writer: MetricsWriter | None  # None: write no metrics
    log: WindowLog | None  # None: log no windows
    report_programs: Callable | None  # as in `train`; compiled in a thread during the first steps
    teacher: Teacher | None

    def __post_init__(self):
        self.hparams, self.num_steps = self.state.hparams, self.state.num_steps
        self.rows = local_rows(self.mesh, self.hparams.data.batch_size)
        self.stopwatch = Stopwatch(self.metadata['seconds'])
        self.step_fns = {}  # compiled train steps of one stage, by (stage, loops)
        self.in_flight = collections.deque()  # (step, metrics, targets per byte), oldest first
        self.compiler, self.compiling = None, {}

    def run(self, preemption, checkpoints) -> TrainState:
        """Train until the last step or a stop signal; returns the state, which is saved."""
        for step in range(int(self.state.step), self.num_steps):
            # Before the step, so that a resumed run makes up for an evaluation that was missed.
            if self._evaluation_is_due(step):
                with self._paused():
                    self.evaluate(step, self.hparams.evaluation.num_batches)

            step_fn = self._step_fn(step)
            if self.profile.begins(step):
                with self._paused():
                    if line := self.profile.start():
                        self.progress.note(line)
            with jax.transfer_guard('disallow'), self.profile.step(step):
                self._dispatch(step_fn, step)
            done = step + 1
            stops = preemption.should_stop(done) or done == self.num_steps

            if self.profile.ends(done) or stops:
                with self._paused():
                    if line := self.profile.stop():
                        self.progress.note(line)
            if stops or done % self.hparams.training.checkpoint_every == 0:
                self._save(done, checkpoints)
            if stops:
                break
            self._collect(in_flight=STEPS_IN_FLIGHT - 1)
        checkpoints.wait()
        return self.state

    @contextlib.contextmanager
    def _paused(self):
        """Inside, no step is in flight and the time does not count."""
        self._collect(in_flight=0)
        with self.stopwatch.pause():
            yield

    def _save(self, step, checkpoints):
        self._collect(in_flight=0)
        self.metadata['seconds'] = self.stopwatch.seconds()
        size, holder = devices.peak_memory()
        before, where = self.metadata.get('peak_memory') or (0, '')  # of an earlier start
        self.metadata['peak_memory'] = max(size, before if where == holder else 0), holder
        self.metadata['stage'] = self._stage(step - 1)._asdict()
        if self.writer is not None:
            self.metadata['metrics'] = self.writer.digest()
        with self.stopwatch.pause():
            checkpoints.save(step, self.state, self.metadata)

    def evaluate(self, step, num_batches) -> dict:
        """Evaluate the state on held-out text, with the capacity of its last step.

        Writes a row of metrics and prints a line. After the last step of the run, it also measures
        what the causal rule costs in each single routed layer. Returns the result.
        """
        self._wait_for_compiler(1 + self.hparams.model.looks_ahead)
        batches_per_layer = 0
        if step == self.num_steps:
            few = max(1, len(self.dataset.domains), num_batches // 8)
            batches_per_layer = min(self.hparams.evaluation.num_batches, few)
        hparams, variables = self.hparams.at(self._stage(step - 1)), self.state.variables
        result = evaluate_causal(
            variables, hparams, self.dataset, self.mesh, num_batches, batches_per_layer
        )
        if step == self.num_steps:
            self._wait_for_compiler()
        self._write(step, {f'eval/{name}': x for name, x in self._named(result).items()})
        line = f'held-out  step {step}: {result["bits_per_byte"]:.3f} bits/byte'
        for name, values in result.get('domains', {}).items():
            line += f', {name} {values["bits_per_byte"]:.3f}'
        if 'routing_gap' in result:
            gap = result['routing_gap']
            line += f', routing gap {gap:+.4f} nats' + ' (large)' * routing_gap.is_large(gap)
        self.progress.note(line)
        return result

    def _stage(self, step):
        return stage_at(self.hparams, self.num_steps, step)

    def _evaluation_is_due(self, step):
        every = self.hparams.evaluation.every
        if not step or not every or step % every:
            return False
        return not multihost.broadcast_from_leader(lambda: self.writer.has(step, 'eval/loss'))

    def _step_fn(self, step):
        """Return the train step of the stage and loops of `step`; compiles it at its first use."""
        stage, loops = self._stage(step), loops_at(self.hparams, self.num_steps, step)
        if (stage, loops) not in self.step_fns:
            with self._paused():
                # The programs of an earlier stage are not used again.
                self.step_fns = {key: fn for key, fn in self.step_fns.items() if key[0] == stage}
                measure = step == 0 and multihost.is_leader()
                self.step_fns[stage, loops] = self._compile(stage, loops, measure)
        return self.step_fns[stage, loops]

    def _compile(self, stage, loops, measure):
        """Compile a train step; with `measure`, a thread measures compression baselines."""
        begin, model = time.monotonic(), self.hparams.with_loops(loops).model
        what = f'the train step of {model.num_blocks} layer{"s" * (model.num_blocks > 1)}'
        hint = ''
        if model.layer_loop == 'unrolled' and model.depth.stream_class.scans:
            hint = '; model.layer_loop=scan would compile one layer of each kind'
        self.progress.note(f'compiling {what}{hint} ...')
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            baselines = thread.submit(measure_baselines, self.dataset.corpus) if measure else None
            batch = self._put(self.dataset.train_batch(0, self.rows))
            shardings = state_shardings(self.mesh, self.state), replicated(self.mesh)
            jitted = jax.jit(
                train_step, static_argnums=(2, 3), donate_argnums=0, out_shardings=shardings
            )
            lowered = jitted.lower(self.state, batch, stage, loops, self.teacher)
            # Not on a GPU, where XLA times products of the train step, or the step already runs.
            if self.report_programs and not self.compiler and jax.default_backend() == 'cpu':
                self._compile_ahead()
            step_fn = compile_step(lowered)
            seconds = time.monotonic() - begin
            if measure:
                bits = ', '.join(f'{name} {x:.2f}' for name, x in baselines.result().items())
                where = describe_measured_text(self.dataset.corpus)
                self.progress.note(f'baselines {bits} bits/byte on the {where}')
        self.progress.note(f'compiled  {what} in {format_seconds(seconds)}')
        return step_fn

    def _compile_ahead(self):
        """Start a thread that compiles what follows the last step: evaluation, summary, report.

        The order matters: `evaluate` waits for the first of these programs only.
        """
        state = ahead.abstract(self.state)
        hparams, model = self.hparams.at(self.hparams.stages[-1]), self.hparams.model
        rules = dict.fromkeys([causal_routing(hparams), *['top_c'] * model.looks_ahead])
        programs = {
            f'compiling the evaluation by {rule}': functools.partial(
                evaluate,
                state.variables,
                hparams,
                self.dataset,
                self.mesh,
                num_batches=len(self.dataset.domains) or 1,
                routing=rule,
            )
            for rule in rules
        }
        flops = functools.partial(step_flops_report, self.hparams, self.num_steps)
        programs |= {"counting XLA's FLOPs": flops} | self.report_programs(state, self.dataset)

        def compile_one(what, program):
            try:
                with jax.set_mesh(self.mesh):
                    program()
            except Exception as error:  # the later use of the program raises it again
                reason = str(error).partition('\n')[0]
                self.progress.note(f'{what} ahead of its use failed: {reason}')

        self.compiler = concurrent.futures.ThreadPoolExecutor(1)
        self.compiling = {
            what: self.compiler.submit(compile_one, what, program)
            for what, program in programs.items()
        }

    def _wait_for_compiler(self, most=None):
        """Wait for the first `most` programs (None: all) that are compiled ahead."""
        for what, future in list(self.compiling.items())[:most]:
            if not future.done():
                self.progress.note(f'{what} ...')
            concurrent.futures.wait([future])

    def close(self):
        """Wait for the program that is being compiled ahead, if any, and drop the others."""
        if self.compiler:
            self.compiler.shutdown(cancel_futures=True)

    def _put(self, batch):
        with jax.transfer_guard('allow'):  # the one intended transfer inside the disallowing guard
            return shard_rows(self.mesh, batch, self.rows, self.hparams.data.batch_size)

    def _dispatch(self, step_fn, step):
        with self.stopwatch.waiting_for_data():
            if self.log is not None:
                self.log.write(step + 1, self.dataset.train_windows(step, self.rows))
            batch = self.dataset.train_batch(step, self.rows)
            labels_BT = masked_labels(batch)
            targets = labels_BT[labels_BT != IGNORED]
            targets_per_byte = targets.size / self.dataset.tokenizer.token_bytes_V[targets].sum()
            batch = self._put(batch)
        self.state, metrics = step_fn(self.state, batch, self.teacher)
        self.in_flight.append((step + 1, metrics, targets_per_byte))

    def _collect(self, in_flight):
        """Wait until only `in_flight` steps are running, and report those that ended."""
        while len(self.in_flight) > in_flight:
            step, metrics, targets_per_byte = self.in_flight.popleft()
            metrics = jax.device_get(metrics)
            self.stopwatch.steps += 1
            self.metadata['train_loss'] = float(metrics['loss'])
            self.metadata['learning_rate'] = float(metrics['learning_rate'])
            self._check_finite(step, metrics)
            if step % self.hparams.training.log_every == 0 or step == self.num_steps:
                row = self._row(step, metrics)
                self._write(step, row)
                bits = row['loss'] / np.log(2) * targets_per_byte
                self.progress.update(step, row | {'bits_per_byte': bits})

    def _check_finite(self, step, metrics):
        in_a_row = int(metrics['skipped_in_a_row'])
        if in_a_row:
            self.progress.note(f'step {step}: loss or gradient is not finite; skipped')

        def give_up():
            raise DivergedError(
                f'training.max_nan_steps={in_a_row}: loss or gradient was not finite in that many '
                f'steps in a row, up to {step}; lower optimizer.learning_rate in another --workdir'
            )

        if in_a_row >= self.hparams.training.max_nan_steps:
            multihost.run_on_leader(give_up)

    def _write(self, step, row):
        if self.writer is not None:
            self.writer.write(step, row)

    def _row(self, step, metrics):
        first = step - self.stopwatch.steps
        before, after = (run_flops(self.hparams, self.num_steps, at) for at in (first, step))
        tokens = self.hparams.data.batch_size * self.hparams.data.sequence_length
        row = {name: np.asarray(x).tolist() for name, x in self._named(metrics).items()}
        rates = self.stopwatch.rates(tokens, after - before)
        mfu = devices.mfu(rates['flops_per_second'], self.mesh.size)
        memory = {'peak_memory_bytes': devices.peak_memory()[0]}
        return row | rates | mfu | memory

    def _named(self, metrics):
        """Flatten metrics into one dict, with names such as routing/layer_01/recall."""
        parts = by_layer(self.hparams.model, metrics) | {'domains': metrics.get('domains', {})}
        named = {
            f'{group}/{part}/{name}': value
            for group in parts
            for part, values in parts[group].items()
            for name, value in values.items()
        }
        return {name: value for name, value in metrics.items() if name not in parts} | named
