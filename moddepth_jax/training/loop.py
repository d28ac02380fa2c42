"""The train loop, from hyper-parameters and a directory to a trained state and its summary."""

import contextlib
import dataclasses
import functools
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
from moddepth_jax.training.profile import Profile, check_profiled
from moddepth_jax.training.progress import Progress
from moddepth_jax.training.run_dir import (
    CONFIG_FILE,
    check_writable,
    open_workdir,
    save_source,
    save_tokenizer,
    update_config,
)
from moddepth_jax.training.saved_run import load_teacher
from moddepth_jax.training.summary import (
    SUMMARY_FILE,
    describe,
    initial_metadata,
    parameter_lines,
    summarize,
    write_summary,
)
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
    'training.num_steps',  # above those that are done
    'training.extended_from',
    'flop_budget',
)
IF_EXTENDED = ('optimizer.schedule', 'optimizer.decay_fraction', 'optimizer.final_fraction')
KEPT = (
    *('seconds', 'train_loss', 'learning_rate', 'peak_memory'),
    *('extended', 'metrics', 'metrics_problems', 'teacher'),
)
INFERENCE_ONLY = ('model.routing.cache_capacity', 'model.routing.overflow')  # if top-C trains


@dataclasses.dataclass(frozen=True)
class Run:
    """What `train` returns; if the signal of the name `signal` ended the run early, no summary."""

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
    """Trains to the last step, from where an earlier call in the same workdir stopped.

    On CPUs two calls with equal hyper-parameters, versions, devices and threads end bit-equal,
    however often they were killed in between. Every process of a run calls this.

    `mesh_spec` is as `make_mesh` takes it, `profiled` the steps that `Profile` traces, `wandb` the
    project of W&B that gets the metrics too, `source` the config file, which the run keeps.
    `report_programs` maps an abstract TrainState and the dataset to functions by name, that compile
    in a thread during training what the caller runs after it. Raises ValueError, one line, before
    anything is compiled or written, for a budget, corpus, mesh or workdir that does not fit, or W&B
    not installed; later SaveError and DivergedError.
    """
    multihost.run_on_all(lambda: check_wandb(wandb))
    hparams, before = multihost.run_on_all(lambda: plan_extension(hparams, workdir))
    num_steps, dataset, mesh = multihost.run_on_all(
        lambda: prepare_run(hparams, mesh_spec, workdir)
    )
    multihost.run_on_all(lambda: check_profiled(profiled, num_steps))
    workdir, config = pathlib.Path(workdir), dataclasses.asdict(hparams)
    multihost.check_equal_on_all({'--mesh': mesh_spec, **config, 'text': dataset.fingerprint})
    may_change = MAY_CHANGE + dataset.may_change
    if hparams.model.routing.train_rule == 'top_c':
        may_change += INFERENCE_ONLY
    if 0 < before != num_steps:
        may_change += IF_EXTENDED
    notes = multihost.broadcast_from_leader(lambda: open_workdir(workdir, config, may_change))
    multihost.run_on_all(lambda: check_not_done(hparams, num_steps, before, workdir))
    with contextlib.ExitStack() as stack:
        multihost.run_on_leader(lambda: stack.enter_context(lock_directory(workdir)))
        multihost.check_shared_directory(workdir / CONFIG_FILE)
        folder, keep = workdir / 'checkpoints', hparams.training.keep_checkpoints
        multihost.run_on_leader(lambda: check_writable(folder))
        checkpoints = stack.enter_context(Checkpoints(folder, keep))
        stack.enter_context(multihost.exit_on_lost_process())
        state, metadata, more = restore_or_init(hparams, num_steps, dataset, mesh, checkpoints)
        teacher = load_teacher(hparams, mesh, metadata)
        multihost.run_on_leader(lambda: update_config(workdir, config, metadata['extended']))
        multihost.run_on_leader(lambda: save_source(workdir, source))
        multihost.run_on_leader(lambda: save_tokenizer(workdir, hparams, dataset.tokenizer))
        first_step = int(state.step)
        earlier = functools.partial(keep_earlier, workdir, SUMMARY_FILE)
        if not first_step and (kept := multihost.run_on_leader(earlier)):
            more.append(f'no checkpoint after step 0 in {folder}: starts there; kept: {kept}')
        profile = multihost.run_on_all(lambda: Profile(workdir, profiled, num_steps, first_step))
        with jax.set_mesh(mesh), contextlib.ExitStack() as files:
            files.enter_context(profile)
            progress, writer, log = _open_outputs(files, hparams, workdir, wandb, state, metadata)
            if writer and writer.problem:
                more.append(writer.problem)
                metadata['metrics_problems'] = [*metadata['metrics_problems'], writer.problem]
            outputs = progress, writer, log, report_programs, teacher
            trainer = Trainer(state, metadata, dataset, mesh, profile, *outputs)
            files.callback(trainer.close)
            for line in (
                *describe(hparams, num_steps, state.params, dataset),
                *parameter_lines(state.params),
                *mesh_lines(mesh, state),
                *notes,
                *more,
            ):
                trainer.progress.note(line)
            with PreemptionHandler() as preemption:
                state = trainer.run(preemption, checkpoints)
            step, signal = int(state.step), preemption.signal_name
            if step < num_steps:
                done = f'{signal}: stopped and saved at step {step} of {num_steps}'
                trainer.progress.note(f'{done}; the same command resumes from there')
                return Run(hparams, workdir, state, dataset, None, signal)
            trainer.progress.note('evaluating on held-out text')
            evaluation = trainer.evaluate(num_steps, hparams.evaluation.final_batches)
        summary = summarize(hparams, state, evaluation, dataset, trainer.metadata)
        multihost.run_on_leader(lambda: write_summary(workdir, summary))
    return Run(hparams, workdir, state, dataset, summary)


