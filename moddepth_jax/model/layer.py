"""One layer of the stack: it reads from the depth stream, operates, and writes."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from moddepth_jax.hparams import ModelHparams
from moddepth_jax.model.attention import DepthSlots, KeysValues, KVView, TokenInfo
from moddepth_jax.model.block import Block, SlotInputs
from moddepth_jax.model.kv_cache import CacheUpdate, LayerCache, cache_from_prefill, visible_mask
from moddepth_jax.model.mod.mixture_of_depths import MixtureOfDepths, RoutingArgs
from moddepth_jax.model.moe.experts import ExpertsRecord, ExpertState
from moddepth_jax.model.routing import RoutingRecord, gather_tokens, indices_to_mask, scatter_tokens
from moddepth_jax.model.streams import STREAMS, LayerKind


class NewSlots(NamedTuple):
    """What a layer leaves for the layers above it.

    Attributes:
      slots: a tuple, oldest first, of KeysValues [B, T, K, H] (`dense`, `average`: of x_BTD).
      valid_BT: bool, which tokens have them; None: all.
    """

    slots: tuple[KeysValues, ...] = ()
    valid_BT: jax.Array | None = None


class LayerArgs(NamedTuple):
    """What a layer is told beside its parameters; traced, so that layers share a scan.

    Attributes:
      routed: the RoutedLayer of a routed block; None for the others.
      limits: of its experts; those of no use are None.
    """

    routed: RoutingArgs | None = None
    limits: ExpertState = ExpertState()

    @property
    def routed_layer(self) -> RoutingArgs:
        """What a routed block is told, of its experts too."""
        return self.routed._replace(limits=self.limits)


class Records(NamedTuple):
    """What a layer decided, or, with an axis of those that have it before the others, all layers.

    Attributes:
      routing: the RoutingRecord of routed blocks; None for the others.
      experts: the ExpertsRecord of layers with experts; None for the others.
    """

    routing: RoutingRecord | None = None
    experts: ExpertsRecord | None = None


class LayerOutput(NamedTuple):
    """What a layer returns.

    Attributes:
      x_BTD: what the stream carries to the next layer.
      written: for all layers above.
      depth: the Depth it was given, cotangents threaded through.
      records: what it decided.
    """

    x_BTD: jax.Array
    written: NewSlots
    depth: DepthSlots | None
    records: Records


class Layer(nn.Module):
    """read, operate, write; the parameters of its block are its own, the stream's are in `stream`.

    `routing` and `sizes` are those of MixtureOfDepths.
    """

    hparams: ModelHparams
    kind: LayerKind
    routing: str
    sizes: tuple[int, ...] = ()

    def setup(self):
        kind = self.kind
        writes = kind.slots > 0 and self.hparams.depth.stream == 'moda'
        self.stream = STREAMS[self.hparams.depth.stream](self.hparams, kind)
        if kind.part != 'block':
            return
        if kind.routed:
            self.operation = MixtureOfDepths(
                self.hparams, kind.window, self.routing, self.sizes, writes, kind.experts
            )
        else:
            ahead = self.routing == 'top_c'
            self.operation = Block(
                self.hparams, kind.window, writes, experts=kind.experts, ahead=ahead
            )
        nn.share_scope(self, self.operation)

    def __call__(
        self, x_BTD, depth: DepthSlots | None, tokens: TokenInfo, told: LayerArgs
    ) -> LayerOutput:
        """All tokens of whole rows.

        Args:
          x_BTD: what the stream carries.
          depth: what earlier layers wrote; None where they wrote nothing.
          tokens: of the rows.
          told: to this layer.
        """
        inputs_BTD, seen, depth = self._read(x_BTD, depth)
        y_BTD, sources, rows_BC, records = inputs_BTD, SlotInputs(), None, Records()
        if self.kind.part == 'block':
            routing = None
            if self.kind.routed:
                y_BTD, left, rows_BC, routing = self.operation(
                    inputs_BTD, tokens, told.routed_layer, seen
                )
            else:
                y_BTD, left = self.operation(inputs_BTD, tokens, depth=seen, limits=told.limits)
            sources, depth = left.sources, depth if seen is None else left.depth
            records = Records(routing, left.experts)
        x_BTD, written = self._write(y_BTD, sources, tokens, rows_BC)
        return LayerOutput(x_BTD, written, depth, records)

    def prefill(
        self,
        x_BTD,
        depth,
        tokens: TokenInfo,
        told: LayerArgs,
        slots: int,
        routed_capacity: int | None,
    ):
        """`__call__` over prompts, which leaves a cache.

        Returns the stream, Written, the LayerCache, and dropped_B (0 in a dense block).
        """
        inputs_BTD, seen, _ = self._read(x_BTD, depth)
        if self.kind.routed:
            y_BTD, left, rows_BC, cache, dropped_B = self.operation.prefill(
                inputs_BTD, tokens, told.routed_layer, routed_capacity, seen
            )
        else:
            y_BTD, left = self.operation(inputs_BTD, tokens, depth=seen, limits=told.limits)
            rows_BC, dropped_B = None, 0
            cache = cache_from_prefill(left.keys, slots)._replace(taken_BE=left.limits.taken_BE)
        return *self._write(y_BTD, left.sources, tokens, rows_BC), cache, dropped_B

    def decode(self, x_B1D, depth, tokens: TokenInfo, told: LayerArgs, cache: LayerCache, rows):
        """One new token of each row; `rows` = lengths_B, documents_B, active_B, as decode_step has.

        Returns the stream, Written, the Entry, and dropped_B (0 in a dense block).
        """
        inputs_B1D, seen, _ = self._read(x_B1D, depth)
        lengths_B, documents_B, active_B = rows
        if self.kind.routed:
            y_B1D, sources, entry, dropped_B = self.operation.decode(
                inputs_B1D, tokens, told.routed_layer, cache, documents_B, active_B, seen
            )
            x_B1D, written = self._write(y_B1D, sources, tokens, None)
            if self.hparams.masks_slots and written.slots:
                written = written._replace(valid_BT=entry.selected_B[:, None])
            return x_B1D, written, entry, dropped_B
        seen_BS = visible_mask(cache, lengths_B, documents_B, self.kind.window, cache.slots)
        past = KVView(cache.k_BKHS, cache.v_BKHS, seen_BS)
        limits = told.limits._replace(taken_BE=cache.taken_BE)
        y_B1D, left = self.operation(inputs_B1D, tokens, past, seen, limits)
        x_B1D, written = self._write(y_B1D, left.sources, tokens, None)
        return x_B1D, written, CacheUpdate(left.keys, None, left.limits.taken_BE), 0

    def _read(self, x_BTD, depth):
        if self.kind.part == 'entry':
            return x_BTD, None, depth
        return self.stream.read(x_BTD, depth)

    def _write(self, y_BTD, sources, tokens, rows_BC):
        """The stream, and Written; `sources` are of the tokens `rows_BC`, None: of all."""
        if rows_BC is None:
            x_BTD, slots = self.stream.write(y_BTD, sources, tokens, self._slot_key)
            masked = self.hparams.masks_slots and slots
            return x_BTD, NewSlots(slots, jnp.ones(y_BTD.shape[:2], bool) if masked else None)
        y_BCD, tokens_BC = jax.tree.map(lambda side: gather_tokens(side, rows_BC), (y_BTD, tokens))
        _, slots = self.stream.write(y_BCD, sources, tokens_BC, self._slot_key)

        def spread(side_BCX):
            nothing_BTX = jnp.zeros((*y_BTD.shape[:2], *side_BCX.shape[2:]), side_BCX.dtype)
            return scatter_tokens(nothing_BTX, rows_BC, side_BCX)

        return y_BTD, NewSlots(
            jax.tree.map(spread, slots), indices_to_mask(rows_BC, y_BTD.shape[1])
        )

    def _slot_key(self, k_BTKH, positions_BT):
        block = self.operation.block if self.kind.routed else self.operation
        return block.attention.slot_key(k_BTKH, positions_BT)
