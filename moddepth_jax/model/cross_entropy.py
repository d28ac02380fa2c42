"""Next-token cross-entropy with z-loss, in chunks of tokens that never hold all logits at once.

The chunks can also compute the divergence from a teacher's logits (Hinton et al. 2015, arXiv
1503.02531, section 2).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.xla.sequence import dot
from moddepth_jax.model.layers import head_matrix, logits, wide_dtype
from moddepth_jax.model.sharding import constrain, map_shards, part_shape

# Bytes of a device's float32 logits, unless loss_chunk is set. Up to the first number, one chunk.
# Above it, chunks of at most half of the logits and at most the second number: chunks should be
# few, since each reads and writes the gradient of the matrix.
LOGITS_BYTES = 2**26, 2**28


class SoftTargets(NamedTuple):
    """A teacher's distributions p; the loss is (1 - weight) nll + weight T^2 KL(p_T || q_T)."""

    x_BTE: jax.Array  # the teacher's hidden states after its final norm
    params: dict  # of the teacher's head, over the same ids
    weight: float
    temperature: float  # T, which divides the logits of both


class _Static(NamedTuple):
    """What the chunks are compiled for. Axes of matrices are dv or vd."""

    axes: str
    chunk: int  # tokens of a chunk
    z_loss: float
    soft_axes: str = ''  # of the teacher's matrix; '': there is no teacher
    weight: float = 0.0
    temperature: float = 1.0


def token_losses(logits_BTV, labels_BT):
    """Return nll [B, T] in nats, log-partition and whether a target counts (label >= 0).

    All are float32, and 0 for a target that does not count.
    """
    counted_BT = (labels_BT >= 0).astype(jnp.float32)
    log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    safe_BT1 = jnp.maximum(labels_BT, 0)[..., None]
    picked_BT = jnp.take_along_axis(logits_BTV, safe_BT1, axis=-1)[..., 0]
    return (log_z_BT - picked_BT) * counted_BT, log_z_BT * counted_BT, counted_BT


def cross_entropy(x_BTD, params, labels_BT, z_loss: float, loss_chunk: int):
    """Return the sum over targets of nll + z_loss log_z^2, and nll_BT and log_z_BT.

    The last two have no gradients. Negative labels mark targets that do not count. At most
    `loss_chunk` tokens per device have logits at once; 0: as many as LOGITS_BYTES allows.
    """
    matrix, axes = head_matrix(params, x_BTD.dtype)
    tokens, most = _chunking(x_BTD, matrix, axes, loss_chunk)
    if tokens <= most:
        nll_BT, log_z_BT, _ = token_losses(logits(x_BTD, matrix, axes), labels_BT)
        total = _total((nll_BT, log_z_BT), z_loss)
    else:
        arrays = {'x_BTD': x_BTD, 'matrix': matrix, 'labels_BT': labels_BT}
        static = _Static(axes, chunk_size(tokens, most), z_loss)
        total, nll_BT, log_z_BT = _in_chunks(static, arrays)
    return total, jax.lax.stop_gradient(nll_BT), jax.lax.stop_gradient(log_z_BT)


