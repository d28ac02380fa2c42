"""What a depth stream is: the interface of all of them, and the plain residual stream."""

from typing import NamedTuple

import flax.linen as nn

from moddepth_jax.hparams import DepthHparams, ModelHparams
from moddepth_jax.hparams.registry import STREAMS
from moddepth_jax.model.attention import DepthSlots, KeysValues
from moddepth_jax.model.block import SlotInputs
from moddepth_jax.model.layers import projection
from moddepth_jax.model.routing import TokenInfo


class LayerKind(NamedTuple):
    """What distinguishes the layers of a stack: layers of one kind can share a scan.

    Attributes:
      routed: whether a router selects the tokens that its block processes.
      window: tokens that its attention sees; 0: all earlier ones.
      slots: depth slots that it writes.
      inputs: arrays that it reads, in a stream that reads outputs.
      experts: whether experts are its mlp.
      part: block; or, in a stream that has ends, entry (the embedding writes) or exit (one more
        read, for the final norm).
    """

    routed: bool
    window: int
    slots: int = 0
    inputs: int = 0
    experts: bool = False
    part: str = 'block'


class Stream(nn.Module):
    """What a layer reads from earlier layers and writes for later ones; by default, nothing.

    A stream is one subclass in its own file, registered in STREAMS. From layer to layer it
    carries one array [B, T, D]; all later layers see the slots that a layer writes. Between `read`
    and `write` the layer runs its block. The class attributes and class methods state what the rest
    of the code needs to know of a stream.

    Attributes:
      hparams: of the model.
      kind: of the layer.
      choices: for each knob of `model.depth` that accepts `auto` and applies to this stream: its
        values, the first being what `auto` stands for.
      scans: whether layers of equal kind have equal shapes, so that they can share a scan.
      has_ends: whether the embedding writes a slot and the final norm reads once more.
      reads_outputs: whether slots are block outputs [B, T, D] rather than keys and values.
      attends: whether slots are read by attention over depth.
      joins_attention: whether attention heads see the slots in one softmax with the sequence.
      parameter_axes: (end of the path of a matrix in `stream`, names of its axes), as in
        `sharding.LEAVES`.
    """

    hparams: ModelHparams
    kind: LayerKind
    choices = {}
    scans = True
    has_ends = False
    reads_outputs = False
    attends = False
    joins_attention = False
    parameter_axes = ()

    def read(self, x_BTD, depth: DepthSlots | None):
        """The layer's input, the slots that its heads see, and `depth`.

        The gradients of the slots flow through the returned `depth`; see SelfAttention.
        """
        return x_BTD, None, depth

    def write(self, y_BTD, slot_inputs: SlotInputs, tokens: TokenInfo, slot_key):
        """What the stream carries after the layer, and a tuple of the slots that it writes.

        Args:
          y_BTD: the output of the layer's block.
          slot_inputs: what the block returned for its slots.
          tokens: of the same.
          slot_key: the layer's own `SelfAttention.slot_key`.
        """
        return y_BTD, ()

    @classmethod
    def check(cls, hparams: ModelHparams):
        """Raise a one-line ValueError if the model does not fit this stream."""

    @classmethod
    def slots_per_layer(cls, depth: DepthHparams) -> int:
        """Key-value slots that each layer writes."""
        del depth
        return 0

    @classmethod
    def slot_inputs(cls, depth: DepthHparams) -> tuple[str, ...]:
        """Names of the SlotInputs that `write` needs from the block."""
        del depth
        return ()

    @classmethod
    def layer_kinds(cls, hparams: ModelHparams) -> list[LayerKind]:
        """The kind of every layer, from the first to the last.

        Without ends the last layer writes no slots: no layer would read them.
        """
        per_layer = hparams.depth.slots_per_layer
        kinds = [
            LayerKind(
                i in hparams.routed_layers,
                hparams.window(i),
                per_layer,
                experts=i in hparams.expert_layers,
            )
            for i in range(hparams.num_layers)
        ]
        if not cls.has_ends:
            return [*kinds[:-1], kinds[-1]._replace(slots=0)]
        entry, last = LayerKind(False, 0, per_layer, part='entry'), LayerKind(False, 0, part='exit')
        return [entry, *kinds, last]

    @classmethod
    def projection_flops(
        cls, hparams: ModelHparams, kind: LayerKind, length: int, num_selected: int
    ) -> float:
        """FLOPs of the stream's own parameters in one layer, for one row.

        Args:
          hparams: of the model.
          kind: of the layer.
          length: tokens of the row.
          num_selected: those that the layer's block processes.
        """
        del hparams, kind, length, num_selected
        return 0.0

    @classmethod
    def difference_at_start(cls, depth: DepthHparams) -> str:
        """Why a residual model converted to this stream has another loss at first; '' if not."""
        del depth
        return ''

    @classmethod
    def describe(cls, hparams: ModelHparams) -> str:
        """Words for the line of a run that describes the model."""
        return f'{hparams.depth.stream} depth stream'


@STREAMS.register('residual')
class Residual(Stream):
    """The running sum: a layer reads it and adds to it, inside its block."""

    @classmethod
    def describe(cls, hparams: ModelHparams) -> str:
        """Nothing: it is the usual one."""
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


def layer_kinds(hparams: ModelHparams) -> list[LayerKind]:
    """The kind of every layer, from the first to the last."""
    return hparams.depth.stream_class.layer_kinds(hparams)
