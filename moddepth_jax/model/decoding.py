"""The same model with its layers unrolled and keys kept: prompts in one pass, then token by token.

Layers are never scanned here: XLA fuses the write of a scanned cache into its readers and copies
every cache at every token.
"""

import jax
import jax.numpy as jnp

from moddepth_jax.hparams import Hparams
from moddepth_jax.model.attention import TokenInfo, model_segment_ids
from moddepth_jax.model.kv_cache import Cache
from moddepth_jax.model.layer import LayerArgs
from moddepth_jax.model.layers import embed, lm_head, rms_norm
from moddepth_jax.model.mod.mixture_of_depths import RoutingArgs
from moddepth_jax.model.mod.routers import token_seeds
from moddepth_jax.model.routing import static_sizes
from moddepth_jax.model.sharding import unshard_params
from moddepth_jax.model.stack import Stack, per_layer_args, stack_slots, unstack_layers
from moddepth_jax.model.streams import layer_kinds
from moddepth_jax.model.transformer import check_causal, check_dtype, layer_thresholds


def unroll(variables, hparams: Hparams, routing: str) -> dict:
    """The variables of a Transformer with a dict of parameters for each layer.

    Args:
      variables: of the Transformer.
      hparams: of the same.
      routing: the causal rule that they are for.

    Returns:
      `embedding`, `layers` (a list of each layer's parameters), `final_norm`, `head` (absent where
      the embedding is tied), and `told`: a Told for each layer.

    Raises:
      ValueError: as `layer_thresholds` says.
    """
    check_dtype(hparams.model)
    params = variables['params']
    layers = [mine for _, mine in unstack_layers(Stack(hparams.model, routing), params['stack'])]
    thresholds_R, limits = layer_thresholds(hparams.model, variables.get('averages'), routing)
    num_routed = len(hparams.model.routed_layers)
    routed = RoutingArgs(jnp.arange(num_routed), thresholds_R, jnp.ones(num_routed, bool))
    told = per_layer_args(layer_kinds(hparams.model), LayerArgs(routed, limits))
    rest = {name: params[name] for name in ('embedding', 'final_norm', 'head') if name in params}
    return {**rest, 'layers': layers, 'told': told}


def _tokens(hparams, tokens_BT, positions_BT, segment_ids_BT):
    random = hparams.model.routing.router == 'random'
    key = jax.random.key(hparams.seed)
    seeds = token_seeds(key, tokens_BT, positions_BT) if random else None
    return TokenInfo(positions_BT, segment_ids_BT, seeds)


def _embed(unrolled, hparams, tokens_BT):
    return embed(unrolled['embedding'], tokens_BT, hparams.model.dtype)


def _read_out(unrolled, hparams, x_B1D):
    scale_D, epsilon = unrolled['final_norm']['scale'], hparams.model.norm_eps
    return lm_head(rms_norm(x_B1D, scale_D, epsilon), unrolled)[:, 0]


def _layers(unrolled, hparams, routing, sizes=()):
    """(Layer, its variables, Told) of each layer."""
    stack = Stack(hparams.model, routing, sizes)
    each = zip(layer_kinds(hparams.model), unrolled['layers'], unrolled['told'], strict=True)
    for kind, params, told in each:
        params = unshard_params(params, hparams.model.dtype)
        yield stack.layer(kind, parent=None), {'params': params}, told


def prefill(
    unrolled,
    tokens_BT,
    segment_ids_BT,
    *,
    hparams: Hparams,
    routing: str,
    slots: int,
    routed_capacity: int | None,
):
    """A causal-routed pass over prompts, which leaves their keys and values.

    Args:
      unrolled: of `unroll`.
      tokens_BT: int32 [B, T], prompts from the left; what follows one is padding.
      segment_ids_BT: int32 [B, T], 0 for padding; documents count from 1.
      hparams: of the model.
      routing: a causal rule of its.
      slots: of a dense block's cache, T at least.
      routed_capacity: of a routed block's cache, where the rule selects no more tokens; None:
        every token that the rule lets in enters, and there are T slots.

    Returns:
      logits_BV after the last token of each prompt, float32, and the Cache.
    """
    check_causal(hparams, routing)
    batch, length = tokens_BT.shape
    positions_BT = jnp.broadcast_to(jnp.arange(length), tokens_BT.shape)
    segment_ids_BT = model_segment_ids(hparams.model, segment_ids_BT)
    tokens = _tokens(hparams, tokens_BT, positions_BT, segment_ids_BT)
    x_BTD = _embed(unrolled, hparams, tokens_BT)
    sizes = static_sizes(length, length if routed_capacity is None else routed_capacity)
    written, caches, dropped_B = [], [], jnp.zeros(batch, jnp.int32)
    for layer, params, told in _layers(unrolled, hparams, routing, sizes):
        given = (params, x_BTD, stack_slots(written), tokens, told)
        if layer.kind.part == 'block':
            given += (slots, routed_capacity)
            x_BTD, new, cache, refused = layer.apply(*given, method='prefill')
            caches.append(cache)
            dropped_B += refused
        else:
            x_BTD, new, _, _ = layer.apply(*given)
        written.append(new)
    lengths_B = jnp.sum(segment_ids_BT > 0, axis=1)
    last_B = jnp.maximum(lengths_B - 1, 0)
    x_B1D = jnp.take_along_axis(x_BTD, last_B[:, None, None], axis=1)
    mine_BT = segment_ids_BT == jnp.take_along_axis(segment_ids_BT, last_B[:, None], axis=1)
    documents_B = jnp.argmax(mine_BT, axis=1).astype(jnp.int32)
    cache = Cache(tuple(caches), lengths_B, documents_B, dropped_B)
    return _read_out(unrolled, hparams, x_B1D), cache


def decode_step(unrolled, cache: Cache, token_B, begins_B, active_B, *, hparams, routing: str):
    """One token of each row, reading the cache and writing nothing.

    Args:
      unrolled: of `unroll`.
      cache: of `prefill` or `cache.write`.
      token_B: int32 [B], the next token of each row, at position `cache.lengths_B`.
      begins_B: bool [B], the token begins a document.
      active_B: bool [B]; the others are computed in dense blocks and never enter a routed one.
      hparams: of the model.
      routing: as in `prefill`.

    Returns:
      logits_BV in float32 after the token, a list of an Entry for each block, and dropped_B: what
      `cache.write` takes.
    """
    check_causal(hparams, routing)
    documents_B = jnp.where(begins_B, cache.lengths_B, cache.documents_B)
    token_B1, positions_B1 = token_B[:, None], cache.lengths_B[:, None]
    tokens = _tokens(hparams, token_B1, positions_B1, jnp.ones_like(token_B1))
    x_B1D = _embed(unrolled, hparams, token_B1)
    rows = (cache.lengths_B, documents_B, active_B)
    # Slots of the new token alone: a query sees those of its own position, so none is kept.
    written, entries, dropped_B = [], [], jnp.zeros_like(token_B)
    for layer, params, told in _layers(unrolled, hparams, routing):
        given = (params, x_B1D, stack_slots(written), tokens, told)
        if layer.kind.part == 'block':
            given += (cache.layers[len(entries)], rows)
            x_B1D, new, entry, refused = layer.apply(*given, method='decode')
            entries.append(entry)
            dropped_B += refused
        else:
            x_B1D, new, _, _ = layer.apply(*given)
        written.append(new)
    return _read_out(unrolled, hparams, x_B1D), entries, dropped_B
