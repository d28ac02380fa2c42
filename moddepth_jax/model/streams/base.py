"""The interface of depth streams, and the residual stream."""

import flax.linen as nn
import jax

from moddepth_jax.hparams import DepthHparams, ModelHparams
from moddepth_jax.hparams.registry import STREAMS
from moddepth_jax.model.attention import DepthSlots, KeysValues
from moddepth_jax.model.block import LayerKind, SlotInputs
from moddepth_jax.model.layers import projection
from moddepth_jax.model.routing import TokenInfo
from moddepth_jax.model.value_embeddings import embeds_values


class Stream(nn.Module):
    """What a layer reads from earlier layers before its block, and writes for later ones after it.

    A stream is a subclass in its own file that is registered in STREAMS. It carries one array
    [B, T, D] from layer to layer. `depth` is threaded: a layer reads the `depth` that the reader
    before it returned, so that the backward pass adds up the gradients of slots in one buffer.
    """

    hparams: ModelHparams
    kind: LayerKind
    # Values of the knobs of `model.depth` that the stream uses and that accept `auto`, by knob.
    # `auto` is the first value.
    choices = {}
    counts = ()  # numeric knobs of `model.depth` that the stream uses; 0 in all other streams
    scans = True  # whether layers of equal kind have equal shapes, so that they can share a scan
    keeps_sum = False  # whether the stream carries only x, to which each block adds its output
    sized_by_depth = False  # whether shapes depend on the blocks that run, so that loops are fixed
    has_ends = False  # whether the embedding writes a slot and the final norm reads
    reads_outputs = False  # whether slots are block outputs [B, T, D], not keys and values
    # A module that SelfAttention makes in layers whose kind `mixes`. It is called with
    # (x_BTD, q_BTNH, k_BTKH, v_BTKH, tokens, depth). It returns the values that attention uses and
    # stores, and `depth`, threaded.
    value_mixer = None
    # A module that Block makes with (hparams, opens) for attention and for the mlp. Its `read`
    # returns the input of the sublayer (for attention an array or AttentionInputs) and `depth`,
    # threaded; `add` adds the output to what the stream carries. None: x, and x + output.
    connection = None
    gates_state = False  # whether a gate scales the change of x, or the outputs of a connection
    attends = False  # whether slots are read by attention over depth
    sums_gradients = False  # whether `sums` adds up the gradients of slots in another dtype
    masks_skipped = False  # whether tokens that skip a routed block have no slots there
    joins_attention = False  # whether heads see slots and sequence in one softmax
    parameter_axes = ()  # (end of a matrix's path in `stream`, its axes), as sharding.LEAVES

    def read(self, x_BTD, depth: DepthSlots | None):
        """Return the layer's input, the slots that its heads see, and `depth`, threaded."""
        return x_BTD, None, depth

    def write(self, y_BTD, slot_inputs: SlotInputs, tokens: TokenInfo, slot_key):
        """Return what the stream carries after the layer, and a tuple of the slots it writes.

        slot_key(k_BTKH, positions_BT) returns a projected key as a slot stores it. By default a
        slot of a stream that reads outputs is the block's output.
        """
        return y_BTD, (y_BTD,) if self.reads_outputs and self.kind.slots else ()

    @classmethod
    def check(cls, hparams: ModelHparams):
        """Raise a one-line ValueError if the model does not fit this stream."""

    @classmethod
    def slots_per_layer(cls, depth: DepthHparams) -> int:
        """Return the number of key/value slots that each layer writes."""
        return 0

    @classmethod
    def slot_shape(cls, hparams: ModelHparams):
        """Return the ShapeDtypeStructs of one token's slot."""
        if cls.reads_outputs:
            return jax.ShapeDtypeStruct((hparams.d_model,), hparams.dtype)
        side = jax.ShapeDtypeStruct((hparams.num_kv_heads, hparams.head_dim), hparams.dtype)
        return KeysValues(side, side)

    @classmethod
    def projects_values(cls, depth: DepthHparams) -> bool:
        """Return whether attention has a value projection in layers whose kind `mixes`."""
        return True

    @classmethod
    def start(cls, hparams: ModelHparams, number) -> dict:
        """Return the initial values of the parameters of a block that depend on its number."""
        return {}

    @classmethod
    def enter(cls, hparams: ModelHparams, x_BTD):
        """Return the input of the first layer, given the embedded tokens."""
        return x_BTD

    @classmethod
    def leave(cls, hparams: ModelHparams, x_BTD):
        """Return the input of the final norm, given the output of the last layer."""
        return x_BTD

    @classmethod
    def slot_inputs(cls, depth: DepthHparams) -> tuple[str, ...]:
        """Return the names of the SlotInputs that `write` needs from the block."""
        return ()

    @classmethod
    def layer_kinds(cls, hparams: ModelHparams) -> list[LayerKind]:
        """Return the kind of every stored layer, which has its own parameters.

        Without ends, the last layer writes no slots unless it is looped: nothing would read them.
        """
        per_layer, layers = hparams.depth.slots_per_layer, hparams.num_layers
        routed = hparams.routing.routed_layers(layers)
        experts = hparams.experts.expert_layers(layers)
        kinds = [
            LayerKind(
                i in routed,
                hparams.window(i),
                per_layer,
                experts=i in experts,
                gathered=hparams.routing.routes_loops and i in hparams.looped_range,
                embeds=embeds_values(hparams, i),
                own_norms=hparams.loop_norms == 'own' and i in hparams.looped_range,
            )
            for i in range(layers)
        ]
        if not cls.has_ends:
            looped = layers - 1 in hparams.looped_range
            return kinds if looped else [*kinds[:-1], kinds[-1]._replace(slots=0)]
        entry, last = LayerKind(False, 0, per_layer, part='entry'), LayerKind(False, 0, part='exit')
        return [entry, *kinds, last]

    @classmethod
    def projection_flops(
        cls, hparams: ModelHparams, kind: LayerKind, length: int, num_selected: int
    ) -> float:
        """Return the FLOPs of the stream's parameters in a layer, for a row of `length`.

        The block of the layer processes `num_selected` of these tokens.
        """
        return 0.0

    @classmethod
    def reading_flops(
        cls, hparams: ModelHparams, kind: LayerKind, length: int, num_selected: int, written: int
    ) -> float:
        """Return the FLOPs of a layer's reads in a row after `written` slots."""
        return 0.0

    @classmethod
    def mixing_flops(cls, hparams: ModelHparams, tokens: int, written: int) -> float:
        """Return the FLOPs of `value_mixer` on some tokens of a row after `written` slots."""
        return 0.0

    @classmethod
    def difference_at_start(cls, depth: DepthHparams) -> str:
        """Say why a residual model that is converted to this stream changes its loss; or ''."""
        return ''

    @classmethod
    def describe(cls, hparams: ModelHparams) -> str:
        """Return a phrase for the line of a run that describes the model; without commas, or ''."""
        return f'{hparams.depth.stream} depth stream'


