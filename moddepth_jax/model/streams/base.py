"""What a depth stream is: the interface of all of them, and the plain residual stream."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from moddepth_jax.hparams import DepthHparams, ModelHparams
from moddepth_jax.hparams.checks import refuse
from moddepth_jax.hparams.registry import STREAMS
from moddepth_jax.model.attention import DepthSlots, KeysValues
from moddepth_jax.model.block import LayerKind, SlotInputs
from moddepth_jax.model.layers import projection
from moddepth_jax.model.routing import TokenInfo
from moddepth_jax.model.value_embeddings import embeds_values


class Stream(nn.Module):
    """What a layer reads from earlier layers and writes for later ones, before and after its block.

    A stream is one subclass in its own file, registered in STREAMS; it carries one array [B, T, D].
    """

    hparams: ModelHparams
    kind: LayerKind
    # Values of each knob of `model.depth` that applies and accepts `auto`, which is the first.
    choices = {}
    counts = ()  # knobs of `model.depth` that are numbers and 0 in all other streams
    scans = True  # whether layers of equal kind have equal shapes, so that they can share a scan
    keeps_sum = False  # whether it carries x alone, to which each block adds its output
    sized_by_depth = False  # whether parameters are as many as layers run, so that loops are fixed
    has_ends = False  # whether the embedding writes a slot and the final norm reads once more
    reads_outputs = False  # whether slots are block outputs [B, T, D], not keys and values
    # The module, made in SelfAttention of layers whose kind `mixes`, that is called with
    # (x_BTD, q_BTNH, k_BTKH, v_BTKH, tokens, depth) and returns the values to attend to and store,
    # and `depth`, threaded.
    value_mixer = None
    # The module, made in Block for attention and for the mlp with (hparams, opens), by which each
    # reads what the stream carries (attention an array, or AttentionInputs; and `depth`, threaded)
    # and joins its output to that; None: x, and x + output.
    connection = None
    gates_state = False  # whether a gate scales the change of x, or the outputs of a connection
    attends = False  # whether slots are read by attention over depth
    sums_gradients = False  # whether gradients of slots are summed in `sums` of another dtype
    masks_skipped = False  # whether tokens that skip a routed block have no slots of it
    joins_attention = False  # whether heads see the slots in one softmax with the sequence
    parameter_axes = ()  # (end of the path of a matrix in `stream`, its axes), as sharding.LEAVES

    def read(self, x_BTD, depth: DepthSlots | None):
        """The layer's input, the slots that its heads see, and `depth` with threaded cotangents."""
        return x_BTD, None, depth

    def write(self, y_BTD, slot_inputs: SlotInputs, tokens: TokenInfo, slot_key):
        """What the stream carries after the layer, and a tuple of the slots that it writes."""
        return y_BTD, ()

    @classmethod
    def check(cls, hparams: ModelHparams):
        """Raise a one-line ValueError if the model does not fit this stream."""

    @classmethod
    def slots_per_layer(cls, depth: DepthHparams) -> int:
        """Key-value slots that each layer writes."""
        return 0

    @classmethod
    def slot_shape(cls, hparams: ModelHparams):
        """ShapeDtypeStructs of one token's slot."""
        if cls.reads_outputs:
            return jax.ShapeDtypeStruct((hparams.d_model,), hparams.dtype)
        side = jax.ShapeDtypeStruct((hparams.num_kv_heads, hparams.head_dim), hparams.dtype)
        return KeysValues(side, side)

    @classmethod
    def projects_values(cls, depth: DepthHparams) -> bool:
        """Whether attention has a value projection in layers whose kind `mixes`."""
        return True

    @classmethod
    def start(cls, hparams: ModelHparams, number) -> dict:
        """First values of those parameters of a block that depend on its number."""
        return {}

    @classmethod
    def enter(cls, hparams: ModelHparams, x_BTD):
        """What the first layer gets, of the embedded tokens."""
        return x_BTD

    @classmethod
    def leave(cls, hparams: ModelHparams, x_BTD):
        """What the final norm reads, of what the last layer returns."""
        return x_BTD

    @classmethod
    def slot_inputs(cls, depth: DepthHparams) -> tuple[str, ...]:
        """Names of the SlotInputs that `write` needs from the block."""
        return ()

    @classmethod
    def layer_kinds(cls, hparams: ModelHparams) -> list[LayerKind]:
        """The kind of every layer that has parameters of its own.

        Without ends the last writes no slots, unless it is looped: none would read them.
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
                own_norms=hparams.loop_norms == 'own' and i in hparams.looped_range,
            )
            for i in range(layers)
        ]
        kinds = [kind._replace(embeds=embeds_values(hparams, i)) for i, kind in enumerate(kinds)]
        if not cls.has_ends:
            looped = layers - 1 in hparams.looped_range
            return kinds if looped else [*kinds[:-1], kinds[-1]._replace(slots=0)]
        entry, last = LayerKind(False, 0, per_layer, part='entry'), LayerKind(False, 0, part='exit')
        return [entry, *kinds, last]

    @classmethod
    def projection_flops(
        cls, hparams: ModelHparams, kind: LayerKind, length: int, num_selected: int
    ) -> float:
        """FLOPs of the stream's parameters in a layer whose block processes some of a row."""
        return 0.0

    @classmethod
    def reading_flops(
        cls, hparams: ModelHparams, kind: LayerKind, length: int, num_selected: int, written: int
    ) -> float:
        """FLOPs of the reads of a layer, in a row, after `written` slots."""
        return 0.0

    @classmethod
    def mixing_flops(cls, hparams: ModelHparams, tokens: int, written: int) -> float:
        """FLOPs of `value_mixer` on some tokens of a row, after `written` slots."""
        return 0.0

    @classmethod
    def difference_at_start(cls, depth: DepthHparams) -> str:
        """Why a residual model converted to this stream has another loss at first; '' if not."""
        return ''

    @classmethod
    def describe(cls, hparams: ModelHparams) -> str:
        """Words for the line of a run that describes the model."""
        return f'{hparams.depth.stream} depth stream'


