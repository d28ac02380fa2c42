"""Trains the dense model of a folder in JAX on the CPU, in a process of its own.

  python -m moddepth_jax.benchmarks.jax_steps FOLDER

Prints one line of JSON: the seconds and the loss of each step, and the peak memory of the process.
benchmarks/pytorch.py compares them with those of benchmarks/pytorch_steps.py. This process must not
import PyTorch, which would count as its memory; tensorboardX does.
"""

import json
import pathlib
import sys
import time
from typing import NamedTuple

import jax
import numpy as np

from configs import base
from moddepth_jax.host import peak_bytes
from moddepth_jax.hparams import Hparams, from_config
from moddepth_jax.training.train_step import init_state, train_step

HEAD_DIM = 64
STEPS = 6  # of a process; the first compiles and is not timed


class Shape(NamedTuple):
    """Sizes of a batch and of a Llama model."""

    rows: int
    length: int
    layers: int
    width: int
    d_ff: int
    ids: int


def make_hparams(shape: Shape) -> Hparams:
    """Return the dense model of a shape, trained by AdamW at a constant rate on the mean loss."""
    config = base.get_config()
    config.model.num_layers, config.model.d_model = shape.layers, shape.width
    config.model.d_ff, config.model.vocab_size = shape.d_ff, shape.ids
    config.model.head_dim = HEAD_DIM
    config.model.num_heads = config.model.num_kv_heads = shape.width // HEAD_DIM
    config.data.batch_size, config.data.sequence_length = shape.rows, shape.length
    config.optimizer.schedule, config.optimizer.warmup_fraction = 'constant', 0.0
    config.optimizer.learning_rate, config.optimizer.z_loss = 3e-4, 0.0
    config.training.num_steps = STEPS
    return from_config(config)


def train(folder: pathlib.Path) -> dict:
    """Train the model of the shape in setting.json; its initial bits are those in the folder."""
    shape = Shape(*json.loads((folder / 'setting.json').read_text())['shape'])
    inputs_BT, labels_BT = np.load(folder / 'tokens.npy')
    ones_BT = np.ones_like(inputs_BT)
    batch = {'tokens_BT': inputs_BT, 'labels_BT': labels_BT, 'segment_ids_BT': ones_BT}
    state = init_state(make_hparams(shape), STEPS)
    step, seconds, losses = jax.jit(train_step, donate_argnums=0), [], []
    for _ in range(STEPS):
        begin = time.perf_counter()
        state, metrics = jax.block_until_ready(step(state, batch))
        losses.append(float(metrics['loss']))
        seconds.append(time.perf_counter() - begin)
    return {'seconds': seconds, 'losses': losses, 'peak_bytes': peak_bytes()}


if __name__ == '__main__':
    print(json.dumps(train(pathlib.Path(sys.argv[1]))))
