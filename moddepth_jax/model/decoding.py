"""Decoding with a KV cache: a prompt in one pass, then token by token.

Layers are unrolled, because XLA would copy every cache of a scan at every token.
"""

import functools

import jax
import jax.numpy as jnp

from moddepth_jax.hparams import Hparams
from moddepth_jax.hparams.rules import check_causal
from moddepth_jax.model.adapters import merge_adapters
from moddepth_jax.model.embedding_residual import embedded_input
from moddepth_jax.model.kv_cache import (
    Cache,
    LayerCache,
    cache_from_prefill,
    documents_of,
    next_positions,
    without_newest,
)
from moddepth_jax.model.layer import LayerOutput
from moddepth_jax.model.layers import embed, lm_head, rms_norm, rope_turns
from moddepth_jax.model.loop_exit import apply_exits, extend_with_exits, has_exits
from moddepth_jax.model.loop_params import with_embeddings
from moddepth_jax.model.mod.mixture_of_recursions import Recursions
from moddepth_jax.model.routing import gather_tokens, mask_to_indices, static_sizes
from moddepth_jax.model.sharding import unshard_params
from moddepth_jax.model.stack import Stack, per_layer_args, stack_slots, unstack_layers
from moddepth_jax.model.streams import layer_kinds
from moddepth_jax.model.transformer import check_dtype, layer_args, token_info


def unroll(variables, hparams: Hparams, routing: str) -> dict:
    """Return the variables for decoding, with a list `layers` in place of `stack`.

    They also have the `layer_args` and `turns`, and `loops` if loops are routed.
    """
    check_dtype(hparams.model)
    params = variables['params']
    stored = with_embeddings(merge_adapters(params['stack'], hparams.model), params)
    args = layer_args(hparams.model, variables.get('averages'), routing)
    kept = 'embedding', 'final_norm', 'head'
    unrolled = {name: params[name] for name in kept if name in params}
    stack = Stack(hparams.model, routing)
    unrolled['layers'] = [layer for _, layer in unstack_layers(stack, stored)]
    unrolled['layer_args'] = per_layer_args(layer_kinds(hparams.model), args)
    unrolled['turns'] = _turns(hparams)
    if hparams.model.routing.routes_loops:
        stacked, loops = (params['loop_routers'], args.routing), range(hparams.model.loops)
        unrolled['loops'] = [jax.tree.map(lambda leaf, n=n: leaf[n], stacked) for n in loops]
    return unrolled


def _turns(hparams):
    """Return `rope_turns` of all positions of the context, [T, 1, F] each.

    Without this table, XLA would compute the sines several times in every unrolled layer.
    """
    model, positions_1T = hparams.model, jnp.arange(hparams.data.sequence_length)[None]
    half = model.head_dim // 2
    turns = rope_turns(positions_1T, half, model.dtype, model.rope_theta, model.scaled_rope)
    return jax.tree.map(lambda side: side[0], turns)


def _with_turns(unrolled, tokens):
    """Return TokenInfo with the `turns` of its positions."""
    positions_BT = tokens.positions_BT
    turns = jax.tree.map(lambda side: side.at[positions_BT].get(mode='clip'), unrolled['turns'])
    return tokens._replace(turns=turns)


def _embed(unrolled, hparams, tokens_BT):
    x_BTD = embed(unrolled['embedding'], tokens_BT, hparams.model.dtype)
    return hparams.model.depth.stream_class.enter(hparams.model, x_BTD)


def _final(unrolled, hparams, x_BTD):
    x_BTD = hparams.model.depth.stream_class.leave(hparams.model, x_BTD)
    return rms_norm(x_BTD, unrolled['final_norm']['scale'], hparams.model.norm_eps)


def layers_of(unrolled, hparams, routing, sizes=()):
    """Yield (Layer, its variables, LayerArgs) of each layer that runs."""
    stack, kinds = Stack(hparams.model, routing, sizes), layer_kinds(hparams.model)
    for kind, params, args in zip(kinds, unrolled['layers'], unrolled['layer_args'], strict=True):
        params = unshard_params(params, hparams.model.dtype)
        yield stack.layer(kind, parent=None), {'params': params}, args


