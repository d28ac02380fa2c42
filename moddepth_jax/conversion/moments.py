"""What a dense model's own text does in it: moments of what routers and slots would read."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moddepth_jax.hparams import Hparams, ModelHparams
from moddepth_jax.model.attention import TokenInfo, model_segment_ids
from moddepth_jax.model.block import Block
from moddepth_jax.model.layers import apply_rope, embed
from moddepth_jax.model.stack import Stack, unstack_layers

RIDGE = 1e-3  # of the mean square of what is fitted on
TOKENS_PER_WIDTH = 64  # that moments are taken of, for each dimension of the stream


class Moments(NamedTuple):
    """Sums over tokens of a vector x of width D, in float64.

    Attributes:
      outer: of x x^T, [..., D, D].
      first: of x, [..., D].
      count: tokens.
    """

    outer: np.ndarray
    first: np.ndarray
    count: float

    def __add__(self, other):
        return Moments(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def towards(self, value: float) -> np.ndarray:
        """w [..., D], such that w . x is near `value` for every x: ridge regression, no bias."""
        width = self.first.shape[-1]
        mean = np.trace(self.outer, axis1=-2, axis2=-1)[..., None, None] / width
        outer = self.outer + (RIDGE * mean + 1e-30) * np.eye(width)
        return value * np.linalg.solve(outer, self.first[..., None])[..., 0]

    def error(self, w_D, value: float) -> float:
        """Root mean square of w . x - value."""
        square = w_D @ self.outer @ w_D - 2 * value * (w_D @ self.first) + value**2 * self.count
        return float(np.sqrt(max(square, 0.0) / self.count))


class LayerMoments(NamedTuple):
    """Moments of a layer of the dense model.

    Attributes:
      stream: of what enters the layer, as a router reads it.
      attention, mlp, block: of what attention and mlp read and of what the layer returns; None
        where the model that it is to become makes no slot of it.
      queries: of each key/value head's queries, as a slot's key meets them, [K, H, H] and [K, H].
    """

    stream: Moments
    attention: Moments | None
    mlp: Moments | None
    block: Moments | None
    queries: Moments


def num_fit_batches(hparams: Hparams) -> int:
    """Batches that hold enough tokens for the moments of a model."""
    tokens = hparams.data.batch_size * hparams.data.sequence_length
    return -(-TOKENS_PER_WIDTH * hparams.model.d_model // tokens)


def layer_moments(source: ModelHparams, params, target: ModelHparams, batches) -> list:
    """LayerMoments of each layer of a dense model.

    Args:
      source: of the dense model.
      params: of the same.
      target: what it is to become.
      batches: iterable of `tokens_BT`, `segment_ids_BT`.
    """
    # Cut up on the host: no program for each shape.
    stacked = jax.tree.map(np.asarray, params['stack'])
    layers, totals = list(unstack_layers(Stack(source, 'top_c'), stacked)), None
    for batch in batches:
        tokens_BT, segment_ids_BT = (
            jnp.asarray(batch[f'{n}_BT']) for n in ('tokens', 'segment_ids')
        )
        positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        tokens = TokenInfo(positions_BT, model_segment_ids(source, segment_ids_BT))
        x_BTD = embed(params['embedding'], tokens_BT, source.dtype)
        found = []
        for kind, mine in layers:
            x_BTD, sums = _layer(mine, x_BTD, tokens, model=target, kind=kind)
            found.append(jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), sums))
        add = functools.partial(jax.tree.map, np.add)
        totals = (
            found if totals is None else [add(a, b) for a, b in zip(totals, found, strict=True)]
        )
    return totals


@functools.partial(jax.jit, static_argnames=('model', 'kind'))
def _layer(params, x_BTD, tokens, *, model, kind):
    """The stream after a dense layer, and its LayerMoments of these tokens."""
    block = Block(model, kind.window, True, False, kind.experts)
    (y_BTD, left), aside = block.apply({'params': params}, x_BTD, tokens, mutable=['intermediates'])
    q_BTNH = aside['intermediates']['attention']['sequence'][0][0]
    if model.depth.slot_keys != 'unrotated':  # as they meet a key of their own position
        q_BTNH = apply_rope(q_BTNH, -tokens.positions_BT, model.rope_theta)
    real_BT = (tokens.segment_ids_BT > 0).astype(jnp.float32)
    sources = left.slot_inputs
    sums = LayerMoments(
        _sums(x_BTD, real_BT),
        None
        if sources.attention_input_BTD is None
        else _sums(sources.attention_input_BTD, real_BT),
        None if sources.mlp_input_BTD is None else _sums(sources.mlp_input_BTD, real_BT),
        _sums(y_BTD, real_BT) if model.depth.slots == 'block' else None,
        _query_sums(model, q_BTNH, real_BT),
    )
    return y_BTD, sums


def _sums(x_BTD, real_BT):
    x_BTD, precise = x_BTD.astype(jnp.float32), {'precision': 'highest'}
    outer_DE = jnp.einsum('btd,bte,bt->de', x_BTD, x_BTD, real_BT, **precise)
    first_D = jnp.einsum('btd,bt->d', x_BTD, real_BT, **precise)
    return Moments(outer_DE, first_D, jnp.sum(real_BT))


def _query_sums(model, q_BTNH, real_BT):
    """Moments of q H^-1/2, of all queries of a key/value head."""
    kv_heads, width = model.num_kv_heads, model.head_dim
    q_BTKGH = q_BTNH.astype(jnp.float32).reshape(*q_BTNH.shape[:2], kv_heads, -1, width)
    q_BTKGH, precise = q_BTKGH * width**-0.5, {'precision': 'highest'}
    outer = jnp.einsum('btkgh,btkgi,bt->khi', q_BTKGH, q_BTKGH, real_BT, **precise)
    first = jnp.einsum('btkgh,bt->kh', q_BTKGH, real_BT, **precise)
    return Moments(outer, first, jnp.sum(real_BT) * q_BTKGH.shape[3])
