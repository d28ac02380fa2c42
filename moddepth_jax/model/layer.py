"""One layer of the stack: read from the depth stream, run the block, write to the stream."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from moddepth_jax.hparams import ModelHparams
from moddepth_jax.model.attention import DepthSlots, FirstKeys, KeysValues
from moddepth_jax.model.block import Block, BlockAux, LayerKind, SlotInputs
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


class NewSlots(NamedTuple):
    """The depth slots that a layer writes for later layers."""

    # Oldest first, each [B, T, K, H] or [B, T, ...] as the stream's `slot_shape`.
    slots: tuple[KeysValues, ...] = ()
    valid_BT: jax.Array | None = None  # bool, the tokens that have these slots; None: all


class LayerArgs(NamedTuple):
    """Arguments of a layer besides its parameters. They are traced, so that layers share a scan."""

    routing: RoutingArgs | None = None  # for a routed block
    expert_state: ExpertState = ExpertState()


class Records(NamedTuple):
    """The decisions of a layer, or of all layers that make them, along a leading axis."""

    routing: RoutingRecord | None = None
    experts: ExpertsRecord | None = None
    loops_BT: jax.Array | None = None  # int32, loops of each token if tokens exit; no layer axis


class LayerOutput(NamedTuple):
    """What a layer returns."""

    x_BTD: jax.Array  # what the stream carries to the next layer
    written: NewSlots
    depth: DepthSlots | None  # its input with threaded cotangents
    records: Records
    aux: BlockAux | None = None  # of its block, for a KV cache


class Layer(nn.Module):
    """Blend in the embedding, read, run the block, write.

    The parameters of the block are parameters of the layer itself.
    """

    hparams: ModelHparams
    kind: LayerKind
    routing: str  # this and `sizes` as of MixtureOfDepths
    sizes: tuple[int, ...] = ()

    def setup(self):
        hparams, kind = self.hparams, self.kind
        self.stream = hparams.depth.stream_class(hparams, kind)
        if kind.part != 'block':
            return
        if hparams.embedding_residual != 'none':
            self.blend = EmbeddingBlend()
        if kind.routed:
            self.operation = MixtureOfDepths(hparams, self.routing, kind, self.sizes)
        else:
            self.operation = Block(hparams, kind, looks_ahead=self.routing == 'top_c')
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
        """Process all tokens of whole rows.

        Args:
          x_BTD: what the stream carries.
          depth: the slots of earlier layers; None: they wrote none.
          tokens: positions and documents.
          args: those of this layer.
          embedded_BTD: the `embedded_input` of the model.
          first: as of SelfAttention.
        """
        input_BTD, visible, depth = self._read(x_BTD, depth, embedded_BTD)
        if self.kind.part != 'block':
            x_BTD, written = self._write(input_BTD, SlotInputs(), tokens, None)
            return LayerOutput(x_BTD, written, depth, Records())
        record, indices_BC = None, None
        if self.kind.routed:
            y_BTD, aux, indices_BC, record = self.operation(
                input_BTD, tokens, args.routing, visible, args.expert_state
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
        """Process new tokens of each row, or of the rows `rows_C` of the cache.

        Returns x_BTD of the stream, NewSlots, the CacheUpdate, and dropped_BT.

        Args:
          x_BTD: what the stream carries.
          depth: the slots of earlier layers for these tokens; None: they wrote none.
          tokens: positions, and the branch of each token as its segment id.
          args: those of this layer.
          cache: the LayerCache of the block.
          documents_BT: where the document of each token begins.
          embedded_BTD: the `embedded_input` of the model.
          rows_C: if given, B above stands for these C rows, except in the cache.
          first: what the block made of these tokens in the first loop, if it reads that cache.
        """
        input_BTD, visible, _ = self._read(x_BTD, depth, embedded_BTD)
        if self.kind.routed:
            y_BTD, slot_inputs, update, dropped_BT = self.operation.extend(
                input_BTD, tokens, args.routing, cache, documents_BT, visible, args.expert_state
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
        """Return only the KeysValues that `extend` makes, for a stream without slots."""
        input_BTD, *_ = self._read(x_BTD, None, embedded_BTD)
        return self.operation.keys(input_BTD, tokens)

    def _read(self, x_BTD, depth, embedded_BTD):
        if self.kind.part == 'entry':
            return x_BTD, None, depth
        if self.has_variable('params', EMBEDDING):
            x_BTD = add_embedding(x_BTD, self.get_variable('params', EMBEDDING))
        if embedded_BTD is not None:  # for all tokens, also those that skip the block
            x_BTD = self.blend(x_BTD, embedded_BTD)
        return self.stream.read(x_BTD, depth)

    def _write(self, y_BTD, slot_inputs, tokens, indices_BC):
        """Return what the stream carries, and NewSlots for the tokens `indices_BC` (None: all)."""
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