def prefill(unrolled, tokens_BT, segment_ids_BT, *, hparams, routing, capacity, routed_capacity):
    """Process whole prompts by a causal rule.

    Args:
      unrolled: the variables that `unroll` returns.
      tokens_BT: int, the prompts, each followed by padding; T is at most data.sequence_length.
      segment_ids_BT: int, 0 for padding.
      hparams: those of the model.
      routing: the causal rule.
      capacity: of a dense block's cache, at least T.
      routed_capacity: of a routed block's cache, and so the most tokens that it selects; None: T.
        Routed loops have their own capacities, or T if this is None.

    Returns:
      float32 logits_BV after the last token of each prompt, and the Cache.
    """
    check_causal(hparams, routing)
    batch, length = tokens_BT.shape
    if length > (most := hparams.data.sequence_length):
        raise ValueError(f'prompts of {length} tokens; must be at most data.sequence_length={most}')
    tokens = _with_turns(unrolled, token_info(hparams, tokens_BT, segment_ids_BT))
    x_BTD = _embed(unrolled, hparams, tokens_BT)
    embedded_BTD = embedded_input(hparams.model, x_BTD)
    sizes = static_sizes(length, length if routed_capacity is None else routed_capacity)
    written, caches, dropped_B = [], [], jnp.zeros(batch, jnp.int32)
    layers = list(layers_of(unrolled, hparams, routing, sizes))
    if hparams.model.routing.routes_loops:
        recursions = Recursions(hparams, routing, unrolled['loops'], layers)
        grows, layers = routed_capacity is None, []
        x_BTD, caches, dropped_B = recursions.prefill(x_BTD, tokens, capacity, grows)
    exits, may_exit = None, has_exits(hparams.model, routing)
    for place, (layer, params, args) in enumerate(layers):
        output = layer.apply(params, x_BTD, stack_slots(written), tokens, args, embedded_BTD)
        before_BTD, x_BTD = x_BTD, output.x_BTD
        if may_exit:
            x_BTD, exits = apply_exits(hparams.model, place, exits, before_BTD, x_BTD)
        record = output.records.routing
        if layer.kind.part == 'block':
            last_block = place, before_BTD, [*written], record
        written.append(output.written)
        if layer.kind.routed and hparams.model.routing.part != 'mlp':
            caches.append(_selected_tokens(output, tokens, sizes[-1], routed_capacity))
        elif layer.kind.part == 'block':
            caches.append(_all_tokens(output, capacity))
        if layer.kind.routed:
            dropped_B += jnp.sum(record.dropped_BT, axis=1)
    lengths_B = jnp.sum(tokens.segment_ids_BT > 0, axis=1)
    last_B = jnp.maximum(lengths_B - 1, 0)
    take_last = functools.partial(gather_tokens, indices_BC=last_B[:, None])
    last = jax.tree.map(take_last, tokens)
    documents_B = jnp.argmax(tokens.segment_ids_BT == last.segment_ids_BT, axis=1)
    cache = Cache(tuple(caches), lengths_B, documents_B.astype(jnp.int32), dropped_B)
    if may_exit or not layers or hparams.model.experts.row_capacity:
        x_B1D = take_last(x_BTD)
    else:
        # Run the last block again, for the last token only. Then nothing uses its output above, so
        # XLA removes its queries, attention and mlp for all other tokens from the program.
        place, x_BTD, written, record = last_block
        x_B1D, embedded_B1D, written, record = jax.tree.map(
            take_last, (x_BTD, embedded_BTD, written, record)
        )
        if record is not None:
            caches[-1] = without_newest(caches[-1], record.selected_BT[:, 0])
        by_token = x_B1D, last, cache.documents_B[:, None], embedded_B1D
        x_B1D, *_ = _extend_layers(layers[place:], by_token, written, caches)
    return lm_head(_final(unrolled, hparams, x_B1D), unrolled)[:, 0], cache


def _selected_tokens(output: LayerOutput, tokens, most: int, capacity: int | None) -> LayerCache:
    """Return the cache of a block that has only the tokens that its router selected."""
    selected_BT = output.records.routing.selected_BT
    positions_BC = gather_tokens(tokens.positions_BT, mask_to_indices(selected_BT, most))
    lengths_B = jnp.sum(selected_BT, axis=1)
    return cache_from_prefill(output.aux.keys, capacity or most, positions_BC, lengths_B)


def _all_tokens(output: LayerOutput, capacity: int) -> LayerCache:
    """Return the cache of a block whose attention runs on all tokens."""
    cache, record = cache_from_prefill(output.aux.keys, capacity), output.records.routing
    if record is not None:
        selected_B = jnp.sum(record.selected_BT, axis=1, dtype=jnp.int32)
        cache = cache._replace(selected_B=selected_B)
    return cache._replace(taken_BE=output.aux.expert_state.taken_BE)


