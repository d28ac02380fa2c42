"""The train loop, from hyper-parameters and a directory to a trained state and its summary."""

import contextlib
import dataclasses
import pathlib

import jax

from moddepth_jax.data.pipeline import Dataset
from moddepth_jax.hparams import Hparams
from moddepth_jax.training import agreement, processes
from moddepth_jax.training.checkpoint import Checkpoints
from moddepth_jax.training.events import Events
from moddepth_jax.training.interruption import Interruption
from moddepth_jax.training.metrics import MetricsWriter
from moddepth_jax.training.parameter_table import parameter_lines
from moddepth_jax.training.plan import describe, prepare
from moddepth_jax.training.profile import Profile
from moddepth_jax.training.progress import Progress
from moddepth_jax.training.run_tokenizer import keep_tokenizer
from moddepth_jax.training.sharding_table import mesh_lines
from moddepth_jax.training.start import start
from moddepth_jax.training.steps import Steps
from moddepth_jax.training.summary import summarise, write_summary
from moddepth_jax.training.train_step import TrainState
from moddepth_jax.training.wandb_run import WandbRun, check_wandb
from moddepth_jax.training.window_log import WindowLog
from moddepth_jax.training.workdir import CONFIG_FILE, WorkdirLock, open_workdir, update_config

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


def train(
    hparams: Hparams,
    workdir,
    mesh_spec: str = '',
    profiled: tuple[int, int] | None = None,
    wandb: str = '',
) -> Run:
    """Trains to the last step, or goes on where an earlier call in the same workdir stopped.

    On CPUs two calls with equal hyper-parameters, versions, devices and threads end bit-equal,
    however often they were killed in between. Where several processes have joined, each of them
    calls this; process 0 alone prints and writes, but for its share of checkpoints.

    Args:
      hparams: of the run.
      workdir: its directory; made if it is not there.
      mesh_spec: see `make_mesh`.
      profiled: steps to trace, see `Profile`; None: none.
      wandb: project of W&B that gets the metrics too; empty: none.

    Raises:
      ValueError: one line, before anything is compiled or written, for a budget, corpus, mesh or
        workdir that does not fit, or W&B that is not there; where a checkpoint could not be
        written.
      Diverged: a ValueError, after `training.max_nan_steps` non-finite steps in a row.
    """
    agreement.together(lambda: check_wandb(wandb))
    num_steps, dataset, mesh = agreement.together(lambda: prepare(hparams, mesh_spec, workdir))
    config = dataclasses.asdict(hparams)
    agreement.check_alike({'--mesh': mesh_spec, **config, 'text': dataset.fingerprint})
    may_change = MAY_CHANGE + dataset.may_change
    if hparams.model.routing.train_rule == 'top_c':
        may_change += INFERENCE_ONLY
    older = agreement.from_first(lambda: open_workdir(workdir, config, may_change))
    workdir, first = pathlib.Path(workdir), processes.is_first()
    with contextlib.ExitStack() as held:
        agreement.on_first(lambda: held.enter_context(WorkdirLock(workdir)))
        agreement.check_shared(workdir / CONFIG_FILE)
        keep = hparams.training.keep_checkpoints
        checkpoints = held.enter_context(Checkpoints(workdir / 'checkpoints', keep))
        held.enter_context(processes.ended_by_loss())
        state, metadata, news = start(hparams, num_steps, dataset, mesh, checkpoints)
        agreement.from_first(lambda: update_config(workdir, config))
        agreement.from_first(lambda: keep_tokenizer(workdir, hparams, dataset.tokenizer))
        profile = agreement.together(lambda: Profile(workdir, profiled, num_steps, int(state.step)))
        first_step, tokens = int(state.step), hparams.data.batch_size * hparams.data.sequence_length
        with (
            jax.set_mesh(mesh),
            contextlib.ExitStack() as files,
            Progress(num_steps, first_step, tokens, silent=not first) as progress,
        ):

            def open_writer():
                sinks = [Events(workdir, first_step)]
                if wandb:
                    sinks.append(WandbRun(workdir, wandb, config))
                return files.enter_context(MetricsWriter(workdir, first_step, sinks))

            writer = agreement.on_first(open_writer)
            profile = files.enter_context(profile)
            log = None
            if hparams.data.log_windows:
                log = files.enter_context(WindowLog(workdir, first_step, jax.process_index()))
            lines = describe(hparams, num_steps, state.params, dataset)
            lines += parameter_lines(state.params)
            for line in (*lines, *mesh_lines(mesh, state), *older, *news):
                progress.note(line)
            steps = Steps(
                state, metadata, hparams, num_steps, dataset, mesh, writer, progress, log, profile
            )
            with Interruption() as interruption:
                state = steps.run(interruption, checkpoints)
            step = int(state.step)
            if step < num_steps:
                done = f'{interruption.requested}: stopped and saved at step {step} of {num_steps}'
                progress.note(f'{done}; the same command goes on from there')
                return Run(hparams, workdir, state, dataset, None, interruption.requested)
            progress.note('evaluating on held-out text, then counting the FLOPs of the traced step')
            evaluation = steps.evaluate(num_steps, hparams.evaluation.final_batches)
        summary = summarise(hparams, state, evaluation, dataset, steps.metadata)
        agreement.from_first(lambda: write_summary(workdir, summary))
    return Run(hparams, workdir, state, dataset, summary)
