"""Causal self-attention of a block: projections, QK-norm, RoPE, and the call of the kernel."""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from kernels_pallas import decode_attention, depth_attention
from moddepth_jax.hparams import ModelHparams
from moddepth_jax.model.layers import RMSNorm, apply_rope, projection, rms_norm
from moddepth_jax.model.routing import TokenInfo, gather_tokens
from moddepth_jax.model.sharding import map_shards
from moddepth_jax.model.value_embeddings import ValueEmbedding


def _after_tokens(tokens: TokenInfo):
    """Return the positions [B, T] with unused places after all tokens, so that they ascend."""
    last = jnp.iinfo(tokens.positions_BT.dtype).max // 2  # differences and sums must not overflow
    return jnp.where(tokens.segment_ids_BT > 0, tokens.positions_BT, last)


def model_segment_ids(hparams: ModelHparams, segment_ids_BT):
    """Return the ids that attention and routers use: 1 for real tokens under `across_documents`."""
    if hparams.across_documents:
        return (segment_ids_BT > 0).astype(segment_ids_BT.dtype)
    return segment_ids_BT


class KVView(NamedTuple):
    """A block's cache, and what new tokens of all or some of its rows see of it and each other."""

    k_BKHS: jax.Array
    v_BKHS: jax.Array
    visible_CTS: jax.Array  # bool, the cache entries that each token sees
    visible_CTT: jax.Array  # bool, the new tokens that each token sees, always including itself
    # Rows of the cache; B or more, at the end, names none. None: C = B, all rows.
    rows_C: jax.Array | None = None


class AttentionInputs(NamedTuple):
    """The inputs of the query, key and value projections, [B, T, D] each."""

    query_BTD: jax.Array
    key_BTD: jax.Array
    value_BTD: jax.Array


class KeysValues(NamedTuple):
    """Keys and values of tokens: for later tokens, or as a depth slot for later layers."""

    k_BTKH: jax.Array
    v_BTKH: jax.Array


class FirstKeys(NamedTuple):
    """Keys and values that a looped block made in the first loop, and reads in later loops."""

    keys: KeysValues  # [B, S, K, H]
    tokens: TokenInfo  # of the keys, [B, S]; decoding does not use it, since it has a KVView


class DepthSlots(NamedTuple):
    """The depth slots that earlier layers wrote for the same tokens."""

    slots: KeysValues  # leaves [L, B, T, K, H]; or an array, as the stream's `slot_shape`
    valid_LBT: jax.Array | None = None  # bool, which tokens have a slot; None: all
    count: jax.Array | int | None = None  # number of written slots; None: L
    # int32, the tokens that the layer runs on; T or more names none. None: all T.
    indices_BC: jax.Array | None = None
    # Arrays like the slots that are never read. Their cotangents are the gradients of the slots, in
    # their own dtype. None: the cotangents of `slots` are these gradients.
    sums: KeysValues | None = None

    def of_tokens(self):
        """Return the slots of the tokens that the layer runs on, [L, B, T or C, ...]."""
        return jax.vmap(self.pick)(self.slots)

    @property
    def num_written(self):
        """The number of written slots."""
        return jax.tree.leaves(self.slots)[0].shape[0] if self.count is None else self.count

    def pick(self, side_BTX):
        """Return the part of one slot, or of its validity, for the tokens the layer runs on."""
        if self.indices_BC is None:
            return side_BTX
        return jax.tree.map(lambda side: gather_tokens(side, self.indices_BC), side_BTX)


SLOTS = (None, 'batch', None, 'kv_heads', None)


def _axis_names(name: str) -> tuple:
    """Return how depth_attention's argument of that name, by its letters, is split over a mesh."""
    letters = name.rpartition('_')[2]
    names = {'B': 'batch', 'N': 'heads', 'K': 'kv_heads'}
    return tuple(names.get(letter) for letter in letters) if letters.isupper() else ()


def attend(hparams: ModelHparams, q_BTNH, k_BSKH, v_BSKH, depth: DepthSlots | None, options: dict):
    """Call depth_attention on each device's part. Returns o_BTNH and `depth`, threaded.

    `options` are further arguments of depth_attention.
    """
    arrays = {'q_BTNH': q_BTNH, 'k_BSKH': k_BSKH, 'v_BSKH': v_BSKH, **options}
    static = {name: arrays.pop(name) for name in ('window', 'slot_window') if name in arrays}
    queries = _axis_names('q_BTNH')
    outputs = queries if depth is None else (queries, SLOTS, SLOTS)
    if depth is not None and depth.sums is not None:
        outputs += (SLOTS, SLOTS)
        arrays |= {'k_LBRKH': depth.sums.k_BTKH, 'v_LBRKH': depth.sums.v_BTKH}

    def call(k_LBRKH=None, v_LBRKH=None, **arrays):
        return depth_attention(
            implementation=None if hparams.attention == 'auto' else hparams.attention,
            thread_slots=depth is not None,
            slot_sums=None if k_LBRKH is None else (k_LBRKH, v_LBRKH),
            **arrays,
            **static,
        )

    result = map_shards(call, arrays, {name: _axis_names(name) for name in arrays}, outputs)
    if depth is None:
        return result, None
    o_BTNH, k_LBTKH, v_LBTKH, *sums = result
    sums = KeysValues(*sums) if sums else None
    return o_BTNH, depth._replace(slots=KeysValues(k_LBTKH, v_LBTKH), sums=sums)


