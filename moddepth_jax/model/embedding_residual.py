"""The embedded tokens once more before each block: x = r_i x + a_i x_0, with two scalars a block.

After nanochat's gpt.py (Karpathy, github.com/karpathy/nanochat), `resid_lambdas`, `x0_lambdas`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from moddepth_jax.hparams import ModelHparams
from moddepth_jax.model.sharding import constrain

# (in the first block, in the last): the first values of r_i and a_i under `learned`, linear in i.
FIRST_RESIDUAL_SCALES = (1.15, 1.05)
FIRST_EMBEDDING_SCALES = (0.20, 0.05)


def embedded_input(hparams: ModelHparams, x_BTD):
    """x_0 of what the first layer gets, [B, T, D], or None if no block reads it.

    It is float32 or wider, because its gradient is a sum over the layers.
    """
    if hparams.embedding_residual == 'none':
        return None
    wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
    return constrain(x_BTD.astype(wide), 'batch', None, None)


def blend_embedding(x_BTD, embedded_BTD, residual_scale, embedding_scale):
    """residual_scale x + embedding_scale x_0, in float32 or wider, returned in the dtype of x."""
    blended_BTD = residual_scale * x_BTD.astype(embedded_BTD.dtype) + embedding_scale * embedded_BTD
    return blended_BTD.astype(x_BTD.dtype)


def first_scales(hparams: ModelHparams, number) -> dict:
    """The scales with which the block of that number starts, if they are not 1 and 0."""
    if hparams.embedding_residual != 'learned':
        return {}
    depth = number / max(1, hparams.num_layers - 1)

    def between(first, last):
        return jnp.asarray(first + (last - first) * depth, jnp.float32)

    scales = {'residual_scale': between(*FIRST_RESIDUAL_SCALES)}
    scales |= {'embedding_scale': between(*FIRST_EMBEDDING_SCALES)}
    return {'blend': scales}


class EmbeddingBlend(nn.Module):
    """`blend_embedding` with learned scalars, float32; they start at 1 and 0 or `first_scales`."""

    @nn.compact
    def __call__(self, x_BTD, embedded_BTD) -> jax.Array:
        residual_scale = self.param('residual_scale', nn.initializers.ones, ())
        embedding_scale = self.param('embedding_scale', nn.initializers.zeros, ())
        return blend_embedding(x_BTD, embedded_BTD, residual_scale, embedding_scale)
