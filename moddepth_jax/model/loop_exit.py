"""Exits from the loops: a token whose stream has almost stopped changing leaves the loops.

This happens only in evaluation and decoding. A token exits after loop r if the relative change
|x_r - x_(r-1)| / |x_r| of its stream is below a threshold, and keeps x_r from then on. In later
loops each block still makes keys and values from x_r, so that the result depends neither on later
tokens nor on whether tokens are decoded at once or one by one. In decoding, a row whose new tokens
have all exited computes nothing but these keys and values.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moddepth_jax.hparams import ModelHparams
from moddepth_jax.model.kv_cache import CacheUpdate
from moddepth_jax.model.layers import widen
from moddepth_jax.model.routing import run_on_rows


class Exits(NamedTuple):
    """The state of the tokens during the loops."""

    start_BTD: jax.Array  # the stream before this loop
    exited_BT: jax.Array  # bool, tokens that have exited
    loops_BT: jax.Array  # int32, how many loops each token went through


def has_exits(hparams: ModelHparams, routing: str) -> bool:
    """Return whether tokens exit under that routing; they never do under that of training."""
    return hparams.loop_exit_threshold > 0 and routing != 'top_c'


def apply_exits(hparams: ModelHparams, place: int, exits: Exits | None, before_BTD, x_BTD):
    """Return the stream after the block at `place`, and the Exits.

    Args:
      hparams: those of the model.
      place: the number of the block among those that run.
      exits: returned for the block before; None before the first block.
      before_BTD: the input of the block, which tokens that have exited keep.
      x_BTD: the output of the block.
    """
    size = len(hparams.looped_range)
    loop, block = divmod(place - hparams.looped_range.start, size)
    if not 0 <= loop < hparams.loops:
        return x_BTD, exits
    if exits is None:
        exited_BT = jnp.zeros(x_BTD.shape[:2], bool)
        exits = Exits(before_BTD, exited_BT, jnp.zeros(exited_BT.shape, jnp.int32))
    exited_BT = exits.exited_BT
    x_BTD = jnp.where(exited_BT[..., None], before_BTD, x_BTD)
    if block < size - 1:
        return x_BTD, exits
    small_BT = relative_change(exits.start_BTD, x_BTD) < hparams.loop_exit_threshold
    return x_BTD, Exits(x_BTD, exited_BT | small_BT, exits.loops_BT + ~exited_BT)


def extend_with_exits(hparams: ModelHparams, layers, by_token, caches):
    """Run `decoding.extend` through the layers of a model with exits.

    From the second loop on, a loop runs in full only on rows with a token that has not exited, in
    the smallest bucket of rows that holds them. On the others it makes only keys and values.

    Args:
      hparams: those of the model.
      layers: (Layer, its variables, LayerArgs) of each layer.
      by_token: x_BTD, TokenInfo, where documents begin [B, T], and the `embedded_input`.
      caches: the LayerCache of each layer.

    Returns:
      x_BTD after the layers, and a CacheUpdate for each.
    """
    x_BTD, *by_token = by_token

    def run(some, x_BTD, tokens, documents_BT, embedded_BTD, exited_BT=None, rows_C=None):
        keys = []
        for (layer, variables, args), cache in zip(layers[some], caches[some], strict=True):
            inputs = None, tokens, args, cache, documents_BT, embedded_BTD, rows_C
            y_BTD, _, update, _ = layer.apply(variables, x_BTD, *inputs, method='extend')
            x_BTD = y_BTD if exited_BT is None else jnp.where(exited_BT[..., None], x_BTD, y_BTD)
            keys.append(update.keys)
        return x_BTD, keys

    def run_loop(some, x_BTD, exited_BT):
        if exited_BT is None:
            return run(some, x_BTD, *by_token)

        def skip(sides):
            x_BTD, tokens, _, embedded_BTD, _ = sides
            inputs = x_BTD, tokens, embedded_BTD
            keys = [layer.apply(of, *inputs, method='keys') for layer, of, _ in layers[some]]
            return x_BTD, keys

        stay_B = jnp.any(~exited_BT & (by_token[0].segment_ids_BT > 0), axis=1)
        sides = x_BTD, *by_token, exited_BT
        return run_on_rows(lambda sides, rows_C: run(some, *sides, rows_C), skip, stay_B, sides)

    first, size = hparams.looped_range.start, len(hparams.looped_range)
    x_BTD, keys = run(slice(first), x_BTD, *by_token)
    exited_BT = None
    for loop in range(hparams.loops):
        start = first + loop * size
        before_BTD = x_BTD
        x_BTD, new = run_loop(slice(start, start + size), x_BTD, exited_BT)
        # A token that has exited does not change, so it counts as exited again.
        exited_BT = relative_change(before_BTD, x_BTD) < hparams.loop_exit_threshold
        keys += new
    x_BTD, new = run(slice(first + hparams.loops * size, None), x_BTD, *by_token)
    return x_BTD, [CacheUpdate(one, None) for one in (*keys, *new)]


def relative_change(before_BTD, x_BTD) -> jax.Array:
    """Return |x - before| / |x| of each token by L2 norms, [B, T], float32 or wider."""
    before_BTD, x_BTD = widen(before_BTD), widen(x_BTD)
    return jnp.linalg.norm(x_BTD - before_BTD, axis=-1) / jnp.linalg.norm(x_BTD, axis=-1)