def distillation(
    x_BTD, params, labels_BT, z_loss: float, loss_chunk: int, targets: SoftTargets
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return `cross_entropy` with the divergence from `targets`, and T^2 KL [B, T] in nats last.

    `targets` get no gradients. Their logits are computed in the same chunks as the model's.
    """
    matrix, axes = head_matrix(params, x_BTD.dtype)
    tokens, most = _chunking(x_BTD, matrix, axes, loss_chunk)
    soft_matrix, soft_axes = head_matrix(targets.params, targets.x_BTE.dtype)
    arrays = {'x_BTD': x_BTD, 'matrix': matrix, 'labels_BT': labels_BT}
    arrays |= jax.lax.stop_gradient({'soft_BTE': targets.x_BTE, 'soft_matrix': soft_matrix})
    chunk = chunk_size(tokens, most)
    static = _Static(axes, chunk, z_loss, soft_axes, targets.weight, targets.temperature)
    total, *parts = _in_chunks(static, arrays)
    return total, *jax.lax.stop_gradient(parts)


def _chunking(x_BTD, matrix, axes, loss_chunk):
    """Return the tokens of a device, and the most of them that have logits at once."""
    names = _names(axes)
    rows, length, _ = part_shape(names['x_BTD'], x_BTD.shape)
    vocab_size = part_shape(names['matrix'], matrix.shape)[axes.index('v')]
    tokens, most = rows * length, loss_chunk
    if not most:
        small, large = (size // (4 * vocab_size) for size in LOGITS_BYTES)
        most = tokens if tokens <= small else max(1, min(-(-tokens // 2), large))
    return tokens, most


def chunk_size(tokens: int, most: int) -> int:
    """Return the tokens per chunk: a divisor of `tokens` in (most / 2, most], or about `most`."""
    fewest = -(-tokens // most)
    count = next((count for count in range(fewest, 2 * fewest) if tokens % count == 0), fewest)
    return -(-tokens // count)


def _names(axes, soft_axes=''):
    """Return the axis names of each array; `axes` of the matrices are dv or vd."""
    states = ('batch', None, None)
    matrix, soft_matrix = (
        tuple('vocab' if axis == 'v' else None for axis in each) for each in (axes, soft_axes)
    )
    names = {'x_BTD': states, 'matrix': matrix, 'labels_BT': ('batch', None)}
    return names | {'soft_BTE': states, 'soft_matrix': soft_matrix}


def _total(parts, z_loss, weight=0.0):
    nll_BT, log_z_BT, *divergence_BT = parts
    total = (1 - weight) * jnp.sum(nll_BT) + z_loss * jnp.sum(log_z_BT**2)
    return total + weight * jnp.sum(divergence_BT[0]) if divergence_BT else total


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_chunks(static, arrays):
    parts = _sharded(static, arrays, slopes=False)
    return _total(parts, static.z_loss, static.weight), *parts


def _in_chunks_forward(static, arrays):
    *parts, dx_BTD, sums = _sharded(static, arrays, slopes=True)
    # Reduce-scattered in the dtype of the matrix.
    names = ['vocab' if axis == 'v' else 'embed' for axis in static.axes]
    d_matrix = constrain(jnp.sum(sums, axis=0, dtype=sums.dtype), *names)
    # Without a barrier XLA postpones the sum until the optimizer reads it, and until then keeps the
    # float32 parts, each as large as the matrix.
    slopes = jax.lax.optimization_barrier({'x_BTD': dx_BTD, 'matrix': d_matrix})
    total = _total(parts, static.z_loss, static.weight)
    return (total, *parts), dict.fromkeys(arrays) | slopes


def _in_chunks_backward(static, slopes, cotangents):
    del static
    return (jax.tree.map(lambda slope: (slope * cotangents[0]).astype(slope.dtype), slopes),)


_in_chunks.defvjp(_in_chunks_forward, _in_chunks_backward)


def _sharded(static, arrays, slopes):
    """Return nll_BT, log_z_BT and, with a teacher, T^2 KL; with `slopes` also the gradients.

    These are dx_BTD and parts [X, ...] that sum to d_matrix. `arrays` are x_BTD, matrix and
    labels_BT, and the teacher's soft_BTE and soft_matrix.
    """
    axes, chunk, z_loss, soft_axes, weight, temperature = static
    names = _names(axes, soft_axes)
    names_out = (names['labels_BT'],) * (3 if soft_axes else 2)
    if slopes:
        names_out += names['x_BTD'], ('batch', *names['matrix'])
    vocab_axis = axes.index('v')
    vocab_size = arrays['matrix'].shape[vocab_axis]

    def own(x_BTD, matrix, labels_BT, soft_BTE=None, soft_matrix=None):
        # Without a mesh, or if `tensor` does not divide V, each device has all ids.
        split = 'tensor' if matrix.shape[vocab_axis] < vocab_size else None
        tokens = labels_BT.size
        count = -(-tokens // chunk)
        empty = count * chunk - tokens

        def chunked(x_BTD):
            x_XD = jnp.pad(x_BTD.reshape(tokens, -1), ((0, empty), (0, 0)))
            return x_XD.reshape(count, chunk, -1)

        labels_XK = jnp.pad(labels_BT.ravel(), (0, empty), constant_values=-1)
        labels_XK = labels_XK.reshape(count, chunk)
        operand = matrix.astype(x_BTD.dtype)

        def of_chunk(sums, inputs):
            x_KD, labels_K, soft_KE = inputs
            logits_KV = dot(f'kd,{axes}->kv', x_KD, operand)
            log_z_K, picked_K, here_KV = _log_partition(logits_KV, labels_K, split)
            counted_K = labels_K >= 0
            losses = (log_z_K - picked_K) * counted_K, log_z_K * counted_K
            if soft_axes:
                other_KV = dot(f'kd,{soft_axes}->kv', soft_KE, soft_matrix.astype(soft_KE.dtype))
                divergence_K, soft_slope_KV = _divergence(logits_KV, other_KV, temperature, split)
                losses += (divergence_K * counted_K,)
            if not slopes:
                return None, losses
            factor_K = (1 - weight + 2 * z_loss * log_z_K) * counted_K
            slope_KV = jnp.exp(logits_KV - log_z_K[:, None]) * factor_K[:, None]
            slope_KV -= (1 - weight) * here_KV
            if soft_axes:
                slope_KV += weight * counted_K[:, None] * soft_slope_KV
            slope_KV = slope_KV.astype(x_KD.dtype)
            dx_KD = dot(f'kv,{axes}->kd', slope_KV, operand).astype(x_KD.dtype)
            sums += dot(f'kd,kv->{axes}', x_KD, slope_KV)
            return sums, (*losses, dx_KD)

        wide = wide_dtype(x_BTD.dtype)
        sums = jnp.zeros(matrix.shape, wide) if slopes else None
        inputs = chunked(x_BTD), labels_XK, chunked(soft_BTE) if soft_axes else None
        sums, outputs = jax.lax.scan(of_chunk, sums, inputs)
        outputs = [side.reshape(-1, *side.shape[2:])[:tokens] for side in outputs]
        if not slopes:
            return tuple(side.reshape(labels_BT.shape) for side in outputs)
        *losses, dx_XD = outputs
        dx_BTD = dx_XD.reshape(x_BTD.shape)
        if split:
            dx_BTD = jax.lax.psum(dx_BTD, split)
        losses = (side.reshape(labels_BT.shape) for side in losses)
        return *losses, dx_BTD, sums.astype(matrix.dtype)[None]

    return map_shards(own, arrays, names, names_out)


def _divergence(logits_KV, other_KV, temperature, split):
    """Return T^2 KL(p || q) [K] and its gradient by the logits [K, V].

    p = softmax(other / T) is the teacher, and q = softmax(logits / T).
    """
    sides = logits_KV / temperature, other_KV / temperature
    no_labels_K = jnp.full(logits_KV.shape[0], -1)
    log_q_KV, log_p_KV = (
        side_KV - _log_partition(side_KV, no_labels_K, split)[0][:, None] for side_KV in sides
    )
    p_KV = jnp.exp(log_p_KV)
    divergence_K = jnp.sum(p_KV * (log_p_KV - log_q_KV), axis=-1)
    if split:
        divergence_K = jax.lax.psum(divergence_K, split)
    return temperature**2 * divergence_K, temperature * (jnp.exp(log_q_KV) - p_KV)


def _log_partition(logits_KV, labels_K, split):
    """Return log_z_K, the label's logit (0 for a negative label), and where it is, bool [K, V].

    `split` is the mesh axis over which V is split, or None.
    """
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
