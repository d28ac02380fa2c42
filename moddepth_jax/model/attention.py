"""Causal self-attention of a block: projections, QK-norm, rotary positions, the kernel."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from kernels_pallas import decode_attention, depth_attention
from moddepth_jax.hparams import ModelHparams
from moddepth_jax.model.layers import RMSNorm, apply_rope, projection, rms_norm
from moddepth_jax.model.sharding import map_shards


class TokenInfo(NamedTuple):
    """What a block knows of its tokens beside their vectors; gathered with them when routed.

    Attributes:
      positions_BT: int32 [B, T], places in the original row, ascending.
      segment_ids_BT: int32 [B, T]; tokens of different ids do not see each other, 0 is padding.
      seeds_BT: uint32 [B, T], what the `random` router draws from; None for the others.
    """

    positions_BT: jax.Array
    segment_ids_BT: jax.Array
    seeds_BT: jax.Array | None = None


def model_segment_ids(hparams: ModelHparams, segment_ids_BT):
    """Segment ids as the model takes them: of `across_documents`, 1 for all that is not padding."""
    if hparams.across_documents:
        return (segment_ids_BT > 0).astype(segment_ids_BT.dtype)
    return segment_ids_BT


class KVView(NamedTuple):
    """What one new token of each row, or of some rows, sees of the earlier ones.

    Attributes:
      k_BKHS, v_BKHS: a cache of keys and values [B, K, H, S].
      visible_CS: bool [C, S], which slots a token sees.
      rows_C: int32 [C], the row of the cache that each token belongs to, B and above for none,
        which come last; None: C = B, row by row.
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
    """What earlier layers wrote of the same tokens.

    Attributes:
      slots: KeysValues with leaves [L, B, T, K, H]; in `dense` and `average` x_LBTD.
      valid_LBT: bool, which tokens have a slot; None: all.
      count: int, traced or not: slots that are written. None: L.
      rows_BC: int32 [B, C], where the layer runs on C of the T tokens: which; T and above none.
        None: on all.
      sums: KeysValues of the slots' shapes whose values do not matter: their cotangents are the
        slots' gradients, in their dtype. None: the slots' own cotangents are.
    """

    slots: KeysValues
    valid_LBT: jax.Array | None = None
    count: jax.Array | int | None = None
    rows_BC: jax.Array | None = None
    sums: KeysValues | None = None


QUERIES = ('rows', None, 'heads', None)
KEYS = ('rows', None, 'kv_heads', None)
SLOTS = (None, *KEYS)
# How what depth_attention is given is split over a mesh; all else of it is static.
SPLIT = {
    'q_BTNH': QUERIES,
    'k_BSKH': KEYS,
    'v_BSKH': KEYS,
    'k_depth_LBRKH': SLOTS,
    'v_depth_LBRKH': SLOTS,
    'num_slots': (),
    'k_sums': SLOTS,
    'v_sums': SLOTS,
    'slot_mask_LBR': (None, 'rows', None),
    'slot_rows_BT': ('rows', None),
    'q_depth_BTNH': QUERIES,
    'positions_BT': ('rows', None),
    'segment_ids_BT': ('rows', None),
}


def attend(hparams: ModelHparams, q_BTNH, k_BSKH, v_BSKH, depth: DepthSlots | None, given: dict):
    """depth_attention by `model.attention`, and `depth` with threaded cotangents.

    Each device computes its own rows and heads, which see no others.

    Args:
      hparams: of the model.
      q_BTNH, k_BSKH, v_BSKH: as there.
      depth: what slots there are; None: none.
      given: the other arguments, `slots_of(depth)` among them.
    """
    implementation = None if hparams.attention == 'auto' else hparams.attention
    given = {'q_BTNH': q_BTNH, 'k_BSKH': k_BSKH, 'v_BSKH': v_BSKH, **given}
    arrays = {name: value for name, value in given.items() if name in SPLIT}
    static = {name: value for name, value in given.items() if name not in SPLIT}
    outputs = QUERIES
    if depth is not None:
        outputs = (QUERIES, SLOTS, SLOTS)
    if depth is not None and depth.sums is not None:
        outputs += (SLOTS, SLOTS)
        arrays |= {'k_sums': depth.sums.k_BTKH, 'v_sums': depth.sums.v_BTKH}

    def call(k_sums=None, v_sums=None, **arrays):
        sums = None if k_sums is None else (k_sums, v_sums)
        how = {'implementation': implementation, 'thread_slots': depth is not None}
        return depth_attention(slot_sums=sums, **how, **arrays, **static)

    result = map_shards(call, arrays, SPLIT, outputs)
    if depth is None:
        return result, None
    o_BTNH, *sides = result
    sums = None if depth.sums is None else KeysValues(*sides[2:])
    return o_BTNH, depth._replace(slots=KeysValues(*sides[:2]), sums=sums)


def slots_of(hparams: ModelHparams, depth: DepthSlots) -> dict:
    """What depth_attention and its reference are told of the slots."""
    return {
        'k_depth_LBRKH': depth.slots.k_BTKH,
        'v_depth_LBRKH': depth.slots.v_BTKH,
        'num_slots': depth.count,
        'slot_window': hparams.depth.slot_window,
        'slot_mask_LBR': depth.valid_LBT,
        'slot_rows_BT': depth.rows_BC,
    }


