"""The fused Hopper forward, by the interpreter of Mosaic GPU kernels, beside float64."""

import functools
import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import _compat, mosaic_fused, mosaic_fused_ring, reference
from tests.kernels.cases import KINDS, SEQUENCE, SIZES, USUAL, exact, jit, make_case

interpreted = pytest.mark.skipif(
    not _compat.CAN_INTERPRET,
    reason='the Mosaic GPU interpreter before JAX 0.11.2 lacks primitives (drop with Python 3.11)',
)
SMALL = {'B': 1, 'T': 5, 'N': 8, 'K': 1, 'H': 64, 'L': 8}
CASES = {
    'octets_of_3': {'L': 9, 'num': 8},
    'two_kv_heads': {'B': 2, 'N': 16, 'K': 2, 'L': 40, 'num': 35, 'slot_window': 30},
    'rows_masked': {'R': 7, 'L': 7, 'num': 6, 'mask': True, 'own_query': True, 'H': 56, 'B': 2},
    'two_blocks': {'T': 131, 'num': 0, 'window': 60},
    'documents': {'T': 132, 'H': 96, 'segments': True, 'mask': True, 'dtype': 'float16'},
}


class Case:
    """Random inputs of a kind, and what they give."""

    def __init__(self, own_query=False, dtype='bfloat16', **sizes):
        options = {**SIZES, **KINDS, **SEQUENCE, **SMALL, **sizes}
        self.num, self.scale = options['num'], options['scale'] or options['H'] ** -0.5
        self.num = options['L'] if self.num is None else self.num
        options |= {'num': self.num, 'own_query': own_query}
        names = inspect.signature(make_case).parameters
        made = make_case(**{name: options[name] for name in names})
        inputs, self.cotangents, given, *self.grids = made
        self.window, self.slot_window = options['window'], options['slot_window']
        self.inputs = [jnp.asarray(x, dtype) for x in inputs]
        if not own_query:
            self.inputs[5] = self.inputs[0]
        self.q_depth = self.inputs[5] if own_query else None
        names = 'segment_ids_BT', 'slot_mask_LBR', 'slot_rows_BT'
        self.ids, *self.masks = (
            None if (x := given.get(n)) is None else jnp.asarray(x) for n in names
        )

    def run(self):
        """(o, lse) of the kernel."""
        q, k, v, *slots, _ = self.inputs
        rest = (*self.masks, self.window, self.slot_window, self.scale)

        def forward(num):
            given = (q, k, v, self.ids, self.q_depth, slots, num, *rest)
            return mosaic_fused.fused_forward(*given, interpret=True)

        return [np.asarray(x, np.float64) for x in jit(forward)(self.num)]

    def plain(self):
        """o by the plain implementation, in the inputs' dtype."""
        q, k, v, *slots, _ = self.inputs
        positions = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
        mask = (positions, positions, self.ids, self.ids)
        seen = (self.num, *self.masks)
        rest = (self.q_depth, slots, seen, self.window, self.slot_window, self.scale)
        return np.asarray(reference.reference_attention(q, k, v, mask, *rest)[0], np.float64)

    def check(self):
        wide = [np.asarray(x.astype(jnp.float32)) for x in self.inputs]
        o, lse, _ = exact(wide, self.cotangents, *self.grids, self.scale)
        got_o, got_lse = self.run()
        assert np.abs(got_o - o).max() <= 2 * np.abs(self.plain() - o).max()
        np.testing.assert_allclose(got_lse, lse, rtol=0, atol=2e-6)


@interpreted
@pytest.mark.parametrize('name', CASES)
def test_equals_float64(name):
    """As near as the plain form in the same dtype, and NaN in slots that are hidden hides too."""
    Case(**CASES[name]).check()


def racing(monkeypatch):
    params = functools.partial(_compat.interpret_params, detect_races=True)
    monkeypatch.setattr(_compat, 'interpret_params', params)


@interpreted
def test_no_race(monkeypatch):
    """The ring's barriers order copies, products and the zeros for what is hidden."""
    racing(monkeypatch)
    monkeypatch.setattr(mosaic_fused, 'MAX_STAGES', 2)
    Case(mask=True, L=40, T=9).check()


@interpreted
def test_a_race_is_seen(monkeypatch):
    """That test can fail: a ring that never waits for its stages to be used."""
    racing(monkeypatch)
    monkeypatch.setattr(mosaic_fused, 'MAX_STAGES', 2)
    monkeypatch.setattr(mosaic_fused_ring.plgpu, 'barrier_wait', lambda barrier: None)
    with pytest.raises(Exception, match='(?i)race'):
        Case().run()


def test_first_keys_are_those_of_the_oldest_segment():
    """Blocks of keys before them are skipped: of sorted ids, and of ids that come again."""
    ids = np.array([[0] * 10 + [3] * 20 + [5] * 10, [7] * 5 + [2] * 30 + [7] * 5])
    got = mosaic_fused._first_keys(jnp.asarray(ids), 3)
    np.testing.assert_array_equal(got, [[0, 10, 30], [0, 5, 0]])


@pytest.mark.parametrize(
    ('changes', 'value'),
    [
        ({'q': (2, 1024, 14, 64)}, '7 query heads'),
        ({'q': (2, 1024, 16, 256)}, '256'),
        ({'q': (2, 1024, 16, 72)}, '72'),
        ({'dtypes': ('float32',)}, 'float32'),
        ({'dtypes': ('bfloat16', 'float32')}, 'bfloat16, float32'),
        ({'k': (2, 65, 2, 64)}, '65 keys'),
        ({'ordered': False}, 'positions'),
        ({'window': 3, 'consecutive': False}, 'positions'),
        ({'scale': -1.0}, 'scale -1.0'),
    ],
)
def test_what_it_cannot_do_is_named(changes, value):
    assert mosaic_fused.unsupported(USUAL) is None
    assert value in mosaic_fused.unsupported(USUAL._replace(**changes))
