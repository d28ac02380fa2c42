"""About how long a study will take, from a few steps of one of its models."""

import time

import jax

from moddepth_jax.data.pipeline import make_dataset
from moddepth_jax.hparams import Hparams
from moddepth_jax.model.flops import train_step_flops
from moddepth_jax.training.mesh import make_mesh, shard_batch
from moddepth_jax.training.train_step import init_state, train_step

PROGRAMS = 3  # that a run compiles, of about the cost of one train step: two evaluations besides
_STEPS = 5  # to time, fewer where they take longer than
_SECONDS = 5.0


def rates(hparams: Hparams) -> tuple[float, float]:
    """Counted FLOPs a second of training, and seconds that a run takes besides.

    Args:
      hparams: of a run like those that are to come.
    """
    mesh = make_mesh('')
    with jax.set_mesh(mesh):
        batch = shard_batch(mesh, make_dataset(hparams.data, hparams.seed).train_batch(0))
        state = jax.jit(lambda: init_state(hparams, _STEPS))()
        begin = time.perf_counter()
        step_fn = jax.jit(train_step, donate_argnums=0).lower(state, batch).compile()
        compiling = time.perf_counter() - begin

        seconds = []
        while len(seconds) < _STEPS and sum(seconds) < _SECONDS:
            begin = time.perf_counter()
            state, _ = jax.block_until_ready(step_fn(state, batch))
            seconds.append(time.perf_counter() - begin)
    flops_per_second = train_step_flops(hparams) / min(seconds)
    # A held-out batch passes forward twice, by the causal rule and by top-C: two thirds of a step.
    evaluating = 2 / 3 * train_step_flops(hparams) * hparams.evaluation.final_batches
    return flops_per_second, PROGRAMS * compiling + evaluating / flops_per_second