def _open_outputs(files, hparams, workdir, wandb, state, metadata):
    """Opens what the Trainer writes, to be closed by the ExitStack `files`."""
    num_steps, first_step = state.num_steps, int(state.step)
    tokens = hparams.data.batch_size * hparams.data.sequence_length
    silent = not multihost.is_leader()

    def open_writer():
        sinks = [TensorBoardWriter(workdir, first_step)]
        if wandb:
            sinks.append(WandbWriter(workdir, wandb, dataclasses.asdict(hparams)))
        return files.enter_context(MetricsWriter(workdir, first_step, sinks, metadata['metrics']))

    progress = files.enter_context(Progress(num_steps, first_step, tokens, silent=silent))
    writer, log = multihost.run_on_leader(open_writer), None
    if hparams.data.log_windows:
        log = files.enter_context(WindowLog(workdir, first_step, jax.process_index()))
    return progress, writer, log


def restore_or_init(hparams: Hparams, num_steps: int, dataset, mesh, checkpoints) -> tuple:
    """The state of the newest good checkpoint, or a fresh one, placed by `state_shardings`.

    Returns the TrainState, the metadata of its next checkpoint, and notes for the user. Every
    process calls this. Raises ValueError, one line, for a checkpoint of other data, steps or stage.
    """
    multihost.warm_up_collectives(mesh)
    initial = jax.jit(lambda: init_state(hparams, num_steps))
    abstract = abstract_on_mesh(mesh, jax.eval_shape(initial))
    metadata = initial_metadata(dataset, num_steps, mesh.shape)
    # Runs older than the averages have none.
    restored = checkpoints.restore(abstract, abstract.replace(averages={}))
    if restored is None:
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
        notes.append('no averages in the checkpoint: the rule threshold cannot run')
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
        raise ValueError(f'this run had {found}: FLOPs are counted differently; start anew')
    stage = stage_at(hparams, num_steps, step - 1)._asdict()
    if stored.get('stage', stage) != stage:
        raise ValueError(f'this run was in stage {stored["stage"]} and is in {stage}; start anew')
