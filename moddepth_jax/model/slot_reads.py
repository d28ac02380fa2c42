"""Softmaxes and sums over the depth slots of a token, one slot after another.

Only written slots are read, once in the forward and once in the backward pass. The backward pass
adds to the gradients of the slots in place: nothing of the size of all slots is saved or zeroed.
"""

import functools

import jax
import jax.numpy as jnp

from moddepth_jax.model.attention import DepthSlots
from moddepth_jax.model.layers import widen


def softmax_over_slots(score, arguments, depth: DepthSlots):
    """Average the values of the visible slots by a softmax with a running maximum and sum.

    The method is from Milakov and Gimelshein 2018 (arXiv 1805.02867).

    Args:
      score: score(arguments, slot) -> (logit [B, T, ...], value [B, T, ..., W]). A slot has the
        stream's `slot_shape` after axes B and T. All are float32 or wider. The function must not
        close over arrays.
      arguments: any arrays.
      depth: the slots of the tokens that the layer runs on.

    Returns:
      The mean, its log-sum-exp (0 and -inf for a token without visible slots), and `depth` for the
      next reader. The cotangent of that `depth` has the gradients of the slots from later reads,
      and this read adds to them in place; or those of `depth.sums`, in their dtype.
    """
    mean, lse, buffers = _softmax(score, arguments, depth)
    return mean, lse, _threaded(depth, buffers)


def _threaded(depth, buffers):
    """Return `depth` with the buffers whose cotangents are the gradients of the slots."""
    return depth._replace(**{'slots' if depth.sums is None else 'sums': buffers})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _softmax(score, arguments, depth):
    return _softmax_forward(score, arguments, depth)[0]


def join_softmaxes(parts):
    """Join parts of one softmax, pairs (mean, log-sum-exp), into the mean [..., W] over all.

    A single value is also a mean, with its logit as the log-sum-exp. At least one log-sum-exp must
    be finite.
    """
    means, logits = zip(*parts, strict=True)
    p = jax.nn.softmax(jnp.stack(logits), axis=0)
    return sum(one[..., None] * mean for one, mean in zip(p, means, strict=True))


def sum_slots(weights_LCBT, depth: DepthSlots):
    """Return weighted sums [C, B, T, D] of all written slots [B, T, D], and `depth`.

    The weights are float32 or wider, which is also the dtype of the sums. Weights of [L, C, 1, 1]
    are the same for all tokens. Weights from slot `depth.num_written` on are not read. For `depth`
    see `softmax_over_slots`.
    """
    total_CBTD, buffers = _sum(weights_LCBT, depth)
    return total_CBTD, _threaded(depth, buffers)


@jax.custom_vjp
def _sum(weights_LCBT, depth):
    return _sum_forward(weights_LCBT, depth)[0]


def _slot(depth, i):
    """Return slot i of all tokens in float32 or wider."""

    def take(side_LBTX):
        side_BTX = jax.lax.dynamic_index_in_dim(side_LBTX, i, keepdims=False)
        return widen(side_BTX)

    return jax.tree.map(take, depth.slots)


def _of_tokens(score, depth):
    """Return `score` as a function of a slot of all tokens."""
    return lambda arguments, slot: score(arguments, depth.pick(slot))


def _visible(depth, i, logit):
    """Return the logit, with -inf for tokens that do not see slot i."""
    if depth.valid_LBT is None:
        return logit
    visible_BT = depth.pick(jax.lax.dynamic_index_in_dim(depth.valid_LBT, i, keepdims=False))
    visible_BT = visible_BT.reshape(*visible_BT.shape, *[1] * (logit.ndim - 2))
    return jnp.where(visible_BT, logit, -jnp.inf)


def _buffers(depth):
    """Return the buffers whose cotangents are the gradients of the slots."""
    return depth.slots if depth.sums is None else depth.sums


def _add(dslots, dslot, i):
    """Add to the gradient of slot i in the gradients of all slots."""

    def add(of_all, one):
        new = jax.lax.dynamic_index_in_dim(of_all, i, keepdims=False) + one.astype(of_all.dtype)
        return jax.lax.dynamic_update_index_in_dim(of_all, new, i, 0)

    return jax.tree.map(add, dslots, dslot)


def _cotangent(depth, dslots):
    return DepthSlots(dslots) if depth.sums is None else DepthSlots(None, sums=dslots)