class SelfAttention(nn.Module):
    """Grouped-query attention of one layer. `window` 0 sees every earlier token.

    Its heads also see the depth slots they are given, in one softmax with the sequence (MoDA, Zhu
    et al. 2026, section 2.2): those of the token itself alone.
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
        self, x_BTD, tokens: TokenInfo, past: KVView | None = None, depth: DepthSlots | None = None
    ):
        """The layer's output, the KeysValues of its tokens, those of their depth slot, and `depth`.

        Args:
          x_BTD: the layer's input.
          tokens: of the same.
          past: what earlier tokens left, where T = 1; None: the tokens attend to each other.
          depth: what earlier layers left. It is returned with the cotangents of its slots
            threaded through, so that a scan over layers accumulates them in place.
        """
        q_BTNH, k_BTKH, v_BTKH = self.query(x_BTD), self.key(x_BTD), self.value(x_BTD)
        if self.hparams.qk_norm != 'none':
            q_BTNH = self._normed(q_BTNH, self.query_norm)
        q_BTNH = apply_rope(q_BTNH, tokens.positions_BT, self.hparams.rope_theta)
        keys = slot = KeysValues(self._rotated(k_BTKH, tokens.positions_BT), v_BTKH)
        if self.hparams.depth.slot_keys == 'unrotated':
            slot = KeysValues(self.slot_key(k_BTKH, tokens.positions_BT), v_BTKH)
        if past is None:
            o_BTNH, depth = self._over_sequence(q_BTNH, keys, tokens, depth)
        else:
            o_BTNH = self._over_cache(q_BTNH, keys, past, depth)
        return self.out(o_BTNH), keys, slot, depth

    def slot(self, x_BTD, tokens: TokenInfo) -> KeysValues:
        """The depth slot of tokens of which this would be the layer's input."""
        return KeysValues(self.slot_key(self.key(x_BTD), tokens.positions_BT), self.value(x_BTD))

    def slot_key(self, k_BTKH, positions_BT):
        """A projected key as a depth slot stores it.

        `rotated`: as the sequence sees it, after this layer's key norm and RoPE. `unrotated`: as
        it is, but divided by its root mean square where readers norm it: what is left of a
        reader's norm, its scale, is moved to the query, so that the slot is normed once.
        """
        if self.hparams.depth.slot_keys != 'unrotated':
            return self._rotated(k_BTKH, positions_BT)
        if self.hparams.qk_norm == 'none':
            return k_BTKH
        epsilon = self.hparams.norm_eps
        return self._normed(k_BTKH, lambda k: rms_norm(k, jnp.ones(k.shape[-1:]), epsilon))

    def _rotated(self, k_BTKH, positions_BT):
        if self.hparams.qk_norm != 'none':
            k_BTKH = self._normed(k_BTKH, self.key_norm)
        return apply_rope(k_BTKH, positions_BT, self.hparams.rope_theta)

    def _normed(self, x_BTNH, norm):
        if self.hparams.qk_norm == 'head':
            return norm(x_BTNH)
        return norm(x_BTNH.reshape(*x_BTNH.shape[:2], -1)).reshape(x_BTNH.shape)

    def _slot_query(self, q_BTNH):
        """The query for depth slots; None where it is that for the sequence."""
        if self.hparams.depth.slot_keys != 'unrotated' or self.hparams.qk_norm == 'none':
            return None
        kv_heads, width = self.hparams.num_kv_heads, self.hparams.head_dim
        scale = self.key_norm.get_variable('params', 'scale').astype(q_BTNH.dtype)
        scale_KH = jnp.broadcast_to(scale.reshape(-1, width), (kv_heads, width))
        return q_BTNH * jnp.repeat(scale_KH, self.hparams.num_heads // kv_heads, axis=0)[None, None]

    def _over_sequence(self, q_BTNH, keys, tokens, depth):
        given = {
            # Of a whole row they are those of the index, and a kernel may count a window by it.
            'positions_BT': tokens.positions_BT if self.gathered else None,
            # Without documents padding alone is told apart, and it comes last: nothing sees it.
            'segment_ids_BT': None if self.hparams.across_documents else tokens.segment_ids_BT,
            'window': self.window,
        }
        if depth is not None:
            given |= slots_of(self.hparams, depth)
            given['q_depth_BTNH'] = self._slot_query(q_BTNH)
        # For analysis.depth_mass; in no program where `apply` is not asked for that collection.
        sown = (q_BTNH, keys.k_BTKH, given, tokens.segment_ids_BT)
        self.sow('intermediates', 'sequence', sown)
        return attend(self.hparams, q_BTNH, *keys, depth, given)

    def _over_cache(self, q_B1NH, keys, past, depth):
        if depth is None:
            return decode_attention(q_B1NH, *keys, *past)
        return decode_attention(
            q_B1NH,
            *keys,
            *past,
            k_depth_LC1KH=depth.slots.k_BTKH,
            v_depth_LC1KH=depth.slots.v_BTKH,
            slot_mask_LC1=depth.valid_LBT,
            slot_window=self.hparams.depth.slot_window,
            q_depth_C1NH=self._slot_query(q_B1NH),
        )
