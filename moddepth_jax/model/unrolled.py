"""The same model with its layers unrolled and keys kept: prompts in one pass, then token by token.

Layers are never scanned here: XLA fuses the write of a scanned cache into its readers and copies
every cache at every token.
"""

import jax
import jax.numpy as jnp

from moddepth_jax.hparams import Hparams
from moddepth_jax.model.attention import Past, Tokens
from moddepth_jax.model.block import Block
from moddepth_jax.model.cache import Cache, Entry, from_prefill, visible
from moddepth_jax.model.depth_scan import find_runs
from moddepth_jax.model.layers import logits, rms_norm
from moddepth_jax.model.mixture_of_depths import MixtureOfDepths, RoutedLayer
from moddepth_jax.model.routers import token_seeds
from moddepth_jax.model.routing import static_sizes
from moddepth_jax.model.transformer import layer_kinds, layer_thresholds


def unroll(variables, hparams: Hparams, routing: str) -> dict:
    """The variables of a Transformer with a dict of parameters for each layer.

    Args:
      variables: of the Transformer.
      hparams: of the same.
      routing: the causal rule that they are for.

    Returns:
      `embedding`, `layers` (a list in order of depth), `final_norm`, `head` (absent where the
      embedding is tied), and `thresholds_R`.

    Raises:
      ValueError: as `layer_thresholds` says.
    """
    model, params = hparams.model, variables['params']
    layers = []
    for i, run in enumerate(find_runs(layer_kinds(model))):
        stacked = params['stack'][f'run_{i}']
        for repeat in range(run.repeats):
            one = jax.tree.map(lambda leaf, repeat=repeat: leaf[repeat], stacked)
            layers += [one[f'layer_{j}'] for j in range(len(run.group))]
    thresholds_R = layer_thresholds(model, variables.get('averages'), routing)
    rest = {name: params[name] for name in ('embedding', 'final_norm', 'head') if name in params}
    return {**rest, 'layers': layers, 'thresholds_R': thresholds_R}


def _tokens(hparams, tokens_BT, positions_BT, segment_ids_BT):
    random = hparams.model.routing.router == 'random'
    key = jax.random.key(hparams.seed)
    seeds = token_seeds(key, tokens_BT, positions_BT) if random else None
    return Tokens(positions_BT, segment_ids_BT, seeds)


def _embed(unrolled, hparams, tokens_BT):
    return jnp.take(unrolled['embedding'], tokens_BT, axis=0).astype(hparams.model.dtype)


def _read_out(unrolled, hparams, x_B1D):
    scale_D, epsilon = unrolled['final_norm']['scale'], hparams.model.norm_eps
    tied = hparams.model.tie_embeddings
    head_DV = unrolled['embedding'].T if tied else unrolled['head']['kernel']
    return logits(rms_norm(x_B1D, scale_D, epsilon), head_DV)[:, 0]


def _layers(unrolled, hparams):
    """(number, kind, params, RoutedLayer or None) of each layer."""
    number = 0
    for i, kind in enumerate(layer_kinds(hparams.model)):
        told = None
        if kind.routed:
            threshold = unrolled['thresholds_R'][number]
            told = RoutedLayer(jnp.int32(number), threshold, jnp.bool_(True))
            number += 1
        yield i, kind, {'params': unrolled['layers'][i]}, told


def prefill(
    unrolled,
    tokens_BT,
    segment_ids_BT,
    *,
    hparams: Hparams,
    routing: str,
    slots: int,
    routed_slots: int | None,
):
    """A causal-routed pass over prompts, which leaves their keys and values.

    Args:
      unrolled: of `unroll`.
      tokens_BT: int32 [B, T], prompts from the left; what follows one is padding.
      segment_ids_BT: int32 [B, T], 0 for padding; documents count from 1.
      hparams: of the model.
      routing: a causal rule of its.
      slots: of a dense block's cache, T at least.
      routed_slots: of a routed block's cache, where the rule admits no more tokens than that; None:
        every token that the rule lets in enters, and there are T slots.

    Returns:
      logits_BV after the last token of each prompt, float32, and the Cache.
    """
    model, (batch, length) = hparams.model, tokens_BT.shape
    positions_BT = jnp.broadcast_to(jnp.arange(length), tokens_BT.shape)
    tokens = _tokens(hparams, tokens_BT, positions_BT, segment_ids_BT)
    x_BTD = _embed(unrolled, hparams, tokens_BT)
    sizes = static_sizes(length, length if routed_slots is None else routed_slots)
    caches, refused_B = [], jnp.zeros(batch, jnp.int32)
    for _, kind, params, told in _layers(unrolled, hparams):
        if kind.routed:
            module = MixtureOfDepths(model, kind.window, routing, sizes)
            x_BTD, cache, refused = module.apply(
                params, x_BTD, tokens, told, routed_slots, method='prefill'
            )
            refused_B += refused
        else:
            block = Block(model, kind.window)
            x_BTD, keys = block.apply(params, x_BTD, tokens, method='with_keys')
            cache = from_prefill(keys, slots)
        caches.append(cache)
    lengths_B = jnp.sum(segment_ids_BT > 0, axis=1)
    last_B = jnp.maximum(lengths_B - 1, 0)
    x_B1D = jnp.take_along_axis(x_BTD, last_B[:, None, None], axis=1)
    mine_BT = segment_ids_BT == jnp.take_along_axis(segment_ids_BT, last_B[:, None], axis=1)
    documents_B = jnp.argmax(mine_BT, axis=1).astype(jnp.int32)
    cache = Cache(tuple(caches), lengths_B, documents_B, refused_B)
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
      logits_BV in float32 after the token, a list of an Entry for each block, and refused_B: what
      `cache.write` takes.
    """
    model = hparams.model
    documents_B = jnp.where(begins_B, cache.lengths_B, cache.documents_B)
    token_B1, positions_B1 = token_B[:, None], cache.lengths_B[:, None]
    tokens = _tokens(hparams, token_B1, positions_B1, jnp.ones_like(token_B1))
    x_B1D = _embed(unrolled, hparams, token_B1)
    entries, refused_B = [], jnp.zeros_like(token_B)
    for i, kind, params, told in _layers(unrolled, hparams):
        layer = cache.layers[i]
        if kind.routed:
            module = MixtureOfDepths(model, kind.window, routing)
            x_B1D, entry, refused = module.apply(
                params, x_B1D, tokens, told, layer, documents_B, active_B, method='decode'
            )
            refused_B += refused
        else:
            block = Block(model, kind.window)
            seen_BS = visible(layer, cache.lengths_B, documents_B, kind.window, layer.slots)
            past = Past(layer.k_BKHS, layer.v_BKHS, seen_BS)
            x_B1D, keys = block.apply(params, x_B1D, tokens, past, method='with_keys')
            entry = Entry(keys, None)
        entries.append(entry)
    return _read_out(unrolled, hparams, x_B1D), entries, refused_B
