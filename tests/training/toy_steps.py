"""A model of one routed block and its compiled train step, shared by the tests of single steps."""

import functools

import jax
import numpy as np

from moddepth_jax.model.transformer import Transformer
from moddepth_jax.training.train_step import init_state, train_step

NUM_STEPS = 40
RARE = 256  # a token that no batch holds unless a test puts it there
DECAY = 0.7
ROUTED = {
    'model.num_layers': 1,
    'model.routing.router': 'learned',
    'model.routing.layers': '0',
    'model.routing.capacity': 0.25,
    'model.routing.threshold_decay': DECAY,
    'model.remat': 'none',
    'model.attention': 'reference',
    'optimizer.warmup_fraction': 0.0,
    'optimizer.learning_rate': 0.01,
    'optimizer.clip_norm': 1e6,  # on, but never reached: gradients can be read off the optimizer
    'optimizer.z_loss': 0.02,  # large enough to be seen in a gradient
}

step = jax.jit(train_step, static_argnums=2)


@functools.cache
def initial(hparams):
    return jax.jit(lambda: init_state(hparams, NUM_STEPS))()


def make_batch(seed, rows=4, length=32, padded=False):
    """Make rows of two documents without ignored labels; `padded` pads the end of row 0."""
    tokens_BT = np.random.default_rng(seed).integers(0, 64, (rows, length + 1)).astype(np.int32)
    segment_ids_BT = np.ones((rows, length), np.int32)
    segment_ids_BT[:, length // 3 :] = 2
    if padded:
        segment_ids_BT[0, 20:] = 0
    return {
        'tokens_BT': tokens_BT[:, :-1].copy(),
        'labels_BT': tokens_BT[:, 1:].copy(),
        'segment_ids_BT': segment_ids_BT,
    }


@functools.cache
def _forward(hparams, routing):
    apply = functools.partial(Transformer(hparams).apply, routing=routing)
    return jax.jit(apply)


def forward(hparams, variables, batch, routing='top_c', **layers):
    tokens_BT, segment_ids_BT = batch['tokens_BT'], batch['segment_ids_BT']
    return _forward(hparams, routing)(variables, tokens_BT, segment_ids_BT, **layers)


def with_rare_nan(state):
    """The state with a NaN in the embedding of the token RARE."""
    embedding_VD = state.params['embedding'].at[RARE].set(np.nan)
    return state.replace(params=state.params | {'embedding': embedding_VD})


def batch_with_rare(seed, padded=False):
    """A batch that holds the token RARE once."""
    batch = make_batch(seed, padded=padded)
    batch['tokens_BT'][2, 7] = RARE
    return batch
