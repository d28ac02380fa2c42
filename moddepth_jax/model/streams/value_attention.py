"""The stream `value_attention`: layers mix their values with those that earlier layers stored."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from moddepth_jax.hparams import DepthHparams, ModelHparams
from moddepth_jax.hparams.checks import refuse
from moddepth_jax.hparams.registry import STREAMS
from moddepth_jax.model.attention import DepthSlots, KeysValues, read_slots
from moddepth_jax.model.block import SlotInputs
from moddepth_jax.model.routing import TokenInfo
from moddepth_jax.model.streams.base import Stream


def mix_values(q_BTNH, own: KeysValues, slots: KeysValues, visible_LBT):
    """The values of a layer mixed with earlier ones of their tokens, [B, T, K, H], dtype of own.

    sum_i p_i v_i with p = softmax_i(q . k_i / sqrt(H)) over the visible slots and the layer's own
    keys and values, q the mean of the queries of a group (Depth-Attention, arXiv 2606.05014). All
    of it is computed in float32 or wider.

    Args:
      q_BTNH: queries of the layer, as its attention uses them.
      own: keys and values of the layer, [B, T, K, H].
      slots: keys and mixed values of earlier layers, [L, B, T, K, H].
      visible_LBT: bool, the slots that take part; its axes B and T may be 1.
    """
    dtype = jnp.promote_types(own.v_BTKH.dtype, jnp.float32)
    k_BTKH, v_BTKH = (side.astype(dtype) for side in own)
    k_LBTKH, v_LBTKH = (side.astype(dtype) for side in slots)
    batch, length, kv_heads, width = k_BTKH.shape
    q_BTKGH = q_BTNH.astype(dtype).reshape(batch, length, kv_heads, -1, width)
    q_1BTKH = jnp.mean(q_BTKGH, axis=3)[None] / width**0.5
    logits_LBTK = jnp.sum(q_1BTKH * k_LBTKH, axis=-1)
    logits_LBTK = jnp.where(visible_LBT[..., None], logits_LBTK, -jnp.inf)
    own_1BTK = jnp.sum(q_1BTKH * k_BTKH[None], axis=-1)
    p_LBTK = jax.nn.softmax(jnp.concatenate([logits_LBTK, own_1BTK]), axis=0)[..., None]
    mixed_BTKH = jnp.sum(p_LBTK[:-1] * v_LBTKH, axis=0) + p_LBTK[-1] * v_BTKH
    return mixed_BTKH.astype(own.v_BTKH.dtype)


def is_source(layer, reader, stride: int, recent: int):
    """Whether a layer reads an earlier one's slot: each `stride`-th, and the last `recent`."""
    return (layer % stride == 0) | (layer >= reader - recent)


def stride_of(hparams: ModelHparams) -> int:
    """Layers from one source to the next."""
    return hparams.depth.value_stride or max(1, hparams.num_layers // 2)


class MixValues(nn.Module):
    """`mix_values` over the slots of the layers that are sources."""

    hparams: ModelHparams

    @nn.compact
    def __call__(self, x_BTD, q_BTNH, k_BTKH, v_BTKH, tokens: TokenInfo, depth: DepthSlots):
        stride, recent = stride_of(self.hparams), self.hparams.depth.recent_layers

        def mix(arguments, depth):
            visible_LBT = depth.visible()
            if recent:  # slots are those of all layers
                layer_L = jnp.arange(len(visible_LBT))
                source_L = is_source(layer_L, depth.num_written, stride, recent)
                visible_LBT &= source_L[:, None, None]
            return mix_values(*arguments, depth.of_tokens(), visible_LBT)

        return read_slots(mix, (q_BTNH, KeysValues(k_BTKH, v_BTKH)), depth)


@STREAMS.register('value_attention')
class ValueAttention(Stream):
    """The running sum; values are a softmax over own and stored ones, before attention reads them.

    Depth-Attention (arXiv 2606.05014). A slot holds the keys and the mixed values of a layer that
    is a source: each `value_stride`-th, from the first on, and if `recent_layers` all layers.
    """

    counts = ('value_stride', 'recent_layers')
    keeps_sum = True
    value_mixer = MixValues
    sums_gradients = True
    masks_skipped = True

    def read(self, x_BTD, depth: DepthSlots | None):
        return x_BTD, depth if self.kind.mixes else None, depth

    def write(self, y_BTD, slot_inputs: SlotInputs, tokens: TokenInfo, slot_key):
        return y_BTD, (slot_inputs.attention_slot,) if self.kind.slots else ()

    @classmethod
    def check(cls, hparams: ModelHparams):
        depth, layers = hparams.depth, hparams.num_layers
        if hparams.looped:
            right = 'must be none: the value_attention stream counts layers, of which each is at '
            right += 'most once a source'
            refuse('model.looped_layers', hparams.looped_layers, right)
        for knob in cls.counts:
            if getattr(depth, knob) > layers:
                right = f'must be at most {layers}, which is model.num_layers'
                refuse(f'model.depth.{knob}', getattr(depth, knob), right)
        if depth.recent_layers and stride_of(hparams) == 1:
            right = 'must be 0: with value_stride 1 all earlier layers are sources'
            refuse('model.depth.recent_layers', depth.recent_layers, right)

    @classmethod
    def slot_inputs(cls, depth: DepthHparams) -> tuple[str, ...]:
        return ('attention_slot',)

    @classmethod
    def layer_kinds(cls, hparams: ModelHparams):
        """The first layer mixes nothing; the last writes nothing."""
        stride, recent, last = stride_of(hparams), hparams.depth.recent_layers, hparams.num_layers
        writes = [(recent > 0 or i % stride == 0) and i < last - 1 for i in range(last)]
        return [
            kind._replace(slots=int(writes[i]), mixes=i > 0)
            for i, kind in enumerate(super().layer_kinds(hparams))
        ]

    @classmethod
    def mixing_flops(cls, hparams: ModelHparams, tokens: int, written: int) -> float:
        """A product with the query and a weighted sum, 4 K H, for each source and the own layer."""
        sources, stride, recent = written, stride_of(hparams), hparams.depth.recent_layers
        if recent:
            sources = sum(is_source(i, written, stride, recent) for i in range(written))
        return 4 * tokens * (sources + 1) * hparams.num_kv_heads * hparams.head_dim

    @classmethod
    def difference_at_start(cls, depth: DepthHparams) -> str:
        return 'the value_attention stream mixes values of earlier layers into those of later ones'

    @classmethod
    def describe(cls, hparams: ModelHparams) -> str:
        recent = hparams.depth.recent_layers
        newest = f' and the newest {recent}' if recent else ''
        return f'value attention, sources at stride {stride_of(hparams)}{newest}'
