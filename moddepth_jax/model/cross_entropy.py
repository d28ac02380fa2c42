"""Next-token cross-entropy with z-loss, of which the logits exist for a few tokens at a time.

Logits of a batch can be its largest array: 1.6 GB for 4096 tokens over 100k ids, and their gradient
is as large. So a device goes through its tokens in chunks: the logits of a chunk, its losses, their
slopes, and what these add to both gradients. The gradients are known before the backward pass asks
for them, so that no product is computed twice.
"""

import functools

import jax
import jax.numpy as jnp

from moddepth_jax.model.layers import head_matrix, logits, wide_einsum
from moddepth_jax.model.partition import by_shards, constrain, part_shape

LOGITS_BYTES = 2**28  # most float32 logits that a device holds if nobody says how many


def token_losses(logits_BTV, labels_BT):
    """Negative log-likelihood and log-partition of every target, 0 where the label is negative.

    Args:
      logits_BTV: float32 [B, T, V].
      labels_BT: int [B, T], negative for a target that does not count.

    Returns:
      nll_BT in nats, log_z_BT, counted_BT (float32 0 or 1).
    """
    counted_BT = (labels_BT >= 0).astype(jnp.float32)
    log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    safe_BT1 = jnp.maximum(labels_BT, 0)[..., None]
    picked_BT = jnp.take_along_axis(logits_BTV, safe_BT1, axis=-1)[..., 0]
    return (log_z_BT - picked_BT) * counted_BT, log_z_BT * counted_BT, counted_BT


