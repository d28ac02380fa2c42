"""The depth kernels for GPUs, interpreted and compared with float64, query by query."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.joint_softmax import Slots
from kernels_pallas.mosaic import common, fused
from kernels_pallas.mosaic import depth as mosaic
from kernels_pallas.reference import slot_visibility
from kernels_pallas.triton import depth as triton
from kernels_pallas.xla import depth as xla
from tests.kernels.cases import USUAL

interpreted = pytest.mark.skipif(
    not common.CAN_INTERPRET,
    reason='the Mosaic GPU interpreter before JAX 0.11.2 lacks primitives (drop with Python 3.11)',
)
BACKENDS = {'xla': xla, 'triton': triton, 'mosaic': mosaic}
SIZES = {
    'triton': {'B': 2, 'T': 13, 'K': 2, 'G': 2, 'H': 8, 'L': 5, 'dtype': 'float32'},
    'mosaic': {'B': 1, 'T': 3, 'K': 1, 'G': 3, 'H': 64, 'L': 9, 'dtype': 'bfloat16'},
}
KINDS = {'R': None, 'num': None, 'window': 0, 'mask': False, 'sums': 'float32', 'joined': True}
TRITON = {
    'one_slot': {'L': 1, 'G': 1, 'T': 1},
    'odd_sizes': {'T': 97, 'G': 5, 'H': 56, 'L': 7, 'num': 6, 'K': 1, 'mask': True},
    'many_tokens': {'T': 265, 'G': 1, 'H': 96, 'K': 1, 'B': 1, 'L': 3, 'num': 2},
    'many_slots': {'G': 6, 'H': 128, 'L': 70, 'T': 33, 'window': 66, 'K': 1, 'mask': True},
    'widest': {'G': 16, 'H': 256, 'T': 19, 'window': 2, 'num': 4, 'B': 1},
    'rows': {'R': 17, 'L': 9, 'num': 6, 'mask': True, 'H': 56, 'T': 27, 'window': 5, 'G': 3},
    'bfloat16': {'T': 21, 'G': 7, 'H': 64, 'dtype': 'bfloat16', 'B': 1, 'num': 4},
    'float16': {'R': 11, 'T': 12, 'K': 3, 'dtype': 'float16', 'sums': 'float16', 'window': 3},
    'fresh': {'R': 17, 'L': 7, 'num': 5, 'mask': True, 'sums': 'fresh'},
}
FRESH = {
    'seven_slots': {'L': 7, 'G': 1, 'num': 6, 'mask': True, 'B': 2},
    'none_written': {'L': 70, 'num': 0, 'G': 2, 'T': 2, 'H': 128},
    'some_written': {'L': 150, 'num': 33, 'G': 8, 'T': 2, 'K': 2},
    'window': {'L': 140, 'num': 90, 'window': 12, 'G': 2, 'T': 2, 'H': 128},
    'masked_window': {'L': 40, 'num': 37, 'window': 20, 'mask': True, 'H': 80, 'dtype': 'float16'},
    'rows': {'L': 24, 'T': 5, 'R': 7, 'K': 2, 'num': 9, 'window': 5, 'B': 2, 'mask': True},
}
MOSAIC = {
    'one_slot': {'T': 1, 'G': 1, 'L': 1, 'H': 56},
    'seven_slots': {'L': 7, 'G': 5, 'num': 6, 'mask': True, 'sums': 'bfloat16'},
    'a_full_chunk': {'L': 64, 'G': 8, 'K': 2, 'T': 5},
    'two_padded_chunks': {'L': 70, 'G': 8, 'num': 66, 'window': 62, 'mask': True, 'H': 128},
    'two_chunks': {'L': 72, 'num': 70, 'window': 69, 'B': 2, 'K': 3, 'T': 2, 'G': 1},
    'group_of_16': {'L': 64, 'G': 16, 'H': 96, 'num': 17, 'T': 2, 'mask': True},
    'group_of_12': {'G': 12, 'L': 9, 'num': 7, 'T': 2},
    'narrow_tiles': {'H': 80, 'G': 7, 'num': 4, 'window': 3},
    'widest': {'H': 128, 'L': 16, 'T': 2, 'sums': 'bfloat16'},
    'rows': {'L': 24, 'T': 5, 'R': 6, 'K': 2, 'num': 20, 'window': 11, 'B': 2, 'mask': True},
    'fewer_rows': {'L': 8, 'T': 4, 'R': 3, 'sums': 'bfloat16'},
    'none_written': {'num': 0, 'L': 64},
    'float16': {'dtype': 'float16', 'sums': 'float16', 'L': 32, 'num': 30},
    **{f'fresh_{name}': {'sums': 'fresh', **case} for name, case in FRESH.items()},
}
EACH = [pytest.param('triton'), pytest.param('mosaic', marks=interpreted)]


class Case:
    """Random arguments of both passes; some queries see nothing of the sequence.

    `joined`: the logsumexp has a cotangent, and there is a gradient of the queries to add to.

    Slots that no query sees hold NaN; their sums hold NaN, -0 and others. `sums` 'fresh': there
    are none, and gradients are as if they were zeros.
    """

    def __init__(self, backend, B, T, R, K, G, H, L, num, window, mask, dtype, sums, joined):
        rng = np.random.default_rng(T + G + H)
        self.backend, self.options = backend, {'window': window, 'scale': 0.9 * H**-0.5}
        self.num = L if num is None else num

        def normal(*shape, dtype=dtype):
            return rng.normal(size=shape).astype(jnp.dtype(dtype))

        self.q, self.do, self.o, dq = (normal(B, T, K * G, H) for _ in range(4))
        self.lse, dlse = (normal(B, K * G, T, dtype='float32') for _ in range(2))
        self.dq, self.dlse = (dq, dlse) if joined else (None, None)
        unseen = rng.random((B, T, K * G)) < 0.2
        self.o[unseen], self.lse[np.moveaxis(unseen, 2, 1)] = 0, -np.inf
        places = L, B, R or T, K, H
        self.sides = normal(*places), normal(*places)
        self.fresh, sums = sums == 'fresh', dtype if sums == 'fresh' else sums
        self.sums = normal(*places, dtype=sums), normal(*places, dtype=sums)
        self.rows, taken = None, np.tile(np.arange(T), (B, 1))
        if R:
            taken = np.stack([np.sort(rng.choice(T + R, T, replace=False)) for _ in range(B)])
            self.rows = taken.astype(np.int32)
        self.mask = rng.random(places[:3]) < 0.6 if mask else None
        self.taken = np.minimum(taken, (R or T) - 1)
        seen = slot_visibility(places[:3], self.num, window, self.mask, self.rows)
        self.seen = np.broadcast_to(seen, (B, T, L))
        self.by_a_query = np.zeros(places[:3], bool)
        for b, t, slot in np.argwhere(self.seen):
            self.by_a_query[slot, b, self.taken[b, t]] = True
        for side in self.sides:
            side[~self.by_a_query] = np.nan
        for side in self.sums:
            odd = np.array([np.nan, -0.0, np.inf, 1e-30], side.dtype)
            side[~self.by_a_query] = odd[rng.integers(0, 4, ((~self.by_a_query).sum(), K, H))]
        if self.fresh:
            self.sums = tuple(np.zeros_like(side) for side in self.sums)

    @functools.cached_property
    def exact(self):
        """Return o, lse, dq and the two sums in float64, one query after another."""
        arrays = (self.q, self.do, self.o, self.lse, *self.sides, *self.sums)
        q, do, o, lse, kd, vd, dk, dv = (np.array(x, np.float64) for x in arrays)
        dq = np.zeros_like(q) if self.dq is None else np.array(self.dq, np.float64)
        dlse = np.zeros_like(lse) if self.dlse is None else self.dlse
        scale, group = self.options['scale'], q.shape[2] // kd.shape[3]
        for b, t, head in np.ndindex(*q.shape[:3]):
            at = self.seen[b, t], b, self.taken[b, t], head // group
            scores = kd[at] @ q[b, t, head] * scale
            if not scores.size:
                continue
            before, here = lse[b, head, t], do[b, t, head]
            joint = lse[b, head, t] = np.logaddexp.reduce([before, *scores])
            p = np.exp(scores - joint)
            o[b, t, head] = np.exp(before - joint) * o[b, t, head] + p @ vd[at]
            delta = here @ o[b, t, head].astype(self.o.dtype) - dlse[b, head, t]
            ds = p * (vd[at] @ here - delta) * scale
            dq[b, t, head] += ds @ kd[at]
            dk[at] += np.outer(ds, q[b, t, head])
            dv[at] += np.outer(p, here)
        return o, lse, dq, dk, dv

    def passes(self, backend=None):
        """Return both passes, each jitted with a traced number of slots."""
        module = BACKENDS[backend or self.backend]
        options = self.options | {'interpret': backend != 'xla'}

        def forward(num, q, o, lse, sides):
            slots = Slots(*sides, num, self.mask, self.rows)
            o, lse, returned = module.depth_forward(q, o, lse, slots, **options)
            assert backend == 'xla' or all(x is y for x, y in zip(returned, sides, strict=True))
            return o, lse

        def backward(num, *arrays, sides, sums, dq):
            slots = Slots(*sides, num, self.mask, self.rows)
            sums = None if self.fresh else sums
            return module.depth_backward(*arrays, slots, sums, dq, **options)

        return jax.jit(forward), jax.jit(backward)

    def run(self, passes=None):
        """Return what `exact` does, by the kernels; backward from exact o and the kernel's lse."""
        forward, backward = passes or self.passes()
        o, lse = forward(self.num, self.q, self.o, self.lse, self.sides)
        finite = jnp.where(jnp.isfinite(lse), lse, 0)
        arrays = self.q, self.exact[0].astype(self.o.dtype), self.do, finite, self.dlse
        gradients = backward(self.num, *arrays, sides=self.sides, sums=self.sums, dq=self.dq)
        return [np.asarray(x) for x in (o, lse, *gradients)]


