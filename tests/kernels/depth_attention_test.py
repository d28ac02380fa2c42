"""Sequence and depth slots are one softmax: values, gradients, and who sees what."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import depth_attention

# Unoptimised programs, of the same operations, compile in less than half the time.
jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})
SIZES = {'B': 2, 'T': 13, 'S': None, 'R': None, 'N': 6, 'K': 2, 'H': 8, 'L': 9}
KINDS = {'num': None, 'traced': False, 'slot_window': 0, 'mask': False, 'own_query': False}
SEQUENCE = {'window': 0, 'segments': False, 'scale': None}
CASES = {
    'no_slots': {'L': 0, 'num': 0},
    'one_slot': {'L': 1, 'N': 2, 'T': 1},
    'group_of_3': {'L': 7, 'own_query': True},
    'group_of_5': {'N': 5, 'K': 1, 'num': 8, 'mask': True, 'window': 4, 'scale': 0.5},
    'group_of_8': {'N': 8, 'K': 1, 'L': 20, 'num': 11, 'traced': True, 'segments': True},
    'none_written': {'L': 20, 'num': 0, 'traced': True},
    'newest': {'L': 20, 'num': 17, 'slot_window': 5, 'traced': True, 'mask': True},
    'fewer_than_the_newest': {'num': 3, 'slot_window': 5},
    'rows': {'T': 7, 'R': 11, 'num': 6, 'traced': True, 'mask': True, 'own_query': True},
    'rows_unmasked': {'T': 7, 'R': 6, 'L': 7, 'window': 3, 'segments': True},
    'depth_alone': {'S': 0, 'num': 5, 'traced': True, 'mask': True},
}


def make_case(B, T, S, R, N, K, H, L, num, slot_window, mask, own_query, window, segments, scale):
    """(q, k, v, k_depth, v_depth, q_depth), cotangents, arguments, key grid, slot grid.

    Slots that no query may see hold NaN.
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
        arguments['segment_ids_BT'] = ids = np.sort(rng.integers(0, 3, (B, T)), axis=1)
        keys &= ids[:, :, None] == ids[:, None]
    return inputs, (normal(B, T, N, H), normal(B, N, T)), arguments, taken, keys, slots


def exact(inputs, cotangents, taken, keys, slots, scale):
    """o, lse and six gradients in float64: the softmax over the concatenation, by its Jacobian."""
    q, k, v, kd, vd, qd, do, dlse = (
        np.nan_to_num(np.asarray(x, np.float64)) for x in (*inputs, *cotangents)
    )
    gradients = [np.zeros_like(x) for x in (q, k, v, kd, vd, qd)]
    dq, dk, dv, dkd, dvd, dqd = gradients
    o, lse = np.zeros_like(q), np.full(dlse.shape, -np.inf)
    for b, t, head in np.ndindex(*q.shape[:3]):
        kv, row = head // (q.shape[2] // k.shape[2]), taken[b, t]
        at, seen = (b, keys[b, t], kv), (slots[b, t], b, row, kv)
        scores = np.concatenate([k[at] @ q[b, t, head], kd[seen] @ qd[b, t, head]]) * scale
        if not scores.size:
            continue
        lse[b, head, t] = np.logaddexp.reduce(scores)
        p = np.exp(scores - lse[b, head, t])
        values, here = np.concatenate([v[at], vd[seen]]), do[b, t, head]
        o[b, t, head] = p @ values
        ds = p * (values @ here - here @ o[b, t, head] + dlse[b, head, t]) * scale
        split = keys[b, t].sum()
        dq[b, t, head] = ds[:split] @ k[at]
        dqd[b, t, head] = ds[split:] @ kd[seen]
        dk[at] += np.outer(ds[:split], q[b, t, head])
        dkd[seen] += np.outer(ds[split:], qd[b, t, head])
        dv[at] += np.outer(p[:split], here)
        dvd[seen] += np.outer(p[split:], here)
    return o, lse, gradients


def run(inputs, cotangents, num, traced, own_query, **arguments):
    """o, lse and the gradients of all inputs through both, under one jit."""
    *given, qd = (jnp.asarray(x) for x in inputs)

    def loss(q, k, v, kd, vd, qd, traced_num):
        slots = (kd, vd) if kd.shape[0] else (None, None)
        if kd.shape[0]:
            arguments['num_slots'] = traced_num if traced else num
            arguments['q_depth_BTNH'] = qd if own_query else None
        o, lse = depth_attention(q, k, v, *slots, return_lse=True, **arguments)
        finite = jnp.where(jnp.isfinite(lse), lse, 0)
        dot = jnp.vdot(o, cotangents[0]).astype(lse.dtype) + jnp.vdot(finite, cotangents[1])
        return dot, (o, lse)

    step = jit(jax.value_and_grad(loss, argnums=range(6), has_aux=True))
    (_, (o, lse)), gradients = step(*given, qd, num)
    return jax.tree.map(np.asarray, (o, lse, gradients))


