"""RMSNorm, RoPE, projections, embedding and head, and the mlp of a block."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from kernels_pallas.xla.sequence import dot
from moddepth_jax.hparams import ModelHparams, RopeScaling
from moddepth_jax.model.sharding import constrain, unshard_embedding, unshard_params


def wide_dtype(dtype):
    """Return float32, or `dtype` if it is wider: the dtype of sums, norms and scores."""
    return jnp.promote_types(dtype, jnp.float32)


def widen(x):
    """Convert an array to `wide_dtype`."""
    return x.astype(wide_dtype(x.dtype))


def rms_norm(x, scale, epsilon):
    """Return x rsqrt(mean(x^2) + epsilon) scale over the last axis, computed in float32."""
    x32 = widen(x)
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon)
    return (x32 * inverse * jnp.expand_dims(scale, range(x.ndim - 1))).astype(x.dtype)


def rope_frequencies(count, theta, scaling: RopeScaling | None, dtype):
    """Return the radians per position of each pair of channels: theta^(-i / count), then scaled.

    Between the two bounds of `scaling`, the weight of the unscaled frequency is linear in the
    number of turns in the original context (Llama 3.1, arXiv 2407.21783, and its reference code).
    """
    frequency_F = theta ** (-jnp.arange(count, dtype=dtype) / count)
    if scaling is None:
        return frequency_F
    factor, low, high, length = scaling
    turns_F = length * frequency_F / (2 * math.pi)
    kept_F = jnp.clip((turns_F - low) / (high - low), 0, 1)
    return frequency_F * (kept_F + (1 - kept_F) / factor)


def rope_turns(positions_BT, half: int, dtype, theta, scaling: RopeScaling | None = None):
    """Return the sines and cosines, [B, T, 1, F], of the rotation angles of F = `half` pairs."""
    dtype = wide_dtype(dtype)
    frequency_F = rope_frequencies(half, theta, scaling, dtype)
    angle_BT1F = positions_BT[:, :, None, None] * frequency_F[None, None, None, :]
    return jnp.sin(angle_BT1F), jnp.cos(angle_BT1F)


def apply_rope(x_BTNH, positions_BT, theta, scaling: RopeScaling | None = None, turns=None):
    """Apply RoPE in its half-split form: x cos + concat(-x2, x1) sin (Su et al. 2021).

    `turns` are `rope_turns` of the positions, if they have been computed.
    """
    half = x_BTNH.shape[-1] // 2
    dtype = wide_dtype(x_BTNH.dtype)
    if turns is None:
        turns = rope_turns(positions_BT, half, dtype, theta, scaling)
    sin, cos = turns
    x1, x2 = jnp.split(x_BTNH.astype(dtype), 2, axis=-1)
    rotated = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
    return rotated.astype(x_BTNH.dtype)


def logits(x_BTD, matrix, axes: str):
    """Return x W in float32, with W rounded to x's dtype; `axes` of W: dv or vd."""
    logits_BTV = dot(f'btd,{axes}->btv', x_BTD, matrix.astype(x_BTD.dtype))
    return constrain(logits_BTV, 'batch', None, 'vocab')


def embed(embedding_VD, tokens_BT, dtype):
    """Look up the embeddings of tokens, [B, T, D]."""
    x_BTD = jnp.take(unshard_embedding(embedding_VD, dtype), tokens_BT, axis=0).astype(dtype)
    return constrain(x_BTD, 'batch', None, None)


def head_matrix(params, dtype):
    """Return the unsharded matrix of the logits and its axes: dv, or vd for a tied embedding."""
    if 'head' in params:
        return unshard_params({'head': params['head']}, dtype)['head']['kernel'], 'dv'
    return unshard_params({'embedding': params['embedding']}, dtype)['embedding'], 'vd'


def lm_head(x_BTD, params):
    """Return the logits, by the head or the tied embedding."""
    return logits(x_BTD, *head_matrix(params, x_BTD.dtype))


def swiglu(gate, value):
    """Return silu(gate) value (Shazeer 2020)."""
    return jax.nn.silu(gate) * value


def initializer(stddev):
    """Return an initializer: normal with standard deviation `stddev`, truncated at 3 sigma."""
    return nn.initializers.truncated_normal(stddev, lower=-3.0, upper=3.0)


def residual_init(hparams: ModelHparams):
    """Return the initializer of projections that write to the residual stream."""
    shrink = math.sqrt(2 * hparams.num_blocks) if hparams.scale_residual_init else 1.0
    return initializer(hparams.init_std / shrink)


class RMSNorm(nn.Module):
    """`rms_norm` with a learned scale that starts at 1."""

    epsilon: float

    @nn.compact
    def __call__(self, x):
        return rms_norm(x, self.param('scale', nn.initializers.ones, x.shape[-1:]), self.epsilon)


def _flat_dot_general(x, kernel, dimensions, **options):
    """Compute `lax.dot_general` of x [..., contracted] and kernel [contracted, ...] in 2-D form.

    With several token axes, XLA on CPUs would transpose the inputs of the gradient's product.
    """
    (contracted, leading), batch = dimensions
    count = len(contracted)
    expected = tuple(range(x.ndim - count, x.ndim)), tuple(range(count)), (), ()
    if tuple(map(tuple, (contracted, leading, *batch))) != expected:
        right = 'must contract the last axes of x with the first of the kernel, in order'
        raise ValueError(f'{dimensions=} {right}')
    kept, features = x.shape[: x.ndim - count], kernel.shape[count:]
    rows = math.prod(kernel.shape[:count])
    x, kernel = x.reshape(-1, rows), kernel.reshape(rows, -1)
    product = jax.lax.dot_general(x, kernel, (((1,), (0,)), ((), ())), **options)
    return product.reshape(*kept, *features)


def projection(
    hparams: ModelHparams,
    *features,
    contracted=1,
    writes_residual=False,
    use_bias: bool | None = None,
    name=None,
):
    """Return a Linen module that maps the last `contracted` axes of its input to `features`.

    `use_bias` is that of the model by default.
    """
    return nn.DenseGeneral(
        features,
        axis=tuple(range(-contracted, 0)),
        use_bias=hparams.use_bias if use_bias is None else use_bias,
        dtype=hparams.dtype,
        dot_general=_flat_dot_general,
        kernel_init=residual_init(hparams) if writes_residual else initializer(hparams.init_std),
        name=name,
    )


class SwiGLU(nn.Module):
    """w2(silu(w1 x) * w3 x), from D through `width` back to D."""

    hparams: ModelHparams
    width: int

    @nn.compact
    def __call__(self, x_BTD):
        hparams = self.hparams
        gate_BTF = projection(hparams, self.width, name='w1')(x_BTD)
        value_BTF = projection(hparams, self.width, name='w3')(x_BTD)
        out = projection(hparams, hparams.d_model, writes_residual=True, name='w2')
        return out(swiglu(gate_BTF, value_BTF))
