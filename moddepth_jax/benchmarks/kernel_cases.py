"""Random inputs of depth attention, exact results in float64, and the cases of launch.gpu."""

import math

import numpy as np

KINDS = {'num': None, 'slot_window': 0, 'mask': False, 'own_query': False}
KINDS |= {'window': 0, 'segments': False, 'scale': None}
DEFAULTS = {'B': 2, 'S': None, 'R': None, 'K': 2, 'H': 64, 'L': 9, **KINDS}
# Cases for compiled kernels on a GPU, in bfloat16 by default.
CASES = {
    'group_of_8': {'T': 1025, 'N': 8, 'K': 1, 'H': 128, 'L': 64, 'num': 40, 'traced': True},
    'group_of_2': {'T': 200, 'N': 8, 'K': 4, 'H': 128, 'L': 70, 'num': 33, 'traced': True},
    'masked': {'T': 200, 'N': 8, 'K': 1, 'L': 64, 'num': 63, 'mask': True, 'traced': True},
    'depth_alone': {'T': 200, 'S': 0, 'N': 8, 'L': 64, 'num': 33, 'traced': True},
    'rows': {'T': 97, 'R': 150, 'N': 8, 'num': 6, 'traced': True, 'mask': True},
    'window': {'T': 200, 'N': 8, 'window': 50, 'L': 64},
    'own_query': {'T': 97, 'N': 8, 'own_query': True, 'num': 6},
    'group_of_1': {'T': 97, 'N': 4, 'K': 4, 'L': 7, 'num': 5, 'traced': True},
    'group_of_3': {'T': 200, 'N': 6, 'L': 70, 'num': 65, 'slot_window': 9},
    'sums': {'T': 200, 'N': 8, 'K': 1, 'L': 9, 'num': 6, 'traced': True, 'sums': True},
    'group_of_16': {'T': 256, 'N': 32, 'L': 64, 'B': 1},
    'none_written': {'T': 97, 'N': 8, 'num': 0, 'traced': True},
    'one_slot': {'T': 200, 'N': 8, 'L': 1},
    'width_96': {'T': 200, 'N': 8, 'H': 96, 'L': 64},
    'group_of_5': {'T': 97, 'N': 5, 'K': 1, 'H': 56, 'L': 7},
    'float32': {'T': 97, 'N': 8, 'L': 7, 'dtype': 'float32'},
    'octets_of_7': {'T': 97, 'N': 16, 'L': 70, 'num': 66, 'mask': True, 'R': 99},
    'group_of_12': {'T': 97, 'N': 12, 'K': 1, 'L': 9, 'num': 6, 'traced': True, 'sums': True},
    'group_of_20': {'T': 97, 'N': 20, 'K': 1, 'L': 9, 'R': 99, 'mask': True, 'own_query': True},
    'width_256': {'T': 97, 'N': 8, 'H': 256, 'L': 9},
}
# Packed documents. In `edges`, documents begin at or next to block boundaries.
PACKED_CASES = {
    'three': {'T': 200, 'N': 8, 'segments': True, 'mask': True},
    'group_of_32': {'T': 200, 'N': 32, 'K': 1, 'segments': True, 'mask': True},
    'no_slots': {'T': 200, 'N': 8, 'L': 0, 'num': 0, 'segments': True},
    'edges': {'T': 1025, 'N': 8, 'K': 1, 'L': 64, 'segments': (1, 127, 384, 1, 511, 1)},
    'group_of_2': {'T': 300, 'N': 8, 'K': 4, 'H': 128, 'L': 70, 'num': 33, 'segments': True},
    'group_of_3': {'T': 200, 'N': 6, 'L': 24, 'segments': (64, 136)},
    'rows': {'T': 97, 'R': 150, 'N': 8, 'num': 6, 'segments': True, 'mask': True},
    'window': {'T': 200, 'N': 8, 'window': 50, 'L': 7, 'segments': True},
}
LARGEST_TOYS = {'B': 1, 'T': 7, 'R': 9, 'N': 8, 'H': 16, 'L': 5, 'num': 3}
LARGEST_TOYS |= {'window': 4, 'slot_window': 2}


