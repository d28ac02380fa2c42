"""The depth part for Hopper, by the interpreter of Mosaic GPU kernels: its contract, on the CPU."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import _compat, mosaic_depth, mosaic_depth_backward, xla_depth
from tests.kernels.pallas_depth_test import Case, jit

interpreted = pytest.mark.skipif(
    not _compat.CAN_INTERPRET,
    reason='the Mosaic GPU interpreter before JAX 0.11.2 lacks primitives (drop with Python 3.11)',
)

SIZES = {'B': 1, 'T': 3, 'R': None, 'K': 1, 'G': 3, 'H': 64, 'L': 9, 'num': None}
KINDS = {'window': 0, 'mask': False, 'dtype': 'bfloat16', 'sums': 'float32'}
CASES = {
    'one_slot': {'T': 1, 'G': 1, 'L': 1, 'H': 56},
    'an_octet_of_7': {'L': 7, 'G': 5, 'num': 6, 'mask': True, 'sums': 'bfloat16'},
    'a_full_chunk': {'L': 64, 'G': 8, 'K': 2, 'T': 5},
    'two_chunks_of_7s': {'L': 70, 'G': 8, 'num': 66, 'window': 62, 'mask': True, 'H': 128},
    'two_chunks': {'L': 72, 'num': 70, 'window': 69, 'B': 2, 'K': 3, 'T': 2, 'G': 1},
    'group_of_16': {'L': 64, 'G': 16, 'H': 96, 'num': 17, 'T': 2, 'mask': True},
    'narrow_tiles': {'H': 80, 'G': 7, 'num': 4, 'window': 3},
    'widest': {'H': 128, 'L': 16, 'T': 2, 'sums': 'bfloat16'},
    'rows': {'L': 24, 'T': 5, 'R': 6, 'K': 2, 'num': 20, 'window': 11, 'B': 2, 'mask': True},
    'fewer_rows': {'L': 8, 'T': 4, 'R': 3, 'sums': 'bfloat16'},
    'none_written': {'num': 0, 'L': 64},
    'float16': {'dtype': 'float16', 'sums': 'float16', 'L': 32, 'num': 30},
}


class HopperCase(Case):
    """The same arguments, by the kernels for Hopper."""

    @functools.cached_property
    def passes(self):
        return self.jitted(mosaic_depth, mosaic_depth_backward, interpret=True)

    def jitted(self, forward_module, backward_module, **options):
        static = {'window': self.window, 'scale': self.scale, **options}
        masks = self.mask, self.rows

        def forward(num, q, o, lse, buffers):
            o, lse, _ = forward_module.depth_forward(q, o, lse, buffers, num, *masks, **static)
            return o, lse

        def backward(num, *arrays):
            return backward_module.depth_backward(*arrays, num, *masks, **static)

        return jit(forward), jit(backward)

    def plain(self):
        """What run() returns, by XLA in float32, from the same slots."""
        kernels, self.passes = self.passes, self.jitted(xla_depth, xla_depth)
        result = self.run()
        self.passes = kernels
        return result


def make(**changes):
    return HopperCase(**{**SIZES, **KINDS, **changes})


def check(case):
    """Errors of results as wide as the slots, against those of plain results rounded to that."""
    results, plain, exact = case.run(), case.plain(), case.exact()
    seen = np.isfinite(exact[1])
    assert np.all(np.isneginf(results[1]) == ~seen)
    np.testing.assert_allclose(results[1][seen], exact[1][seen], rtol=0, atol=1e-5)
    narrow, everywhere = jnp.dtype(case.q.dtype), np.ones((), bool)
    shown = (everywhere, everywhere, everywhere, case.by_a_query, case.by_a_query)
    for i, at_most in ((0, 2), (2, 3), (3, 3), (4, 3)):
        right = exact[i][shown[i]]
        errors = [
            np.abs(given[i].astype(narrow).astype(np.float64)[shown[i]] - right).max(initial=0)
            for given in (results, plain)
        ]
        assert errors[0] <= at_most * errors[1], (i, errors)
    for total, given in zip(results[3:], case.sums, strict=True):
        assert total.dtype == given.dtype
        assert total[~case.by_a_query].tobytes() == given[~case.by_a_query].tobytes()


@interpreted
@pytest.mark.parametrize('name', CASES)
def test_both_passes_match_float64(name):
    """Groups, widths, slots, masks, windows and looked-up tokens; NaN in what no query sees."""
    check(make(**CASES[name]))


@interpreted
def test_traced_num_slots_from_none_to_all():
    """One program serves every number of slots; those from it on hold NaN and keep their sums."""
    case, passes = make(L=70, T=1), None
    for num in (0, 35, 63, 70):
        case = make(L=70, T=1, num=num)
        case.passes = passes = case.passes if passes is None else passes
        check(case)
        assert [f._cache_size() for f in passes] == [1, 1]


@interpreted
def test_reruns_are_bit_equal():
    """Nothing is summed in an order that may vary."""
    case = make(L=24, K=2, mask=True, sums='bfloat16')
    assert [x.tobytes() for x in case.run()] == [x.tobytes() for x in case.run()]


@interpreted
@pytest.mark.parametrize('L', [72, 7])
def test_no_race(L, monkeypatch):
    """Copies, products and stores are ordered by barriers and fences: the interpreter looks."""
    racing = functools.partial(_compat.interpret_params, detect_races=True)
    monkeypatch.setattr(_compat, 'interpret_params', racing)
    check(make(L=L, T=2, K=2, mask=True, R=2))


@interpreted
def test_a_race_is_seen(monkeypatch):
    """That test can fail: without the wait for copies, the products read what is on its way."""
    racing = functools.partial(_compat.interpret_params, detect_races=True)
    monkeypatch.setattr(_compat, 'interpret_params', racing)
    monkeypatch.setattr(mosaic_depth.plgpu, 'barrier_wait', lambda barrier: None)
    with pytest.raises(Exception, match='(?i)race'):
        make(L=16).run()


@pytest.mark.skipif(_compat.CAN_INTERPRET, reason='this JAX has the interpreter')
def test_no_interpreter_is_said():
    """Not a failure inside the interpreter of JAX 0.10, but a line that says what is needed."""
    with pytest.raises(ValueError, match='JAX 0.11.2'):
        make().run()


@pytest.mark.parametrize(
    ('shape', 'kv_heads', 'slots', 'dtype', 'value'),
    [
        ((1, 8, 8, 64), 1, 9, 'float32', 'float32'),
        ((1, 8, 8, 264), 1, 9, 'bfloat16', '264'),
        ((1, 8, 8, 72), 1, 9, 'bfloat16', '72'),
        ((1, 8, 8, 60), 1, 9, 'bfloat16', '60'),
        ((1, 8, 12, 64), 1, 9, 'bfloat16', '12'),
        ((1, 8, 40, 64), 1, 9, 'bfloat16', '40'),
        ((1, 8, 8, 256), 1, 9, 'bfloat16', '256'),
        ((2, 2**28, 8, 64), 4, 9, 'bfloat16', str(2**31)),
    ],
)
def test_what_it_cannot_do_is_said(shape, kv_heads, slots, dtype, value):
    """One line that names the value."""
    reason = mosaic_depth.unsupported(shape, kv_heads, slots, dtype)
    assert value in reason and '\n' not in reason


@pytest.mark.parametrize('H', [8, 56, 64, 80, 96, 112, 128])
@pytest.mark.parametrize('G', [1, 3, 5, 6, 7, 8, 16])
def test_what_it_can_do(H, G):
    """Each width and group is taken at any number of slots."""
    for slots in (1, 7, 64, 67, 70):
        assert mosaic_depth.unsupported((2, 97, 2 * G, H), 2, slots, jnp.bfloat16) is None
