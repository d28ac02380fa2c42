"""The embedding residual: x = r_i x + a_i x_0 before each block i, with x_0 the embedded tokens.

From nanochat's gpt.py (Karpathy, github.com/karpathy/nanochat): `resid_lambdas`, `x0_lambdas`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from moddepth_jax.hparams import ModelHparams
from moddepth_jax.model.layers import widen
from moddepth_jax.model.sharding import constrain

# Initial r_i and a_i under `learned` in the (first, last) block; linear in i between them.
FIRST_RESIDUAL_SCALES = (1.15, 1.05)
FIRST_EMBEDDING_SCALES = (0.20, 0.05)


def embedded_input(hparams: ModelHparams, x_BTD):
    """Return x_0 [B, T, D] from the input of the first layer, or None if no block reads it.

    It is float32 or wider because its gradient is a sum over the layers.
    """
    if hparams.embedding_residual == 'none':
        return None
    return constrain(widen(x_BTD), 'batch', None, None)


def blend_embedding(x_BTD, embedded_BTD, residual_scale, embedding_scale):
    """Return residual_scale x + embedding_scale x_0, computed in float32, in the dtype of x."""
    blended_BTD = residual_scale * x_BTD.astype(embedded_BTD.dtype) + embedding_scale * embedded_BTD
    return blended_BTD.astype(x_BTD.dtype)


def first_scales(hparams: ModelHparams, number) -> dict:
    """Return the initial scales of a block by parameter name; {} if they are 1 and 0."""
    if hparams.embedding_residual != 'learned':
        return {}
    depth = number / max(1, hparams.num_layers - 1)

    def between(first, last):
        return jnp.asarray(first + (last - first) * depth, jnp.float32)

    scales = {'residual_scale': between(*FIRST_RESIDUAL_SCALES)}
    scales |= {'embedding_scale': between(*FIRST_EMBEDDING_SCALES)}
    return {'blend': scales}


class EmbeddingBlend(nn.Module):
    """`blend_embedding` with two learned float32 scalars: at first 1 and 0, or `first_scales`."""

    @nn.compact
    def __call__(self, x_BTD, embedded_BTD) -> jax.Array:
        residual_scale = self.param('residual_scale', nn.initializers.ones, ())
        embedding_scale = self.param('embedding_scale', nn.initializers.zeros, ())
        return blend_embedding(x_BTD, embedded_BTD, residual_scale, embedding_scale)
