"""Reads a saved run: its hyper-parameters and its newest good checkpoint."""

import dataclasses
import functools
import os
import pathlib
import shlex

import jax
from jax.sharding import Mesh

from moddepth_jax.hparams import Hparams, checks
from moddepth_jax.hparams.rules import causal_routing
from moddepth_jax.model.adapters import merge_adapters
from moddepth_jax.training import multihost
from moddepth_jax.training.checkpoint import Checkpoints, state_sha256
from moddepth_jax.training.mesh import abstract_on_mesh
from moddepth_jax.training.plan import stage_at
from moddepth_jax.training.run_dir import CONFIG_FILE, missing_step, read_hparams
from moddepth_jax.training.teacher import Teacher
from moddepth_jax.training.train_step import TrainState, init_state

MAX_READS = 10  # attempts, while a running run removes the checkpoint that is being read


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """A run at its newest good checkpoint; the result of `load_run`.

    Attributes:
      hparams: hyper-parameters of the run.
      state: TrainState of the checkpoint.
      step, num_steps: steps done, and steps of the whole run.
      fingerprint: fingerprint of the data.
      notes: lines for the user.
    """

    hparams: Hparams
    state: TrainState
    step: int
    num_steps: int
    fingerprint: dict
    notes: tuple[str, ...]

    def with_loops(self, loops: int) -> 'SavedRun':
        """Return the run with another number of loops, without averages, which belong to loops.

        Raises ValueError if no block is looped, if the causal rule needs the averages, if the
        parameters fit one number of loops only, or if a loop would lack norms or an embedding.
        """
        model = self.hparams.model
        if loops == model.loops:
            return self
        problem = ''
        if not model.looped:
            problem = 'no block of this run is looped'
        elif causal_routing(self.hparams) == 'threshold':
            problem = f'must be {model.loops}: each loop has its own thresholds from training'
        elif model.depth.stream_class.sized_by_depth:
            problem = f'must be {model.loops}: the {model.depth.stream} stream has weights for each'
        elif model.routing.routes_loops:
            problem = f'must be {model.loops}: each loop has its own router'
        elif model.sized_by_loops and loops > model.loops:
            problem = f'must be at most {model.loops}: each loop has its own {model.sized_by_loops}'
        if problem:
            raise ValueError(f'--loops={loops}: {problem}')
        hparams, state = self.hparams.with_loops(loops), self.state.replace(averages={})
        return dataclasses.replace(self, hparams=hparams, state=state)

    def with_exits(self, threshold: float) -> 'SavedRun':
        """Return the run with this threshold, by which tokens exit the loops; 0: no token exits.

        Raises ValueError, one line, for a threshold or a model that does not fit.
        """
        flag = f'--exit_threshold={threshold:g}'
        checks.positive('--exit_threshold', float(threshold), 0)
        if not self.hparams.model.looped:
            raise ValueError(f'{flag}: no block of this run is looped')
        try:
            model = dataclasses.replace(self.hparams.model, loop_exit_threshold=float(threshold))
        except ValueError as error:
            raise ValueError(f'{flag}: {error}') from None
        return dataclasses.replace(self, hparams=dataclasses.replace(self.hparams, model=model))

    @property
    def merged(self) -> 'SavedRun':
        """The run with its adapters merged into their matrices."""
        if not self.hparams.model.adapters.rank:
            return self
        params = jax.device_get(self.state.params)
        params |= {'stack': merge_adapters(params['stack'], self.hparams.model)}
        state = self.state.replace(params=params)
        return dataclasses.replace(self, hparams=self.hparams.without_adapters, state=state)

    @property
    def hparams_of_stage(self) -> Hparams:
        """`hparams` with the capacity of the last step, for evaluation."""
        return self.hparams.at(stage_at(self.hparams, self.num_steps, self.step - 1))


