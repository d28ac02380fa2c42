"""Routers and slots of a model that was dense, so that it begins near to what it was."""

import jax
import jax.numpy as jnp
import numpy as np

from moddepth_jax.conversion.carried import leaf_places
from moddepth_jax.conversion.moments import LayerMoments
from moddepth_jax.hparams import ModelHparams

# The score at which a gate is 1, or so near to it that little is lost and a gradient is left:
# sigmoid(5) = 0.993, tanh(3) = 0.995.
SCORES = {'raw': 1.0, 'sigmoid': 5.0, 'tanh': 3.0}
# Of a slot's key against the mean query: the higher, the less weight on average, and the more of it
# for the few queries that turn the other way. Which is best is measured.
STRENGTHS = (0.0, 2.0, 4.0, 8.0)
SLOTS = {'attention_slot': 'attention', 'ffn_slot': 'mlp', 'block_slot': 'block'}


def fit_routers(params: dict, target: ModelHparams, moments: list[LayerMoments]):
    """Parameters with routers under which gates are near 1, and how near, by layer.

    A score is w . x without a bias: w is fitted, by ridge regression on the dense model's own
    stream, to give every token the score of a gate of 1. Where scores pass no gate, or by
    `straight_through`, w keeps its direction, and scores get a root mean square of 1.

    Args:
      params: of `carry`.
      target: of the same.
      moments: of `layer_moments`.

    Returns:
      The parameters, and the root mean square of score / wanted score - 1 of each fitted layer.
    """
    value, errors = SCORES.get(target.routing.gate), {}

    def fitted(leaf, layer):
        stream = moments[layer].stream
        if value is None:
            w_D = np.asarray(leaf, np.float64)
            return w_D / (stream.error(w_D, 0.0) + 1e-30)
        w_D = stream.towards(value)
        errors[layer] = stream.error(w_D, value) / value
        return w_D

    return _replaced(params, target, {('router', 'w'): fitted}), errors


def fit_slots(params: dict, target: ModelHparams, moments: list[LayerMoments], strength: float):
    """Parameters in which each slot's own projection has values 0 and keys that take little weight.

    A key is (a . x) k: a . x near 1 for what the slot is made of, and k such that the queries of
    all later layers give it logits near -strength: both by ridge regression. 0: keys are 0, and
    logits too.

    Args:
      params, target, moments: as `fit_routers` takes them.
      strength: 0 or more.
    """

    def key_of(part):
        def key(leaf, layer):
            read = getattr(moments[layer], part)
            later = [other.queries for other in moments[layer + 1 :]]
            if not (strength and later):
                return np.zeros(leaf.shape)
            k_KH = sum(later[1:], later[0]).towards(-strength)
            return read.towards(1.0)[:, None, None] * k_KH[None]

        return key

    changes = {}
    for slot, part in SLOTS.items():
        changes['stream', slot, 'key', 'kernel'] = key_of(part)
        changes['stream', slot, 'value', 'kernel'] = lambda leaf, layer: np.zeros(leaf.shape)
    return _replaced(params, target, changes)


def _replaced(params, target, changes):
    """Parameters with `changes` of leaves by their names in a layer, called for each repeat."""
    places = leaf_places(target)

    def replace(path, leaf):
        keys = tuple(key.key for key in path)
        change = changes.get(keys[3:]) if keys[0] == 'stack' else None
        if change is None:
            return leaf
        i, j = int(keys[1].removeprefix('run_')), int(keys[2].removeprefix('layer_'))
        new = [change(leaf[repeat], places[i, repeat, j]) for repeat in range(len(leaf))]
        return jnp.asarray(np.stack(new), leaf.dtype)

    return jax.tree_util.tree_map_with_path(replace, params)
