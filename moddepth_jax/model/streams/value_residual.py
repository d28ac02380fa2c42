"""The stream `value_residual`: layers mix the first layer's values into their own."""

import flax.linen as nn
import jax

from moddepth_jax.hparams import DepthHparams, ModelHparams
from moddepth_jax.hparams.checks import refuse
from moddepth_jax.hparams.registry import STREAMS
from moddepth_jax.model.attention import DepthSlots
from moddepth_jax.model.block import SlotInputs
from moddepth_jax.model.layers import wide_dtype
from moddepth_jax.model.routing import TokenInfo
from moddepth_jax.model.streams.base import Stream

SPARSE = (5.0, 1.0)  # weights of the first layer's values and of the layer's own
SPARSE_LAYERS = 3


class AddFirstValues(nn.Module):
    """w_1 V_1 + w_2 X W_V, with weights by `model.depth.value_mix`; `shared`: only V_1."""

    hparams: ModelHparams

    @nn.compact
    def __call__(self, x_BTD, q_BTNH, k_BTKH, v_BTKH, tokens: TokenInfo, depth: DepthSlots):
        first_BTKH = depth.of_tokens()[0]
        mix = self.hparams.depth.value_mix
        if mix == 'shared':
            return first_BTKH.astype(k_BTKH.dtype), depth
        weights = SPARSE if mix == 'sparse' else (0.5, 0.5)
        if mix == 'learned':
            weights = self.param('weights', nn.initializers.constant(0.5), (2,))
        return add_first_values(first_BTKH, v_BTKH, weights), depth


def add_first_values(first_BTKH, v_BTKH, weights):
    """Return weights[0] V_1 + weights[1] V, computed in float32 or wider, in the dtype of V."""
    dtype = wide_dtype(v_BTKH.dtype)
    v_1, v = (side.astype(dtype) for side in (first_BTKH, v_BTKH))
    return (weights[0] * v_1 + weights[1] * v).astype(v_BTKH.dtype)


@STREAMS.register('value_residual')
class ValueResidual(Stream):
    """The running sum. The first layer writes its values V_1, and later layers mix them in.

    ResFormer, and SVFormer with `value_mix=shared` (Zhou et al. 2024, arXiv 2410.17897). The slot
    is float32 because its gradient is a sum over the layers.
    """

    choices = {'value_mix': ('learned', 'fixed', 'sparse', 'shared')}
    counts = ('sparse_layers',)
    keeps_sum = True
    value_mixer = AddFirstValues

    def read(self, x_BTD, depth: DepthSlots | None):
        return x_BTD, depth if self.kind.mixes else None, depth

    def write(self, y_BTD, slot_inputs: SlotInputs, tokens: TokenInfo, slot_key):
        if not self.kind.slots:
            return y_BTD, ()
        return y_BTD, (slot_inputs.attention_slot.v_BTKH.astype(wide_dtype(self.hparams.dtype)),)

    @classmethod
    def check(cls, hparams: ModelHparams):
        depth, layers = hparams.depth, hparams.num_layers
        if layers < 2:
            right = 'must be 2 or more: later layers read the values of the first'
            refuse('model.num_layers', layers, right)
        if 0 in hparams.looped_range:
            right = 'must be middle:1:0 or a later start: the first block runs once and writes the '
            right += 'values that all others read'
            refuse('model.looped_layers', hparams.looped_layers, right)
        if depth.sparse_layers and depth.value_mix != 'sparse':
            right = f'must be 0: value_mix {depth.value_mix} mixes in all layers but the first'
            refuse('model.depth.sparse_layers', depth.sparse_layers, right)
        if depth.sparse_layers >= layers:
            right = f'must be below model.num_layers={layers}: the first layer has nothing to mix'
            refuse('model.depth.sparse_layers', depth.sparse_layers, right)
        if depth.value_mix == 'shared' and hparams.routed_layers:
            right = 'must be none under value_mix shared: a routed block caches other tokens than '
            right += 'the first block, whose values it reads'
            refuse('model.routing.router', hparams.routing.router, right)
        if 0 in hparams.routed_layers:
            right = 'must not route layer 0: the value_residual stream stores its values, and '
            right += 'tokens that skip it have none'
            refuse('model.routing.layers', hparams.routing.layers, right)

    @classmethod
    def slot_shape(cls, hparams: ModelHparams):
        shape = hparams.num_kv_heads, hparams.head_dim
        return jax.ShapeDtypeStruct(shape, wide_dtype(hparams.dtype))

    @classmethod
    def projects_values(cls, depth: DepthHparams) -> bool:
        return depth.value_mix != 'shared'

    @classmethod
    def slot_inputs(cls, depth: DepthHparams) -> tuple[str, ...]:
        return ('attention_slot',)

    @classmethod
    def layer_kinds(cls, hparams: ModelHparams):
        depth, first = hparams.depth, 1
        if depth.value_mix == 'sparse':
            first = max(1, hparams.num_layers - (depth.sparse_layers or SPARSE_LAYERS))
        return [
            kind._replace(slots=int(i == 0), mixes=i >= first)
            for i, kind in enumerate(super().layer_kinds(hparams))
        ]

    @classmethod
    def difference_at_start(cls, depth: DepthHparams) -> str:
        return "the value_residual stream adds the first layer's values to those of later layers"

    @classmethod
    def describe(cls, hparams: ModelHparams) -> str:
        return f'{hparams.depth.value_mix} value residual'