def make(backend, **changes):
    return Case(backend, **SIZES[backend] | KINDS | changes)


def check(case, passes=None):
    """Check dtypes and values of the results, and that sums of hidden slots keep their bits.

    Triton is right to float32's tolerances and one rounding of the result. Mosaic's errors, with
    results rounded to the slots' dtype, are at most two (gradients: three) times those of XLA.
    """
    results, exact = case.run(passes), case.exact
    shown = 3 * [np.ones((), bool)] + 2 * [case.by_a_query]
    assert np.all(np.isneginf(results[1]) == np.isneginf(exact[1]))
    seen, lse_error = np.isfinite(exact[1]), {'triton': 2e-6, 'mosaic': 1e-5}[case.backend]
    np.testing.assert_allclose(results[1][seen], exact[1][seen], rtol=0, atol=lse_error)
    if case.backend == 'triton':
        assert [x.dtype for x in results[:3]] == [case.o.dtype, np.float32, case.q.dtype]
        for i, atol in ((0, 2e-6), (2, 1e-5), (3, 1e-5), (4, 1e-5)):
            dtype, got = results[i].dtype, results[i].astype(np.float64)[shown[i]]
            half_a_step = 0 if dtype == np.float32 else float(jnp.finfo(dtype).eps) / 2
            np.testing.assert_allclose(got, exact[i][shown[i]], rtol=half_a_step, atol=atol)
    else:
        plain, narrow = case.run(case.passes('xla')), case.q.dtype
        for i, at_most in ((0, 2), (2, 3), (3, 3), (4, 3)):
            right = exact[i][shown[i]]
            errors = [
                np.abs(x[i].astype(narrow).astype(np.float64)[shown[i]] - right).max(initial=0)
                for x in (results, plain)
            ]
            assert errors[0] <= at_most * errors[1], (i, errors)
    for total, given in zip(results[3:], case.sums, strict=True):
        assert total.dtype == given.dtype
        assert total[~case.by_a_query].tobytes() == given[~case.by_a_query].tobytes()


