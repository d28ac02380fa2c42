"""The depth part by generic Pallas, interpreted: its contract against float64, place by place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import pallas_depth

# Unoptimised programs, of the same operations, compile in less than half the time.
jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})

SIZES = {'B': 2, 'T': 13, 'R': None, 'K': 2, 'G': 2, 'H': 8, 'L': 5, 'num': None}
KINDS = {'window': 0, 'mask': False, 'dtype': 'float32', 'sums': 'float32'}
CASES = {
    'one_slot': {'L': 1, 'G': 1, 'T': 1},
    'odd_length': {'T': 97, 'G': 3, 'H': 56, 'L': 7, 'num': 6, 'B': 1},
    'even_length': {'T': 200, 'G': 5, 'H': 64, 'K': 1, 'mask': True},
    'many_tokens': {'T': 1025, 'G': 1, 'H': 96, 'K': 1, 'B': 1, 'L': 3, 'num': 2},
    'many_slots': {'G': 8, 'H': 128, 'L': 64, 'num': 63, 'K': 1, 'mask': True},
    'more_slots': {'G': 6, 'H': 64, 'L': 70, 'T': 33, 'window': 66, 'K': 1},
    'group_of_7': {'G': 7, 'H': 128, 'T': 21, 'sums': 'bfloat16'},
    'group_of_16': {'G': 16, 'H': 96, 'T': 17, 'num': 3},
    'widest': {'G': 3, 'H': 256, 'T': 19, 'window': 2, 'num': 4, 'B': 1},
    'rows': {'R': 17, 'L': 9, 'num': 6, 'mask': True, 'H': 56, 'T': 27, 'window': 5, 'G': 3},
    'fewer_rows': {'R': 11, 'T': 12, 'K': 3},
    'bfloat16': {'T': 97, 'G': 3, 'H': 64, 'dtype': 'bfloat16', 'B': 1, 'num': 4},
    'bfloat16_sums': {'G': 8, 'dtype': 'bfloat16', 'sums': 'bfloat16', 'mask': True, 'R': 15},
    'float16': {'H': 16, 'dtype': 'float16', 'sums': 'float16', 'window': 3},
}


def test_any_number_of_programs_is_on_one_axis():
    """The other axes of a CUDA grid end at 65,535."""
    sizes = pallas_depth._Sizes(300001, 2, 16, 128, 300001)
    assert sizes.grid(3) == (3 * 2 * -(-300001 // sizes.tile[0]),) and sizes.grid(3)[0] > 2**16


class Case:
    """Random arguments of both passes, and by which queries each slot of a token is seen.

    What no query sees holds NaN in the slots; in the sums it holds NaN, -0 and others. Some queries
    have seen nothing of the sequence.
    """

    def __init__(self, B, T, R, K, G, H, L, num, window, mask, dtype, sums):
        rng = np.random.default_rng(T + G + H)
        self.num, self.window, self.scale = L if num is None else num, window, 0.9 * H**-0.5

        def normal(*shape, dtype=dtype):
            return rng.normal(size=shape).astype(jnp.dtype(dtype))

        self.q, self.do, self.o = (normal(B, T, K * G, H) for _ in range(3))
        self.lse = normal(B, K * G, T, dtype='float32')
        self.delta = normal(B, K * G, T, dtype='float32')
        unseen = rng.random((B, T, K * G)) < 0.2
        self.o[unseen], self.lse[np.moveaxis(unseen, 2, 1)] = 0, -np.inf
        places = L, B, R or T, K, H
        self.buffers = normal(*places), normal(*places)
        self.sums = normal(*places, dtype=sums), normal(*places, dtype=sums)
        self.rows, taken = None, np.tile(np.arange(T), (B, 1))
        if R:
            taken = np.stack([np.sort(rng.choice(T + R, T, replace=False)) for _ in range(B)])
            self.rows = taken.astype(np.int32)
        self.mask = rng.random(places[:3]) < 0.6 if mask else None
        shown = np.ones(places[:3], bool) if self.mask is None else self.mask.copy()
        shown[self.num :] = False
        shown[: max(self.num - window, 0) if window else 0] = False
        self.taken, has_row = np.minimum(taken, (R or T) - 1), taken < (R or T)
        self.seen = np.stack([shown[:, b, self.taken[b]].T for b in range(B)]) & has_row[..., None]
        self.by_a_query = np.zeros(places[:3], bool)
        for b, t, slot in np.argwhere(self.seen):
            self.by_a_query[slot, b, self.taken[b, t]] = True
        for side in self.buffers:
            side[~self.by_a_query] = np.nan
        for side in self.sums:
            odd = np.array([np.nan, -0.0, np.inf, 1e-30], side.dtype)
            side[~self.by_a_query] = odd[rng.integers(0, 4, ((~self.by_a_query).sum(), K, H))]

    def exact(self):
        """o, lse, dq and the two sums in float64, one query after another."""
        q, do, o, lse, delta, kd, vd, dk, dv = (
            np.asarray(x, np.float64)
            for x in (self.q, self.do, self.o, self.lse, self.delta, *self.buffers, *self.sums)
        )
        o, lse, dq = o.copy(), lse.copy(), np.zeros_like(q)
        group = q.shape[2] // kd.shape[3]
        for b, t, head in np.ndindex(*q.shape[:3]):
            at = self.seen[b, t], b, self.taken[b, t], head // group
            scores = kd[at] @ q[b, t, head] * self.scale
            if not scores.size:
                continue
            before, here = lse[b, head, t], do[b, t, head]
            joint = lse[b, head, t] = np.logaddexp.reduce([before, *scores])
            p = np.exp(scores - joint)
            o[b, t, head] = np.exp(before - joint) * o[b, t, head] + p @ vd[at]
            ds = p * (vd[at] @ here - delta[b, head, t]) * self.scale
            dq[b, t, head] = ds @ kd[at]
            dk[at] += np.outer(ds, q[b, t, head])
            dv[at] += np.outer(p, here)
        return o, lse, dq, dk, dv

    @functools.cached_property
    def passes(self):
        """Both passes, each under one jit with num_slots traced."""
        static = {'window': self.window, 'scale': self.scale, 'interpret': True}
        side = self.mask, self.rows

        def forward(num, q, o, lse, buffers):
            o, lse, given = pallas_depth.depth_forward(q, o, lse, buffers, num, *side, **static)
            assert given is buffers
            return o, lse

        def backward(num, q, do, lse, delta, buffers, sums):
            arrays = q, do, lse, delta, buffers, sums
            return pallas_depth.depth_backward(*arrays, num, *side, **static)

        return jit(forward), jit(backward)

    def run(self):
        """What exact() returns, by the kernels; the forward pass's lse is the backward pass's."""
        forward, backward = self.passes
        o, lse = forward(self.num, self.q, self.o, self.lse, self.buffers)
        finite = jnp.where(jnp.isfinite(lse), lse, 0)
        arrays = self.q, self.do, finite, self.delta, self.buffers, self.sums
        return [np.asarray(x) for x in (o, lse, *backward(self.num, *arrays))]


def make(**changes):
    return Case(**{**SIZES, **KINDS, **changes})


def check(case):
    """Both passes at float32's tolerances, whatever is given: nothing within them is narrower.

    Results are rounded once more, to their own type, sums only where a query sees the slot.
    """
    o, lse, dq, *totals = case.run()
    exact_o, exact_lse, exact_dq, *exact_totals = case.exact()
    assert (o.dtype, lse.dtype, dq.dtype) == (case.o.dtype, np.float32, case.q.dtype)
    half_a_step = 0 if o.dtype == np.float32 else float(jnp.finfo(o.dtype).eps) / 2
    np.testing.assert_allclose(o.astype(np.float64), exact_o, rtol=half_a_step, atol=2e-6)
    np.testing.assert_allclose(lse, exact_lse, rtol=0, atol=2e-6)
    np.testing.assert_allclose(dq.astype(np.float64), exact_dq, rtol=half_a_step, atol=1e-5)
    hidden = ~case.by_a_query
    for total, exact, given in zip(totals, exact_totals, case.sums, strict=True):
        assert total.dtype == given.dtype
        half_a_step = 0 if total.dtype == np.float32 else float(jnp.finfo(total.dtype).eps) / 2
        wide, right = total[case.by_a_query].astype(np.float64), exact[case.by_a_query]
        np.testing.assert_allclose(wide, right, rtol=half_a_step, atol=1e-5)
        assert total[hidden].tobytes() == given[hidden].tobytes()


@pytest.mark.parametrize('name', CASES)
def test_both_passes_match_float64(name):
    """Odd sides, groups of any size, masks, windows and looked-up tokens, in each dtype."""
    check(make(**CASES[name]))


def test_traced_num_slots_from_none_to_all():
    """One program serves every number of slots; those from it on hold NaN and keep their sums."""
    case, passes = make(L=9), None
    for num in range(10):
        case = make(L=9, num=num)
        case.passes = passes = case.passes if passes is None else passes
        check(case)
        assert [f._cache_size() for f in passes] == [1, 1]


def test_what_sees_nothing_is_zero():
    """A query without a key in the sequence or a slot: o = 0, lse = -inf, no gradient."""
    case = make(mask=True, R=9)
    o, lse, dq, *_ = case.run()
    lost = ~case.seen.any(axis=2)[:, None] & np.isneginf(case.lse)
    assert lost.any()
    assert np.all(np.isneginf(lse) == lost)
    by_query = np.moveaxis(lost, 1, 2)
    assert not o[by_query].any()
    assert not dq[by_query].any()


def test_reruns_are_bit_equal():
    """Nothing is summed in an order that may vary."""
    case = make(T=40, G=3, mask=True)
    assert [x.tobytes() for x in case.run()] == [x.tobytes() for x in case.run()]


@pytest.mark.parametrize(
    ('shape', 'kv_heads', 'dtype', 'value'),
    [
        ((1, 8, 8, 64), 1, jnp.float64, 'float64'),
        ((1, 8, 8, 64), 1, jnp.int8, 'int8'),
        ((1, 8, 8, 257), 1, jnp.bfloat16, '257'),
        ((1, 8, 130, 200), 2, jnp.bfloat16, '65'),
    ],
)
def test_what_it_cannot_do_is_said(shape, kv_heads, dtype, value):
    """One line that names the value; and one step less is taken."""
    reason = pallas_depth.unsupported(shape, kv_heads, 64, dtype)
    assert value in reason and '\n' not in reason
    less = (*shape[:2], min(shape[2], 64 * kv_heads), min(shape[3], 256))
    assert pallas_depth.unsupported(less, kv_heads, 64, jnp.bfloat16) is None
