"""Initializes routers and slots so that a dense model changes as little as possible."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from moddepth_jax.conversion.transfer_params import in_layer
from moddepth_jax.hparams import ModelHparams
from moddepth_jax.model.adapters import merge_adapters
from moddepth_jax.model.attention import model_segment_ids
from moddepth_jax.model.block import Block
from moddepth_jax.model.embedding_residual import blend_embedding, embedded_input
from moddepth_jax.model.layers import apply_rope, embed
from moddepth_jax.model.loop_params import EMBEDDING, add_embedding, with_embeddings
from moddepth_jax.model.routing import TokenInfo
from moddepth_jax.model.stack import Stack, unstack_layers

# The score at which a gate is 1, or close to 1 with some gradient: sigmoid(5) = 0.993,
# tanh(3) = 0.995.
SCORES = {'raw': 1.0, 'sigmoid': 5.0, 'tanh': 3.0}
# How strongly a slot's key points away from the mean query; the best value is found by measurement.
# A larger one means less weight on average, but more for the few queries that point the other way.
STRENGTHS = (0.0, 2.0, 4.0, 8.0)
SLOTS = {'attention_slot': 'attention', 'ffn_slot': 'mlp', 'block_slot': 'block'}
RIDGE = 1e-3  # relative to the mean square of the inputs of a fit
TOKENS_PER_WIDTH = 64  # tokens of a fit for each dimension of the stream


class Moments(NamedTuple):
    """Sums over `count` tokens of x: `outer` [..., D, D] sums x x^T, `first` [..., D] sums x."""

    outer: np.ndarray
    first: np.ndarray
    count: float

    def fit(self, value: float) -> np.ndarray:
        """Fit w [..., D] so that w . x is near `value` for every x: ridge regression, no bias."""
        width = self.first.shape[-1]
        mean = np.trace(self.outer, axis1=-2, axis2=-1)[..., None, None] / width
        outer = self.outer + (RIDGE * mean + 1e-30) * np.eye(width)
        return value * np.linalg.solve(outer, self.first[..., None])[..., 0]

    def error(self, w_D, value: float) -> float:
        """Return the root mean square of w . x - value."""
        square = w_D @ self.outer @ w_D - 2 * value * (w_D @ self.first) + value**2 * self.count
        return float(np.sqrt(max(square, 0.0) / self.count))


class LayerMoments(NamedTuple):
    """float64 Moments of a layer of the dense model; None if the target has no slot for it.

    Attributes:
      stream: input of the router: the layer's input, with the embedding residual, or the stream
        after attention if only the mlp is routed.
      attention: input of attention.
      mlp: input of the mlp.
      block: output of the layer.
      queries: queries of each key/value head as a slot's key meets them, [K, H].
    """

    stream: Moments
    attention: Moments | None
    mlp: Moments | None
    block: Moments | None
    queries: Moments


def layer_moments(source: ModelHparams, params, target: ModelHparams, batches) -> list:
    """Return LayerMoments of each block of the dense model `source`, over some batches.

    Those of a looped block are sums over its loops. `batches` are of `make_dataset`, which have
    no padding.
    """
    if target.depth.stream_class.connection is not None:  # the dense layers have none
        target = dataclasses.replace(target, depth=source.depth)
    # On the host, so that no program compiles for each shape.
    stacked = merge_adapters(jax.tree.map(np.asarray, params['stack']), source)
    stacked = with_embeddings(stacked, params)
    layers, totals = list(unstack_layers(Stack(source, 'top_c'), stacked)), None
    for batch in batches:
        tokens_BT = jnp.asarray(batch['tokens_BT'])
        segment_ids_BT = jnp.asarray(batch['segment_ids_BT'])
        positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        tokens = TokenInfo(
            positions_BT, model_segment_ids(source, segment_ids_BT), ids_BT=tokens_BT
        )
        x_BTD = embed(params['embedding'], tokens_BT, source.dtype)
        embedded_BTD, found = embedded_input(source, x_BTD), []
        for kind, layer_params in layers:
            x_BTD, sums = _layer(layer_params, x_BTD, embedded_BTD, tokens, model=target, kind=kind)
            found.append(jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), sums))
        totals = found if totals is None else jax.tree.map(np.add, totals, found)
    of_blocks = [[] for _ in range(source.num_layers)]
    for block, sums in zip(source.block_order, totals, strict=True):
        of_blocks[block].append(sums)
    return [jax.tree.map(lambda *each: sum(each), *of_block) for of_block in of_blocks]


@functools.partial(jax.jit, static_argnames=('model', 'kind'))
def _layer(params, x_BTD, embedded_BTD, tokens, *, model, kind):
    """Return the stream after a dense layer, and its LayerMoments of these tokens."""
    if EMBEDDING in params:
        x_BTD = add_embedding(x_BTD, params[EMBEDDING])
    if embedded_BTD is not None:
        x_BTD = blend_embedding(x_BTD, embedded_BTD, **params['blend'])
    block = Block(model, kind._replace(slots=1))  # returns the inputs of depth slots
    (y_BTD, aux), recorded = block.apply(
        {'params': params}, x_BTD, tokens, mutable=['intermediates']
    )
    if model.routed_layers and model.routing.part == 'mlp':  # the input of routers
        x_BTD, *_ = block.apply({'params': params}, 'attention', x_BTD, tokens, method='sublayer')
    q_BTNH = recorded['intermediates']['attention']['sequence'][0][0]
    if model.depth.slot_keys != 'unrotated':  # relative to a key of their own position
        q_BTNH = apply_rope(q_BTNH, -tokens.positions_BT, model.rope_theta, model.scaled_rope)
    inputs, slot_BTD = aux.slot_inputs, y_BTD if model.depth.slots == 'block' else None
    read = (x_BTD, inputs.attention_input_BTD, inputs.mlp_input_BTD, slot_BTD)
    sums = (None if of_BTD is None else _sums(of_BTD) for of_BTD in read)
    shape = (*q_BTNH.shape[:2], model.num_kv_heads, -1, model.head_dim)
    q_BTKGH = q_BTNH.astype(jnp.float32).reshape(shape) * model.head_dim**-0.5
    return y_BTD, LayerMoments(*sums, _sums(q_BTKGH, 'kg'))


def _sums(x, heads=''):
    """Return Moments of x [B, T, *heads, D] over tokens; if `heads` is 'kg', also over g."""
    x, kept = x.astype(jnp.float32), heads[:1]
    outer = jnp.einsum(f'bt{heads}d,bt{heads}e->{kept}de', x, x, precision='highest')
    first = jnp.einsum(f'bt{heads}d->{kept}d', x)
    return Moments(outer, first, x.size // first.size)


def fit_routers(params: dict, target: ModelHparams, moments: list[LayerMoments]):
    """Return the parameters with gates near 1, and the error of each fitted layer.

    `params` are of `transfer_params`. The score w . x has no bias; ridge regression on the dense
    stream fits it to a gate of 1. Scores without a gate keep the direction of w and get a root mean
    square of 1. The error is the root mean square of score / wanted score - 1.
    """
    value, errors = SCORES.get(target.routing.gate), {}

    def fitted(leaf, layer):
        stream = moments[layer].stream
        if value is None:
            w_D = np.asarray(leaf, np.float64)
            return w_D / (stream.error(w_D, 0.0) + 1e-30)
        w_D = stream.fit(value)
        errors[layer] = stream.error(w_D, value) / value
        return w_D

    return _replace(params, target, {('router', 'w'): fitted}), errors


def fit_slots(params: dict, target: ModelHparams, moments: list[LayerMoments], strength: float):
    """Return the parameters with slots that have values of 0 and keys that get little weight.

    Only slots with their own projection change. A key is (a . x) k, by ridge regression: a . x is
    near 1 for the slot's inputs, and k . q near -strength for the queries of all later layers. With
    strength 0, keys and logits are 0.
    """

    def key(leaf, layer, part):
        later = [other.queries for other in moments[layer + 1 :]]
        if not (strength and later):
            return np.zeros(leaf.shape)
        k_KH = jax.tree.map(lambda *sums: sum(sums), *later).fit(-strength)
        return getattr(moments[layer], part).fit(1.0)[:, None, None] * k_KH[None]

    changes = {}
    for slot, part in SLOTS.items():
        changes['stream', slot, 'key', 'kernel'] = functools.partial(key, part=part)
        changes['stream', slot, 'value', 'kernel'] = lambda leaf, layer: np.zeros(leaf.shape)
    return _replace(params, target, changes)


def _replace(params, target, changes):
    """Apply `changes`, {name of a leaf in a layer: function (leaf, layer)}, to parameters."""
    numbers = Stack(target, 'top_c').layer_numbers

    def replace(keys, leaf):
        if keys[0] != 'stack':
            return leaf
        place, name = in_layer(keys)
        if (change := changes.get(name)) is None:
            return leaf
        new = [change(*pair) for pair in zip(leaf, numbers[place], strict=True)]
        return jnp.asarray(np.stack(new), leaf.dtype)

    return traverse_util.path_aware_map(replace, params)