@pytest.mark.parametrize(
    ('backend', 'name'),
    [('triton', name) for name in TRITON]
    + [pytest.param('mosaic', name, marks=interpreted) for name in MOSAIC],
)
def test_both_passes_match_float64(backend, name):
    """Odd sizes, groups, widths, masks, windows and looked-up tokens, in each dtype."""
    check(make(backend, **{'triton': TRITON, 'mosaic': MOSAIC}[backend][name]))


@pytest.mark.parametrize('backend', EACH)
def test_traced_num_slots_from_none_to_all(backend):
    """One program serves every number of slots; the others hold NaN and keep their sums."""
    sizes = {'triton': {'L': 9}, 'mosaic': {'L': 70, 'T': 1}}[backend]
    make(backend, **sizes).run()  # the first use of Triton changes a key of JAX's cache
    passes = make(backend, **sizes).passes()
    for num in {'triton': range(10), 'mosaic': (0, 35, 63, 70)}[backend]:
        check(make(backend, **sizes, num=num), passes)
        assert [f._cache_size() for f in passes] == [1, 1]


@pytest.mark.parametrize('backend', EACH)
def test_reruns_are_bit_equal_and_unseen_queries_zero(backend):
    """Sums have a fixed order. Without a visible key or slot o = 0, lse = -inf, dq = 0."""
    sizes = {'triton': {'R': 9}, 'mosaic': {'R': 3, 'T': 5, 'K': 2}}
    case = make(backend, mask=True, joined=False, **sizes[backend])
    passes = case.passes()
    o, lse, dq, *sums = results = case.run(passes)
    assert [x.tobytes() for x in results] == [x.tobytes() for x in case.run(passes)]
    lost = ~case.seen.any(axis=2)[:, None] & np.isneginf(case.lse)
    assert lost.any() and np.all(np.isneginf(lse) == lost)
    by_query = np.moveaxis(lost, 1, 2)
    assert not o[by_query].any() and not dq[by_query].any()