@STREAMS.register('residual')
class Residual(Stream):
    """The running sum: a layer reads it and adds to it, inside its block."""

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
        """FLOPs of one slot of one token."""
        return 4 * hparams.d_model * hparams.num_kv_heads * hparams.head_dim


def wide(hparams: ModelHparams):
    """The dtype of arrays whose gradients are sums over layers: float32, or wider."""
    return jnp.promote_types(hparams.dtype, jnp.float32)


def refuse_routed_writers(hparams: ModelHparams):
    """Refuse a routed block that writes slots where tokens that skip it would have none."""
    for i, kind in enumerate(kind for kind in layer_kinds(hparams) if kind.part == 'block'):
        if kind.routed and kind.slots:
            right = f'must not route layer {i}: the {hparams.depth.stream} stream stores its '
            right += 'values, and tokens that skip it have none'
            refuse('model.routing.layers', hparams.routing.layers, right)


def layer_kinds(hparams: ModelHparams) -> list[LayerKind]:
    """The kind of every layer that runs, from the first to the last; looped ones come again."""
    kinds = hparams.depth.stream_class.layer_kinds(hparams)
    return [kinds[layer] for layer in layer_order(hparams)]


def layer_order(hparams: ModelHparams) -> list[int]:
    """The index, among the stream's `layer_kinds`, of every layer that runs."""
    kinds = hparams.depth.stream_class.layer_kinds(hparams)
    blocks = [layer for layer, kind in enumerate(kinds) if kind.part == 'block']
    ends = range(blocks[0]), range(blocks[-1] + 1, len(kinds))
    return [*ends[0], *(blocks[number] for number in hparams.block_order), *ends[1]]
