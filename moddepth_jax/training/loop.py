"""The train loop, from hyper-parameters and a directory to a trained state and its summary."""

import contextlib
import dataclasses
import pathlib

import jax

from moddepth_jax.data.pipeline import Dataset, check_fingerprint
from moddepth_jax.hparams import Hparams
from moddepth_jax.training import multihost
from moddepth_jax.training.checkpoint import Checkpoints
from moddepth_jax.training.mesh import mesh_lines, state_shardings
from moddepth_jax.training.metrics import (
    MetricsWriter,
    TensorBoardWriter,
    WandbWriter,
    WindowLog,
    check_wandb,
)
from moddepth_jax.training.plan import describe, prepare_run
from moddepth_jax.training.preemption import PreemptionHandler
from moddepth_jax.training.profile import Profile
from moddepth_jax.training.progress import Progress
from moddepth_jax.training.run_dir import (
    CONFIG_FILE,
    WorkdirLock,
    open_workdir,
    save_tokenizer,
    update_config,
)
from moddepth_jax.training.saved_run import restore_state
from moddepth_jax.training.stages import stage_at
from moddepth_jax.training.summary import parameter_lines, summarize, versions, write_summary
from moddepth_jax.training.train_step import TrainState, init_state
from moddepth_jax.training.trainer import Trainer

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
    multihost.run_on_all(lambda: check_wandb(wandb))
    num_steps, dataset, mesh = multihost.run_on_all(
        lambda: prepare_run(hparams, mesh_spec, workdir)
    )
    config = dataclasses.asdict(hparams)
    multihost.check_equal_on_all({'--mesh': mesh_spec, **config, 'text': dataset.fingerprint})
    may_change = MAY_CHANGE + dataset.may_change
    if hparams.model.routing.train_rule == 'top_c':
        may_change += INFERENCE_ONLY
    older = multihost.broadcast_from_leader(lambda: open_workdir(workdir, config, may_change))
    workdir, first = pathlib.Path(workdir), multihost.is_leader()
    with contextlib.ExitStack() as held:
        multihost.run_on_leader(lambda: held.enter_context(WorkdirLock(workdir)))
        multihost.check_shared_directory(workdir / CONFIG_FILE)
        keep = hparams.training.keep_checkpoints
        checkpoints = held.enter_context(Checkpoints(workdir / 'checkpoints', keep))
        held.enter_context(multihost.exit_on_lost_process())
        state, metadata, news = restore_or_init(hparams, num_steps, dataset, mesh, checkpoints)
        multihost.broadcast_from_leader(lambda: update_config(workdir, config))
        multihost.broadcast_from_leader(lambda: save_tokenizer(workdir, hparams, dataset.tokenizer))
        profile = multihost.run_on_all(
            lambda: Profile(workdir, profiled, num_steps, int(state.step))
        )
        first_step, tokens = int(state.step), hparams.data.batch_size * hparams.data.sequence_length
        with (
            jax.set_mesh(mesh),
            contextlib.ExitStack() as files,
            Progress(num_steps, first_step, tokens, silent=not first) as progress,
        ):

            def open_writer():
                sinks = [TensorBoardWriter(workdir, first_step)]
                if wandb:
                    sinks.append(WandbWriter(workdir, wandb, config))
                return files.enter_context(MetricsWriter(workdir, first_step, sinks))

            writer = multihost.run_on_leader(open_writer)
            profile = files.enter_context(profile)
            log = None
            if hparams.data.log_windows:
                log = files.enter_context(WindowLog(workdir, first_step, jax.process_index()))
            lines = describe(hparams, num_steps, state.params, dataset)
            lines += parameter_lines(state.params)
            for line in (*lines, *mesh_lines(mesh, state), *older, *news):
                progress.note(line)
            steps = Trainer(
                state, metadata, hparams, num_steps, dataset, mesh, writer, progress, log, profile
            )
            with PreemptionHandler() as interruption:
                state = steps.run(interruption, checkpoints)
            step = int(state.step)
            if step < num_steps:
                done = f'{interruption.requested}: stopped and saved at step {step} of {num_steps}'
                progress.note(f'{done}; the same command goes on from there')
                return Run(hparams, workdir, state, dataset, None, interruption.requested)
            progress.note('evaluating on held-out text, then counting the FLOPs of the traced step')
            evaluation = steps.evaluate(num_steps, hparams.evaluation.final_batches)
        summary = summarize(hparams, state, evaluation, dataset, steps.metadata)
        multihost.broadcast_from_leader(lambda: write_summary(workdir, summary))
    return Run(hparams, workdir, state, dataset, summary)


def restore_or_init(hparams: Hparams, num_steps: int, dataset, mesh, checkpoints) -> tuple:
    """The newest good state or that before step 0, where `state_shardings` wants it.

    Every process of a run has to call it.

    Returns:
      The TrainState; the dict that its next checkpoint carries; lines of news for the user.

    Raises:
      ValueError: one line, for a checkpoint of other data, steps or stage.
    """
    multihost.warm_up_collectives(mesh)
    initial = jax.jit(lambda: init_state(hparams, num_steps))
    abstract = jax.eval_shape(initial)
    shardings = state_shardings(mesh, abstract)
    abstract = jax.tree.map(lambda leaf, to: leaf.update(sharding=to), abstract, shardings)
    here = versions() | {'processes': str(jax.process_count())}
    here |= {f'mesh axis {axis}': str(size) for axis, size in mesh.shape.items()}
    metadata = {
        'fingerprint': dataset.fingerprint,
        'num_steps': num_steps,
        'versions': here,
        'seconds': 0.0,
        'train_loss': None,
    }
    restored = restore_state(checkpoints, abstract)
    if restored is None:
        return jax.jit(initial, out_shardings=shardings)(), metadata, checkpoints.skipped
    state, step, stored = restored
    multihost.broadcast_from_leader(lambda: _check(stored, metadata, hparams, step))
    news = [*checkpoints.skipped, f'resuming after step {step}']
    if abstract.averages and not state.averages:
        news.append('no averages in the checkpoint: the rule threshold cannot run')
    for name, was in stored['versions'].items():
        if here.get(name) != was:
            news.append(f'{name} was {was}, is {here.get(name)}: bits may differ from here on')
    carried = {name: stored[name] for name in ('seconds', 'train_loss')}
    return state, metadata | carried, news


def _check(stored, metadata, hparams, step):
    """Raises ValueError where a run cannot go on from what a checkpoint says of itself."""
    check_fingerprint(stored['fingerprint'], metadata['fingerprint'])
    num_steps = metadata['num_steps']
    if stored['num_steps'] != num_steps:
        found = f'{stored["num_steps"]} steps when it began and {num_steps} now'
        raise ValueError(f'this run was to take {found}: FLOPs are counted otherwise; start anew')
    stage = stage_at(hparams, num_steps, step - 1)._asdict()
    if stored.get('stage', stage) != stage:
        raise ValueError(f'this run was in stage {stored["stage"]} and is in {stage}; start anew')