@interpreted
@pytest.mark.parametrize('rows', [None, 7])
def test_fresh_gradients_are_sums_that_begin_at_zero(rows):
    """The bits are equal, also in a rerun."""
    case = make('mosaic', L=72, num=50, window=30, T=4, R=rows, mask=True, sums='fresh')
    passes, found = case.passes(), []
    for fresh in (True, True, False):
        if not fresh:
            case.fresh, passes = False, case.passes()
        found.append([x.tobytes() for x in case.run(passes)])
    assert found[0] == found[1] == found[2]


@pytest.fixture
def racing(monkeypatch, capfd):
    """Make the Mosaic interpreter look for races. JAX 0.11 only prints some of them."""
    params = functools.partial(common.interpret_params, detect_races=True)
    monkeypatch.setattr(common, 'interpret_params', params)
    yield
    out, errors = capfd.readouterr()
    assert 'RACE DETECTED' not in out + errors


@interpreted
@pytest.mark.parametrize(
    'sizes',
    [
        {'L': 72, 'mask': True, 'R': 2},
        {'L': 7, 'mask': True, 'R': 2},
        {'L': 140, 'num': 133, 'window': 120, 'sums': 'fresh'},
    ],
)
def test_no_race(sizes, racing):
    """Copies, products and stores are ordered by barriers and fences."""
    check(make('mosaic', T=2, K=2, **sizes))


