"""Exits from the loops: a token whose stream has almost stopped changing keeps it from then on.

At evaluation and in decoding alone, by |x_r - x_(r-1)| / |x_r| of its own stream after loop r
against a threshold. A token that has left still has keys and values in each later loop, those
that each block makes of the stream it keeps: nothing depends on later tokens, nor on whether tokens
come at once or one by one.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moddepth_jax.hparams import ModelHparams


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
    size, first = len(hparams.looped_range), hparams.first_looped
    loop, block = divmod(place - first, size)
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


def relative_change(before_BTD, x_BTD) -> jax.Array:
    """|x - before| / |x| of each token, [B, T], float32 or wider; L2 norms."""
    wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
    before_BTD, x_BTD = before_BTD.astype(wide), x_BTD.astype(wide)
    return jnp.linalg.norm(x_BTD - before_BTD, axis=-1) / jnp.linalg.norm(x_BTD, axis=-1)
