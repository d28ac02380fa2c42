"""Softmaxes and sums over the depth slots of a token, one slot after another.

Only slots that are written are read, each once forward and once backward, and nothing of their size
is kept or zeroed for the backward pass, which adds to the gradients of the slots in place.
"""

import functools

import jax
import jax.numpy as jnp

from moddepth_jax.model.attention import DepthSlots


def softmax_over_slots(score, arguments, depth: DepthSlots):
    """The mean of the values of the visible slots by a softmax, its log-sum-exp, and `depth`.

    Where a token sees none they are 0 and -inf. `depth` is for the next reader: the cotangent that
    comes with it is that of the slots by later reads, to which this one adds in place, or of
    `depth.sums` if there are any, in their dtype. The running maximum and sum are those of Milakov
    and Gimelshein 2018 (arXiv 1805.02867).

    Args:
      score: a function that closes over no array, of `arguments` and one slot (the stream's
        `slot_shape` with axes B and T before, in float32 or wider): its logit [B, T, ...] and its
        value [B, T, ..., W], in that dtype.
      arguments: any arrays.
      depth: the slots, of the tokens that the layer runs on.
    """
    mean, lse, buffers = _softmax(score, arguments, depth)
    return mean, lse, _threaded(depth, buffers)


def _threaded(depth, buffers):
    """`depth` with the buffers whose cotangents are the gradients of the slots."""
    return depth._replace(**{'slots' if depth.sums is None else 'sums': buffers})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _softmax(score, arguments, depth):
    return _softmax_forward(score, arguments, depth)[0]


def join_softmaxes(parts):
    """The mean [..., W] over all of `parts`, pairs of a mean and a log-sum-exp, of one softmax.

    A single value is such a mean, and its logit the log-sum-exp; one of them must be finite.
    """
    means, logits = zip(*parts, strict=True)
    p = jax.nn.softmax(jnp.stack(logits), axis=0)
    return sum(one[..., None] * mean for one, mean in zip(p, means, strict=True))


def sum_slots(weights_LCBT, depth: DepthSlots):
    """Sums [C, B, T, D] of all written slots [B, T, D] with a weight for each token, and `depth`.

    Weights of [L, C, 1, 1] are those of all tokens. In their dtype, float32 or wider; those of
    slots from `depth.num_written` on are not read. `depth` as of `softmax_over_slots`.
    """
    total_CBTD, buffers = _sum(weights_LCBT, depth)
    return total_CBTD, _threaded(depth, buffers)


@jax.custom_vjp
def _sum(weights_LCBT, depth):
    return _sum_forward(weights_LCBT, depth)[0]


def _slot(depth, i):
    """Slot i of all tokens, in float32 or wider."""

    def take(side_LBTX):
        side_BTX = jax.lax.dynamic_index_in_dim(side_LBTX, i, keepdims=False)
        return side_BTX.astype(jnp.promote_types(side_BTX.dtype, jnp.float32))

    return jax.tree.map(take, depth.slots)


def _of_tokens(score, depth):
    """`score` as a function of the arguments and of a slot of all tokens."""
    return lambda arguments, slot: score(arguments, depth.pick(slot))


def _visible(depth, i, logit):
    """The logit, or -inf for tokens that do not see slot i."""
    if depth.valid_LBT is None:
        return logit
    visible_BT = depth.pick(jax.lax.dynamic_index_in_dim(depth.valid_LBT, i, keepdims=False))
    visible_BT = visible_BT.reshape(*visible_BT.shape, *[1] * (logit.ndim - 2))
    return jnp.where(visible_BT, logit, -jnp.inf)


def _buffers(depth):
    """Those whose cotangents are the gradients of the slots."""
    return depth.slots if depth.sums is None else depth.sums


def _add(dslots, dslot, i):
    """The gradients of all slots with one more of slot i."""

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
    """[L, C, B, T]: a backward pass keeps those that are shared as they are."""
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