def empty_cache(unrolled, batch: int, *, hparams, routing, capacity: int, routed_capacity):
    """Return an empty Cache for `batch` rows; a `routed_capacity` of None stands for `capacity`."""
    tokens_BT = jax.ShapeDtypeStruct((batch, capacity), jnp.int32)
    run = functools.partial(prefill, hparams=hparams, routing=routing, capacity=capacity)
    run = functools.partial(run, routed_capacity=routed_capacity)
    _, shapes = jax.eval_shape(run, unrolled, tokens_BT, tokens_BT)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def extend(unrolled, cache: Cache, tokens_BT, begins_BT, branches_BT, *, hparams, routing: str):
    """Process T more tokens of each row. The cache is not changed; see `update_cache`.

    Args:
      unrolled: the variables that `unroll` returns.
      cache: the earlier tokens.
      tokens_BT: int, the new tokens. Positions from data.sequence_length on are not known.
      begins_BT: bool, tokens that begin a document.
      branches_BT: the branch of each token. All True: one branch. Numbers above 0: several
        branches, one after another. Each continues from the cache as if it were alone; then no
        document may begin, and no expert may have a `row_capacity`. 0 or False, at the end of a
        row: the token does not exist; its results mean nothing and must not enter the cache.
      hparams: those of the model.
      routing: the causal rule.

    Returns:
      The input of `lm_head` [B, T, D], CacheUpdates, and dropped_BT, int32: how many routed blocks
      selected a token but had no room for it.
    """
    check_causal(hparams, routing)
    documents_BT = documents_of(cache, begins_BT & (branches_BT > 0))
    branches_BT = branches_BT.astype(jnp.int32)
    positions_BT = next_positions(cache, branches_BT)
    tokens = _with_turns(unrolled, token_info(hparams, tokens_BT, branches_BT, positions_BT))
    tokens = tokens._replace(segment_ids_BT=branches_BT)  # also if attention crosses documents
    x_BTD = _embed(unrolled, hparams, tokens_BT)
    embedded_BTD = embedded_input(hparams.model, x_BTD)
    most = hparams.model.routing.max_selected(hparams.data.sequence_length, routing)
    layers = list(layers_of(unrolled, hparams, routing, (most,)))
    by_token = x_BTD, tokens, documents_BT, embedded_BTD
    if hparams.model.routing.routes_loops:
        recursions = Recursions(hparams, routing, unrolled['loops'], layers)
        x_BTD, updates, dropped_BT = recursions.extend(x_BTD, tokens, cache, documents_BT)
    elif has_exits(hparams.model, routing):
        x_BTD, updates = extend_with_exits(hparams.model, layers, by_token, cache.layers)
        dropped_BT = jnp.zeros_like(tokens_BT)
    else:
        x_BTD, updates, dropped_BT = _extend_layers(layers, by_token, [], cache.layers)
    return _final(unrolled, hparams, x_BTD), updates, dropped_BT


def _extend_layers(layers, by_token, written, caches):
    """Run `extend` through some layers. Returns x_BTD, CacheUpdates and dropped_BT.

    Args:
      layers: (Layer, its variables, LayerArgs) of each layer.
      by_token: x_BTD, TokenInfo, where documents begin [B, T], and the `embedded_input`.
      written: the NewSlots of earlier layers for the new tokens. A query sees only the slots of its
        own position, so the cache has none.
      caches: those of all blocks; the last ones belong to `layers`.
    """
    x_BTD, tokens, documents_BT, embedded_BTD = by_token
    written, updates, dropped_BT = [*written], [], jnp.zeros_like(tokens.positions_BT)
    blocks = iter(caches[len(caches) - sum(layer.kind.part == 'block' for layer, *_ in layers) :])
    for layer, params, args in layers:
        inputs = x_BTD, stack_slots(written), tokens, args
        if layer.kind.part == 'block':
            past = next(blocks)
            if past.v_BKHS is None:
                past = past._replace(v_BKHS=caches[0].v_BKHS)
            inputs += past, documents_BT, embedded_BTD
            x_BTD, new, update, dropped = layer.apply(params, *inputs, method='extend')
            updates.append(update)
            dropped_BT += dropped
        else:
            x_BTD, new, *_ = layer.apply(params, *inputs)
        written.append(new)
    return x_BTD, updates, dropped_BT


def decode_step(unrolled, cache: Cache, token_B, begins_B, active_B, *, hparams, routing: str):
    """Run `extend` on one token per row. Returns float32 logits_BV, CacheUpdates and dropped_BT."""
    new_tokens = token_B[:, None], begins_B[:, None], active_B[:, None]
    x_B1D, *updates = extend(unrolled, cache, *new_tokens, hparams=hparams, routing=routing)
    return lm_head(x_B1D, unrolled)[:, 0], *updates
