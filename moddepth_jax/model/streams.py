"""Depth streams: how a layer reads its input from what earlier layers wrote, and writes its own.

Five of them, by name (Zhu et al. 2026, arXiv 2603.15619, section 2.2; `average`: Pagliardini et al.
2024, arXiv 2402.02622): each is a small class with `read` and `write`, between which the layer's
block operates. What they carry from layer to layer is an array [B, T, D], and slots that every
later layer sees.
"""

from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp

from moddepth_jax.hparams import ModelHparams
from moddepth_jax.model.attention import DepthSlots, KeysValues, TokenInfo, attend, slots_of
from moddepth_jax.model.block import SlotInputs
from moddepth_jax.model.layers import projection


class LayerKind(NamedTuple):
    """What tells one layer of a stack from another: layers of one kind can share a scan.

    Attributes:
      routed: whether a router decides which tokens its block processes.
      window: tokens that its attention sees, 0 for all.
      slots: depth slots that it writes.
      inputs: arrays that it reads, where the stream keeps them all (`dense`, `average`).
      experts: whether experts are its mlp.
      part: block; or, at the ends of the streams that have them, entry (the embedding writes) and
        exit (one more read, for the final norm).
    """

    routed: bool
    window: int
    slots: int = 0
    inputs: int = 0
    experts: bool = False
    part: str = 'block'


def layer_kinds(hparams: ModelHparams) -> list[LayerKind]:
    """The kind of every layer, from the first to the last.

    In MoDA the embedding writes nothing, and nor does the last layer: no layer would see it. In
    `dense`, `average` and `attention` the embedding is slot 0; the last read sees every block's.
    """
    stream, per_layer = hparams.depth.stream, hparams.depth.slots_per_layer
    kinds = [
        LayerKind(
            i in hparams.routed_layers,
            hparams.window(i),
            per_layer,
            experts=i in hparams.expert_layers,
        )
        for i in range(hparams.num_layers)
    ]
    if stream in ('residual', 'moda'):
        return [*kinds[:-1], kinds[-1]._replace(slots=0)]
    ends = [LayerKind(False, 0, per_layer, part='entry'), LayerKind(False, 0, part='exit')]
    kinds = [ends[0], *kinds, ends[1]]
    if hparams.depth.reads_outputs:
        writes = [int(kind.part != 'exit') for kind in kinds]
        kinds = [kind._replace(slots=writes[i], inputs=i) for i, kind in enumerate(kinds)]
    return kinds


class Residual(nn.Module):
    """The running sum: a layer reads it and adds to it, inside its block."""

    hparams: ModelHparams
    kind: LayerKind

    def read(self, x_BTD, depth: DepthSlots | None):
        """The layer's input, the slots that its heads see, and `depth` with threaded cotangents."""
        return x_BTD, None, depth

    def write(self, y_BTD, sources: SlotInputs, tokens: TokenInfo, slot_key):
        """The stream after the layer, and a tuple of the slots that it leaves.

        Args:
          y_BTD: the output of the layer's block.
          sources: what else the block left.
          tokens: of the same.
          slot_key: the layer's own `SelfAttention.slot_key`.
        """
        return y_BTD, ()


class DepthDense(nn.Module):
    """read: W_l . concat(X_0 .. X_{l-1}); write: append X_l, the block's output.

    W_l starts as the identity on the newest array and 0 on the others: the residual stream. Weight
    decay acts on it as on any matrix.
    """

    hparams: ModelHparams
    kind: LayerKind

    def setup(self):
        if self.kind.inputs:
            width = self.hparams.d_model
            self.kernel = self.param('kernel', _newest, (self.kind.inputs * width, width))

    def read(self, x_BTD, depth: DepthSlots | None):
        """As Residual.read."""
        kernel_LDE = self.kernel.reshape(self.kind.inputs, *x_BTD.shape[-1:], -1)
        kernel_LDE = kernel_LDE.astype(x_BTD.dtype)
        x_LBTD = depth.slots[: self.kind.inputs]
        return jnp.einsum('lbtd,lde->bte', x_LBTD, kernel_LDE), None, depth

    def write(self, y_BTD, sources: SlotInputs, tokens: TokenInfo, slot_key):
        """As Residual.write."""
        return y_BTD, (y_BTD,) if self.kind.slots else ()


def _newest(key, shape):
    older = jnp.zeros((shape[0] - shape[1], shape[1]))
    return jnp.concatenate([older, jnp.eye(shape[1])])


