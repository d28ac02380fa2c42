"""The stream `attention_residual`: a sublayer reads a softmax over earlier sublayer outputs."""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from moddepth_jax.hparams import DepthHparams, ModelHparams
from moddepth_jax.hparams.checks import refuse
from moddepth_jax.hparams.registry import STREAMS
from moddepth_jax.model.attention import DepthSlots
from moddepth_jax.model.block import SlotInputs
from moddepth_jax.model.layers import wide_dtype
from moddepth_jax.model.routing import TokenInfo
from moddepth_jax.model.slot_reads import join_softmaxes, softmax_over_slots
from moddepth_jax.model.streams.base import LayerKind, Stream


class Sources(NamedTuple):
    """What the stream carries through a block. Sources of earlier blocks are depth slots."""

    newest_BTD: jax.Array  # the source that sublayers add to
    closed: tuple[jax.Array, ...] = ()  # [B, T, D] each, sources completed in this block


def score_source(epsilon, query_D, v_BTD):
    """Return the logit query . v / rms(v), [B, T], and the value v of a source."""
    dot_BT = jnp.einsum('btd,d->bt', v_BTD, query_D, precision='highest')
    square_BT = jnp.einsum('btd,btd->bt', v_BTD, v_BTD, precision='highest') / v_BTD.shape[-1]
    return dot_BT * jax.lax.rsqrt(square_BT + epsilon), v_BTD


def mix_sources(epsilon, query_D, newer, depth: DepthSlots | None):
    """Return sum_i p_i v_i, [B, T, D], p = softmax_i(query . v_i / rms(v_i)), and threaded `depth`.

    From Attention Residuals (arXiv 2603.15031). Everything is computed in float32 or wider.

    Args:
      epsilon: of the key norm.
      query_D: the query times the scale of the key norm.
      newer: a tuple of sources [B, T, D] of the tokens that the layer runs on.
      depth: the earlier sources, of which a token uses those that it sees; None: no sources.
    """
    dtype = wide_dtype(newer[0].dtype)
    query_D, score = query_D.astype(dtype), functools.partial(score_source, epsilon)
    parts = []
    for v_BTD in newer:
        logit_BT, v_BTD = score(query_D, v_BTD.astype(dtype))
        parts.append((v_BTD, logit_BT))
    if depth is not None:
        *part, depth = softmax_over_slots(score, query_D, depth)
        parts.append(part)
    return join_softmaxes(parts), depth


class SourceReader(nn.Module):
    """How one sublayer reads the sources and adds its output to them."""

    hparams: ModelHparams
    opens: bool = False  # whether its output opens a source, or is added to the newest one

    def setup(self):
        width = (self.hparams.d_model,)
        self.query = self.param('query', nn.initializers.zeros, width)
        self.scale = self.param('scale', nn.initializers.ones, width)

    def read(self, sources: Sources, depth: DepthSlots | None):
        """Return the input of the sublayer before its norm, [B, T, D], and `depth`, threaded."""
        newer = (*sources.closed, sources.newest_BTD)
        query_D = self.query * self.scale
        x_BTD, depth = mix_sources(self.hparams.norm_eps, query_D, newer, depth)
        return x_BTD.astype(sources.newest_BTD.dtype), depth

    def add(self, sources: Sources, output_BTD) -> Sources:
        """Return the sources after the sublayer."""
        newest_BTD, closed = sources
        if self.opens:
            return Sources(output_BTD, (*closed, newest_BTD))
        return Sources(newest_BTD + output_BTD, closed)

    def skip(self, sources: Sources) -> Sources:
        """Return the sources of tokens that skip the sublayer, in the same structure as `add`."""
        newest_BTD, closed = sources
        return Sources(newest_BTD, (*closed, *[jnp.zeros_like(newest_BTD)] * self.opens))


@STREAMS.register('attention_residual')
class AttentionResidual(Stream):
    """Attention Residuals (arXiv 2603.15031), full or in blocks of `sublayers_per_source`.

    A source is the embedding, or the sum of the outputs of some sublayers. The stream carries the
    newest source. A sublayer that opens a source writes the previous one as a slot. There is no
    running sum.
    """

    counts = ('sublayers_per_source',)
    connection = SourceReader
    sums_gradients = True
    reads_outputs = True
    masks_skipped = True

    def setup(self):
        if self.kind.part == 'exit':
            self.reader = SourceReader(self.hparams)

    def read(self, x_BTD, depth: DepthSlots | None):
        if self.kind.part == 'block':
            return Sources(x_BTD), depth, depth
        x_BTD, depth = self.reader.read(Sources(x_BTD), depth)
        return x_BTD, None, depth

    def write(self, y, slot_inputs: SlotInputs, tokens: TokenInfo, slot_key):
        if self.kind.part == 'exit':
            return y, ()
        return y.newest_BTD, y.closed

    @classmethod
    def check(cls, hparams: ModelHparams):
        depth, sublayers = hparams.depth, 2 * hparams.num_layers
        if depth.sublayers_per_source > sublayers:
            right = f'must be at most {sublayers}, the sublayers of model.num_layers='
            right += f'{hparams.num_layers}'
            refuse('model.depth.sublayers_per_source', depth.sublayers_per_source, right)
        size, in_turn = depth.sublayers_per_source or 1, hparams.loop_order == 'cycle'
        period = 2 * (len(hparams.looped_range) if in_turn else 1)
        if hparams.loops > 1 and period % size:
            right = f'must divide {period}, the sublayers that repeat with model.looped_layers='
            refuse('model.depth.sublayers_per_source', size, right + hparams.looped_layers)
        if hparams.norm_placement == 'post':
            right = 'must be pre or reordered: post norms the running sum, which the '
            right += 'attention_residual stream does not have'
            refuse('model.norm_placement', hparams.norm_placement, right)

    @classmethod
    def layer_kinds(cls, hparams: ModelHparams) -> list[LayerKind]:
        """Every `sublayers_per_source`-th sublayer opens a source. The final norm reads as well."""
        size = hparams.depth.sublayers_per_source or 1
        kinds = super().layer_kinds(hparams)
        for i, kind in enumerate(kinds):
            opens = tuple(sublayer % size == 0 for sublayer in (2 * i, 2 * i + 1))
            kinds[i] = kind._replace(slots=sum(opens), opens=opens)
        return [*kinds, LayerKind(False, 0, part='exit')]

    @classmethod
    def reading_flops(cls, hparams, kind, length, num_selected, written) -> float:
        """4 D for each source: a product with the query and a weighted sum."""
        sources = written + 1
        if kind.part == 'block':
            both = num_selected * (2 * sources + kind.opens[0])
            router = length * sources if kind.routed else 0
            return 4 * hparams.d_model * (both + router)
        return 4 * hparams.d_model * length * sources

    @classmethod
    def difference_at_start(cls, depth: DepthHparams) -> str:
        reason = 'sublayers read the mean of their sources instead of the sum; after a pre-norm '
        return reason + 'these differ only by model.norm_eps'

    @classmethod
    def describe(cls, hparams: ModelHparams) -> str:
        size = hparams.depth.sublayers_per_source or 1
        return 'attention residuals' + (f' of {size} sublayers each' if size > 1 else '')