def slot_arguments(hparams: ModelHparams, depth: DepthSlots) -> dict:
    """Return the arguments of depth_attention, and of its reference, that describe the slots."""
    return {
        'k_depth_LBRKH': depth.slots.k_BTKH,
        'v_depth_LBRKH': depth.slots.v_BTKH,
        'num_slots': depth.count,
        'slot_window': hparams.depth.slot_window,
        'slot_mask_LBR': depth.valid_LBT,
        'slot_rows_BT': depth.indices_BC,
    }


class SelfAttention(nn.Module):
    """Grouped-query attention, with one softmax over the sequence and the token's depth slots."""

    hparams: ModelHparams
    window: int  # tokens that a query sees, including itself; 0: all earlier ones
    gathered: bool = False  # whether the tokens are selected ones rather than whole rows
    mixes: bool = False  # whether the stream's `value_mixer` changes the values
    embeds: bool = False  # whether a ValueEmbedding adds to the projected values

    def setup(self):
        hparams = self.hparams
        heads, kv_heads, width = hparams.num_heads, hparams.num_kv_heads, hparams.head_dim
        self.query = projection(hparams, heads, width, use_bias=hparams.qkv_bias)
        self.key = projection(hparams, kv_heads, width, use_bias=hparams.qkv_bias)
        stream = hparams.depth.stream_class
        self.projects_values = not self.mixes or stream.projects_values(hparams.depth)
        if self.projects_values:
            self.value = projection(hparams, kv_heads, width, use_bias=hparams.qkv_bias)
        if self.embeds:
            self.value_embedding = ValueEmbedding(hparams)
        if self.mixes:
            self.values = stream.value_mixer(hparams)
        self.out = projection(
            hparams,
            hparams.d_model,
            contracted=2,
            writes_residual=True,
            use_bias=hparams.attention_out_bias,
        )
        if hparams.qk_norm != 'none':
            self.query_norm = RMSNorm(hparams.norm_eps)
            self.key_norm = RMSNorm(hparams.norm_eps)

    def __call__(
        self,
        inputs: AttentionInputs,
        tokens: TokenInfo,
        view: KVView | None = None,
        depth: DepthSlots | None = None,
        first: FirstKeys | None = None,
    ):
        """Attend to the tokens, to a cache if there is one, and to depth slots.

        Args:
          inputs: the inputs of the projections.
          tokens: positions and documents.
          view: the cache that the tokens see, and which of each other they see.
          depth: the slots of the tokens.
          first: keys and values to attend to in place of the tokens' own. Only queries are
            projected then.

        Returns:
          The output [B, T, D], KeysValues of the tokens (without values if there is no value
          projection), KeysValues of their depth slots, and `depth`, threaded.
        """
        if first is not None:
            o_BTNH = self._over_first(self.query(inputs.query_BTD), tokens, view, first)
            return self.out(o_BTNH), first.keys, None, depth
        q_BTNH, k_BTKH = self.query(inputs.query_BTD), self.key(inputs.key_BTD)
        v_BTKH = self._values(inputs.value_BTD, tokens) if self.projects_values else None
        q_BTNH = self._turned_query(q_BTNH, tokens)
        rotated_BTKH = self._norm_and_rotate(k_BTKH, tokens.positions_BT, tokens.turns)
        if self.mixes:
            v_BTKH, depth = self.values(
                inputs.value_BTD, q_BTNH, rotated_BTKH, v_BTKH, tokens, depth
            )
        keys = slot = KeysValues(rotated_BTKH, v_BTKH)
        if self.hparams.depth.slot_keys == 'unrotated':
            slot = KeysValues(self.slot_key(k_BTKH, tokens.positions_BT), v_BTKH)
        joint = depth if self.hparams.depth.stream_class.joins_attention else None
        if view is None:
            o_BTNH, joint = self._over_sequence(q_BTNH, keys, tokens, joint)
        else:
            o_BTNH = self._over_cache(q_BTNH, keys, view, joint)
        stored = keys if self.projects_values else keys._replace(v_BTKH=None)
        return self.out(o_BTNH), stored, slot, depth if joint is None else joint

    def keys(self, x_BTD, tokens: TokenInfo) -> KeysValues:
        """Return the KeysValues of tokens, where no stream mixes their values."""
        rotated_BTKH = self._norm_and_rotate(self.key(x_BTD), tokens.positions_BT, tokens.turns)
        return KeysValues(rotated_BTKH, self._values(x_BTD, tokens))

    def slot(self, x_BTD, tokens: TokenInfo) -> KeysValues:
        """Return the depth slot of tokens for this layer input."""
        k_BTKH = self.slot_key(self.key(x_BTD), tokens.positions_BT)
        return KeysValues(k_BTKH, self._values(x_BTD, tokens))

    def _values(self, x_BTD, tokens):
        v_BTKH = self.value(x_BTD)
        return self.value_embedding(v_BTKH, x_BTD, tokens.ids_BT) if self.embeds else v_BTKH

    def slot_key(self, k_BTKH, positions_BT):
        """Return a projected key as a depth slot stores it.

        `rotated`: as the sequence sees it. `unrotated`: as projected, or divided by its root mean
        square under QK-norm; the reader then applies the scale of its key norm to its query.
        """
        if self.hparams.depth.slot_keys != 'unrotated':
            return self._norm_and_rotate(k_BTKH, positions_BT)
        if self.hparams.qk_norm == 'none':
            return k_BTKH
        epsilon = self.hparams.norm_eps
        return self._normalize(k_BTKH, lambda k: rms_norm(k, jnp.ones(k.shape[-1:]), epsilon))

    def _turned_query(self, q_BTNH, tokens):
        if self.hparams.qk_norm != 'none':
            q_BTNH = self._normalize(q_BTNH, self.query_norm)
        return self._rotate(q_BTNH, tokens.positions_BT, tokens.turns)

    def _norm_and_rotate(self, k_BTKH, positions_BT, turns=None):
        if self.hparams.qk_norm != 'none':
            k_BTKH = self._normalize(k_BTKH, self.key_norm)
        return self._rotate(k_BTKH, positions_BT, turns)

    def _rotate(self, x_BTNH, positions_BT, turns):
        hparams = self.hparams
        return apply_rope(x_BTNH, positions_BT, hparams.rope_theta, hparams.scaled_rope, turns)

    def _normalize(self, x_BTNH, norm):
        if self.hparams.qk_norm == 'head':
            return norm(x_BTNH)
        return norm(x_BTNH.reshape(*x_BTNH.shape[:2], -1)).reshape(x_BTNH.shape)

    def _slot_query(self, q_BTNH):
        """Return the query for depth slots; None if it is the query for the sequence."""
        if self.hparams.depth.slot_keys != 'unrotated' or self.hparams.qk_norm == 'none':
            return None
        kv_heads, width = self.hparams.num_kv_heads, self.hparams.head_dim
        scale = self.key_norm.get_variable('params', 'scale').astype(q_BTNH.dtype)
        scale_KH = jnp.broadcast_to(scale.reshape(-1, width), (kv_heads, width))
        return q_BTNH * jnp.repeat(scale_KH, self.hparams.num_heads // kv_heads, axis=0)[None, None]

    def _over_sequence(self, q_BTNH, keys, tokens, depth):
        options = {
            # In a whole row the position is the index, and a kernel can compute the window from it.
            'positions_BT': _after_tokens(tokens) if self.gathered else None,
            # Without documents, only padding and unused places have another id. They come last, so
            # no token sees them.
            'segment_ids_BT': None if self.hparams.across_documents else tokens.segment_ids_BT,
            'window': self.window,
        }
        if depth is not None:
            options |= slot_arguments(self.hparams, depth)
            options['q_depth_BTNH'] = self._slot_query(q_BTNH)
        # For `analysis`. It is in a program only with mutable=['intermediates'].
        sown = (q_BTNH, keys.k_BTKH, options, tokens.segment_ids_BT)
        self.sow('intermediates', 'sequence', sown)
        return attend(self.hparams, q_BTNH, *keys, depth, options)

    def _over_first(self, q_BTNH, tokens, view, first):
        q_BTNH = self._turned_query(q_BTNH, tokens)
        if view is not None:
            return self._over_cache(q_BTNH, first.keys, view, None)
        options = {
            'positions_BT': tokens.positions_BT,
            'key_positions_BS': first.tokens.positions_BT,
            'segment_ids_BT': tokens.segment_ids_BT,
            'key_segment_ids_BS': first.tokens.segment_ids_BT,
            'window': self.window,
        }
        return attend(self.hparams, q_BTNH, *first.keys, None, options)[0]

    def _over_cache(self, q_BTNH, keys, view, depth):
        # `model.attention` names implementations for training; `xla` stands for all of them here.
        implementation = None if self.hparams.attention == 'auto' else 'xla'
        decode = functools.partial(decode_attention, implementation=implementation)
        if depth is None:
            return decode(q_BTNH, *keys, *view)
        return decode(
            q_BTNH,
            *keys,
            *view,
            *depth.slots,
            slot_mask_LCT=depth.valid_LBT,
            slot_window=self.hparams.depth.slot_window,
            q_depth_CTNH=self._slot_query(q_BTNH),
        )