class DepthAverage(DepthDense):
    """read: a_l0 X_0 + .. + a_l(l-1) X_(l-1), one scalar for each; write: append, as `dense`.

    DenseFormer's average (Pagliardini et al. 2024, arXiv 2402.02622, section 3.1): the scalars are
    not bound to sum to 1, and start as 1 on the newest array and 0 on the others: the residual
    stream. Weight decay leaves them alone. Products and sums are of the scalars' float32 or wider.
    """

    def setup(self):
        if self.kind.inputs:
            self.weights = self.param('weights', _one_on_newest, self.kind.inputs)

    def read(self, x_BTD, depth: DepthSlots | None):
        """As Residual.read."""
        x_LBTD = depth.slots[: self.kind.inputs]
        y_BTD = jnp.einsum('lbtd,l->btd', x_LBTD, self.weights, precision='highest')
        return y_BTD.astype(x_BTD.dtype), None, depth


def _one_on_newest(key, count):
    return jnp.zeros(count).at[-1].set(1)


class DepthAttention(nn.Module):
    """read: the previous layer's query attends to the slots of layers 0..l-1 at the same token.

    write: a query for the next read, and a slot's key and value, projected from the block's output.
    What is carried from layer to layer is that query, heads side by side.
    """

    hparams: ModelHparams
    kind: LayerKind

    def setup(self):
        hparams = self.hparams
        if self.kind.slots:
            self.query = projection(hparams, hparams.num_heads, hparams.head_dim)
            self.slot = SlotProjection(hparams)

    def read(self, q_BTD, depth: DepthSlots | None):
        """As Residual.read."""
        kv_heads, width = self.hparams.num_kv_heads, self.hparams.head_dim
        nothing_BSKH = jnp.zeros((q_BTD.shape[0], 0, kv_heads, width), q_BTD.dtype)
        q_BTNH = q_BTD.reshape(*q_BTD.shape[:2], -1, width)
        given = slots_of(self.hparams, depth)
        self.sow('intermediates', 'depth', (q_BTNH, nothing_BSKH, given))  # see SelfAttention
        nothing = (nothing_BSKH, nothing_BSKH)
        o_BTNH, depth = attend(self.hparams, q_BTNH, *nothing, depth, given)
        return o_BTNH.reshape(q_BTD.shape), None, depth

    def write(self, y_BTD, sources: SlotInputs, tokens: TokenInfo, slot_key):
        """As Residual.write."""
        if not self.kind.slots:
            return y_BTD, ()
        return self.query(y_BTD).reshape(y_BTD.shape), (self.slot(y_BTD),)


class SlotProjection(nn.Module):
    """Key and value of a slot, [B, T, K, H] each, projected from an array [B, T, D]."""

    hparams: ModelHparams

    def setup(self):
        shape = (self.hparams.num_kv_heads, self.hparams.head_dim)
        self.key = projection(self.hparams, *shape)
        self.value = projection(self.hparams, *shape)

    def __call__(self, x_BTD) -> KeysValues:
        return KeysValues(self.key(x_BTD), self.value(x_BTD))


class Moda(nn.Module):
    """The running sum, and the attention heads see the slots; write: add, and append slots.

    `attention`: the layer's own sequence keys and values, or a projection of what attention reads.
    `attention+ffn`: also a projection of what the mlp reads. `block`: one of the block's output.
    """

    hparams: ModelHparams
    kind: LayerKind

    def setup(self):
        depth = self.hparams.depth
        if not self.kind.slots:
            return
        if depth.attention_slot_projection:
            self.attention_slot = SlotProjection(self.hparams)
        if depth.slots == 'attention+ffn':
            self.ffn_slot = SlotProjection(self.hparams)
        if depth.slots == 'block':
            self.block_slot = SlotProjection(self.hparams)

    def read(self, x_BTD, depth: DepthSlots | None):
        """As Residual.read."""
        return x_BTD, depth, depth

    def write(self, y_BTD, sources: SlotInputs, tokens: TokenInfo, slot_key):
        """As Residual.write."""
        if not self.kind.slots:
            return y_BTD, ()

        def stored(slot):
            return slot._replace(k_BTKH=slot_key(slot.k_BTKH, tokens.positions_BT))

        depth = self.hparams.depth
        if depth.slots == 'block':
            return y_BTD, (stored(self.block_slot(y_BTD)),)
        slots = (sources.attention_slot,)
        if depth.attention_slot_projection:
            slots = (stored(self.attention_slot(sources.attention_input_BTD)),)
        if depth.slots == 'attention+ffn':
            slots += (stored(self.ffn_slot(sources.mlp_input_BTD)),)
        return y_BTD, slots


STREAMS = {
    'residual': Residual,
    'dense': DepthDense,
    'average': DepthAverage,
    'attention': DepthAttention,
    'moda': Moda,
}
