"""One transformer block: attention, then the mlp or experts, with their residuals and norms."""

from typing import NamedTuple

import flax.linen as nn
import jax

from moddepth_jax.hparams import ModelHparams
from moddepth_jax.model.attention import AttentionInputs, DepthSlots, KeysValues, SelfAttention
from moddepth_jax.model.layers import RMSNorm, SwiGLU
from moddepth_jax.model.moe.experts import NO_EXPERT_STATE, Experts, ExpertsRecord, ExpertState
from moddepth_jax.model.routing import TokenInfo


class LayerKind(NamedTuple):
    """The static properties of a layer. Layers of equal kind can share a scan."""

    routed: bool  # a router selects the tokens that the block processes
    window: int  # tokens that the attention sees; 0: all earlier ones
    slots: int = 0  # depth slots that the layer writes
    inputs: int = 0  # arrays that the layer reads, in a stream that reads outputs
    experts: bool = False  # the mlp is a mixture of experts
    part: str = 'block'  # block, entry (before the first block) or exit (after the last)
    mixes: bool = False  # the stream's `value_mixer` changes the values of the attention
    opens: tuple[bool, ...] = (False, False)  # the outputs of attention and mlp each open a source
    embeds: bool = False  # the attention has a ValueEmbedding
    gathered: bool = False  # the attention runs on selected tokens; set for routed loops
    own_norms: bool = False  # each loop has its own norm scales


class SlotInputs(NamedTuple):
    """What the depth slots of a layer are made from. None: the stream does not need it."""

    attention_slot: KeysValues | None = None  # keys and values of the attention, as a slot has them
    attention_input_BTD: jax.Array | None = None
    mlp_input_BTD: jax.Array | None = None


class BlockAux(NamedTuple):
    """What a block returns for its tokens in addition to its output."""

    keys: KeysValues
    slot_inputs: SlotInputs
    depth: DepthSlots | None  # its input with threaded cotangents; see SelfAttention
    experts: ExpertsRecord | None  # None: the block has no experts
    expert_state: ExpertState  # for later tokens; unchanged if the block has no experts


class AttentionOutput(NamedTuple):
    """What the attention of a block returns."""

    output_BTD: jax.Array  # what it adds to the stream
    stream_BTD: jax.Array  # the stream after it; under `post` with the norm
    value_input_BTD: jax.Array
    keys: KeysValues
    slot: KeysValues  # keys and values of the tokens' slots
    depth: DepthSlots | None


class MlpOutput(NamedTuple):
    """What the mlp or the experts of a block return."""

    output_BTD: jax.Array  # what they add to the stream
    input_BTD: jax.Array
    depth: DepthSlots | None
    experts: ExpertsRecord | None
    expert_state: ExpertState