def make_case(B, T, S, R, N, K, H, L, num, slot_window, mask, window, segments, scale):
    """Draw a case. Slots that no query may see hold NaN.

    Args:
      B: batch rows.
      T: queries.
      S: keys; None: T; 0: slots only.
      R: tokens that have slots, of which the queries use some; None: T.
      N: query heads.
      K: key/value heads.
      H: head width.
      L: slots.
      num: written slots; None: L.
      slot_window: newest visible slots; 0: all.
      mask: whether a random mask hides slots.
      window: of the sequence; 0: none.
      segments: True for three documents of random lengths, or a tuple of lengths.
      scale: of the scores; None: the default.

    Returns:
      (q, k, v, k_depth, v_depth, q_depth), cotangents, arguments, the token whose slots each query
      reads, visible keys, visible slots.
    """
    rng = np.random.default_rng(T + N + L + window)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    S = T if S is None else S
    inputs = [normal(B, T, N, H), normal(B, S, K, H), normal(B, S, K, H)]
    inputs += [normal(L, B, R or T, K, H), normal(L, B, R or T, K, H), normal(B, T, N, H)]
    arguments = {'slot_window': slot_window, 'window': window, 'scale': scale}
    rows = np.tile(np.arange(T), (B, 1))
    if R:
        rows = np.stack([np.sort(rng.choice(R + 3, T, replace=False)) for _ in range(B)])
        assert (rows >= R).any()
        arguments['slot_rows_BT'] = rows.astype(np.int32)
    shown = np.ones((L, B, R or T), bool)
    if mask:
        arguments['slot_mask_LBR'] = shown = rng.random(shown.shape) < 0.6
    written = np.arange(L) < (L if num is None else num)
    if slot_window:
        written &= np.arange(L) >= num - slot_window
    shown = shown & written[:, None, None]
    for side in inputs[3:5]:
        side[~shown] = np.nan
    taken = np.minimum(rows, (R or T) - 1)
    slots = np.stack([shown[:, b, taken[b]].T & (rows[b] < (R or T))[:, None] for b in range(B)])
    gap = np.arange(T)[:, None] - np.arange(S)
    keys = np.tile((gap >= 0) & ((window == 0) | (gap < window)), (B, 1, 1))
    if segments:
        ids = np.sort(rng.integers(0, 3, (B, T)), axis=1)
        if segments is not True:
            ids = np.tile(np.repeat(np.arange(len(segments)), segments), (B, 1))
        arguments['segment_ids_BT'] = ids = ids.astype(np.int32)
        keys &= ids[:, :, None] == ids[:, None]
    return inputs, (normal(B, T, N, H), normal(B, N, T)), arguments, taken, keys, slots


def exact(inputs, cotangents, taken, keys, slots, scale):
    """Return o, lse and six gradients in float64 from the softmax over sequence and slots."""
    q, k, v, kd, vd, qd, do, dlse = (
        np.nan_to_num(np.asarray(x, np.float64)) for x in (*inputs, *cotangents)
    )
    gradients = [np.zeros_like(x) for x in (q, k, v, kd, vd, qd)]
    dq, dk, dv, dkd, dvd, dqd = gradients
    o, lse = np.zeros_like(q), np.zeros_like(dlse)
    (num_keys, kv_heads), heads = k.shape[1:3], q.shape[2]
    group = heads // kv_heads
    for b, kv in np.ndindex(len(q), kv_heads):
        # The queries [T, G, H] of a key/value head, its keys and values [S, H], slots [L, T, H].
        by_head = slice(kv * group, (kv + 1) * group)
        own, seq, depth = np.s_[b, :, by_head], np.s_[b, :, kv], np.s_[:, b, taken[b], kv]
        k_slots, v_slots = kd[depth], vd[depth]
        scores = [_times(q[own], k[seq].T), np.einsum('tgh,lth->tgl', qd[own], k_slots)]
        scores = np.concatenate(scores, axis=2) * scale
        seen = np.concatenate([keys[b], slots[b]], axis=1)
        scores = np.where(seen[:, None], scores, -np.inf)
        # Without a visible key, o and the gradients are 0, and the logsumexp is -inf.
        largest = np.nan_to_num(scores.max(axis=2, keepdims=True, initial=-np.inf), neginf=0)
        p = np.exp(scores - largest)
        total = p.sum(axis=2, keepdims=True)
        with np.errstate(divide='ignore'):
            lse[b, by_head] = (np.log(total) + largest)[..., 0].T
        p /= np.where(total, total, 1)
        p_seq, p_depth = np.split(p, [num_keys], axis=2)
        o[own] = _times(p_seq, v[seq]) + np.einsum('tgl,lth->tgh', p_depth, v_slots)
        dp = [_times(do[own], v[seq].T), np.einsum('tgh,lth->tgl', do[own], v_slots)]
        shift = dlse[b, by_head].T - (do[own] * o[own]).sum(axis=2)
        ds = p * (np.concatenate(dp, axis=2) + shift[..., None]) * scale
        ds_seq, ds_depth = np.split(ds, [num_keys], axis=2)
        dq[own], dqd[own] = _times(ds_seq, k[seq]), np.einsum('tgl,lth->tgh', ds_depth, k_slots)
        dk[seq] = np.tensordot(ds_seq, q[own], ((0, 1), (0, 1)))
        dv[seq] = np.tensordot(p_seq, do[own], ((0, 1), (0, 1)))
        # Queries without a token have the last one here, to which another query may belong.
        t = slots[b].any(axis=1)
        depth = np.s_[:, b, taken[b, t], kv]
        dkd[depth] = np.einsum('tgl,tgh->lth', ds_depth[t], qd[own][t])
        dvd[depth] = np.einsum('tgl,tgh->lth', p_depth[t], do[own][t])
    return o, lse, gradients


def _times(left, right):
    """Return left @ right as one product of two matrices: NumPy would make one for each query."""
    rows = left.reshape(math.prod(left.shape[:-1]), left.shape[-1]) @ np.ascontiguousarray(right)
    return rows.reshape(*left.shape[:-1], right.shape[-1])
