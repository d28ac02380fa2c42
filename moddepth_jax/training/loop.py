"""A training run, from hyper-parameters and a directory to a trained state and its summary."""

import contextlib
import dataclasses
import pathlib

import jax

from moddepth_jax.data.directory import lock_directory
from moddepth_jax.data.pipeline import Dataset, check_fingerprint
from moddepth_jax.hparams import Hparams
from moddepth_jax.training import multihost
from moddepth_jax.training.checkpoint import Checkpoints
from moddepth_jax.training.mesh import abstract_on_mesh, mesh_lines
from moddepth_jax.training.metrics import (
    MetricsWriter,
    TensorBoardWriter,
    WandbWriter,
    WindowLog,
    check_wandb,
    keep_earlier,
)
from moddepth_jax.training.plan import (
    check_not_done,
    describe_extension,
    plan_extension,
    prepare_run,
    stage_at,
)
from moddepth_jax.training.preemption import PreemptionHandler
from moddepth_jax.training.profile import PROFILE_DIRECTORY, Profile, check_profiled
from moddepth_jax.training.progress import Progress
from moddepth_jax.training.run_dir import (
    SUMMARY_FILE,
    check_fresh,
    check_source,
    check_writable,
    has_teacher,
    open_workdir,
    save_source,
    save_tokenizer,
    update_config,
)
from moddepth_jax.training.saved_run import load_teacher
from moddepth_jax.training.summary import (
    describe,
    initial_metadata,
    parameter_lines,
    summarize,
    write_summary,
)
from moddepth_jax.training.train_step import TrainState, init_state
from moddepth_jax.training.trainer import Trainer

MAY_CHANGE = (  # knobs that a resumed run may change: no trained bit depends on them
    'evaluation',
    'report',
    'data.log_windows',
    'training.log_every',
    'training.checkpoint_every',
    'training.keep_checkpoints',
    'training.max_unsharded',
    'training.compilation_cache',
    'training.num_steps',  # to more than the steps that are done
    'training.extended_from',
    'flop_budget',
)
IF_EXTENDED = ('optimizer.schedule', 'optimizer.decay_fraction', 'optimizer.final_fraction')
IF_TOP_C = ('model.routing.cache_capacity', 'model.routing.overflow')  # used in inference only
IF_MOVED = ('training.distill_from',)  # a directory; `load_teacher` compares what it holds
KEPT = (  # metadata that a resumed run takes over
    *('seconds', 'train_loss', 'learning_rate', 'peak_memory'),
    *('extended', 'metrics', 'metrics_problems', 'teacher'),
)


