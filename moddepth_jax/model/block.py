"""One transformer block, dense: attention and mlp with their residuals and norms."""

import flax.linen as nn

from moddepth_jax.hparams import ModelHparams
from moddepth_jax.model.attention import Past, SelfAttention, Tokens
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
        return self.with_keys(x_BTD, tokens)[0]

    def with_keys(self, x_BTD, tokens: Tokens, past: Past | None = None):
        """The block's output and the KeysValues of its tokens; `past` as SelfAttention takes it."""
        if self.hparams.norm_placement == 'post':
            attended_BTD, keys = self.attention(x_BTD, tokens, past)
            x_BTD = self.attention_norm(x_BTD + attended_BTD)
            return self.mlp_norm(x_BTD + self.mlp(x_BTD)), keys
        attended_BTD, keys = self._attend(x_BTD, tokens, past)
        x_BTD = x_BTD + attended_BTD
        return x_BTD + self._transform(x_BTD), keys

    def delta_with_keys(self, x_BTD, tokens: Tokens, past: Past | None = None):
        """block(x) - x, without the cancellation where the placement allows it, and KeysValues."""
        if self.hparams.norm_placement == 'post':
            y_BTD, keys = self.with_keys(x_BTD, tokens, past)
            return y_BTD - x_BTD, keys
        attended_BTD, keys = self._attend(x_BTD, tokens, past)
        return attended_BTD + self._transform(x_BTD + attended_BTD), keys

    def _attend(self, x_BTD, tokens, past):
        if self.hparams.norm_placement == 'pre':
            return self.attention(self.attention_norm(x_BTD), tokens, past)
        attended_BTD, keys = self.attention(x_BTD, tokens, past)
        return self.attention_norm(attended_BTD), keys

    def _transform(self, x_BTD):
        if self.hparams.norm_placement == 'pre':
            return self.mlp(self.mlp_norm(x_BTD))
        return self.mlp_norm(self.mlp(x_BTD))
