"""The steps of a run: dispatched ahead, reported as they end, saved and evaluated in between."""

import collections
import concurrent.futures
import functools
import time
from typing import Any

import jax
import numpy as np

from moddepth_jax.data.compression_baselines import describe_measured_text, measure_baselines
from moddepth_jax.hparams.rules import causal_routing
from moddepth_jax.model import ahead
from moddepth_jax.training import devices, multihost
from moddepth_jax.training.evaluate import evaluate, evaluate_causal
from moddepth_jax.training.losses import IGNORED, masked_labels
from moddepth_jax.training.mesh import local_rows, replicated, shard_rows, state_shardings
from moddepth_jax.training.plan import loops_at, run_flops, stage_at
from moddepth_jax.training.progress import Stopwatch, format_seconds
from moddepth_jax.training.summary import by_layer, step_flops_report
from moddepth_jax.training.train_step import TrainState, train_step

STEPS_IN_FLIGHT = 2  # more would hide a NaN, and abort on many fake CPU devices


class DivergedError(ValueError):
    """A run ended: `training.max_nan_steps` steps in a row were not finite."""


class Trainer:
    """Runs the steps of one start of a run, at most STEPS_IN_FLIGHT of them dispatched at a time.

    `state` and `metadata`, of `restore_or_init`, advance, and are what checkpoints hold. `writer`,
    a MetricsWriter, `log`, a WindowLog, and `teacher`, of `load_teacher`, may be None.
    `report_programs`, of `train`, is compiled in a thread, after what the last evaluation and the
    summary need.
    """

    def __init__(
        self,
        state,
        metadata,
        dataset,
        mesh,
        profile,
        progress,
        writer,
        log,
        report_programs=None,
        teacher=None,
    ):
        self.state, self.metadata, self.report_programs = state, metadata, report_programs
        self.hparams, self.num_steps = state.hparams, state.num_steps
        self.dataset, self.mesh = dataset, mesh
        self.profile, self.progress, self.writer, self.log = profile, progress, writer, log
        self.in_flight = collections.deque()
        self.stopwatch = Stopwatch()
        self.compiler, self.compiling, self.teacher = None, {}, teacher

    def run(self, preemption, checkpoints) -> TrainState:
        """Steps until the last one or a signal; saves `state` and `metadata` in between."""
        first_step = int(self.state.step)
        if first_step == self.num_steps:
            return self.state
        self.rows = local_rows(self.mesh, self.hparams.data.batch_size)
        self.stopwatch, seconds_before = Stopwatch(), self.metadata['seconds']
        step_fns, step_fn, stage = {}, None, None  # by their loops, of one stage
        for step in range(first_step, self.num_steps):
            # Before a step and not after the previous one: a start that resumes here catches up.
            if self._evaluation_is_due(step):
                self._collect(in_flight=0)
                with self.stopwatch.pause():
                    self.evaluate(step, self.hparams.evaluation.num_batches)
            loops = loops_at(self.hparams, self.num_steps, step)
            if stage != self._stage(step):
                stage, step_fns = self._stage(step), {}
            if loops not in step_fns:
                self._collect(in_flight=0)
                measures = step == 0 and multihost.is_leader()
                with self.stopwatch.pause():
                    step_fns[loops] = self._compile(stage, loops, measures)
            step_fn = step_fns[loops]
            if self.profile.begins(step):
                self._collect(in_flight=0)
                self.profile.start()
            with jax.transfer_guard('disallow'), self.profile.step(step):
                self._dispatch(step_fn, step)
            done = step + 1
            stops = done == self.num_steps or preemption.should_stop(done)
            if self.profile.ends(done) or stops:
                self._collect(in_flight=0)
                with self.stopwatch.pause():
                    if line := self.profile.stop():
                        self.progress.note(line)
            saves = stops or done % self.hparams.training.checkpoint_every == 0
            self._collect(in_flight=0 if saves else STEPS_IN_FLIGHT - 1)
            if saves:
                self.metadata['seconds'] = seconds_before + self.stopwatch.seconds()
                self.metadata['peak_memory'] = devices.peak_memory()
                self.metadata['stage'] = stage._asdict()
                if self.writer is not None:
                    self.metadata['metrics'] = self.writer.digest()
                with self.stopwatch.pause():
                    checkpoints.save(done, self.state, self.metadata)
            if stops:
                break
        checkpoints.wait()
        return self.state

    def evaluate(self, step, num_batches) -> dict:
        """Evaluates the state on held-out text; writes a row of metrics and a line for the user.

        With the capacity of its last step; at the end also the cost of each routed block's rule.
        """
        self._wait_for_compiler(1 + self.hparams.model.looks_ahead)
        per_layer = 0
        if step == self.num_steps:
            few = max(1, len(self.dataset.domains), num_batches // 8)
            per_layer = min(self.hparams.evaluation.num_batches, few)
        hparams, variables = self.hparams.at(self._stage(step - 1)), self.state.variables
        result = evaluate_causal(
            variables, hparams, self.dataset, self.mesh, num_batches, per_layer
        )
        if step == self.num_steps:
            self._wait_for_compiler()
        self._write(step, {f'eval/{name}': x for name, x in self._named(result).items()})
        line = f'held-out  step {step}: {result["bits_per_byte"]:.3f} bits/byte'
        for name, values in result.get('domains', {}).items():
            line += f', {name} {values["bits_per_byte"]:.3f}'
        if 'routing_gap' in result:
            line += f', routing gap {result["routing_gap"]:+.4f} nats'
        self.progress.note(line)
        return result

    def _stage(self, step):
        return stage_at(self.hparams, self.num_steps, step)

    def _evaluation_is_due(self, step):
        every = self.hparams.evaluation.every
        if not step or not every or step % every:
            return False
        return not multihost.broadcast_from_leader(lambda: self.writer.has(step, 'eval/loss'))

    def _compile(self, stage, loops, measures) -> Any:
        """Compiles the train step; `measures` compression in the meantime, as a new run does."""
        begin, model = time.monotonic(), self.hparams.with_loops(loops).model
        scans = '; model.layer_loop=scan would compile one for all of a kind'
        scans *= model.layer_loop == 'unrolled' and model.depth.stream_class.scans
        what = f'the train step of {model.num_blocks} layer{"s" * (model.num_blocks > 1)}'
        self.progress.note(f'compiling {what}{scans} ...')
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            baselines = thread.submit(measure_baselines, self.dataset.corpus) if measures else None
            batch = self._put(self.dataset.train_batch(0, self.rows))
            shardings = state_shardings(self.mesh, self.state), replicated(self.mesh)
            how = {'static_argnums': (2, 3), 'donate_argnums': 0, 'out_shardings': shardings}
            lowered = jax.jit(train_step, **how).lower(
                self.state, batch, stage, loops, self.teacher
            )
            if self.report_programs and not self.compiler:
                self._compile_ahead()
            step_fn = lowered.compile()
            seconds = time.monotonic() - begin
            if measures:
                bits = ', '.join(f'{name} {x:.2f}' for name, x in baselines.result().items())
                where = describe_measured_text(self.dataset.corpus)
                self.progress.note(f'baselines {bits} bits/byte on the {where}')
        self.progress.note(f'compiled  {what} in {format_seconds(seconds)}')
        return step_fn

    def _compile_ahead(self):
        """Starts to compile what follows the last step: the evaluation, the summary, the report."""
        state = ahead.abstract(self.state)
        hparams, model = self.hparams.at(self.hparams.stages[-1]), self.hparams.model
        given = state.variables, hparams, self.dataset, self.mesh, len(self.dataset.domains) or 1
        rules = dict.fromkeys([causal_routing(hparams), *['top_c'] * model.looks_ahead])
        programs = {
            f'compiling the evaluation by {rule}': functools.partial(evaluate, *given, rule)
            for rule in rules
        }
        flops = functools.partial(step_flops_report, self.hparams, self.num_steps)
        programs |= {"counting XLA's FLOPs": flops} | self.report_programs(state, self.dataset)

        def compile_one(what, program):
            try:
                with jax.set_mesh(self.mesh):
                    program()
            except Exception as error:  # what runs the program later shows it in full
                reason = str(error).partition('\n')[0]
                self.progress.note(f'{what} ahead of its use failed: {reason}')

        self.compiler = concurrent.futures.ThreadPoolExecutor(1)
        self.compiling = {
            what: self.compiler.submit(compile_one, what, program)
            for what, program in programs.items()
        }

    def _wait_for_compiler(self, most=None):
        """Until `most` programs, or all, that are compiled ahead are ready; says which are not."""
        for what, future in list(self.compiling.items())[:most]:
            if not future.done():
                self.progress.note(f'{what} ...')
            concurrent.futures.wait([future])

    def close(self):
        """Waits for the program that is being compiled ahead, if any, and drops the others."""
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
        """Waits for steps until only `in_flight` are running, and reports them."""
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
                f'training.max_nan_steps={in_a_row}: so many steps in a row, up to {step}, gave no '
                f'finite loss and gradient; lower optimizer.learning_rate in another --workdir'
            )

        if in_a_row >= self.hparams.training.max_nan_steps:
            multihost.run_on_leader(give_up)

    def _write(self, step, row):
        if self.writer is not None:
            self.writer.write(step, row)

    def _row(self, step, metrics):
        first = step - self.stopwatch.steps
        flops = np.diff([run_flops(self.hparams, self.num_steps, at) for at in (first, step)])[0]
        tokens = self.hparams.data.batch_size * self.hparams.data.sequence_length
        row = {name: np.asarray(x).tolist() for name, x in self._named(metrics).items()}
        rates = self.stopwatch.rates(tokens, float(flops))
        memory = {'peak_memory_bytes': devices.peak_memory()[0]}
        return row | rates | devices.mfu(rates['flops_per_second']) | memory

    def _named(self, metrics):
        """Metrics as one dict; those of a layer or domain have names such as a/layer_01/b."""
        parts = by_layer(self.hparams.model, metrics) | {'domains': metrics.get('domains', {})}
        named = {
            f'{group}/{part}/{name}': value
            for group in parts
            for part, values in parts[group].items()
            for name, value in values.items()
        }
        return {name: value for name, value in metrics.items() if name not in parts} | named