@STREAMS.register('residual')
class Residual(Stream):
    """The running sum, which each block reads and adds to."""

    keeps_sum = True

    @classmethod
    def describe(cls, hparams: ModelHparams) -> str:
        return ''


class SlotProjection(nn.Module):
    """Key and value of a slot, [B, T, K, H] each, projected from an array [B, T, D]."""

    hparams: ModelHparams

    def setup(self):
        shape = (self.hparams.num_kv_heads, self.hparams.head_dim)
        self.key = projection(self.hparams, *shape)
        self.value = projection(self.hparams, *shape)

    def __call__(self, x_BTD) -> KeysValues:
        return KeysValues(self.key(x_BTD), self.value(x_BTD))

    @staticmethod
    def flops_per_token(hparams: ModelHparams) -> int:
        """Return the FLOPs of one slot of one token."""
        return 4 * hparams.d_model * hparams.num_kv_heads * hparams.head_dim


def layer_kinds(hparams: ModelHparams) -> list[LayerKind]:
    """Return the kind of every layer that runs, in order; looped layers repeat."""
    kinds = hparams.depth.stream_class.layer_kinds(hparams)
    return [kinds[layer] for layer in layer_order(hparams)]


def layer_order(hparams: ModelHparams) -> list[int]:
    """Return the index in the stream's `layer_kinds` of every layer that runs."""
    kinds = hparams.depth.stream_class.layer_kinds(hparams)
    blocks = [layer for layer, kind in enumerate(kinds) if kind.part == 'block']
    ends = range(blocks[0]), range(blocks[-1] + 1, len(kinds))
    return [*ends[0], *(blocks[number] for number in hparams.block_order), *ends[1]]
