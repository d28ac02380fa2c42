"""A run as its directory stores it: hyper-parameters and newest good checkpoint, read-only."""

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
from moddepth_jax.training.run_dir import missing_step, read_hparams
from moddepth_jax.training.teacher import Teacher
from moddepth_jax.training.train_step import TrainState, init_state

MAX_READS = 10  # if a running run removes, each time, the checkpoint that is being read


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """A run at its newest good checkpoint, after `step` of `num_steps`; `load_run` returns it.

    `fingerprint` is that of its data, `notes` are lines for the user.
    """

    hparams: Hparams
    state: TrainState
    step: int
    num_steps: int
    fingerprint: dict
    notes: tuple[str, ...]

    def with_loops(self, loops: int) -> 'SavedRun':
        """The run with another number of loops, without averages, which are those of each loop.

        Raises ValueError if no block is looped, if the model is causal by its averages alone, if
        its parameters are made for so many loops, or if a loop would lack norms or an embedding.
        """
        model = self.hparams.model
        if loops == model.loops:
            return self
        if not model.looped:
            raise ValueError(f'--loops={loops}: no block of this run is looped')
        if causal_routing(self.hparams) == 'threshold':
            right = f'must be {model.loops}: thresholds are averages of scores of each loop'
            raise ValueError(f'--loops={loops}: {right} in training')
        sized = [f'the {model.depth.stream} stream has weights'] * (
            model.depth.stream_class.sized_by_depth
        ) + ['there are routers'] * model.routing.routes_loops
        if sized:
            right = f'must be {model.loops}: {sized[0]} for so many'
            raise ValueError(f'--loops={loops}: {right}')
        if model.sized_by_loops and loops > model.loops:
            right = f'must be at most {model.loops}: each loop has {model.sized_by_loops} of its '
            raise ValueError(f'--loops={loops}: {right}own')
        hparams, state = self.hparams.with_loops(loops), self.state.replace(averages={})
        return dataclasses.replace(self, hparams=hparams, state=state)

    def with_exits(self, threshold: float) -> 'SavedRun':
        """The run whose tokens leave the loops by that threshold; 0: none leaves.

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
        """The run with its adapters merged into the matrices that they belong to."""
        if not self.hparams.model.adapters.rank:
            return self
        params = jax.device_get(self.state.params)
        params |= {'stack': merge_adapters(params['stack'], self.hparams.model)}
        state = self.state.replace(params=params)
        return dataclasses.replace(self, hparams=self.hparams.without_adapters, state=state)

    @property
    def hparams_of_stage(self) -> Hparams:
        """`hparams` with the capacity of the last step, with which to evaluate the model."""
        return self.hparams.at(stage_at(self.hparams, self.num_steps, self.step - 1))


def load_run(
    workdir: str | os.PathLike, mesh: Mesh | None = None, at: int | None = None
) -> SavedRun:
    """Reads a run, finished, stopped or running; takes no lock and writes nothing.

    Every process of a run calls it. The state is placed on the mesh, or on the first device; it is
    that of the newest good checkpoint, or of step `at`. Raises ValueError, one line, as
    `read_hparams` and `Checkpoints.restore`; without a good checkpoint.
    """
    workdir = pathlib.Path(workdir)
    hparams, notes = multihost.run_on_all(lambda: read_hparams(workdir))
    # No shape depends on the number of steps, which only the checkpoint states.
    abstract = jax.eval_shape(lambda: init_state(hparams, 1))
    if mesh is not None:
        multihost.warm_up_collectives(mesh)
        abstract = abstract_on_mesh(mesh, abstract)
    with Checkpoints(workdir / 'checkpoints', keep=1) as checkpoints:
        # Runs older than the averages have none.
        restored = _restore(checkpoints, at, abstract, abstract.replace(averages={}))
    notes += checkpoints.skipped

    def refuse():
        found = f' ({"; ".join(checkpoints.skipped)})' if checkpoints.skipped else ''
        if at is not None:
            raise ValueError(missing_step(workdir, at, found))
        command = f'python -m launch.train --config=FILE.py --workdir={shlex.quote(str(workdir))}'
        right = f'train it first: {command}'
        raise ValueError(f'--workdir={workdir}: holds no finished checkpoint{found}; {right}')

    if restored is None:
        multihost.run_on_leader(refuse)
    state, step, metadata = restored
    num_steps = metadata['num_steps']
    if abstract.averages and not state.averages:
        notes.append(f'checkpoint {step} holds no averages: the rule threshold cannot run')
    state = state.replace(num_steps=num_steps)
    return SavedRun(hparams, state, step, num_steps, metadata['fingerprint'], tuple(notes))


def _restore(checkpoints, at, *abstract_states):
    """`checkpoints.restore`, repeated if a running run has removed what was being read."""
    steps = functools.partial(multihost.broadcast_from_leader, checkpoints.steps)
    for _ in range(MAX_READS):
        before, restored = steps(), None
        try:
            restored = checkpoints.restore(*abstract_states, at=at)
        except Exception:  # of many kinds: Orbax and TensorStore raise their own
            if steps() == before:
                raise
        if restored is not None or steps() == before:
            return restored
    return None


def load_teacher(hparams: Hparams, mesh: Mesh, metadata: dict) -> Teacher | None:
    """The Teacher of a run, on its mesh; None without one. Every process of the run calls this.

    It is the newest checkpoint of training.distill_from, and after the run's first step the one
    that `metadata` names, which gets `teacher`: its `step`, and the `sha256` of its parameters and
    averages. Raises ValueError, one line, if that checkpoint is gone or another.
    """
    folder = hparams.training.distill_from
    if not folder:
        return None
    before = metadata.get('teacher')
    try:
        run = load_run(folder, mesh, before and before['step'])
    except ValueError as error:
        raise ValueError(f'training.distill_from={folder!r}: {error}') from None
    metadata['teacher'] = {'step': run.step, 'sha256': state_sha256(run.state.variables)}

    def check():
        if before not in (None, metadata['teacher']):
            found = f'checkpoint {run.step} is not the one that the run began with'
            raise ValueError(f'training.distill_from={folder!r}: {found}; put that back')

    multihost.run_on_leader(check)
    return Teacher(run.state.variables, run.hparams.at(run.hparams.stages[-1]))
