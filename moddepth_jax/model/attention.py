"""Causal self-attention of a block: projections, QK-norm, rotary positions, the kernel."""

from typing import NamedTuple

import flax.linen as nn
import jax

from kernels_pallas import attention, decode_attention
from moddepth_jax.hparams import ModelHparams
from moddepth_jax.model.layers import RMSNorm, projection, rotate


class Tokens(NamedTuple):
    """What a block knows of its tokens beside their vectors; gathered with them when routed.

    Attributes:
      positions_BT: int32 [B, T], places in the original row, ascending.
      segment_ids_BT: int32 [B, T]; tokens of different ids do not see each other, 0 is padding.
      seeds_BT: uint32 [B, T], what the `random` router draws from; None for the others.
    """

    positions_BT: jax.Array
    segment_ids_BT: jax.Array
    seeds_BT: jax.Array | None = None


class Past(NamedTuple):
    """What one new token of each row, or of some rows, sees of the earlier ones.

    Attributes:
      k_BKHS, v_BKHS: a cache of keys and values [B, K, H, S].
      visible_CS: bool [C, S], which slots a token sees.
      rows_C: int32 [C], the row of the cache that each token belongs to, B and above for none,
        which come last; None: C = B, row by row.
    """

    k_BKHS: jax.Array
    v_BKHS: jax.Array
    visible_CS: jax.Array
    rows_C: jax.Array | None = None


class KeysValues(NamedTuple):
    """What a block's attention leaves for later tokens: keys after norm and RoPE, and values."""

    k_BTKH: jax.Array
    v_BTKH: jax.Array


class SelfAttention(nn.Module):
    """Grouped-query attention of one layer. `window` 0 sees every earlier token."""

    hparams: ModelHparams
    window: int

    def setup(self):
        hparams = self.hparams
        heads, kv_heads, width = hparams.num_heads, hparams.num_kv_heads, hparams.head_dim
        self.query = projection(hparams, heads, width)
        self.key = projection(hparams, kv_heads, width)
        self.value = projection(hparams, kv_heads, width)
        self.out = projection(hparams, hparams.d_model, contracted=2, writes_residual=True)
        if hparams.qk_norm != 'none':
            self.query_norm = RMSNorm(hparams.norm_eps)
            self.key_norm = RMSNorm(hparams.norm_eps)

    def __call__(self, x_BTD, tokens: Tokens, past: Past | None = None):
        """The layer's output, and the KeysValues of its tokens.

        Args:
          x_BTD: the layer's input.
          tokens: of the same.
          past: what earlier tokens left, where T = 1; None: the tokens attend to each other.
        """
        q_BTNH, k_BTKH, v_BTKH = self.query(x_BTD), self.key(x_BTD), self.value(x_BTD)
        if self.hparams.qk_norm != 'none':
            q_BTNH = self._normed(q_BTNH, self.query_norm)
            k_BTKH = self._normed(k_BTKH, self.key_norm)
        q_BTNH = rotate(q_BTNH, tokens.positions_BT, self.hparams.rope_theta)
        k_BTKH = rotate(k_BTKH, tokens.positions_BT, self.hparams.rope_theta)
        if past is None:
            o_BTNH = attention(
                q_BTNH,
                k_BTKH,
                v_BTKH,
                positions_BT=tokens.positions_BT,
                segment_ids_BT=tokens.segment_ids_BT,
                window=self.window,
                implementation=self.hparams.attention,
            )
        else:
            o_BTNH = decode_attention(q_BTNH, k_BTKH, v_BTKH, *past)
        return self.out(o_BTNH), KeysValues(k_BTKH, v_BTKH)

    def _normed(self, x_BTNH, norm):
        if self.hparams.qk_norm == 'head':
            return norm(x_BTNH)
        return norm(x_BTNH.reshape(*x_BTNH.shape[:2], -1)).reshape(x_BTNH.shape)
