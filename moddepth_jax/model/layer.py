"""One layer of the stack: it reads from the depth stream, operates, and writes."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from moddepth_jax.hparams import ModelHparams
from moddepth_jax.model.attention import Depth, KeysValues, Past, Tokens
from moddepth_jax.model.block import Block, Sources
from moddepth_jax.model.cache import Entry, LayerCache, from_prefill, visible
from moddepth_jax.model.depth_stream import STREAMS, LayerKind
from moddepth_jax.model.experts import ExpertsRecord, Limits
from moddepth_jax.model.mixture_of_depths import MixtureOfDepths, RoutedLayer
from moddepth_jax.model.routing import RoutingRecord, gather_rows, membership, put_rows


class Written(NamedTuple):
    """What a layer leaves for the layers above it.

    Attributes:
      slots: a tuple, oldest first, of KeysValues [B, T, K, H] (`dense`, `average`: of x_BTD).
      valid_BT: bool, which tokens have them; None: all.
    """

    slots: tuple[KeysValues, ...] = ()
    valid_BT: jax.Array | None = None


class Told(NamedTuple):
    """What a layer is told beside its parameters; traced, so that layers share a scan.

    Attributes:
      routed: the RoutedLayer of a routed block; None for the others.
      limits: of its experts; those of no use are None.
    """

    routed: RoutedLayer | None = None
    limits: Limits = Limits()

    @property
    def routed_layer(self) -> RoutedLayer:
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


class Output(NamedTuple):
    """What a layer returns.

    Attributes:
      x_BTD: what the stream carries to the next layer.
      written: for all layers above.
      depth: the Depth it was given, cotangents threaded through.
      records: what it decided.
    """

    x_BTD: jax.Array
    written: Written
    depth: Depth | None
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

    def __call__(self, x_BTD, depth: Depth | None, tokens: Tokens, told: Told) -> Output:
        """All tokens of whole rows.

        Args:
          x_BTD: what the stream carries.
          depth: what earlier layers wrote; None where they wrote nothing.
          tokens: of the rows.
          told: to this layer.
        """
        inputs_BTD, seen, depth = self._read(x_BTD, depth)
        y_BTD, sources, rows_BC, records = inputs_BTD, Sources(), None, Records()
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
        return Output(x_BTD, written, depth, records)

    def prefill(
        self, x_BTD, depth, tokens: Tokens, told: Told, slots: int, routed_slots: int | None
    ):
        """`__call__` over prompts, which leaves a cache.

        Returns the stream, Written, the LayerCache, and refused_B (0 in a dense block).
        """
        inputs_BTD, seen, _ = self._read(x_BTD, depth)
        if self.kind.routed:
            y_BTD, left, rows_BC, cache, refused_B = self.operation.prefill(
                inputs_BTD, tokens, told.routed_layer, routed_slots, seen
            )
        else:
            y_BTD, left = self.operation(inputs_BTD, tokens, depth=seen, limits=told.limits)
            rows_BC, refused_B = None, 0
            cache = from_prefill(left.keys, slots)._replace(taken_BE=left.limits.taken_BE)
        return *self._write(y_BTD, left.sources, tokens, rows_BC), cache, refused_B

    def decode(self, x_B1D, depth, tokens: Tokens, told: Told, cache: LayerCache, rows):
        """One new token of each row; `rows` = lengths_B, documents_B, active_B, as decode_step has.

        Returns the stream, Written, the Entry, and refused_B (0 in a dense block).
        """
        inputs_B1D, seen, _ = self._read(x_B1D, depth)
        lengths_B, documents_B, active_B = rows
        if self.kind.routed:
            y_B1D, sources, entry, refused_B = self.operation.decode(
                inputs_B1D, tokens, told.routed_layer, cache, documents_B, active_B, seen
            )
            x_B1D, written = self._write(y_B1D, sources, tokens, None)
            if self.hparams.masks_slots and written.slots:
                written = written._replace(valid_BT=entry.entered_B[:, None])
            return x_B1D, written, entry, refused_B
        seen_BS = visible(cache, lengths_B, documents_B, self.kind.window, cache.slots)
        past = Past(cache.k_BKHS, cache.v_BKHS, seen_BS)
        limits = told.limits._replace(taken_BE=cache.taken_BE)
        y_B1D, left = self.operation(inputs_B1D, tokens, past, seen, limits)
        x_B1D, written = self._write(y_B1D, left.sources, tokens, None)
        return x_B1D, written, Entry(left.keys, None, left.limits.taken_BE), 0

    def _read(self, x_BTD, depth):
        if self.kind.part == 'entry':
            return x_BTD, None, depth
        return self.stream.read(x_BTD, depth)

    def _write(self, y_BTD, sources, tokens, rows_BC):
        """The stream, and Written; `sources` are of the tokens `rows_BC`, None: of all."""
        if rows_BC is None:
            x_BTD, slots = self.stream.write(y_BTD, sources, tokens, self._slot_key)
            masked = self.hparams.masks_slots and slots
            return x_BTD, Written(slots, jnp.ones(y_BTD.shape[:2], bool) if masked else None)
        y_BCD, tokens_BC = jax.tree.map(lambda side: gather_rows(side, rows_BC), (y_BTD, tokens))
        _, slots = self.stream.write(y_BCD, sources, tokens_BC, self._slot_key)

        def spread(side_BCX):
            nothing_BTX = jnp.zeros((*y_BTD.shape[:2], *side_BCX.shape[2:]), side_BCX.dtype)
            return put_rows(nothing_BTX, rows_BC, side_BCX)

        return y_BTD, Written(jax.tree.map(spread, slots), membership(rows_BC, y_BTD.shape[1]))

    def _slot_key(self, k_BTKH, positions_BT):
        block = self.operation.block if self.kind.routed else self.operation
        return block.attention.slot_key(k_BTKH, positions_BT)