@interpreted
@pytest.mark.parametrize('name', ['barrier_wait', 'commit_smem'])
def test_a_race_is_seen(name, racing, monkeypatch, capfd):
    """The test above can fail: products read unfinished copies, or copies overtake reads."""
    monkeypatch.setattr(mosaic.plgpu, name, lambda *barrier: None)
    error = ''
    try:
        make('mosaic', L=16).run()
    except Exception as raised:
        error = str(raised)
    assert re.search(r'(?i)\brace\b', error + ''.join(capfd.readouterr()))


@pytest.mark.skipif(common.CAN_INTERPRET, reason='this JAX has the interpreter')
def test_a_missing_interpreter_is_named():
    """With JAX 0.10 the error says which version the interpreter needs."""
    with pytest.raises(ValueError, match='JAX 0.11.2'):
        make('mosaic').run()


def shapes_of(q, kv_heads, *dtypes):
    return USUAL._replace(q=q, k=(*q[:2], kv_heads, q[3]), dtypes=dtypes)


HALF, WIDE = 'bfloat16', (1, 8, 8, 64)
UNSUPPORTED = [
    (triton, shapes_of(WIDE, 1, 'float64'), 'float64'),
    (triton, shapes_of(WIDE, 1, HALF, 'int8'), 'int8'),
    (triton, shapes_of((1, 8, 8, 257), 1, HALF), '257'),
    (triton, shapes_of((1, 8, 130, 200), 2, HALF), '65'),
    (mosaic, shapes_of(WIDE, 1, 'float32'), 'float32'),
    (mosaic, shapes_of(WIDE, 1, HALF, 'float16'), 'bfloat16, float16 must be one'),
    *((mosaic, shapes_of((1, 8, 8, H), 1, HALF), str(H)) for H in (60, 72, 256, 264)),
    *((mosaic, shapes_of((1, 8, N, 64), 1, HALF), str(N)) for N in (33, 40)),
    (mosaic, shapes_of((2, 2**28, 8, 64), 4, HALF), str(2**31)),
    (mosaic, shapes_of((2, 8, 8, 64), 4, HALF)._replace(slot_rows=2**28), str(2**31)),
    (fused, USUAL._replace(q=(2, 1024, 66, 64)), '33 query heads'),
    (fused, USUAL._replace(dtypes=('float32',)), 'float32'),
    (fused, USUAL._replace(k=(2, 65, 2, 64)), '65 keys'),
    (fused, USUAL._replace(ordered=False), 'positions'),
    (fused, USUAL._replace(window=3, consecutive=False), 'positions'),
    (fused, USUAL._replace(scale=-1.0), 'scale -1.0'),
]


@pytest.mark.parametrize(('module', 'shapes', 'value'), UNSUPPORTED)
def test_unsupported_shapes_are_named(module, shapes, value):
    """The reason is one line with the value."""
    reason = module.unsupported(shapes, None)
    assert value in reason and '\n' not in reason


def test_supported_shapes():
    """Triton supports its limits, Hopper each width and group."""
    assert fused.unsupported(USUAL, None) is None
    for heads, width in ((128, 200), (8, 256)):
        assert triton.unsupported(shapes_of((1, 8, heads, width), 2, HALF), None) is None
    for group, width in itertools.product((1, 3, 5, 8, 12, 16), (8, 56, 64, 80, 96, 112, 128)):
        shapes = shapes_of((2, 97, 2 * group, width), 2, HALF)
        for module in (mosaic, fused):
            assert module.unsupported(shapes, None) is None


def test_any_number_of_programs_is_on_one_axis():
    """CUDA limits the other axes of a grid to 65,535."""
    (programs,) = triton._grid((3, 300001, 32, 128), 2)
    tokens, *_ = triton._tile(300001, 16, 128)
    assert programs == 3 * 2 * -(-300001 // tokens) and programs > 2**16