@pytest.mark.parametrize('name', CASES)
def test_equals_float64_softmax_over_the_concatenation(name):
    """Output, logsumexp and all gradients; NaN in slots that nobody sees changes nothing."""
    case = SIZES | KINDS | SEQUENCE | CASES[name]
    traced, own_query, num = case.pop('traced'), case['own_query'], case['num']
    inputs, cotangents, arguments, *seen = make_case(**case)
    if not own_query:
        inputs[5] = inputs[0]
    o, lse, gradients = exact(inputs, cotangents, *seen, case['scale'] or case['H'] ** -0.5)
    if not own_query:
        gradients[0] += gradients[5]
        gradients[5] *= 0
    hidden = np.isnan(inputs[3])
    for implementation in ('reference', 'xla'):
        options = {'implementation': implementation, **arguments}
        got = run(inputs, cotangents, num, traced, own_query, **options)
        np.testing.assert_allclose(got[0], o, rtol=0, atol=2e-6)
        np.testing.assert_allclose(got[1], lse, rtol=5e-7, atol=2e-6)
        assert got[0].dtype == got[1].dtype == np.float32
        for mine, right in zip(got[2], gradients, strict=True):
            np.testing.assert_allclose(mine, right, rtol=0, atol=1e-5)
        assert not got[2][3][hidden].any() and not got[2][4][hidden].any()


def test_reference_is_as_wide_as_its_inputs():
    """In float64, where JAX has it, the reference is right to 12 digits."""
    case = SIZES | KINDS | SEQUENCE | {'own_query': True, 'scale': 0.4}
    case.pop('traced')
    inputs, cotangents, arguments, *seen = make_case(**case)
    o, lse, gradients = exact(inputs, cotangents, *seen, 0.4)
    with jax.enable_x64(True):
        wide = [[np.asarray(x, np.float64) for x in side] for side in (inputs, cotangents)]
        got = run(*wide, None, False, True, implementation='reference', **arguments)
    for mine, right in zip(jax.tree.leaves(got), [o, lse, *gradients], strict=True):
        np.testing.assert_allclose(mine, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize('implementation', [None, 'reference'])
def test_bfloat16_is_near(implementation):
    """Softmax and sums in float32 on rounded inputs: near the exact result, in bfloat16."""
    case = SIZES | KINDS | SEQUENCE | {'num': 7, 'mask': True}
    case.pop('traced')
    inputs, cotangents, arguments, *seen = make_case(**case)
    inputs = [jnp.asarray(x, jnp.bfloat16) for x in (*inputs[:5], inputs[0])]
    cotangents = jnp.asarray(cotangents[0], jnp.bfloat16), 0 * cotangents[1]
    o, _, gradients = exact(inputs, cotangents, *seen, 8**-0.5)
    arguments['implementation'] = implementation
    got_o, _, got = run(inputs, cotangents, 7, False, False, **arguments)
    gradients[0] += gradients[5]
    for mine, right in zip((got_o, *got[:5]), (o, *gradients[:5]), strict=True):
        assert mine.dtype == jnp.bfloat16
        np.testing.assert_allclose(mine.astype(float), right, rtol=0.02, atol=0.03)


@pytest.mark.parametrize('implementation', ['reference', 'xla'])
def test_visibility_is_the_drawn_grid(implementation):
    """T = 5, L = 4, layer l sees the l slots before it: columns are keys 0 to 4, slots 0 to 3.

    Probed by perturbing one key or one slot of one token at a time, and by the gradient.
    """
    layers = {0: '0000', 2: '1100', 4: '1111'}
    rng = np.random.default_rng(0)
    draw = [
        rng.normal(size=s).astype(np.float32) for s in [(1, 5, 1, 4)] * 3 + [(4, 1, 5, 1, 4)] * 2
    ]

    def values(keys_moved, slots_moved, num_slots):
        q, k, v, kd, vd = (jnp.asarray(x) for x in draw)
        v, vd = v + keys_moved[None, :, None, None], vd + slots_moved[:, None, :, None, None]
        options = {'num_slots': num_slots, 'implementation': implementation}
        return depth_attention(q, k, v, kd, vd, **options)[0, :, 0, 0]

    probe, jacobian = jit(values), jit(jax.jacrev(values, argnums=(0, 1)))
    for num_slots, seen in layers.items():
        at = (jnp.zeros(5), jnp.zeros((4, 5)), num_slots)
        by_keys, by_slots = jacobian(*at)
        np.testing.assert_array_equal(by_keys != 0, np.tri(5))
        own = np.array([[int(c) for c in seen]] * 5)
        for token in range(5):
            drawn = np.zeros((5, 4), int)
            drawn[token] = own[token]
            np.testing.assert_array_equal(by_slots[:, :, token] != 0, drawn)
            for slot in range(4):
                moved = jnp.zeros((4, 5)).at[slot, token].set(3.0)
                changed = probe(at[0], moved, num_slots) != probe(*at)
                np.testing.assert_array_equal(changed, drawn[:, slot])


def test_output_is_a_mixture_for_any_keys():
    """o = (1 - w) o_sequence + w o_depth with w = Z_depth / (Z_sequence + Z_depth)."""
    case = SIZES | KINDS | SEQUENCE
    case.pop('traced')
    (q, k, v, kd, vd, _), *_ = make_case(**case)
    k = k + 2.0
    both, sequence = depth_attention(q, k, v, kd, vd), depth_attention(q, k, v, return_lse=True)
    none = np.zeros((2, 0, 2, 8), np.float32)
    depth = depth_attention(q, none, none, kd, vd, return_lse=True)
    weight = jnp.moveaxis(jax.nn.sigmoid(depth[1] - sequence[1]), 1, 2)[..., None]
    assert weight.min() < 0.1 and weight.max() > 0.9
    mixture = sequence[0] * (1 - weight) + depth[0] * weight
    np.testing.assert_allclose(both, mixture, rtol=0, atol=2e-6)
