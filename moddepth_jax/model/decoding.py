"""Decoding: a prompt in one pass, then token by token over a cache of keys and values.

Layers are unrolled, never scanned: XLA fuses the write of a scanned cache into its readers, and
copies every cache at every token.
"""

import jax.numpy as jnp

from moddepth_jax.hparams import Hparams
from moddepth_jax.model.kv_cache import Cache
from moddepth_jax.model.layers import embed, lm_head, rms_norm
from moddepth_jax.model.routing import static_sizes
from moddepth_jax.model.sharding import unshard_params
from moddepth_jax.model.stack import Stack, per_layer_args, stack_slots, unstack_layers
from moddepth_jax.model.streams import layer_kinds
from moddepth_jax.model.transformer import check_causal, check_dtype, layer_args, token_info


def unroll(variables, hparams: Hparams, routing: str) -> dict:
    """The variables of a Transformer with the parameters of each layer apart.

    Args:
      variables: of the Transformer.
      hparams: of the same.
      routing: the causal rule that they are for.

    Returns:
      `embedding`, `layers` (a list of each layer's parameters), `final_norm`, `head` (absent if the
      embedding is tied), and `layer_args`: the LayerArgs of each layer.

    Raises:
      ValueError: as `layer_args` says.
    """
    check_dtype(hparams.model)
    params = variables['params']
    layers = [one for _, one in unstack_layers(Stack(hparams.model, routing), params['stack'])]
    args = layer_args(hparams.model, variables.get('averages'), routing)
    rest = {name: params[name] for name in ('embedding', 'final_norm', 'head') if name in params}
    args = per_layer_args(layer_kinds(hparams.model), args)
    return {**rest, 'layers': layers, 'layer_args': args}


def _logits(unrolled, hparams, x_B1D):
    scale_D, epsilon = unrolled['final_norm']['scale'], hparams.model.norm_eps
    return lm_head(rms_norm(x_B1D, scale_D, epsilon), unrolled)[:, 0]


def _layers(unrolled, hparams, routing, sizes=()):
    """(Layer, its variables, LayerArgs) of each layer."""
    stack = Stack(hparams.model, routing, sizes)
    kinds = layer_kinds(hparams.model)
    for kind, params, args in zip(kinds, unrolled['layers'], unrolled['layer_args'], strict=True):
        params = unshard_params(params, hparams.model.dtype)
        yield stack.layer(kind, parent=None), {'params': params}, args


def prefill(
    unrolled,
    tokens_BT,
    segment_ids_BT,
    *,
    hparams: Hparams,
    routing: str,
    capacity: int,
    routed_capacity: int | None,
):
    """One causal-routed pass over prompts, which fills a cache.

    Args:
      unrolled: of `unroll`.
      tokens_BT: int32 [B, T], prompts from the left, followed by padding.
      segment_ids_BT: int32 [B, T], 0 for padding; documents count from 1.
      hparams: of the model.
      routing: one of its causal rules.
      capacity: of a dense block's cache, at least T.
      routed_capacity: of a routed block's cache, which is also the most tokens that the rule may
        select; None: T, and every token that the rule selects is processed.

    Returns:
      logits_BV after the last token of each prompt, float32, and the Cache.
    """
    check_causal(hparams, routing)
    batch, length = tokens_BT.shape
    tokens = token_info(hparams, tokens_BT, segment_ids_BT)
    x_BTD = embed(unrolled['embedding'], tokens_BT, hparams.model.dtype)
    sizes = static_sizes(length, length if routed_capacity is None else routed_capacity)
    written, caches, dropped_B = [], [], jnp.zeros(batch, jnp.int32)
    for layer, params, args in _layers(unrolled, hparams, routing, sizes):
        slots = stack_slots(written)
        if layer.kind.part == 'block':
            x_BTD, new, cache, dropped = layer.apply(
                params, x_BTD, slots, tokens, args, capacity, routed_capacity, method='prefill'
            )
            caches.append(cache)
            dropped_B += dropped
        else:
            x_BTD, new, _, _ = layer.apply(params, x_BTD, slots, tokens, args)
        written.append(new)
    lengths_B = jnp.sum(tokens.segment_ids_BT > 0, axis=1)
    last_B = jnp.maximum(lengths_B - 1, 0)
    x_B1D = jnp.take_along_axis(x_BTD, last_B[:, None, None], axis=1)
    last_id_B1 = jnp.take_along_axis(tokens.segment_ids_BT, last_B[:, None], axis=1)
    documents_B = jnp.argmax(tokens.segment_ids_BT == last_id_B1, axis=1).astype(jnp.int32)
    cache = Cache(tuple(caches), lengths_B, documents_B, dropped_B)
    return _logits(unrolled, hparams, x_B1D), cache


def decode_step(unrolled, cache: Cache, token_B, begins_B, active_B, *, hparams, routing: str):
    """One token of each row; reads the cache and writes nothing.

    Args:
      unrolled: of `unroll`.
      cache: of `prefill` or `update_cache`.
      token_B: int32 [B], the next token of each row, at position `cache.lengths_B`.
      begins_B: bool [B], the token begins a document.
      active_B: bool [B]; other rows are computed in dense blocks and never selected in routed ones.
      hparams: of the model.
      routing: as in `prefill`.

    Returns:
      logits_BV in float32 after the token; a list of the CacheUpdate of each block and dropped_B,
      both for `update_cache`.
    """
    check_causal(hparams, routing)
    documents_B = jnp.where(begins_B, cache.lengths_B, cache.documents_B)
    token_B1 = token_B[:, None]
    tokens = token_info(hparams, token_B1, positions_BT=cache.lengths_B[:, None])
    x_B1D = embed(unrolled['embedding'], token_B1, hparams.model.dtype)
    # Slots of the new token alone: a query sees those of its own position, so none is kept.
    written, updates, dropped_B = [], [], jnp.zeros_like(token_B)
    for layer, params, args in _layers(unrolled, hparams, routing):
        slots = stack_slots(written)
        if layer.kind.part == 'block':
            x_B1D, new, update, dropped = layer.apply(
                params,
                x_B1D,
                slots,
                tokens,
                args,
                cache.layers[len(updates)],
                cache.lengths_B,
                documents_B,
                active_B,
                method='decode',
            )
            updates.append(update)
            dropped_B += dropped
        else:
            x_B1D, new, _, _ = layer.apply(params, x_B1D, slots, tokens, args)
        written.append(new)
    return _logits(unrolled, hparams, x_B1D), updates, dropped_B
