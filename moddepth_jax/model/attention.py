"""Causal self-attention of a block: projections, QK-norm, rotary positions, the kernel."""

from typing import NamedTuple

import flax.linen as nn
import jax

from kernels_pallas import attention
from moddepth_jax.hparams import ModelHparams
from moddepth_jax.model.layers import RMSNorm, projection, rotate


class Tokens(NamedTuple):
    """What a block knows of its tokens beside their vectors; gathered with them when routed.

    Attributes:
      positions_BT: int32 [B, T], places in the original row, ascending.
      segment_ids_BT: int32 [B, T]; tokens of different ids do not see each other, 0 is padding.
    """

    positions_BT: jax.Array
    segment_ids_BT: jax.Array


class SelfAttention(nn.Module):
    """Grouped-query attention of one layer. `window` 0 sees every earlier token."""

    hparams: ModelHparams
    window: int

    @nn.compact
    def __call__(self, x_BTD, tokens: Tokens):
        hparams = self.hparams
        heads, kv_heads, width = hparams.num_heads, hparams.num_kv_heads, hparams.head_dim
        q_BTNH = projection(hparams, heads, width, name='query')(x_BTD)
        k_BTKH = projection(hparams, kv_heads, width, name='key')(x_BTD)
        v_BTKH = projection(hparams, kv_heads, width, name='value')(x_BTD)
        q_BTNH = self._normed(q_BTNH, 'query_norm')
        k_BTKH = self._normed(k_BTKH, 'key_norm')
        o_BTNH = attention(
            rotate(q_BTNH, tokens.positions_BT, hparams.rope_theta),
            rotate(k_BTKH, tokens.positions_BT, hparams.rope_theta),
            v_BTKH,
            positions_BT=tokens.positions_BT,
            segment_ids_BT=tokens.segment_ids_BT,
            window=self.window,
            implementation=hparams.attention,
        )
        out = projection(hparams, hparams.d_model, contracted=2, writes_residual=True, name='out')
        return out(o_BTNH)

    def _normed(self, x_BTNH, name):
        if self.hparams.qk_norm == 'none':
            return x_BTNH
        norm = RMSNorm(self.hparams.norm_eps, name=name)
        if self.hparams.qk_norm == 'head':
            return norm(x_BTNH)
        return norm(x_BTNH.reshape(*x_BTNH.shape[:2], -1)).reshape(x_BTNH.shape)