@dataclasses.dataclass(frozen=True)
class Run:
    """The result of `train`. A run that a signal stopped has no summary, but the signal's name.

    The capacity in `hparams` of a finished run is that of its last step.
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
    source: str | None = None,
    report_programs=None,
) -> Run:
    """Train to the last step, or resume where an earlier call in the same workdir stopped.

    On CPUs, two calls with equal hyper-parameters, versions, devices and threads end with the same
    bits, however often they were killed in between. Every process of a run calls this.

    Args:
      hparams: hyper-parameters of the run.
      workdir: directory of the run, new or of an earlier call.
      mesh_spec: as in `make_mesh`.
      profiled: (first, last) of the steps that `Profile` traces.
      wandb: project of Weights & Biases that also gets the metrics; '' for none.
      source: config file, of which the run keeps a copy.
      report_programs: maps an abstract TrainState and the dataset to {name: function}. The
        functions compile what the caller runs after training; a thread calls them during it.

    Raises:
      ValueError: one line, before anything is compiled or written, for a budget, corpus, mesh,
        workdir or source that does not fit, or if W&B is not installed.
      SaveError, DivergedError: during training.
    """
    workdir = pathlib.Path(workdir)

    def check_and_plan():
        check_wandb(wandb)
        planned, steps_before = plan_extension(hparams, workdir)
        num_steps, dataset, mesh = prepare_run(planned, mesh_spec, workdir)
        check_profiled(profiled, num_steps)
        return planned, steps_before, num_steps, dataset, mesh

    hparams, steps_before, num_steps, dataset, mesh = multihost.run_on_all(check_and_plan)
    config = dataclasses.asdict(hparams)
    multihost.check_equal_on_all({'--mesh': mesh_spec, **config, 'text': dataset.fingerprint})
    may_change = MAY_CHANGE + dataset.may_change
    if hparams.model.routing.train_rule == 'top_c':
        may_change += IF_TOP_C
    if 0 < steps_before != num_steps:
        may_change += IF_EXTENDED

    def open_run():
        moved = IF_MOVED if hparams.training.distill_from and has_teacher(workdir) else ()
        lines = open_workdir(workdir, config, may_change + moved)  # writes to a new run only
        check_source(workdir, source, hparams)
        return lines

    notes = multihost.broadcast_from_leader(open_run)
    multihost.run_on_all(lambda: check_not_done(hparams, num_steps, steps_before, workdir))

    with contextlib.ExitStack() as stack:
        # The lock keeps other runs out of the directory until this one ends.
        multihost.run_on_leader(lambda: stack.enter_context(lock_directory(workdir)))
        multihost.check_shared_directory(workdir)
        folder = workdir / 'checkpoints'
        multihost.run_on_leader(lambda: check_writable(folder))
        if profiled:
            multihost.run_on_leader(lambda: check_writable(workdir / PROFILE_DIRECTORY))
        checkpoints = stack.enter_context(Checkpoints(folder, hparams.training.keep_checkpoints))
        stack.enter_context(multihost.exit_on_lost_process())

        state, metadata, more = restore_or_init(hparams, num_steps, dataset, mesh, checkpoints)
        notes = [*notes, *more]
        first_step = int(state.step)
        had_teacher = 'teacher' in metadata
        teacher = load_teacher(hparams, mesh, metadata)
        if teacher and not had_teacher:
            found = f'{hparams.training.distill_from} at step {metadata["teacher"]["step"]}'
            notes.append(f'teacher {found}: keep this checkpoint until the run has ended')

        with jax.set_mesh(mesh), contextlib.ExitStack() as outputs:
            profile = outputs.enter_context(Profile(workdir, profiled, num_steps))
            if profiled and profiled[1] <= first_step:
                steps = ':'.join(map(str, profiled))
                notes.append(f'--profile={steps}: these steps are done, so there is no new trace')

            tokens = hparams.data.batch_size * hparams.data.sequence_length
            silent = not multihost.is_leader()
            progress = outputs.enter_context(Progress(num_steps, first_step, tokens, silent=silent))

            def open_files():
                sinks = _open_sinks(workdir, state, wandb)  # first, since W&B may fail to start
                update_config(workdir, config, metadata['extended'])
                save_source(workdir, source)
                save_tokenizer(workdir, hparams, dataset.tokenizer)
                # A run that goes on is not finished, also if it was before its extension.
                goes_on = first_step < num_steps
                kept = keep_earlier(workdir, SUMMARY_FILE, first_step) if goes_on else ''
                # After `keep_earlier`, since it drops later rows.
                writer = MetricsWriter(workdir, first_step, sinks, metadata['metrics'])
                return outputs.enter_context(writer), kept

            writer, kept = multihost.run_on_leader(open_files) or (None, '')
            if kept:
                again = f'no checkpoint after step 0 in {folder}: starts there; '
                notes.append(f'{"" if first_step else again}kept: {kept}')

            log = None
            if hparams.data.log_windows:
                log = outputs.enter_context(WindowLog(workdir, first_step, jax.process_index()))
            if writer and writer.problem:
                notes.append(writer.problem)
                metadata['metrics_problems'] = [*metadata['metrics_problems'], writer.problem]

            for line in (
                *describe(hparams, num_steps, state.params, dataset),
                *parameter_lines(state.params),
                *mesh_lines(mesh, state),
                *notes,
            ):
                progress.note(line)

            trainer = Trainer(
                state=state,
                metadata=metadata,
                dataset=dataset,
                mesh=mesh,
                profile=profile,
                progress=progress,
                writer=writer,
                log=log,
                report_programs=report_programs,
                teacher=teacher,
            )
            outputs.callback(trainer.close)
            with PreemptionHandler() as preemption:
                state = trainer.run(preemption, checkpoints)
            step, signal = int(state.step), preemption.signal_name
            if signal or step < num_steps:
                done = f'{signal}: stopped and saved at step {step} of {num_steps}'
                progress.note(f'{done}; the same command resumes from there')
                return Run(hparams, workdir, state, dataset, None, signal)

            progress.note('evaluating on held-out text')
            evaluation = trainer.evaluate(num_steps, hparams.evaluation.final_batches)
        summary = summarize(hparams, state, evaluation, dataset, metadata)
        multihost.run_on_leader(lambda: write_summary(workdir, summary))
    # A run that ends before its last stage never had the capacity of that stage.
    trained = hparams.at(stage_at(hparams, num_steps, step - 1))
    return Run(trained, workdir, state, dataset, summary)


def _open_sinks(workdir, state, wandb):
    """Return what gets the rows of metrics: TensorBoard and, if named, W&B."""
    sinks = [TensorBoardWriter(workdir, int(state.step))]
    if wandb:
        sinks.append(WandbWriter(workdir, wandb, dataclasses.asdict(state.hparams)))
    return sinks


def restore_or_init(hparams: Hparams, num_steps: int, dataset, mesh, checkpoints) -> tuple:
    """Restore the newest good checkpoint, or make a fresh state; placed by `state_shardings`.

    Every process calls this. Returns (TrainState, metadata of its next checkpoint, lines for the
    user). Raises ValueError, one line, for a checkpoint of other data, steps or stage, and without
    a good one in a run that launch.convert made.
    """
    multihost.warm_up_collectives(mesh)
    initial = jax.jit(lambda: init_state(hparams, num_steps))
    abstract = abstract_on_mesh(mesh, jax.eval_shape(initial))
    metadata = initial_metadata(dataset, num_steps, mesh.shape)
    # Runs that are older than the averages have none.
    restored = checkpoints.restore(abstract, abstract.replace(averages={}))
    if restored is None:
        run = checkpoints.directory.parent
        begun = hparams.training.extended_from
        multihost.run_on_leader(lambda: check_fresh(run, checkpoints.skipped, begun))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        return jax.jit(initial, out_shardings=shardings)(), metadata, checkpoints.skipped
    state, step, stored = restored
    multihost.run_on_leader(lambda: _check_metadata(stored, metadata, hparams, step))
    notes = [*checkpoints.skipped, f'resuming after step {step}']
    metadata |= {name: stored[name] for name in KEPT if name in stored}
    if step and stored['num_steps'] != num_steps:
        skipped = int(state.skipped)
        notes.append(describe_extension(hparams, num_steps, step, skipped, stored))
        extension = {'step': step, 'num_steps': num_steps}
        metadata['extended'] = [*metadata['extended'], extension]
    if abstract.averages and not state.averages:
        notes.append('the checkpoint has no averages: the rule threshold cannot run')
    for name, old in stored['versions'].items():
        new = metadata['versions'].get(name)
        if new != old:
            notes.append(f'{name} was {old}, is {new}: bits may differ from here on')
    return state, metadata, notes


def _check_metadata(stored, metadata, hparams, step):
    check_fingerprint(stored['fingerprint'], metadata['fingerprint'])
    num_steps, before = metadata['num_steps'], stored['num_steps']
    extended = not step or hparams.training.extended_from and step < num_steps
    if before != num_steps and not extended:
        found = f'{before} steps when it began and has {num_steps} now'
        right = 'FLOPs are counted differently; start again in another --workdir'
        raise ValueError(f'this run had {found}: {right}')
    stage = stage_at(hparams, num_steps, step - 1)._asdict()
    if stored.get('stage', stage) != stage:
        right = 'start again in another --workdir'
        raise ValueError(f'this run was in stage {stored["stage"]} and is in {stage}; {right}')
