"""Writes a run as training would, without training."""

import dataclasses
import functools

import jax

from moddepth_jax.training.checkpoint import Checkpoints
from moddepth_jax.training.run_dir import open_workdir
from moddepth_jax.training.train_step import init_state


def save_run(path, hparams, step=4):
    """Write step `step` of a run of 4, whose state is the one that training begins with."""
    state = jax.jit(functools.partial(init_state, hparams, 4))()
    open_workdir(path, dataclasses.asdict(hparams))
    with Checkpoints(path / 'checkpoints', keep=1) as checkpoints:
        checkpoints.save(step, state, {'num_steps': 4, 'fingerprint': {}})
