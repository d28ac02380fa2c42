"""One layer of the stack: it reads from the depth stream, runs its block, and writes."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from moddepth_jax.hparams import ModelHparams
from moddepth_jax.model.attention import DepthSlots, FirstKeys, KeysValues
from moddepth_jax.model.block import Block, BlockAux, SlotInputs
from moddepth_jax.model.embedding_residual import EmbeddingBlend
from moddepth_jax.model.kv_cache import CacheUpdate, view_of
from moddepth_jax.model.loop_params import EMBEDDING, add_embedding
from moddepth_jax.model.mod.mixture_of_depths import MixtureOfDepths, RoutingArgs
from moddepth_jax.model.moe.experts import ExpertsRecord, ExpertState
from moddepth_jax.model.routing import (
    RoutingRecord,
    TokenInfo,
    gather_tokens,
    indices_to_mask,
    scatter_tokens,
)
from moddepth_jax.model.streams import LayerKind


class NewSlots(NamedTuple):
    """The depth slots that a layer writes for later layers."""

    # Oldest first, [B, T, K, H]; or arrays [B, T, ...] as the stream's `slot_shape`.
    slots: tuple[KeysValues, ...] = ()
    valid_BT: jax.Array | None = None  # bool, the tokens that have them; None: all


class LayerArgs(NamedTuple):
    """Arguments of a layer apart from its parameters; traced, so that layers share a scan."""

    routing: RoutingArgs | None = None  # of a routed block
    expert_state: ExpertState = ExpertState()


class Records(NamedTuple):
    """What a layer decided; or what all layers did, with a leading axis of those that have it."""

    routing: RoutingRecord | None = None
    experts: ExpertsRecord | None = None
    loops_BT: jax.Array | None = None  # int32, loops of each token, if tokens leave them; no axis


class LayerOutput(NamedTuple):
    """What a layer returns."""

    x_BTD: jax.Array  # what the stream carries to the next layer
    written: NewSlots
    depth: DepthSlots | None  # of its input, with threaded cotangents
    records: Records
    aux: BlockAux | None = None  # of its block, for a cache


class Layer(nn.Module):
    """blend, read, run the block, write. The block's parameters are those of the layer itself."""

    hparams: ModelHparams
    kind: LayerKind
    routing: str  # as is `sizes`, of MixtureOfDepths
    sizes: tuple[int, ...] = ()

    def setup(self):
        kind, writes_slots = self.kind, self.kind.slots > 0
        self.stream = self.hparams.depth.stream_class(self.hparams, kind)
        if kind.part != 'block':
            return
        if self.hparams.embedding_residual != 'none':
            self.blend = EmbeddingBlend()
        options = {'experts': kind.experts, 'mixes': kind.mixes, 'opens': kind.opens}
        options |= {'embeds': kind.embeds}
        if kind.routed:
            self.operation = MixtureOfDepths(
                self.hparams, self.routing, kind.window, self.sizes, writes_slots, **options
            )
        else:
            options |= {'ahead': self.routing == 'top_c', 'gathered': kind.gathered}
            self.operation = Block(self.hparams, kind.window, writes_slots, **options)
        nn.share_scope(self, self.operation)

    def __call__(
        self,
        x_BTD,
        depth: DepthSlots | None,
        tokens: TokenInfo,
        args: LayerArgs,
        embedded_BTD=None,
        first: FirstKeys | None = None,
    ) -> LayerOutput:
        """Process all tokens of whole rows; `depth` is None if earlier layers wrote nothing.

        `embedded_BTD` is the `embedded_input` of the model; `first` as of SelfAttention.
        """
        input_BTD, visible, depth = self._read(x_BTD, depth, embedded_BTD)
        if self.kind.part != 'block':
            x_BTD, written = self._write(input_BTD, SlotInputs(), tokens, None)
            return LayerOutput(x_BTD, written, depth, Records())
        record, indices_BC = None, None
        if self.kind.routed:
            routing_args = args.routing._replace(expert_state=args.expert_state)
            y_BTD, aux, indices_BC, record = self.operation(
                input_BTD, tokens, routing_args, visible
            )
        else:
            y_BTD, aux = self.operation(
                input_BTD, tokens, depth=visible, expert_state=args.expert_state, first=first
            )
        depth = depth if visible is None else aux.depth
        x_BTD, written = self._write(y_BTD, aux.slot_inputs, tokens, indices_BC)
        return LayerOutput(x_BTD, written, depth, Records(record, aux.experts), aux)

    def extend(
        self,
        x_BTD,
        depth,
        tokens: TokenInfo,
        args: LayerArgs,
        cache,
        documents_BT,
        embedded_BTD=None,
        rows_C=None,
        first: FirstKeys | None = None,
    ):
        """New tokens of each row: the stream's x, NewSlots, the CacheUpdate, and dropped_BT.

        With `rows_C`, of those rows of the cache alone; all else has them in its place of rows.
        `first` has what the block made of these tokens in the first loop, whose cache it reads.
        """
        input_BTD, visible, _ = self._read(x_BTD, depth, embedded_BTD)
        if self.kind.routed:
            routing_args = args.routing._replace(expert_state=args.expert_state)
            y_BTD, slot_inputs, update, dropped_BT = self.operation.extend(
                input_BTD, tokens, routing_args, cache, documents_BT, visible
            )
            x_BTD, written = self._write(y_BTD, slot_inputs, tokens, None)
            if self.hparams.masks_slots and written.slots:
                written = written._replace(valid_BT=update.selected_BT)
            return x_BTD, written, update, dropped_BT
        view = view_of(cache, tokens, documents_BT, self.kind.window, rows_C)
        expert_state = args.expert_state._replace(taken_BE=cache.taken_BE)
        y_BTD, aux = self.operation(input_BTD, tokens, view, visible, expert_state, first)
        x_BTD, written = self._write(y_BTD, aux.slot_inputs, tokens, None)
        return x_BTD, written, CacheUpdate(aux.keys, None, aux.expert_state.taken_BE), False

    def keys(self, x_BTD, tokens: TokenInfo, embedded_BTD=None):
        """The KeysValues that `extend` makes of tokens of a stream without slots."""
        input_BTD, *_ = self._read(x_BTD, None, embedded_BTD)
        return self.operation.keys(input_BTD, tokens)

    def _read(self, x_BTD, depth, embedded_BTD):
        if self.kind.part == 'entry':
            return x_BTD, None, depth
        if self.has_variable('params', EMBEDDING):
            x_BTD = add_embedding(x_BTD, self.get_variable('params', EMBEDDING))
        if embedded_BTD is not None:  # of all tokens, also those that skip the block
            x_BTD = self.blend(x_BTD, embedded_BTD)
        return self.stream.read(x_BTD, depth)

    def _write(self, y_BTD, slot_inputs, tokens, indices_BC):
        """What the stream carries, and NewSlots of the tokens `indices_BC` (None: of all)."""
        if indices_BC is None:
            x_BTD, slots = self.stream.write(y_BTD, slot_inputs, tokens, self._slot_key)
            masked = self.hparams.masks_slots and slots
            return x_BTD, NewSlots(slots, jnp.ones(x_BTD.shape[:2], bool) if masked else None)
        valid_BT = indices_to_mask(indices_BC, tokens.positions_BT.shape[1])
        if self.hparams.depth.stream_class.connection is not None:  # slots are parts of y
            x_BTD, slots = self.stream.write(y_BTD, slot_inputs, tokens, None)
            return x_BTD, NewSlots(slots, valid_BT)
        y_BCD, tokens_BC = jax.tree.map(
            lambda side: gather_tokens(side, indices_BC), (y_BTD, tokens)
        )
        _, slots = self.stream.write(y_BCD, slot_inputs, tokens_BC, self._slot_key)

        def spread(side_BCX):
            zeros_BTX = jnp.zeros((*y_BTD.shape[:2], *side_BCX.shape[2:]), side_BCX.dtype)
            return scatter_tokens(zeros_BTX, indices_BC, side_BCX)

        return y_BTD, NewSlots(jax.tree.map(spread, slots), valid_BT)

    def _slot_key(self, k_BTKH, positions_BT):
        block = self.operation.block if self.kind.routed else self.operation
        return block.attention.slot_key(k_BTKH, positions_BT)
