"""Plans a run before anything is compiled or written: its stages, steps, data and mesh."""

import dataclasses
import functools
import itertools
import os
import pathlib

import jax
import numpy as np

from moddepth_jax.data.pipeline import Dataset, make_dataset
from moddepth_jax.data.tokenizers.tokenizer import Tokenizer, tokenizer_of
from moddepth_jax.hparams import Hparams, Stage
from moddepth_jax.model.own_choices import check_own_choices
from moddepth_jax.model.transformer import check_attention, check_dtype
from moddepth_jax.training.mesh import check_mesh, make_mesh
from moddepth_jax.training.optimizer import learning_rate_schedule
from moddepth_jax.training.run_dir import (
    CONFIG_FILE,
    build_stored,
    checkpoint_steps,
    read_config,
)
from moddepth_jax.training.teacher import check_teacher, step_flops
from moddepth_jax.training.trainable import check_trainable


def prepare_run(
    hparams: Hparams, mesh_spec: str, workdir: str | os.PathLike | None = None
) -> tuple[int, Dataset, jax.sharding.Mesh]:
    """Check a run and return its number of steps, dataset and mesh.

    A tokenizer stored in `workdir` takes precedence over `data.tokenizer`. Raises ValueError, one
    line, for a budget, corpus, tokenizer, vocabulary, dtype or mesh that does not fit.
    """
    num_steps = resolve_steps(hparams)
    tokenizer = tokenizer_of(hparams.data, workdir)
    if workdir is not None and (pathlib.Path(workdir) / CONFIG_FILE).exists():
        _check_tokenizer(hparams.data, tokenizer, workdir)
    mesh = make_mesh(mesh_spec)
    check_model(hparams, tokenizer, mesh)
    dataset = make_dataset(hparams.data, hparams.seed, tokenizer=tokenizer)
    return num_steps, dataset, mesh


def _check_tokenizer(data, tokenizer, workdir):
    """Raise ValueError if `data` newly names a tokenizer that is not the one the run stores."""
    if data.tokenizer == (before := read_config(workdir)[0]['data']['tokenizer']):
        return  # also if it is gone: the run has its own copy
    if tokenizer_of(data).sha256 != tokenizer.sha256:
        found = f'differs from {before!r}, the tokenizer of the run in --workdir'
        raise ValueError(f'data.tokenizer={data.tokenizer!r}: {found}; use another --workdir')


def check_model(hparams: Hparams, tokenizer: Tokenizer, mesh: jax.sharding.Mesh):
    """Raise ValueError, one line, if the model does not fit its tokenizer, teacher, or the mesh.

    Also for a dtype or attention that the devices lack, globs that match no parameter, and a router
    or stream of a config file that looks at other tokens.
    """
    check_vocabulary(hparams, tokenizer)
    check_teacher(hparams, tokenizer)
    check_dtype(hparams.model)
    check_attention(hparams)
    check_own_choices(hparams)
    check_trainable(hparams)
    check_mesh(hparams, mesh)


def check_vocabulary(hparams: Hparams, tokenizer: Tokenizer):
    """Raise ValueError if the tokenizer has more ids than the model."""
    if hparams.model.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f'model.vocab_size={hparams.model.vocab_size}: must be at least '
            f'{tokenizer.vocab_size}, the size of data.tokenizer={hparams.data.tokenizer!r}'
        )


def stage_starts(hparams: Hparams, num_steps: int) -> list[tuple[int, Stage]]:
    """Return (first step, stage) of each stage in order; a stage without a step is left out."""
    starts = {hparams.first_step(stage, num_steps): stage for stage in hparams.stages}
    return sorted((first, stage) for first, stage in starts.items() if first < max(1, num_steps))


def stage_at(hparams: Hparams, num_steps: int, step: int) -> Stage:
    """Return the stage of step `step`, counted from 0; after the last step, the last stage."""
    step = max(step, 0)
    return [stage for first, stage in stage_starts(hparams, num_steps) if first <= step][-1]


def loops_at(hparams: Hparams, num_steps: int, step: int) -> int:
    """Return the number of loops drawn for `step` from `training.loops`; 0 if that is empty."""
    counts = hparams.training.loops
    return counts[_draws(hparams.seed, len(counts), num_steps)[step]] if counts else 0


@functools.lru_cache(maxsize=4)
def _draws(seed, num_choices, num_steps):
    """Draw an index below `num_choices` for each step; a longer run begins with the same ones."""
    uniform = np.random.default_rng([seed, 24]).random(num_steps)
    return (num_choices * uniform).astype(int)


