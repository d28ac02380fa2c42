"""Next-token cross-entropy with z-loss, in chunks of tokens that never hold all logits."""

import functools

import jax
import jax.numpy as jnp

from kernels_pallas.xla.sequence import dot
from moddepth_jax.model.layers import head_matrix, logits
from moddepth_jax.model.sharding import constrain, map_shards, part_shape

# Bytes of a device's float32 logits, unless loss_chunk is set. Up to the first number there is one
# chunk; above it, chunks of at most half of the logits and at most the second number: each reads
# and writes the gradient of the matrix.
LOGITS_BYTES = 2**26, 2**28


def token_losses(logits_BTV, labels_BT):
    """nll [B, T] in nats, log-partition, whether a target counts: float32, 0 if label < 0."""
    counted_BT = (labels_BT >= 0).astype(jnp.float32)
    log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    safe_BT1 = jnp.maximum(labels_BT, 0)[..., None]
    picked_BT = jnp.take_along_axis(logits_BTV, safe_BT1, axis=-1)[..., 0]
    return (log_z_BT - picked_BT) * counted_BT, log_z_BT * counted_BT, counted_BT


def cross_entropy(x_BTD, params, labels_BT, z_loss: float, loss_chunk: int):
    """The sum over targets of nll + z_loss log_z^2; and, without gradients, nll_BT and log_z_BT.

    Labels are negative for targets that do not count. At most `loss_chunk` tokens of a device have
    logits at once; 0: by LOGITS_BYTES.
    """
    matrix, axes = head_matrix(params, x_BTD.dtype)
    names = _names(axes)
    rows, length, _ = part_shape(names['x_BTD'], x_BTD.shape)
    vocab_size = part_shape(names['matrix'], matrix.shape)[axes.index('v')]
    tokens, most = rows * length, loss_chunk
    if not most:
        small, large = (size // (4 * vocab_size) for size in LOGITS_BYTES)
        most = tokens if tokens <= small else max(1, min(-(-tokens // 2), large))
    if tokens <= most:
        nll_BT, log_z_BT, _ = token_losses(logits(x_BTD, matrix, axes), labels_BT)
        total = _total(nll_BT, log_z_BT, z_loss)
    else:
        chunk = chunk_size(tokens, most)
        total, nll_BT, log_z_BT = _in_chunks(x_BTD, matrix, labels_BT, z_loss, axes, chunk)
    return total, jax.lax.stop_gradient(nll_BT), jax.lax.stop_gradient(log_z_BT)


def chunk_size(tokens: int, most: int) -> int:
    """Tokens of a chunk, at most `most`: a divisor of `tokens` if one is above half of that."""
    fewest = -(-tokens // most)
    count = next((count for count in range(fewest, 2 * fewest) if tokens % count == 0), fewest)
    return -(-tokens // count)


def _names(axes):
    """Names of the axes of each array; `axes` of the matrix are dv or vd."""
    of_matrix = tuple('vocab' if axis == 'v' else None for axis in axes)
    return {'x_BTD': ('batch', None, None), 'matrix': of_matrix, 'labels_BT': ('batch', None)}


def _total(nll_BT, log_z_BT, z_loss):
    return jnp.sum(nll_BT) + z_loss * jnp.sum(log_z_BT**2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _in_chunks(x_BTD, matrix, labels_BT, z_loss, axes, chunk):
    nll_BT, log_z_BT = _sharded(x_BTD, matrix, labels_BT, z_loss, axes, chunk, slopes=False)
    return _total(nll_BT, log_z_BT, z_loss), nll_BT, log_z_BT


def _in_chunks_forward(x_BTD, matrix, labels_BT, z_loss, axes, chunk):
    nll_BT, log_z_BT, dx_BTD, parts = _sharded(
        x_BTD, matrix, labels_BT, z_loss, axes, chunk, slopes=True
    )
    # Reduce-scattered in the dtype of the matrix.
    names = ['vocab' if axis == 'v' else 'embed' for axis in axes]
    d_matrix = constrain(jnp.sum(parts, axis=0, dtype=parts.dtype), *names)
    # Without a barrier XLA postpones the sum to its first reader, the optimizer, and keeps the
    # float32 parts, as large as the matrix, until then.
    slopes = jax.lax.optimization_barrier((dx_BTD, d_matrix))
    return (_total(nll_BT, log_z_BT, z_loss), nll_BT, log_z_BT), slopes


def _in_chunks_backward(z_loss, axes, chunk, slopes, cotangents):
    del z_loss, axes, chunk
    dx_BTD, d_matrix = ((slope * cotangents[0]).astype(slope.dtype) for slope in slopes)
    return dx_BTD, d_matrix, None


_in_chunks.defvjp(_in_chunks_forward, _in_chunks_backward)


def _sharded(x_BTD, matrix, labels_BT, z_loss, axes, chunk, slopes):
    """nll_BT and log_z_BT; with `slopes` also dx_BTD and the parts [X, ...] of the sum d_matrix."""
    names = _names(axes)
    names_out = (names['labels_BT'],) * 2
    if slopes:
        names_out += names['x_BTD'], ('batch', *names['matrix'])
    vocab_axis = axes.index('v')
    vocab_size = matrix.shape[vocab_axis]

    def own(x_BTD, matrix, labels_BT):
        # Without a mesh, or if `tensor` does not divide V, each device holds all ids.
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
            logits_KV = dot(f'kd,{axes}->kv', x_KD, operand)
            log_z_K, picked_K, here_KV = _log_partition(logits_KV, labels_K, split)
            counted_K = labels_K >= 0
            losses = (log_z_K - picked_K) * counted_K, log_z_K * counted_K
            if not slopes:
                return None, losses
            factor_K = (1 + 2 * z_loss * log_z_K) * counted_K
            slope_KV = jnp.exp(logits_KV - log_z_K[:, None]) * factor_K[:, None] - here_KV
            slope_KV = slope_KV.astype(x_KD.dtype)
            dx_KD = dot(f'kv,{axes}->kd', slope_KV, operand).astype(x_KD.dtype)
            sums += dot(f'kd,kv->{axes}', x_KD, slope_KV)
            return sums, (*losses, dx_KD)

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
    return map_shards(own, arrays, names, names_out)


def _log_partition(logits_KV, labels_K, split):
    """log_z_K, the label's logit (0 if negative), and its position [K, V]; V may be `split`."""
    high_K = jnp.max(logits_KV, axis=-1)
    first = 0
    if split:
        high_K = jax.lax.pmax(high_K, split)
        first = jax.lax.axis_index(split) * logits_KV.shape[1]
    ids_KV = first + jax.lax.broadcasted_iota(labels_K.dtype, logits_KV.shape, 1)
    here_KV = ids_KV == labels_K[:, None]
    sum_K = jnp.sum(jnp.exp(logits_KV - high_K[:, None]), axis=-1)
    picked_K = jnp.sum(jnp.where(here_KV, logits_KV, 0), axis=-1)
    if split:
        sum_K, picked_K = jax.lax.psum((sum_K, picked_K), split)
    return high_K + jnp.log(sum_K), picked_K, here_KV
