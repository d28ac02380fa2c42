"""How long a training step takes: dense, routed, and written out by hand, in turn."""

import dataclasses
import functools
import time

import jax
import numpy as np

from moddepth_jax.benchmarks.plain_step import plain_carry, plain_step
from moddepth_jax.benchmarks.timing import time_interleaved
from moddepth_jax.data.pipeline import make_dataset
from moddepth_jax.hparams import Hparams
from moddepth_jax.model.flops import train_step_flops
from moddepth_jax.training.mesh import make_mesh, shard_batch
from moddepth_jax.training.summary import versions
from moddepth_jax.training.train_step import init_state, train_step

NUM_STEPS = 1000  # of the schedule that the timed steps belong to


def _library(hparams):
    state = jax.jit(lambda: init_state(hparams, NUM_STEPS))()
    step_fn = jax.jit(train_step, donate_argnums=0)

    def step(batch):
        nonlocal state
        state, metrics = step_fn(state, batch)
        return metrics['loss']

    return step


def _by_hand(hparams):
    carry = plain_carry(jax.jit(lambda: init_state(hparams, NUM_STEPS))().params)

    def step(batch):
        nonlocal carry
        carry, loss = plain_step(carry, batch, hparams=hparams, num_steps=NUM_STEPS)
        return loss

    return step


def _with_length(hparams: Hparams, length: int, tokens: int) -> Hparams:
    if tokens % length:
        raise ValueError(f'--tokens={tokens}: must be a multiple of every length, {length} is not')
    data = dataclasses.replace(hparams.data, sequence_length=length, batch_size=tokens // length)
    return dataclasses.replace(hparams, data=data)


def bench_step(dense: Hparams, routed: Hparams, lengths, tokens: int, repeats: int) -> dict:
    """Times one training step of both models at equal batch tokens, in turn.

    Args:
      dense, routed: two models of the same shape.
      lengths: sequence lengths; each divides `tokens`.
      tokens: of a batch.
      repeats: rounds that are timed.

    Returns:
      dict with `versions`, and `rows`: one per length with median seconds of dense, routed, and
      each by hand; `flops`; `realised_saving`, the median over rounds of (dense / routed time) over
      (dense / routed FLOPs); `over_by_hand`, the median over rounds of library / by-hand time;
      `data_wait_fraction`, time to fetch and place a batch over the routed step's time.
    """
    mesh = make_mesh()
    rows = []
    for length in lengths:
        models = {
            'dense': _with_length(dense, length, tokens),
            'routed': _with_length(routed, length, tokens),
        }
        data = make_dataset(models['dense'].data, dense.seed)
        batch = shard_batch(mesh, data.train_batch(0))
        steps = {name: _library(hparams) for name, hparams in models.items()}
        steps |= {f'{name}_by_hand': _by_hand(hparams) for name, hparams in models.items()}
        calls = {name: functools.partial(step, batch) for name, step in steps.items()}
        seconds = time_interleaved(calls, repeats)
        flops = {name: train_step_flops(hparams) for name, hparams in models.items()}
        saving = seconds['dense'] / seconds['routed'] / (flops['dense'] / flops['routed'])
        begin = time.perf_counter()
        for index in range(20):
            jax.block_until_ready(shard_batch(mesh, data.train_batch(index)))
        wait = (time.perf_counter() - begin) / 20
        rows.append(
            {
                'length': length,
                'batch': tokens // length,
                'seconds': {name: float(np.median(values)) for name, values in seconds.items()},
                'flops': flops,
                'realised_saving': float(np.median(saving)),
                'over_by_hand': {
                    name: float(np.median(seconds[name] / seconds[f'{name}_by_hand']))
                    for name in models
                },
                'data_wait_fraction': wait / float(np.median(seconds['routed'])),
            }
        )
    return {'versions': versions(), 'tokens': tokens, 'repeats': repeats, 'rows': rows}
