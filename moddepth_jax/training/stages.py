"""When the stages of training begin, and what a run of them costs."""

from moddepth_jax.hparams import Hparams, Stage
from moddepth_jax.model.flops import train_step_flops


def stage_starts(hparams: Hparams, num_steps: int) -> list[tuple[int, Stage]]:
    """(first step, stage) in order; a stage too short for a step of its own is left out."""
    starts = {}
    for stage in hparams.stages:
        starts[min(round(stage.begins * num_steps), max(0, num_steps - 1))] = stage
    return sorted(starts.items())


def stage_at(hparams: Hparams, num_steps: int, step: int) -> Stage:
    """The stage that trains step `step`, from 0; past the last one, the last stage."""
    step = max(step, 0)
    return [stage for first, stage in stage_starts(hparams, num_steps) if first <= step][-1]


def run_flops(hparams: Hparams, num_steps: int, steps_done: int | None = None) -> float:
    """Counted FLOPs of the first `steps_done` steps (None: all) of a run of `num_steps`."""
    done = num_steps if steps_done is None else steps_done
    starts = stage_starts(hparams, num_steps)
    ends = [first for first, _ in starts[1:]] + [num_steps]
    return sum(
        max(0, min(end, done) - first) * train_step_flops(hparams, stage)
        for (first, stage), end in zip(starts, ends, strict=True)
    )