def load_run(
    workdir: str | os.PathLike, mesh: Mesh | None = None, at: int | None = None
) -> SavedRun:
    """Load a run, which may be finished, stopped or running; takes no lock and writes nothing.

    Every process calls this. The state is that of the newest good checkpoint, or of step `at`, and
    is placed on the mesh, or without one on the first device. Raises ValueError, one line, like
    `read_hparams` and `Checkpoints.restore`, or if there is no good checkpoint.
    """
    workdir = pathlib.Path(workdir)
    hparams, notes = multihost.run_on_all(lambda: read_hparams(workdir))
    # The checkpoint states the number of steps; no shape depends on it.
    abstract = jax.eval_shape(lambda: init_state(hparams, 1))
    if mesh is not None:
        multihost.warm_up_collectives(mesh)
        abstract = abstract_on_mesh(mesh, abstract)
    with Checkpoints(workdir / 'checkpoints', keep=1) as checkpoints:
        # Runs that are older than the averages have none.
        restored = _restore(checkpoints, at, abstract, abstract.replace(averages={}))
    notes += checkpoints.skipped

    def refuse():
        found = f' ({"; ".join(checkpoints.skipped)})' if checkpoints.skipped else ''
        if at is not None:
            raise ValueError(missing_step(workdir, at, found))
        config = shlex.quote(str(workdir / CONFIG_FILE))
        command = f'python -m launch.train --config={config} --workdir={shlex.quote(str(workdir))}'
        right = f'train it first: {command}'
        raise ValueError(f'--workdir={workdir}: holds no finished checkpoint{found}; {right}')

    if restored is None:
        multihost.run_on_leader(refuse)
    state, step, metadata = restored
    num_steps = metadata['num_steps']
    if abstract.averages and not state.averages:
        notes.append(f'checkpoint {step} has no averages: the rule threshold cannot run')
    state = state.replace(num_steps=num_steps)
    return SavedRun(hparams, state, step, num_steps, metadata['fingerprint'], tuple(notes))


def _restore(checkpoints, at, *abstract_states):
    """Call `checkpoints.restore`, again if a running run removed what was being read."""
    steps = functools.partial(multihost.broadcast_from_leader, checkpoints.steps)
    for _ in range(MAX_READS):
        before, restored = steps(), None
        try:
            restored = checkpoints.restore(*abstract_states, at=at)
        except Exception:  # Orbax and TensorStore raise errors of many kinds
            if steps() == before:
                raise
        if restored is not None or steps() == before:
            return restored
    return None


def load_teacher(hparams: Hparams, mesh: Mesh, metadata: dict) -> Teacher | None:
    """Load the Teacher of a run onto its mesh; None without a teacher. Every process calls this.

    The first time, it is the newest checkpoint of training.distill_from, and `metadata` gets
    `teacher`: the `step`, and the `sha256` of the parameters and averages. From then on it is that
    checkpoint. Raises ValueError, one line, if it is missing, has changed, or has not reached the
    last stage of its training, whose capacity a teacher has.
    """
    folder = hparams.training.distill_from
    if not folder:
        return None
    before = metadata.get('teacher')
    try:
        run = load_run(folder, mesh, before and before['step'])
    except ValueError as error:
        began = f'; this run began with checkpoint {before["step"]}: restore it' if before else ''
        raise ValueError(f'training.distill_from={folder!r}: {error}{began}') from None
    at_end = run.hparams.at(run.hparams.stages[-1])
    metadata['teacher'] = {'step': run.step, 'sha256': state_sha256(run.state.variables)}

    def check():
        if before not in (None, metadata['teacher']):
            found = f'checkpoint {run.step} is not the one that the run began with; restore that'
            raise ValueError(f'training.distill_from={folder!r}: {found}')
        capacity, last = (some.model.routing.capacity for some in (run.hparams_of_stage, at_end))
        if capacity != last:
            found = f'its capacity is {capacity:g} at step {run.step} of {run.num_steps}'
            right = f'must be {last:g}, as at its end; train it further first'
            raise ValueError(f'training.distill_from={folder!r}: {found}; {right}')

    multihost.run_on_leader(check)
    return Teacher(run.state.variables, at_end)
