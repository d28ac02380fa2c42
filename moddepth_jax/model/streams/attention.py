"""The stream `attention`: a layer's input is attention over the depth slots of each token."""

import jax.numpy as jnp

from moddepth_jax.hparams import DepthHparams, ModelHparams
from moddepth_jax.hparams.checks import refuse
from moddepth_jax.hparams.registry import STREAMS
from moddepth_jax.model.attention import DepthSlots, attend, slot_arguments
from moddepth_jax.model.block import SlotInputs
from moddepth_jax.model.layers import projection
from moddepth_jax.model.routing import TokenInfo
from moddepth_jax.model.streams.base import SlotProjection, Stream


@STREAMS.register('attention')
class DepthAttention(Stream):
    """Attention over depth.

    read: the previous layer's query attends to the token's slots of layers 0..l-1.
    write: project a query and a slot from the block's output. The stream carries the query.
    """

    has_ends = True
    attends = True
    sums_gradients = True

    def setup(self):
        hparams = self.hparams
        if self.kind.slots:
            self.query = projection(hparams, hparams.num_heads, hparams.head_dim)
            self.slot = SlotProjection(hparams)

    def read(self, q_BTD, depth: DepthSlots | None):
        kv_heads, width = self.hparams.num_kv_heads, self.hparams.head_dim
        no_keys_BSKH = jnp.zeros((q_BTD.shape[0], 0, kv_heads, width), q_BTD.dtype)
        q_BTNH = q_BTD.reshape(*q_BTD.shape[:2], -1, width)
        options = slot_arguments(self.hparams, depth)
        self.sow('intermediates', 'depth', (q_BTNH, no_keys_BSKH, options))  # as SelfAttention
        o_BTNH, depth = attend(self.hparams, q_BTNH, no_keys_BSKH, no_keys_BSKH, depth, options)
        return o_BTNH.reshape(q_BTD.shape), None, depth

    def write(self, y_BTD, slot_inputs: SlotInputs, tokens: TokenInfo, slot_key):
        if not self.kind.slots:
            return y_BTD, ()
        return self.query(y_BTD).reshape(y_BTD.shape), (self.slot(y_BTD),)

    @classmethod
    def check(cls, hparams: ModelHparams):
        width = hparams.num_heads * hparams.head_dim
        if width != hparams.d_model:
            right = f'must be num_heads x head_dim = {width}, the width of an attention stream'
            refuse('model.d_model', hparams.d_model, right)

    @classmethod
    def slots_per_layer(cls, depth: DepthHparams) -> int:
        return 1

    @classmethod
    def projection_flops(cls, hparams, kind, length, num_selected) -> float:
        """A query and a slot of every token."""
        if not kind.slots:
            return 0.0
        query = 2 * hparams.d_model * hparams.num_heads * hparams.head_dim
        return length * (SlotProjection.flops_per_token(hparams) + query)

    @classmethod
    def difference_at_start(cls, depth: DepthHparams) -> str:
        return 'the attention stream reads mixtures of values instead of the running sum'
