"""The stream `moda`: attention heads see the slots that earlier layers wrote for their token."""

from moddepth_jax.hparams import DepthHparams, ModelHparams
from moddepth_jax.hparams.registry import STREAMS
from moddepth_jax.model.attention import DepthSlots
from moddepth_jax.model.block import SlotInputs
from moddepth_jax.model.routing import TokenInfo
from moddepth_jax.model.streams.base import SlotProjection, Stream
from moddepth_jax.model.value_embeddings import gate_flops


@STREAMS.register('moda')
class Moda(Stream):
    """The running sum, with slots that the attention heads see in one softmax with the sequence.

    `attention`: a slot is the layer's own keys and values, or a projection of the attention input.
    `attention+ffn`: a second slot is projected from the mlp input. `block`: the only slot is
    projected from the block's output.
    """

    choices = {
        'slots': ('attention+ffn', 'attention', 'block'),
        'slot_keys': ('rotated', 'unrotated'),
        'skipped_slots': ('projected', 'masked'),
    }
    keeps_sum = True
    attends = True
    sums_gradients = True
    joins_attention = True

    def setup(self):
        depth = self.hparams.depth
        if not self.kind.slots:
            return
        if depth.attention_slot_projection:
            self.attention_slot = SlotProjection(self.hparams)
        if depth.slots == 'attention+ffn':
            self.ffn_slot = SlotProjection(self.hparams)
        if depth.slots == 'block':
            self.block_slot = SlotProjection(self.hparams)

    def read(self, x_BTD, depth: DepthSlots | None):
        return x_BTD, depth, depth

    def write(self, y_BTD, slot_inputs: SlotInputs, tokens: TokenInfo, slot_key):
        if not self.kind.slots:
            return y_BTD, ()

        def stored(slot):
            return slot._replace(k_BTKH=slot_key(slot.k_BTKH, tokens.positions_BT))

        depth = self.hparams.depth
        if depth.slots == 'block':
            return y_BTD, (stored(self.block_slot(y_BTD)),)
        slots = (slot_inputs.attention_slot,)
        if depth.attention_slot_projection:
            slots = (stored(self.attention_slot(slot_inputs.attention_input_BTD)),)
        if depth.slots == 'attention+ffn':
            slots += (stored(self.ffn_slot(slot_inputs.mlp_input_BTD)),)
        return y_BTD, slots

    @classmethod
    def slots_per_layer(cls, depth: DepthHparams) -> int:
        return 2 if depth.slots == 'attention+ffn' else 1

    @classmethod
    def slot_inputs(cls, depth: DepthHparams) -> tuple[str, ...]:
        if depth.slots == 'block':
            return ()
        own = 'attention_input_BTD' if depth.attention_slot_projection else 'attention_slot'
        return (own, 'mlp_input_BTD') if depth.slots == 'attention+ffn' else (own,)

    @classmethod
    def projection_flops(cls, hparams: ModelHparams, kind, length, num_selected) -> float:
        """The slots of each token that has them. A block's own keys and values cost nothing."""
        depth, masked = hparams.depth, hparams.masks_slots
        flops = kind.slots * SlotProjection.flops_per_token(hparams)
        if kind.slots and depth.slots != 'block' and not depth.attention_slot_projection:
            if masked or not kind.routed:
                flops -= SlotProjection.flops_per_token(hparams)
            elif kind.embeds:
                flops += gate_flops(hparams)
        return (num_selected if masked else length) * flops

    @classmethod
    def difference_at_start(cls, depth: DepthHparams) -> str:
        if depth.slots == 'block' or depth.attention_slot_projection:
            return "new slots have values 0 and take a little of each head's softmax"
        return (
            "heads share their softmax with earlier layers' own keys and values, which no new "
            'parameter can hide (model.depth.attention_slot_projection=True has new ones)'
        )

    @classmethod
    def describe(cls, hparams: ModelHparams) -> str:
        depth = hparams.depth
        skipped = f' ({depth.skipped_slots} where skipped)' if hparams.routed_layers else ''
        return f'MoDA with {depth.slots} slots{skipped}'
