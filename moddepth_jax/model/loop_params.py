"""Parameters of each loop: norm scales, and a vector that is added to the stream.

Scales have an axis of loops after the axis of layers. The modules do not know about it: the scales
of a loop are picked before a layer is applied. The vectors are learned; Universal Transformers add
sinusoids of the loop's number instead (Dehghani et al. 2018, arXiv 1807.03819, section 2.1).
"""

import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp

NORMS = frozenset(('attention_norm', 'mlp_norm', 'query_norm', 'key_norm'))
EMBEDDINGS = 'loop_embeddings'  # [N, D] for N loops, next to the stack
EMBEDDING = 'loop_embedding'  # [D], a parameter of a layer that adds it to its input


class Visit(NamedTuple):
    """One application of a stored layer; ints, or int32 arrays for several."""

    row: int | jax.Array  # of the leaves of its stored run
    loop: int | jax.Array = 0
    embedding: int | jax.Array = -1  # row of the loop embeddings that it adds; -1: none


def has_loops(path, kind) -> bool:
    """Return whether a leaf of a layer of that kind has an axis of loops."""
    return kind.own_norms and len(path) > 1 and path[-2].key in NORMS


def repeat_norms(params: dict, kind, loops: int) -> dict:
    """Return the initial parameters of a layer with norm scales repeated along an axis of loops."""

    def repeat(path, leaf):
        return jnp.stack([leaf] * loops) if has_loops(path, kind) else leaf

    return jax.tree_util.tree_map_with_path(repeat, params)


def with_embeddings(stack: dict, params: dict) -> dict:
    """Return the parameters of a stack together with the loop embeddings, if there are any."""
    return stack | {EMBEDDINGS: params[EMBEDDINGS]} if EMBEDDINGS in params else stack


def visit_params(stack: dict, place, visit: Visit, take=operator.getitem) -> dict:
    """Return the parameters of a visit without its embedding; `take(leaf, index)` picks a row."""

    def pick(path, leaf):
        leaf = take(leaf, visit.row)
        return take(leaf, visit.loop) if has_loops(path, place.kind) else leaf

    stored = stack.get(place.run, {}).get(place.layer, {})
    return jax.tree_util.tree_map_with_path(pick, stored)


def visit_embedding(stack: dict, visit: Visit) -> dict:
    """Return the embedding of a visit as a parameter of the layer; 0 if it has none."""
    row = jnp.maximum(visit.embedding, 0)
    vector_D = jax.lax.dynamic_index_in_dim(stack[EMBEDDINGS], row, keepdims=False)
    return {EMBEDDING: jnp.where(visit.embedding >= 0, vector_D, 0)}


def add_gradient(dstack: dict, place, visit: Visit, dlayer: dict) -> dict:
    """Return the gradients of a stack's parameters, with those of one visit added."""
    dlayer = dict(dlayer)
    vector_D = dlayer.pop(EMBEDDING, None)
    if vector_D is not None:
        total_ND = dstack[EMBEDDINGS]
        row = jnp.where(visit.embedding >= 0, visit.embedding, len(total_ND))  # none: dropped
        dstack = dstack | {EMBEDDINGS: total_ND.at[row].add(vector_D, mode='drop')}
    if not dlayer:
        return dstack

    def add(path, total, one):
        looped = has_loops(path, place.kind)
        return total.at[(visit.row, visit.loop) if looped else visit.row].add(one)

    run = dstack[place.run]
    new = jax.tree_util.tree_map_with_path(add, run[place.layer], dlayer)
    return dstack | {place.run: run | {place.layer: new}}


def add_embedding(x_BTD, embedding_D) -> jax.Array:
    """Return the stream plus the embedding of a loop, rounded once to the dtype of the stream."""
    wide = jnp.promote_types(x_BTD.dtype, embedding_D.dtype)
    return (x_BTD.astype(wide) + embedding_D.astype(wide)[None, None]).astype(x_BTD.dtype)