class Block(nn.Module):
    """Attention f, then the mlp f, each added to x as the norm placement says.

    pre: x + f(norm(x)). post: norm(x + f(x)). reordered: x + norm(f(x)).
    """

    hparams: ModelHparams
    kind: LayerKind
    looks_ahead: bool = True  # whether experts choose among whole rows, or by thresholds
    part: str = 'block'  # the part that `delta` and `gated` run, as `model.routing.part`

    def setup(self):
        hparams, kind = self.hparams, self.kind
        self.attention = SelfAttention(hparams, kind.window, kind.gathered, kind.mixes, kind.embeds)
        if kind.experts:
            self.mlp = Experts(hparams, self.looks_ahead)
        else:
            self.mlp = SwiGLU(hparams, hparams.d_ff)
        self.attention_norm = RMSNorm(hparams.norm_eps)
        self.mlp_norm = RMSNorm(hparams.norm_eps)
        self.attention_connection = self.mlp_connection = None
        connection = hparams.depth.stream_class.connection
        if connection is not None:
            self.attention_connection = connection(hparams, kind.opens[0])
            self.mlp_connection = connection(hparams, kind.opens[1])

    def __call__(
        self,
        x_BTD,
        tokens: TokenInfo,
        view=None,
        depth=None,
        expert_state=NO_EXPERT_STATE,
        first=None,
    ) -> tuple[jax.Array, BlockAux]:
        """Return the output [B, T, D] and BlockAux. Arguments as of SelfAttention and Experts."""
        attended, fed = self._run(x_BTD, tokens, view, depth, expert_state, first)
        y_BTD = _add(self.mlp_connection, attended.stream_BTD, fed.output_BTD)
        y_BTD = self.mlp_norm(y_BTD) if self.hparams.norm_placement == 'post' else y_BTD
        return y_BTD, self._aux(attended, fed)

    def delta(self, x_BTD, tokens: TokenInfo, view, depth, expert_state):
        """Return part(x) - x and BlockAux. Only post-norm subtracts, which cancels digits."""
        if self.part != 'block':
            y_BTD, added_BTD, keys = self.sublayer(self.part, x_BTD, tokens, view)
            delta_BTD = y_BTD - x_BTD if self.hparams.norm_placement == 'post' else added_BTD
            return delta_BTD, BlockAux(keys, SlotInputs(), depth, None, expert_state)
        if self.hparams.norm_placement == 'post':
            y_BTD, aux = self(x_BTD, tokens, view, depth, expert_state)
            return y_BTD - x_BTD, aux
        attended, fed = self._run(x_BTD, tokens, view, depth, expert_state)
        return attended.output_BTD + fed.output_BTD, self._aux(attended, fed)

    def sublayer(self, name: str, x_BTD, tokens: TokenInfo, view=None):
        """Run one sublayer, `attention` or `mlp`, without experts and depth slots.

        Returns x after it (and its norm), what it adds to x, and KeysValues (None for the mlp).
        """
        if name == 'attention':
            attended = self._attend(x_BTD, tokens, view, None)
            return attended.stream_BTD, attended.output_BTD, attended.keys
        added_BTD = self._feed_forward(x_BTD, tokens, None, NO_EXPERT_STATE).output_BTD
        y_BTD = x_BTD + added_BTD
        y_BTD = self.mlp_norm(y_BTD) if self.hparams.norm_placement == 'post' else y_BTD
        return y_BTD, added_BTD, None

    def gated(self, x, gates_BT, tokens: TokenInfo, view, depth, expert_state):
        """Return x after `part`, with what that adds scaled by the gates, and BlockAux."""
        if self.attention_connection is None:
            delta_BTD, aux = self.delta(x, tokens, view, depth, expert_state)
            return x + (gates_BT[..., None] * delta_BTD).astype(x.dtype), aux
        if self.hparams.depth.stream_class.gates_state:
            y, aux = self(x, tokens, view, depth, expert_state)
            return x + (gates_BT[..., None] * (y - x)).astype(x.dtype), aux
        attended, fed = self._run(x, tokens, view, depth, expert_state)
        for connection, output_BTD in (
            (self.attention_connection, attended.output_BTD),
            (self.mlp_connection, fed.output_BTD),
        ):
            x = connection.add(x, (gates_BT[..., None] * output_BTD).astype(output_BTD.dtype))
        return x, self._aux(attended, fed)

    def keys(self, x_BTD, tokens: TokenInfo):
        """Return only the KeysValues that the block makes from x."""
        if self.hparams.norm_placement == 'pre':
            x_BTD = self.attention_norm(x_BTD)
        return self.attention.keys(x_BTD, tokens)

    def skip(self, x):
        """Return the state after the block of tokens that skip it."""
        if self.attention_connection is None:
            return x
        return self.mlp_connection.skip(self.attention_connection.skip(x))

    def read(self, x, depth):
        """Return the input of attention before its norm, an array or AttentionInputs, and depth."""
        return _read(self.attention_connection, x, depth)

    def skipped_slot_inputs(self, x_BTD, tokens: TokenInfo) -> SlotInputs:
        """Return SlotInputs of tokens that skip the block, as if attention and mlp added 0."""
        placement, needed = self.hparams.norm_placement, self._needed_slot_inputs
        if not needed:
            return SlotInputs()
        input_BTD = x_BTD if placement == 'reordered' else self.attention_norm(x_BTD)
        mlp_input_BTD = self.mlp_norm(x_BTD) if placement == 'pre' else input_BTD
        slot = self.attention.slot(input_BTD, tokens) if 'attention_slot' in needed else None
        return self._slot_inputs(slot, input_BTD, mlp_input_BTD)

    def _run(self, x_BTD, tokens, view, depth, expert_state, first=None):
        attended = self._attend(x_BTD, tokens, view, depth, first)
        fed = self._feed_forward(attended.stream_BTD, tokens, attended.depth, expert_state)
        return attended, fed

    def _aux(self, attended: AttentionOutput, fed: MlpOutput) -> BlockAux:
        slots = self._slot_inputs(attended.slot, attended.value_input_BTD, fed.input_BTD)
        return BlockAux(attended.keys, slots, fed.depth, fed.experts, fed.expert_state)

    def _attend(self, x_BTD, tokens, view, depth, first=None) -> AttentionOutput:
        """Run attention with its residual and norm."""
        placement = self.hparams.norm_placement
        inputs, depth = self.read(x_BTD, depth)
        if placement == 'pre':
            inputs = jax.tree.map(self.attention_norm, inputs)
        if not isinstance(inputs, AttentionInputs):
            inputs = AttentionInputs(inputs, inputs, inputs)
        output_BTD, keys, slot, depth = self.attention(inputs, tokens, view, depth, first)
        if placement == 'reordered':
            output_BTD = self.attention_norm(output_BTD)
        stream_BTD = _add(self.attention_connection, x_BTD, output_BTD)
        if placement == 'post':
            stream_BTD = self.attention_norm(stream_BTD)
        return AttentionOutput(output_BTD, stream_BTD, inputs.value_BTD, keys, slot, depth)

    def _feed_forward(self, x_BTD, tokens, depth, expert_state) -> MlpOutput:
        """Run the mlp or the experts, without their residual and what follows it."""
        placement = self.hparams.norm_placement
        input_BTD, depth = _read(self.mlp_connection, x_BTD, depth)
        input_BTD = self.mlp_norm(input_BTD) if placement == 'pre' else input_BTD
        if self.kind.experts:
            real_BT = tokens.segment_ids_BT > 0
            output_BTD, record, expert_state = self.mlp(input_BTD, real_BT, expert_state)
        else:
            output_BTD, record = self.mlp(input_BTD), None
        if placement == 'reordered':
            output_BTD = self.mlp_norm(output_BTD)
        return MlpOutput(output_BTD, input_BTD, depth, record, expert_state)

    def _slot_inputs(self, slot, attention_input_BTD, mlp_input_BTD):
        every = SlotInputs(slot, attention_input_BTD, mlp_input_BTD)
        return SlotInputs(**{name: getattr(every, name) for name in self._needed_slot_inputs})

    @property
    def _needed_slot_inputs(self):
        depth = self.hparams.depth
        return depth.stream_class.slot_inputs(depth) if self.kind.slots else ()


def _read(connection, x, depth):
    return (x, depth) if connection is None else connection.read(x, depth)


def _add(connection, x, output_BTD):
    return x + output_BTD if connection is None else connection.add(x, output_BTD)
