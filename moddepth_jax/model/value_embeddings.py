"""Value embeddings: v += 3 sigmoid(x[:12] W) VE[token] in some layers, with one gate per head.

From nanochat's gpt.py (Karpathy, github.com/karpathy/nanochat): `value_embeds`, `ve_gate`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from moddepth_jax.hparams import ModelHparams
from moddepth_jax.model.layers import wide_dtype
from moddepth_jax.model.sharding import constrain

GATE_CHANNELS = 12  # the gates read the first channels of the attention's input
LARGEST_GATE = 3.0
LARGEST_GATE_WEIGHT = 0.02  # initially, so that gates start at about half of the largest


def embeds_values(hparams: ModelHparams, layer: int) -> bool:
    """Return whether a layer has a table: all layers, or every second one up to the last."""
    if hparams.value_embeddings == 'alternate':
        return (hparams.num_layers - 1 - layer) % 2 == 0
    return hparams.value_embeddings == 'all'


def gate_flops(hparams: ModelHparams) -> int:
    """Return the FLOPs of one token's gates in a layer. The lookup is not counted."""
    return 2 * min(GATE_CHANNELS, hparams.d_model) * hparams.num_kv_heads


def add_gated(v_BTKH, embedded_BTKH, gate_logits_BTK):
    """Return v + 3 sigmoid(gate_logits) embedded, computed in float32, in the dtype of v."""
    wide = gate_logits_BTK.dtype
    gates_BTK1 = LARGEST_GATE * jax.nn.sigmoid(gate_logits_BTK)[..., None]
    return (v_BTKH.astype(wide) + gates_BTK1 * embedded_BTKH.astype(wide)).astype(v_BTKH.dtype)


def _uniform(low: float, high: float):
    return lambda key, shape: jax.random.uniform(key, shape, jnp.float32, low, high)


class ValueEmbedding(nn.Module):
    """`add_gated` with a table [V, K, H] and gates [12, K], initialized as in nanochat.

    The table starts with variance 1 / D, as do the values that are projected from normed inputs.
    """

    hparams: ModelHparams

    @nn.compact
    def __call__(self, v_BTKH, x_BTD, ids_BT) -> jax.Array:
        """Add to the values of tokens, given the input of their projection and their int32 ids."""
        hparams = self.hparams
        limit = (3 / hparams.d_model) ** 0.5
        shape = (hparams.vocab_size, hparams.num_kv_heads, hparams.head_dim)
        embedding_VKH = self.param('embedding', _uniform(-limit, limit), shape)
        x_BTC = x_BTD[..., :GATE_CHANNELS]
        shape = (x_BTC.shape[-1], hparams.num_kv_heads)
        gate_CK = self.param('gate', _uniform(0, LARGEST_GATE_WEIGHT), shape)
        wide = wide_dtype(v_BTKH.dtype)
        gate_logits_BTK = x_BTC.astype(wide) @ gate_CK.astype(wide)
        # Rows are rounded after the lookup, so that the gradients of a token are summed in float32.
        embedded_BTKH = jnp.take(embedding_VKH, ids_BT, axis=0).astype(v_BTKH.dtype)
        embedded_BTKH = constrain(embedded_BTKH, 'batch', None, 'kv_heads', None)
        return add_gated(v_BTKH, embedded_BTKH, gate_logits_BTK)
