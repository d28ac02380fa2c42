"""The stream `value_attention`: layers mix their values with values of earlier layers."""

import flax.linen as nn
import jax.numpy as jnp

from moddepth_jax.hparams import DepthHparams, ModelHparams
from moddepth_jax.hparams.checks import refuse
from moddepth_jax.hparams.registry import STREAMS
from moddepth_jax.model.attention import DepthSlots, KeysValues
from moddepth_jax.model.block import SlotInputs
from moddepth_jax.model.layers import wide_dtype
from moddepth_jax.model.routing import TokenInfo
from moddepth_jax.model.slot_reads import join_softmaxes, softmax_over_slots
from moddepth_jax.model.streams.base import Stream


def score_values(q_BTKH, slot: KeysValues):
    """Return the logit q . k of a slot, [B, T, K], and its value."""
    return jnp.einsum('btkh,btkh->btk', q_BTKH, slot.k_BTKH, precision='highest'), slot.v_BTKH


def mix_values(q_BTNH, own: KeysValues, depth: DepthSlots):
    """Mix the values of a layer with those of earlier layers (Depth-Attention, arXiv 2606.05014).

    sum_i p_i v_i with p = softmax_i(q . k_i / sqrt(H)) over the visible slots and the layer's own
    keys and values, where q is the mean query of a group. Computed in float32 or wider.

    Args:
      q_BTNH: queries of the layer, as its attention uses them.
      own: keys and values of the layer, [B, T, K, H].
      depth: keys and mixed values of earlier layers.

    Returns:
      The mixed values [B, T, K, H] in the dtype of `own`, and `depth`, threaded.
    """
    dtype = wide_dtype(own.v_BTKH.dtype)
    batch, length, kv_heads, width = own.k_BTKH.shape
    q_BTKGH = q_BTNH.astype(dtype).reshape(batch, length, kv_heads, -1, width)
    q_BTKH = jnp.mean(q_BTKGH, axis=3) / width**0.5
    logit_BTK, v_BTKH = score_values(q_BTKH, KeysValues(*(side.astype(dtype) for side in own)))
    *earlier, depth = softmax_over_slots(score_values, q_BTKH, depth)
    mixed_BTKH = join_softmaxes([earlier, (v_BTKH, logit_BTK)])
    return mixed_BTKH.astype(own.v_BTKH.dtype), depth


def is_source(layer, reader, stride: int, recent: int):
    """Return whether `reader` reads a layer's slot: every `stride`-th, and the last `recent`."""
    return (layer % stride == 0) | (layer >= reader - recent)


def stride_of(hparams: ModelHparams) -> int:
    """Return the number of layers from one source to the next."""
    return hparams.depth.value_stride or max(1, hparams.num_layers // 2)


class MixValues(nn.Module):
    """`mix_values` over the slots of the layers that are sources."""

    hparams: ModelHparams

    @nn.compact
    def __call__(self, x_BTD, q_BTNH, k_BTKH, v_BTKH, tokens: TokenInfo, depth: DepthSlots):
        stride, recent = stride_of(self.hparams), self.hparams.depth.recent_layers
        given_LBT = depth.valid_LBT
        if recent:  # all layers write slots
            layer_L = jnp.arange(len(depth.slots.k_BTKH))
            source_L11 = is_source(layer_L, depth.num_written, stride, recent)[:, None, None]
            valid_LBT = True if given_LBT is None else given_LBT
            shape = depth.slots.k_BTKH.shape[:3]
            depth = depth._replace(valid_LBT=jnp.broadcast_to(source_L11 & valid_LBT, shape))
        mixed_BTKH, depth = mix_values(q_BTNH, KeysValues(k_BTKH, v_BTKH), depth)
        return mixed_BTKH, depth._replace(valid_LBT=given_LBT)


@STREAMS.register('value_attention')
class ValueAttention(Stream):
    """Depth-Attention (arXiv 2606.05014): the running sum, with values mixed before attention.

    A slot has the keys and the mixed values of a layer that is a source. Sources are every
    `value_stride`-th layer from the first on, or all layers if `recent_layers` is above 0.
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
            right = 'must be none: the value_attention stream counts layers, and each is a source '
            right += 'at most once'
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
        """The first layer mixes nothing, and the last layer writes nothing."""
        stride, recent, last = stride_of(hparams), hparams.depth.recent_layers, hparams.num_layers
        writes = [(recent > 0 or i % stride == 0) and i < last - 1 for i in range(last)]
        return [
            kind._replace(slots=int(writes[i]), mixes=i > 0)
            for i, kind in enumerate(super().layer_kinds(hparams))
        ]

    @classmethod
    def mixing_flops(cls, hparams: ModelHparams, tokens: int, written: int) -> float:
        """4 K H for each slot and the layer itself: a product with q and a weighted sum.

        Slots that `recent_layers` hides are read as well.
        """
        return 4 * tokens * (written + 1) * hparams.num_kv_heads * hparams.head_dim

    @classmethod
    def difference_at_start(cls, depth: DepthHparams) -> str:
        return 'the value_attention stream mixes values of earlier layers into those of later ones'

    @classmethod
    def describe(cls, hparams: ModelHparams) -> str:
        recent = hparams.depth.recent_layers
        newest = f' and to the newest {recent}' if recent else ''
        return f'value attention to layers at stride {stride_of(hparams)}{newest}'
