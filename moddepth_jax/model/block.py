"""One transformer block, dense: attention and mlp with their residuals and norms."""

import flax.linen as nn

from moddepth_jax.hparams import ModelHparams
from moddepth_jax.model.attention import SelfAttention, Tokens
from moddepth_jax.model.layers import RMSNorm, SwiGLU


class Block(nn.Module):
    """block(x), in one of three norm placements.

    `pre` (Llama): x + f(norm(x)); `post` (post-LN): norm(x + f(x)); `reordered` (OLMo2):
    x + norm(f(x)); each for f = attention, then the mlp.
    """

    hparams: ModelHparams
    window: int

    def setup(self):
        self.attention = SelfAttention(self.hparams, self.window)
        self.mlp = SwiGLU(self.hparams)
        self.attention_norm = RMSNorm(self.hparams.norm_eps)
        self.mlp_norm = RMSNorm(self.hparams.norm_eps)

    def __call__(self, x_BTD, tokens: Tokens):
        """The block's output, [B, T, D]."""
        if self.hparams.norm_placement == 'post':
            x_BTD = self.attention_norm(x_BTD + self.attention(x_BTD, tokens))
            return self.mlp_norm(x_BTD + self.mlp(x_BTD))
        x_BTD = x_BTD + self._attend(x_BTD, tokens)
        return x_BTD + self._transform(x_BTD)

    def delta(self, x_BTD, tokens: Tokens):
        """block(x) - x, without the cancellation where the placement allows it."""
        if self.hparams.norm_placement == 'post':
            return self(x_BTD, tokens) - x_BTD
        attended_BTD = self._attend(x_BTD, tokens)
        return attended_BTD + self._transform(x_BTD + attended_BTD)

    def _attend(self, x_BTD, tokens):
        if self.hparams.norm_placement == 'pre':
            return self.attention(self.attention_norm(x_BTD), tokens)
        return self.attention_norm(self.attention(x_BTD, tokens))

    def _transform(self, x_BTD):
        if self.hparams.norm_placement == 'pre':
            return self.mlp(self.mlp_norm(x_BTD))
        return self.mlp_norm(self.mlp(x_BTD))