def cross_entropy(x_BTD, params, labels_BT, z_loss: float, loss_chunk: int):
    """Losses of the next tokens, from what the head reads.

    Args:
      x_BTD: `Transformer.hidden_states`.
      params: of the Transformer; of these `head`, or where it is tied `embedding`.
      labels_BT: int [B, T], negative for a target that does not count.
      z_loss: weight of the squared log-partition.
      loss_chunk: most tokens of a device whose logits exist at once; 0: as many as have
        LOGITS_BYTES of them. Where these are all, the logits are those of `read_out`.

    Returns:
      The scalar to differentiate, sum of nll + z_loss log_z^2 over targets; and, without gradients,
      its parts nll_BT and log_z_BT, as `token_losses` returns them.
    """
    matrix, axes = head_matrix(params, x_BTD.dtype)
    names = {'x_BTD': ('rows', None, None), 'labels_BT': ('rows', None)}
    names['matrix'] = tuple('vocab' if axis == 'v' else None for axis in axes)
    rows, length, _ = part_shape(names['x_BTD'], x_BTD.shape)
    vocab_size = part_shape(names['matrix'], matrix.shape)[axes.index('v')]
    most = loss_chunk or max(1, LOGITS_BYTES // (4 * vocab_size))
    if rows * length <= most:
        nll_BT, log_z_BT, _ = token_losses(logits(x_BTD, matrix, axes), labels_BT)
        total = _total(nll_BT, log_z_BT, z_loss)
    else:
        chunk = chunk_size(rows * length, most)
        total, nll_BT, log_z_BT = _in_chunks(x_BTD, matrix, labels_BT, z_loss, axes, chunk)
    return total, jax.lax.stop_gradient(nll_BT), jax.lax.stop_gradient(log_z_BT)


def chunk_size(tokens: int, most: int) -> int:
    """Tokens of equal chunks: at most `most`, and at least half of that if they then divide."""
    fewest = -(-tokens // most)
    count = next((count for count in range(fewest, 2 * fewest) if tokens % count == 0), fewest)
    return -(-tokens // count)


def _total(nll_BT, log_z_BT, z_loss):
    return jnp.sum(nll_BT) + z_loss * jnp.sum(log_z_BT**2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _in_chunks(x_BTD, matrix, labels_BT, z_loss, axes, chunk):
    """`cross_entropy` in chunks of so many tokens of a device.

    matrix: [D, V] or [V, D], as axes says: dv or vd.
    """
    nll_BT, log_z_BT = _sharded(x_BTD, matrix, labels_BT, z_loss, axes, chunk, slopes=False)
    return _total(nll_BT, log_z_BT, z_loss), nll_BT, log_z_BT


def _in_chunks_forward(x_BTD, matrix, labels_BT, z_loss, axes, chunk):
    nll_BT, log_z_BT, dx_BTD, parts = _sharded(
        x_BTD, matrix, labels_BT, z_loss, axes, chunk, slopes=True
    )
    # Summed in the dtype of the matrix, in which the sum is sent, and split as it is stored.
    names = ['vocab' if axis == 'v' else 'embed' for axis in axes]
    d_matrix = constrain(jnp.sum(parts, axis=0, dtype=parts.dtype), *names)
    # Nobody else needs the sum before the step ends: XLA would hold its parts for as long.
    slopes = jax.lax.optimization_barrier((dx_BTD, d_matrix))
    return (_total(nll_BT, log_z_BT, z_loss), nll_BT, log_z_BT), slopes


def _in_chunks_backward(z_loss, axes, chunk, slopes, cotangents):
    del z_loss, axes, chunk
    dx_BTD, d_matrix = ((slope * cotangents[0]).astype(slope.dtype) for slope in slopes)
    return dx_BTD, d_matrix, None


_in_chunks.defvjp(_in_chunks_forward, _in_chunks_backward)


def _sharded(x_BTD, matrix, labels_BT, z_loss, axes, chunk, slopes):
    """nll_BT and log_z_BT, each device going through its own tokens; with `slopes` of the total too.

    Those are dx_BTD and, of the matrix, the parts that devices with other rows add, in its dtype,
    stacked on a leading axis.
    """
    of_matrix = tuple('vocab' if axis == 'v' else None for axis in axes)
    names = {'x_BTD': ('rows', None, None), 'matrix': of_matrix, 'labels_BT': ('rows', None)}
    names_out = (names['labels_BT'],) * 2
    if slopes:
        names_out += names['x_BTD'], ('rows', *of_matrix)
    vocab_axis = axes.index('v')
    vocab_size = matrix.shape[vocab_axis]

    def own(x_BTD, matrix, labels_BT):
        # Without a mesh, or where it does not divide the ids, each device has all of them.
        split = 'tensor' if matrix.shape[vocab_axis] < vocab_size else None
        tokens = labels_BT.size
        count = -(-tokens // chunk)
        empty = count * chunk - tokens
        x_XKD = jnp.pad(x_BTD.reshape(tokens, -1), ((0, empty), (0, 0))).reshape(count, chunk, -1)
        labels_XK = jnp.pad(labels_BT.ravel(), (0, empty), constant_values=-1)
        labels_XK = labels_XK.reshape(count, chunk)
        operand = matrix.astype(x_BTD.dtype)

        def of_chunk(sums, inputs):
            x_KD, labels_K = inputs
            logits_KV = wide_einsum(f'kd,{axes}->kv', x_KD, operand)
            nll_K, log_z_K, here_KV = _chunk_losses(logits_KV, labels_K, split)
            if not slopes:
                return None, (nll_K, log_z_K)
            counted_K1 = (labels_K >= 0)[:, None]
            factor_K1 = jnp.where(counted_K1, 1 + 2 * z_loss * log_z_K[:, None], 0)
            slope_KV = jnp.exp(logits_KV - log_z_K[:, None]) * factor_K1 - here_KV
            slope_KV = slope_KV.astype(x_KD.dtype)
            dx_KD = wide_einsum(f'kv,{axes}->kd', slope_KV, operand).astype(x_KD.dtype)
            sums += wide_einsum(f'kd,kv->{axes}', x_KD, slope_KV)
            return sums, (nll_K, log_z_K, dx_KD)

        wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
        sums = jnp.zeros(matrix.shape, wide) if slopes else None
        sums, outputs = jax.lax.scan(of_chunk, sums, (x_XKD, labels_XK))
        outputs = [side.reshape(-1, *side.shape[2:])[:tokens] for side in outputs]
        nll_BT, log_z_BT = (side.reshape(labels_BT.shape) for side in outputs[:2])
        if not slopes:
            return nll_BT, log_z_BT
        dx_BTD = outputs[2].reshape(x_BTD.shape)
        if split:
            dx_BTD = jax.lax.psum(dx_BTD, split)
        return nll_BT, log_z_BT, dx_BTD, sums.astype(matrix.dtype)[None]

    arrays = {'x_BTD': x_BTD, 'matrix': matrix, 'labels_BT': labels_BT}
    return by_shards(own, arrays, names, names_out)


def _chunk_losses(logits_KV, labels_K, split):
    """nll_K and log_z_K, as `token_losses` has them, and bool [K, V], where the labels' logits are.

    split: the mesh axis over which the ids are split; None: all are here.
    """
    high_K = jax.lax.stop_gradient(jnp.max(logits_KV, axis=-1))
    labels_K1 = labels_K[:, None]
    if split:
        high_K = jax.lax.pmax(high_K, split)
        labels_K1 -= jax.lax.axis_index(split) * logits_KV.shape[1]
    ids_KV = jax.lax.broadcasted_iota(labels_K.dtype, logits_KV.shape, 1)
    here_KV = (ids_KV == labels_K1) & (labels_K >= 0)[:, None]
    parts = (
        jnp.sum(jnp.exp(logits_KV - high_K[:, None]), axis=-1),
        jnp.sum(jnp.where(here_KV, logits_KV, 0), axis=-1),
    )
    sum_K, picked_K = jax.lax.psum(parts, split) if split else parts
    counted_K = labels_K >= 0
    log_z_K = jnp.where(counted_K, high_K + jnp.log(sum_K), 0)
    return log_z_K - picked_K, log_z_K, here_KV
