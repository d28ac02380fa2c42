"""Causal self-attention of a block: projections, QK-norm, rotary positions, the kernel."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from kernels_pallas import decode_attention, depth_attention
from moddepth_jax.hparams import ModelHparams
from moddepth_jax.model.layers import RMSNorm, apply_rope, projection, rms_norm
from moddepth_jax.model.routing import TokenInfo
from moddepth_jax.model.sharding import map_shards


def model_segment_ids(hparams: ModelHparams, segment_ids_BT):
    """Segment ids that attention uses: under `across_documents` 1 for every real token."""
    if hparams.across_documents:
        return (segment_ids_BT > 0).astype(segment_ids_BT.dtype)
    return segment_ids_BT


class KVView(NamedTuple):
    """The cached keys and values that one new token of each row, or of some rows, sees.

    Attributes:
      k_BKHS, v_BKHS: a cache of keys and values [B, K, H, S].
      visible_CS: bool [C, S], the cache entries that each token sees.
      rows_C: int32 [C], the row of the cache that each token belongs to, B and above (last) for
        none; None: C = B, row by row.
    """

    k_BKHS: jax.Array
    v_BKHS: jax.Array
    visible_CS: jax.Array
    rows_C: jax.Array | None = None


class KeysValues(NamedTuple):
    """Keys and values of tokens: for later tokens of a layer, or a depth slot for later layers."""

    k_BTKH: jax.Array
    v_BTKH: jax.Array


class DepthSlots(NamedTuple):
    """What earlier layers wrote for the same tokens.

    Attributes:
      slots: KeysValues with leaves [L, B, T, K, H]; or x_LBTD in a stream that reads outputs.
      valid_LBT: bool, which tokens have a slot; None: all.
      count: int, traced or not: the number of slots that are written. None: L.
      indices_BC: int32 [B, C], the tokens that the layer runs on, if not on all T; T and above for
        none.
      sums: KeysValues of the slots' shapes whose values are never read: their cotangents are the
        gradients of the slots, in their dtype. None: the slots' own cotangents are.
    """

    slots: KeysValues
    valid_LBT: jax.Array | None = None
    count: jax.Array | int | None = None
    indices_BC: jax.Array | None = None
    sums: KeysValues | None = None


QUERIES = ('batch', None, 'heads', None)
KEYS = ('batch', None, 'kv_heads', None)
SLOTS = (None, *KEYS)
# How the arrays of depth_attention are split over a mesh; its other arguments are static.
SPLIT = {
    'q_BTNH': QUERIES,
    'k_BSKH': KEYS,
    'v_BSKH': KEYS,
    'k_depth_LBRKH': SLOTS,
    'v_depth_LBRKH': SLOTS,
    'num_slots': (),
    'k_sums': SLOTS,
    'v_sums': SLOTS,
    'slot_mask_LBR': (None, 'batch', None),
    'slot_rows_BT': ('batch', None),
    'q_depth_BTNH': QUERIES,
    'positions_BT': ('batch', None),
    'segment_ids_BT': ('batch', None),
}


def attend(hparams: ModelHparams, q_BTNH, k_BSKH, v_BSKH, depth: DepthSlots | None, options: dict):
    """depth_attention by the backend that `model.attention` names, over a mesh.

    Each device computes its own batch rows and heads, which see no others.

    Args:
      hparams: of the model.
      q_BTNH, k_BSKH, v_BSKH: as of depth_attention.
      depth: the DepthSlots; None: there are none.
      options: the other arguments by name, those of `slot_arguments` included.

    Returns:
      o_BTNH, and `depth` with threaded cotangents.
    """
    implementation = None if hparams.attention == 'auto' else hparams.attention
    arguments = {'q_BTNH': q_BTNH, 'k_BSKH': k_BSKH, 'v_BSKH': v_BSKH, **options}
    arrays = {name: value for name, value in arguments.items() if name in SPLIT}
    static = {name: value for name, value in arguments.items() if name not in SPLIT}
    outputs = QUERIES
    if depth is not None:
        outputs = (QUERIES, SLOTS, SLOTS)
    if depth is not None and depth.sums is not None:
        outputs += (SLOTS, SLOTS)
        arrays |= {'k_sums': depth.sums.k_BTKH, 'v_sums': depth.sums.v_BTKH}

    def call(k_sums=None, v_sums=None, **arrays):
        sums = None if k_sums is None else (k_sums, v_sums)
        return depth_attention(
            implementation=implementation,
            thread_slots=depth is not None,
            slot_sums=sums,
            **arrays,
            **static,
        )

    result = map_shards(call, arrays, SPLIT, outputs)
    if depth is None:
        return result, None
    o_BTNH, *sides = result
    sums = None if depth.sums is None else KeysValues(*sides[2:])
    return o_BTNH, depth._replace(slots=KeysValues(*sides[:2]), sums=sums)


def slot_arguments(hparams: ModelHparams, depth: DepthSlots) -> dict:
    """The arguments of depth_attention, and of its reference, that describe the slots."""
    return {
        'k_depth_LBRKH': depth.slots.k_BTKH,
        'v_depth_LBRKH': depth.slots.v_BTKH,
        'num_slots': depth.count,
        'slot_window': hparams.depth.slot_window,
        'slot_mask_LBR': depth.valid_LBT,
        'slot_rows_BT': depth.indices_BC,
    }


class SelfAttention(nn.Module):
    """Grouped-query attention of one layer, over the sequence and over depth slots.

    Each head attends in one softmax to earlier tokens and to the depth slots of its own token
    (MoDA, Zhu et al. 2026, section 2.2).

    Attributes:
      hparams: of the model.
      window: tokens that a query sees, itself included; 0: all earlier ones.
      gathered: whether the tokens are a selection rather than whole rows.
    """

    hparams: ModelHparams
    window: int
    gathered: bool = False

    def setup(self):
        hparams = self.hparams
        heads, kv_heads, width = hparams.num_heads, hparams.num_kv_heads, hparams.head_dim
        self.query = projection(hparams, heads, width)
        self.key = projection(hparams, kv_heads, width)
        self.value = projection(hparams, kv_heads, width)
        self.out = projection(hparams, hparams.d_model, contracted=2, writes_residual=True)
        if hparams.qk_norm != 'none':
            self.query_norm = RMSNorm(hparams.norm_eps)
            self.key_norm = RMSNorm(hparams.norm_eps)

    def __call__(
        self, x_BTD, tokens: TokenInfo, view: KVView | None = None, depth: DepthSlots | None = None
    ):
        """Attend.

        Args:
          x_BTD: the layer's input.
          tokens: of the same.
          view: the cached keys and values of earlier tokens, if T = 1; None: the tokens attend to
            each other.
          depth: what earlier layers wrote.

        Returns:
          The layer's output, the KeysValues of its tokens, the KeysValues of their depth slots, and
          `depth` with the cotangents of its slots threaded through, so that a scan over layers
          accumulates them in place.
        """
        q_BTNH, k_BTKH, v_BTKH = self.query(x_BTD), self.key(x_BTD), self.value(x_BTD)
        if self.hparams.qk_norm != 'none':
            q_BTNH = self._normalize(q_BTNH, self.query_norm)
        q_BTNH = apply_rope(q_BTNH, tokens.positions_BT, self.hparams.rope_theta)
        keys = slot = KeysValues(self._norm_and_rotate(k_BTKH, tokens.positions_BT), v_BTKH)
        if self.hparams.depth.slot_keys == 'unrotated':
            slot = KeysValues(self.slot_key(k_BTKH, tokens.positions_BT), v_BTKH)
        if view is None:
            o_BTNH, depth = self._over_sequence(q_BTNH, keys, tokens, depth)
        else:
            o_BTNH = self._over_cache(q_BTNH, keys, view, depth)
        return self.out(o_BTNH), keys, slot, depth

    def slot(self, x_BTD, tokens: TokenInfo) -> KeysValues:
        """The depth slot of tokens whose layer input this would be."""
        return KeysValues(self.slot_key(self.key(x_BTD), tokens.positions_BT), self.value(x_BTD))

    def slot_key(self, k_BTKH, positions_BT):
        """A projected key as a depth slot stores it.

        `rotated`: as the sequence sees it, after this layer's key norm and RoPE. `unrotated`: as
        projected, but divided by its root mean square if readers normalize keys. The scale of a
        reader's norm is applied to its query instead, so that a slot is normalized only once.
        """
        if self.hparams.depth.slot_keys != 'unrotated':
            return self._norm_and_rotate(k_BTKH, positions_BT)
        if self.hparams.qk_norm == 'none':
            return k_BTKH
        epsilon = self.hparams.norm_eps
        return self._normalize(k_BTKH, lambda k: rms_norm(k, jnp.ones(k.shape[-1:]), epsilon))

    def _norm_and_rotate(self, k_BTKH, positions_BT):
        if self.hparams.qk_norm != 'none':
            k_BTKH = self._normalize(k_BTKH, self.key_norm)
        return apply_rope(k_BTKH, positions_BT, self.hparams.rope_theta)

    def _normalize(self, x_BTNH, norm):
        if self.hparams.qk_norm == 'head':
            return norm(x_BTNH)
        return norm(x_BTNH.reshape(*x_BTNH.shape[:2], -1)).reshape(x_BTNH.shape)

    def _slot_query(self, q_BTNH):
        """The query for depth slots; None if it is that for the sequence."""
        if self.hparams.depth.slot_keys != 'unrotated' or self.hparams.qk_norm == 'none':
            return None
        kv_heads, width = self.hparams.num_kv_heads, self.hparams.head_dim
        scale = self.key_norm.get_variable('params', 'scale').astype(q_BTNH.dtype)
        scale_KH = jnp.broadcast_to(scale.reshape(-1, width), (kv_heads, width))
        return q_BTNH * jnp.repeat(scale_KH, self.hparams.num_heads // kv_heads, axis=0)[None, None]

    def _over_sequence(self, q_BTNH, keys, tokens, depth):
        options = {
            # In a whole row the position is the index, by which a kernel may count a window.
            'positions_BT': tokens.positions_BT if self.gathered else None,
            # Without documents only padding differs, and no token sees it: it comes last.
            'segment_ids_BT': None if self.hparams.across_documents else tokens.segment_ids_BT,
            'window': self.window,
        }
        if depth is not None:
            options |= slot_arguments(self.hparams, depth)
            options['q_depth_BTNH'] = self._slot_query(q_BTNH)
        # For `analysis`. Without mutable=['intermediates'] it is in no program.
        sown = (q_BTNH, keys.k_BTKH, options, tokens.segment_ids_BT)
        self.sow('intermediates', 'sequence', sown)
        return attend(self.hparams, q_BTNH, *keys, depth, options)

    def _over_cache(self, q_B1NH, keys, view, depth):
        if depth is None:
            return decode_attention(q_B1NH, *keys, *view)
        return decode_attention(
            q_B1NH,
            *keys,
            *view,
            k_depth_LC1KH=depth.slots.k_BTKH,
            v_depth_LC1KH=depth.slots.v_BTKH,
            slot_mask_LC1=depth.valid_LBT,
            slot_window=self.hparams.depth.slot_window,
            q_depth_C1NH=self._slot_query(q_B1NH),
        )
