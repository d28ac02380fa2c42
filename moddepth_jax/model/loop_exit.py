"""Exits from the loops: a token whose stream has almost stopped changing keeps it from then on.

At evaluation and in decoding alone, by |x_r - x_(r-1)| / |x_r| of its own stream after loop r
against a threshold. A token that has left still has keys and values in each later loop, those
that each block makes of the stream it keeps: nothing depends on later tokens, nor on whether tokens
come at once or one by one. In decoding a row whose new tokens have left computes nothing else.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moddepth_jax.hparams import ModelHparams
from moddepth_jax.model.kv_cache import CacheUpdate
from moddepth_jax.model.routing import run_on_rows


class Exits(NamedTuple):
    """What is known of the tokens during the loops."""

    start_BTD: jax.Array  # the stream before this loop
    left_BT: jax.Array  # bool, tokens that have left
    loops_BT: jax.Array  # int32, how many loops each token went through


def has_exits(hparams: ModelHparams, routing: str) -> bool:
    """Whether tokens leave the loops under that routing: never under that of training."""
    return hparams.loop_exit_threshold > 0 and routing != 'top_c'


def apply_exits(hparams: ModelHparams, place: int, exits: Exits | None, before_BTD, x_BTD):
    """The stream after the block at `place`, x_BTD but for tokens that have left; and the Exits.

    `before_BTD` is the stream that the block has read; `exits` is None before the first block, and
    has what the last loop left from then on.
    """
    size = len(hparams.looped_range)
    loop, block = divmod(place - hparams.looped_range.start, size)
    if not 0 <= loop < hparams.loops:
        return x_BTD, exits
    if exits is None:
        left_BT = jnp.zeros(x_BTD.shape[:2], bool)
        exits = Exits(before_BTD, left_BT, jnp.zeros(left_BT.shape, jnp.int32))
    left_BT = exits.left_BT
    x_BTD = jnp.where(left_BT[..., None], before_BTD, x_BTD)
    if block < size - 1:
        return x_BTD, exits
    small_BT = relative_change(exits.start_BTD, x_BTD) < hparams.loop_exit_threshold
    return x_BTD, Exits(x_BTD, left_BT | small_BT, exits.loops_BT + ~left_BT)


def extend_with_exits(hparams: ModelHparams, layers, by_token, caches):
    """`extend` of decoding by the layers of a model with exits: x_BTD and CacheUpdates.

    `layers` are (Layer, its variables, LayerArgs), `by_token` x_BTD, TokenInfo, where documents
    begin and the `embedded_input`. From the second loop on a loop computes the rows with a token
    that has not left, at the least bucket of rows that holds them, and of the others the keys and
    values of its blocks.
    """
    x_BTD, *by_token = by_token

    def run(some, x_BTD, tokens, documents_BT, embedded_BTD, left_BT=None, rows_C=None):
        keys = []
        for (layer, variables, args), cache in zip(layers[some], caches[some], strict=True):
            inputs = None, tokens, args, cache, documents_BT, embedded_BTD, rows_C
            y_BTD, _, update, _ = layer.apply(variables, x_BTD, *inputs, method='extend')
            x_BTD = y_BTD if left_BT is None else jnp.where(left_BT[..., None], x_BTD, y_BTD)
            keys.append(update.keys)
        return x_BTD, keys

    def run_loop(some, x_BTD, left_BT):
        if left_BT is None:
            return run(some, x_BTD, *by_token)

        def skip(sides):
            x_BTD, tokens, _, embedded_BTD, _ = sides
            inputs = x_BTD, tokens, embedded_BTD
            keys = [layer.apply(of, *inputs, method='keys') for layer, of, _ in layers[some]]
            return x_BTD, keys

        stay_B = jnp.any(~left_BT & (by_token[0].segment_ids_BT > 0), axis=1)
        sides = x_BTD, *by_token, left_BT
        return run_on_rows(lambda sides, rows_C: run(some, *sides, rows_C), skip, stay_B, sides)

    first, size = hparams.looped_range.start, len(hparams.looped_range)
    x_BTD, keys = run(slice(first), x_BTD, *by_token)
    left_BT = None
    for loop in range(hparams.loops):
        start = first + loop * size
        before_BTD = x_BTD
        x_BTD, new = run_loop(slice(start, start + size), x_BTD, left_BT)
        # Of a token that has left nothing changes.
        left_BT = relative_change(before_BTD, x_BTD) < hparams.loop_exit_threshold
        keys += new
    x_BTD, new = run(slice(first + hparams.loops * size, None), x_BTD, *by_token)
    return x_BTD, [CacheUpdate(one, None) for one in (*keys, *new)]


def relative_change(before_BTD, x_BTD) -> jax.Array:
    """|x - before| / |x| of each token, [B, T], float32 or wider; L2 norms."""
    wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
    before_BTD, x_BTD = before_BTD.astype(wide), x_BTD.astype(wide)
    return jnp.linalg.norm(x_BTD - before_BTD, axis=-1) / jnp.linalg.norm(x_BTD, axis=-1)
