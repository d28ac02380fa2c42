"""The fused Hopper forward, by the interpreter of Mosaic GPU kernels, compared with float64."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.backends import Parts
from kernels_pallas.joint_softmax import SequenceMask, Slots, Static
from kernels_pallas.mosaic import common, fused, fused_ring
from kernels_pallas.reference import reference_attention
from tests.kernels.cases import KINDS, SEQUENCE, USUAL, draw, exact, jit

interpreted = pytest.mark.skipif(
    not common.CAN_INTERPRET,
    reason='the Mosaic GPU interpreter before JAX 0.11.2 lacks primitives (drop with Python 3.11)',
)
SMALL = KINDS | SEQUENCE | {'B': 1, 'T': 5, 'N': 8, 'K': 1, 'H': 64, 'L': 8}
CASES = {
    'padded_slots': {'L': 9, 'num': 8},
    'two_kv_heads': {'B': 2, 'N': 16, 'K': 2, 'L': 40, 'num': 35, 'slot_window': 30},
    'rows_masked': {'R': 7, 'L': 7, 'num': 6, 'mask': True, 'own_query': True, 'H': 56, 'B': 2},
    'two_blocks': {'T': 131, 'num': 0, 'window': 60},
    'documents': {'T': 132, 'H': 96, 'segments': True, 'mask': True, 'dtype': 'float16'},
}


class Case:
    """Random inputs of a kind, and their results."""

    def __init__(self, dtype='bfloat16', **sizes):
        options = SMALL | sizes
        self.num = options['L'] if options['num'] is None else options['num']
        inputs, self.cotangents, arguments, *self.seen = draw(**options | {'num': self.num})
        self.inputs = [jnp.asarray(x, dtype) for x in inputs]
        if not options['own_query']:
            self.inputs[5] = self.inputs[0]
        self.q_depth = self.inputs[5] if options['own_query'] else None
        names = 'segment_ids_BT', 'slot_mask_LBR', 'slot_rows_BT'
        self.ids, *self.masks = (arguments.get(name) for name in names)
        window, slot_window, scale = options['window'], options['slot_window'], options['H'] ** -0.5
        parts = Parts('xla', 'mosaic_gpu_fused', interpret=True)
        self.static = Static(window, True, slot_window, scale, False, parts)

    def run(self):
        """(o, lse) of the kernel."""
        q, k, v, *sides, _ = self.inputs

        def forward(num):
            slots = Slots(*sides, num, *self.masks)
            return fused.fused_forward(q, k, v, self.ids, self.q_depth, slots, self.static)

        return [np.asarray(x, np.float64) for x in jit(forward)(self.num)]

    def check(self):
        """o errs at most twice as much as the plain form in the same dtype."""
        q, k, v, *sides, _ = self.inputs
        positions = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
        mask = SequenceMask(positions, positions, self.ids, self.ids)
        slots, static = Slots(*sides, self.num, *self.masks), self.static
        windows = static.window, static.slot_window, static.scale
        plain = reference_attention(q, k, v, mask, self.q_depth, slots, *windows)[0]
        wide = [np.asarray(x.astype(jnp.float32)) for x in self.inputs]
        o, lse, _ = exact(wide, self.cotangents, *self.seen, static.scale)
        got_o, got_lse = self.run()
        assert np.abs(got_o - o).max() <= 2 * np.abs(np.asarray(plain, np.float64) - o).max()
        np.testing.assert_allclose(got_lse, lse, rtol=0, atol=2e-6)


@interpreted
@pytest.mark.parametrize('name', CASES)
def test_equals_float64(name):
    """As near as the plain form in the same dtype; NaN in hidden slots does not show."""
    Case(**CASES[name]).check()


@pytest.fixture
def racing(monkeypatch):
    """The interpreter looks for races in a ring of two stages."""
    params = functools.partial(common.interpret_params, detect_races=True)
    monkeypatch.setattr(common, 'interpret_params', params)
    monkeypatch.setattr(fused, 'MAX_STAGES', 2)


@interpreted
def test_no_race(racing):
    """The ring's barriers order copies, products and the zeros for hidden slots."""
    Case(mask=True, L=40, T=9).check()


@interpreted
def test_a_race_is_seen(racing, monkeypatch):
    """The test above can fail: a ring that never waits for its stages to be used."""
    monkeypatch.setattr(fused_ring.plgpu, 'barrier_wait', lambda barrier: None)
    with pytest.raises(Exception, match='(?i)race'):
        Case().run()


def test_first_keys_are_those_of_the_oldest_segment():
    """Blocks of keys before them are skipped: of sorted ids, and of ids that recur."""
    ids = np.array([[0] * 10 + [3] * 20 + [5] * 10, [7] * 5 + [2] * 30 + [7] * 5])
    got = fused._first_keys(jnp.asarray(ids), 3)
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
def test_unsupported_calls_are_named(changes, value):
    assert fused.unsupported(USUAL) is None
    for num_slots in (0, USUAL.num_slots):
        assert value in fused.unsupported(USUAL._replace(**changes, num_slots=num_slots))