def _softmax_forward(score, arguments, depth):
    score_of = _of_tokens(score, depth)
    shapes = jax.eval_shape(lambda: score_of(arguments, _slot(depth, 0)))
    nothing, zeros = (jnp.zeros(shape.shape, shape.dtype) for shape in shapes)

    def add(i, carry):
        highest, total, weighted = carry
        logit, value = score_of(arguments, _slot(depth, i))
        logit = _visible(depth, i, logit)
        new = jnp.maximum(highest, logit)
        shift = jnp.where(jnp.isneginf(new), 0, new)
        kept, p = jnp.exp(highest - shift), jnp.exp(logit - shift)
        return new, kept * total + p, kept[..., None] * weighted + p[..., None] * value

    start = jnp.full_like(nothing, -jnp.inf), nothing, zeros
    highest, total, weighted = jax.lax.fori_loop(0, depth.num_written, add, start)
    mean = weighted / jnp.where(total > 0, total, 1)[..., None]
    lse = highest + jnp.log(total)
    return (mean, lse, _buffers(depth)), (arguments, depth, mean, lse)


def _softmax_backward(score, residuals, cotangents):
    arguments, depth, mean, lse = residuals
    dmean, dlse, dslots = cotangents
    score_of, seen = _of_tokens(score, depth), jnp.isfinite(lse)
    shared = jnp.where(seen, dlse, 0) - _dot(dmean, mean)

    def add(i, carry):
        darguments, dslots = carry
        (logit, value), vjp = jax.vjp(score_of, arguments, _slot(depth, i))
        p = jnp.exp(_visible(depth, i, logit) - jnp.where(seen, lse, jnp.inf))
        dlogit = p * (_dot(dmean, value) + shared)
        of_arguments, dslot = vjp((dlogit, p[..., None] * dmean))
        return jax.tree.map(jnp.add, darguments, of_arguments), _add(dslots, dslot, i)

    start = jax.tree.map(jnp.zeros_like, arguments), dslots
    darguments, dslots = jax.lax.fori_loop(0, depth.num_written, add, start)
    return darguments, _cotangent(depth, dslots)


def _dot(a, b):
    return jnp.einsum('...w,...w->...', a, b, precision='highest')


_softmax.defvjp(_softmax_forward, _softmax_backward)


def _sum_forward(weights_LC, depth):
    weights_LCBT = _of_all_tokens(weights_LC, depth)

    def add(i, total_CBTD):
        weights_CBT = jax.lax.dynamic_index_in_dim(weights_LCBT, i, keepdims=False)
        return total_CBTD + weights_CBT[..., None] * _slot(depth, i)[None]

    shape = *weights_LCBT.shape[1:], depth.slots.shape[-1]
    total_CBTD = jnp.zeros(shape, weights_LCBT.dtype)
    total_CBTD = jax.lax.fori_loop(0, depth.num_written, add, total_CBTD)
    return (total_CBTD, _buffers(depth)), (weights_LC, depth)


def _of_all_tokens(weights_LC, depth):
    """Broadcast to [L, C, B, T]. The backward pass saves shared weights in their own shape."""
    return jnp.broadcast_to(weights_LC, (*weights_LC.shape[:2], *depth.slots.shape[1:3]))


def _sum_backward(residuals, cotangents):
    (weights_LC, depth), (dsum_CBTD, dslots) = residuals, cotangents
    weights_LCBT, sum_over_tokens = jax.vjp(lambda w: _of_all_tokens(w, depth), weights_LC)

    def add(i, carry):
        dweights_LCBT, dslots = carry
        weights_CBT = jax.lax.dynamic_index_in_dim(weights_LCBT, i, keepdims=False)
        dweights_CBT = _dot(dsum_CBTD, _slot(depth, i)[None])
        dslot_BTD = jnp.sum(weights_CBT[..., None] * dsum_CBTD, axis=0)
        return _add(dweights_LCBT, dweights_CBT, i), _add(dslots, dslot_BTD, i)

    start = jnp.zeros_like(weights_LCBT), dslots
    dweights_LCBT, dslots = jax.lax.fori_loop(0, depth.num_written, add, start)
    return *sum_over_tokens(dweights_LCBT), _cotangent(depth, dslots)


_sum.defvjp(_sum_forward, _sum_backward)
