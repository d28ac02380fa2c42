"""The stream `mudd`: queries, keys, values and residual sum read their own mixtures of outputs."""

import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from kernels_pallas.xla.sequence import dot
from moddepth_jax.hparams import ModelHparams
from moddepth_jax.hparams.checks import refuse
from moddepth_jax.hparams.registry import STREAMS
from moddepth_jax.model.attention import AttentionInputs, DepthSlots
from moddepth_jax.model.layers import rms_norm, wide_dtype
from moddepth_jax.model.slot_reads import sum_slots
from moddepth_jax.model.streams.base import LayerKind, Stream

LETTERS = 'qkvr'  # the readers: queries, keys, values, and the residual sum


class Ways(NamedTuple):
    """What a block reads, [B, T, D] each."""

    query_BTD: jax.Array
    key_BTD: jax.Array
    value_BTD: jax.Array
    residual_BTD: jax.Array  # what the output of attention is added to


def weights_of_slots(weights, count, size: int):
    """Return the weights of slots 0 to size - 1, [..., size], from weights by age, [..., ages].

    The newest slot, count - 1, has age 0. Slots from `count` on get weight 0. `size` is at most the
    number of ages.
    """
    ages = weights.shape[-1]
    widths = [(0, 0)] * (weights.ndim - 1) + [(0, ages)]
    oldest_first = jnp.pad(jnp.flip(weights, axis=-1), widths)
    return jax.lax.dynamic_slice_in_dim(oldest_first, ages - count, size, axis=-1)


def mix_outputs(weights, depth: DepthSlots):
    """Return weighted sums of the slots, [C, B, T, D], in the dtype of the weights, and `depth`.

    The weights are [B, T, C, L], or [C, L] for all tokens.
    """
    weights_BTCL = weights.reshape(*(weights.shape[:-2] or (1, 1)), *weights.shape[-2:])
    return sum_slots(jnp.transpose(weights_BTCL, (3, 2, 0, 1)), depth)


class WaysConnection(nn.Module):
    """Attention reads three ways and is added to the fourth. The mlp reads that sum."""

    hparams: ModelHparams
    opens: bool = False  # not used

    def read(self, x: Ways | jax.Array, depth: DepthSlots | None):
        """Return the input before the norm: AttentionInputs, or an array for the mlp; and depth."""
        return AttentionInputs(*x[:3]) if isinstance(x, Ways) else x, depth

    def add(self, x: Ways | jax.Array, output_BTD):
        """Return the sum after the sublayer, [B, T, D]."""
        return (x.residual_BTD if isinstance(x, Ways) else x) + output_BTD


@STREAMS.register('mudd')
class Mudd(Stream):
    """Multiway dynamic dense connections (MUDDFormer, Xiao et al. 2025, arXiv 2502.12170).

    read: sum_j A_j X_j for each way. `dynamic`: A = GELU(rms(X_i) W_1) W_2 + a for each token, from
    the newest output X_i. `static`: A = a.
    write: append the block's output.

    W_2 starts at 0, and a as 1 on the newest output, so the model starts as the residual one. All
    layers have weights for as many ages as the last read, so that their shapes are equal.
    """

    choices = {
        # These readers have their own way. The others share one more way.
        'mudd_ways': ('qkvr', 'one', 'q', 'k', 'v', 'r', 'qk', 'qv', 'qr', 'kv', 'kr', 'vr'),
        'mudd_weights': ('dynamic', 'static'),
    }
    connection = WaysConnection
    sized_by_depth = True
    has_ends = True
    reads_outputs = True
    sums_gradients = True
    parameter_axes = (('inner', ('embed', None)),)

    def setup(self):
        if self.kind.part == 'entry':
            return
        width, inner = self.hparams.d_model, inner_width(self.hparams)
        shape = (_num_ways(self.hparams, self.kind), num_ages(self.hparams))
        self.bias = self.param('bias', _one_on_newest, shape)
        if self.hparams.depth.mudd_weights == 'dynamic':
            spread = nn.initializers.normal(1 / math.sqrt(width))
            self.inner = self.param('inner', spread, (width, inner))
            self.outer = self.param('outer', nn.initializers.zeros, (inner, *shape))

    def read(self, x_BTD, depth: DepthSlots | None):
        weights = weights_of_slots(self._weights(x_BTD), depth.num_written, len(depth.slots))
        ways, depth = mix_outputs(weights, depth)
        ways = list(ways.astype(x_BTD.dtype))
        if self.kind.part == 'exit':
            return ways[0], None, depth
        own = self.hparams.depth.mudd_ways
        order = {letter: own.find(letter) for letter in LETTERS}  # -1: the shared way, the last
        return Ways(*(ways[order[letter]] for letter in LETTERS)), None, depth

    def _weights(self, x_BTD):
        """Return A by age in float32 or wider: [B, T, C, ages], or [C, ages] if static."""
        dtype = wide_dtype(x_BTD.dtype)
        bias = self.bias.astype(dtype)
        if self.hparams.depth.mudd_weights == 'static':
            return bias
        normed_BTD = rms_norm(x_BTD, jnp.ones(x_BTD.shape[-1:]), self.hparams.norm_eps)
        inner_BTI = dot('btd,di->bti', normed_BTD, self.inner.astype(x_BTD.dtype))
        inner_BTI = jax.nn.gelu(inner_BTI, approximate=False)
        outer = self.outer.astype(dtype)
        found = jnp.einsum('bti,ica->btca', inner_BTI, outer, precision='highest')
        return bias[None, None] + found

    @classmethod
    def check(cls, hparams: ModelHparams):
        if hparams.routed_layers:
            right = 'must be none: a router scores the one array that a block reads, but in the '
            right += 'mudd stream a block reads four'
            refuse('model.routing.router', hparams.routing.router, right)

    @classmethod
    def layer_kinds(cls, hparams: ModelHparams) -> list[LayerKind]:
        """All layers but the exit write their output."""
        kinds = super().layer_kinds(hparams)
        return [kind._replace(slots=int(kind.part != 'exit')) for kind in kinds]

    @classmethod
    def projection_flops(cls, hparams, kind, length, num_selected) -> float:
        """W_1 and W_2, for all ages."""
        if kind.part == 'entry' or hparams.depth.mudd_weights == 'static':
            return 0.0
        outputs = _num_ways(hparams, kind) * num_ages(hparams)
        return 2 * length * inner_width(hparams) * (hparams.d_model + outputs)

    @classmethod
    def reading_flops(cls, hparams, kind, length, num_selected, written) -> float:
        """2 D for each way and each output that it reads."""
        if kind.part == 'entry':
            return 0.0
        return 2 * length * hparams.d_model * _num_ways(hparams, kind) * written

    @classmethod
    def describe(cls, hparams: ModelHparams) -> str:
        depth = hparams.depth
        return f'{depth.mudd_weights} MUDD connections (ways: {depth.mudd_ways})'


def num_ages(hparams: ModelHparams) -> int:
    """Return the number of outputs at the last read: all blocks that run, and the embedding."""
    return hparams.num_blocks + 1


def inner_width(hparams: ModelHparams) -> int:
    """Return the width between W_1 and W_2, which is the paper's width for the last layer."""
    return len(LETTERS) * num_ages(hparams)


def _num_ways(hparams: ModelHparams, kind: LayerKind) -> int:
    own = hparams.depth.mudd_ways
    if kind.part == 'exit' or own == 'one':
        return 1
    return len(own) + (len(own) < len(LETTERS))


def _one_on_newest(key, shape):
    return jnp.zeros(shape).at[:, 0].set(1)