def run_flops(hparams: Hparams, num_steps: int, steps_done: int | None = None) -> float:
    """Return the counted FLOPs of the first `steps_done` (None: all) of `num_steps` steps."""
    done = num_steps if steps_done is None else steps_done
    if counts := hparams.training.loops:  # these runs have a single stage
        drawn = np.bincount(_draws(hparams.seed, len(counts), num_steps)[:done])
        each = [step_flops(hparams, loops=loops) for loops in counts]
        return float(sum(n * cost for n, cost in zip(drawn, each, strict=False)))
    starts = [*stage_starts(hparams, num_steps), (num_steps, None)]
    return sum(
        max(0, min(end, done) - first) * step_flops(hparams, stage)
        for (first, stage), (end, _) in itertools.pairwise(starts)
    )


def resolve_steps(hparams: Hparams) -> int:
    """Return the number of steps that `flop_budget` pays for; without it, `training.num_steps`.

    Raises ValueError for a budget below the cost of one step, or for 2^31 steps or more.
    """
    if not hparams.flop_budget:
        return hparams.training.num_steps
    loops = hparams.training.loops or (0,)
    by_loops = [[step_flops(hparams, stage, n) for n in loops] for stage in hparams.stages]
    costs = [sum(each) / len(loops) for each in by_loops]
    if hparams.flop_budget < (cost := max(map(max, by_loops))):
        raise ValueError(
            f'flop_budget={hparams.flop_budget:g}: pays for no step; one step of '
            f'{hparams.data.batch_size} x {hparams.data.sequence_length} tokens costs {cost:.3g}'
        )
    ends = [stage.begins for stage in hparams.stages[1:]] + [1.0]
    shares = [end - stage.begins for stage, end in zip(hparams.stages, ends, strict=True)]
    mean = sum(share * cost for share, cost in zip(shares, costs, strict=True))
    num_steps, begun = int(hparams.flop_budget / mean), hparams.training.extended_from
    if begun and (rest := hparams.flop_budget - run_flops(hparams, begun)) > 0:
        num_steps = begun + int(rest / costs[-1])
    if num_steps >= 2**31:
        right = 'must pay for fewer than 2**31; use a larger model or batch'
        raise ValueError(f'flop_budget={hparams.flop_budget:g}: {num_steps} steps; {right}')
    # The estimate is close but not exact, because stages begin at whole steps.
    while num_steps > 1 and run_flops(hparams, num_steps) > hparams.flop_budget:
        num_steps -= 1
    while run_flops(hparams, num_steps + 1) <= hparams.flop_budget:
        num_steps += 1
    return num_steps


def plan_extension(hparams: Hparams, workdir: str | os.PathLike) -> tuple[Hparams, int]:
    """Return the hyper-parameters to resume the run in `workdir` with, and its planned steps.

    `training.extended_from` is set if the number of steps changes now, or did at an earlier start.
    A run without a checkpoint after step 0 starts again: its planned steps are 0.
    """
    workdir = pathlib.Path(workdir)
    if not checkpoint_steps(workdir):
        return hparams, 0
    stored = build_stored(workdir, read_config(workdir)[0])
    before, begun = resolve_steps(stored), stored.training.extended_from
    for steps in (begun, begun or before):
        training = dataclasses.replace(hparams.training, extended_from=steps)
        hparams = dataclasses.replace(hparams, training=training)
        if resolve_steps(hparams) == before:
            break
    return hparams, before


def check_not_done(hparams: Hparams, num_steps: int, before: int, workdir: str | os.PathLike):
    """Raise ValueError, one line, if the run is shortened to steps that are already done.

    `before` is the number of steps that was planned before, `num_steps` the new one.
    """
    if num_steps < before and num_steps <= (done := max(checkpoint_steps(workdir))):
        knob = f'training.num_steps={num_steps}'
        if hparams.flop_budget:
            knob = f'flop_budget={hparams.flop_budget:g}: pays for {num_steps} steps'
        right = f'{before} resumes it, more extends it; for a shorter run, launch.convert --branch '
        right += f'starts one from an earlier step than {done}'
        raise ValueError(f'{knob}: the run in --workdir has {before} steps; {right}')


def describe_extension(hparams: Hparams, num_steps: int, step: int, skipped: int, stored: dict):
    """Return a line for the user about a run that resumes with another number of steps.

    Args:
      hparams: hyper-parameters of the run.
      num_steps: the new number of steps.
      step: the step of the checkpoint.
      skipped: the steps that were skipped up to there.
      stored: metadata of the checkpoint.
    """
    schedule, old = hparams.optimizer.schedule, stored.get('learning_rate')
    new = float(learning_rate_schedule(hparams, num_steps)(step - skipped))
    how = 'extended' if stored['num_steps'] < num_steps else 'shortened'
    line = f'{how} from step {stored["num_steps"]} to {num_steps}: the learning rate at step '
    line += f'{step} is {new:.3g} under the {schedule} schedule of {num_steps} steps'
    warmup = hparams.optimizer.warmup_fraction * hparams.steps_of_shares(num_steps)
    rises = old and new > 1.01 * old and step - skipped > warmup
    was = f'; it was {old:.3g}' if old else ''
    return line + was + ', so it rises again' * bool(rises)
