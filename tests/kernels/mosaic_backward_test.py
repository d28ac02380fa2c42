"""The fused backward pass on Hopper, interpreted and compared with float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.backends import Parts
from kernels_pallas.joint_softmax import SequenceMask, Slots, Static, joint_attention
from kernels_pallas.mosaic import depth, fused, fused_backward, sequence
from tests.kernels.cases import KINDS, draw, exact
from tests.kernels.depth_backends_test import interpreted, racing  # noqa: F401
from tests.kernels.mosaic_fused_test import EDGES

SMALL = KINDS | {'B': 1, 'T': 9, 'N': 1, 'K': 1, 'H': 64, 'L': 7, 'num': None}
OURS = Parts('mosaic_gpu', 'mosaic_gpu_fused', interpret=True)
CASES = {
    'group_of_3': {'N': 3, 'T': 17, 'L': 9, 'num': 7, 'segments': (1, 9, 7), 'own_query': True},
    'group_of_8': {'N': 8, 'T': 16, 'L': 24, 'num': 13, 'slot_window': 9, 'H': 128},
    'rows': {'N': 2, 'T': 9, 'R': 14, 'L': 9, 'mask': True},
    'group_of_1': {'T': 9, 'L': 21, 'num': 12, 'slot_window': 3, 'B': 2},
    'group_of_12': {'N': 24, 'K': 2, 'T': 6, 'R': 8, 'L': 7, 'num': 6},
}
LONG = {
    'group_of_1': {'T': 133, 'L': 7, 'num': 6, 'B': 2},
    'group_of_2': {'N': 4, 'K': 2, 'T': 200, 'L': 24, 'num': 20, 'segments': EDGES},
    'group_of_3': {'N': 3, 'T': 97, 'H': 128, 'L': 24, 'window': 30},
    'group_of_5': {'N': 5, 'T': 33, 'H': 96, 'L': 9, 'num': 7, 'mask': True, 'own_query': True},
    'group_of_8': {'N': 16, 'K': 2, 'T': 40, 'H': 128, 'L': 7, 'num': 7, 'segments': 'any', 'B': 2},
    'group_of_16': {'N': 16, 'T': 33, 'H': 128, 'L': 24, 'num': 17, 'segments': (1, 21, 11)},
    'group_of_20': {'N': 20, 'B': 2, 'T': 10, 'L': 8, 'window': 4, 'segments': 'any'},
    'group_of_32': {'N': 32, 'T': 9, 'R': 14, 'L': 9, 'mask': True, 'own_query': True},
    'narrow': {'N': 2, 'T': 24, 'H': 56, 'L': 24, 'num': 17, 'slot_window': 12, 'mask': True},
    'one_slot': {'N': 8, 'L': 1},
    'none_written': {'N': 2, 'T': 16, 'L': 24, 'num': 0},
    'own_query': {'N': 4, 'K': 2, 'T': 69, 'R': 72, 'L': 7, 'num': 6, 'B': 2, 'own_query': True},
}


class Call:
    """A case, its exact results, and its gradients by joint_attention."""

    def __init__(self, dtype='float32', **sizes):
        case = self.case = SMALL | sizes
        inputs, cotangents, arguments, *self.seen = draw(**case)
        self.own_query = case['own_query']
        if not self.own_query:
            inputs[5] = inputs[0]
        self.inputs = [jnp.asarray(x, dtype) for x in inputs]
        self.do, self.dlse = jnp.asarray(cotangents[0], dtype), jnp.asarray(cotangents[1])
        wide = [np.asarray(x.astype(jnp.float32)) for x in (*self.inputs, self.do)]
        scale = case['H'] ** -0.5
        o, lse, (*gradients, of_slots) = exact(wide[:6], (wide[6], self.dlse), *self.seen, scale)
        if not self.own_query:
            gradients[0] += of_slots
            of_slots *= 0
        self.right = o, lse, *gradients, of_slots
        places = jnp.broadcast_to(jnp.arange(case['T']), (case['B'], case['T']))
        ids, *rest = (
            None if arguments.get(key) is None else jnp.asarray(arguments[key])
            for key in ('segment_ids_BT', 'slot_mask_LBR', 'slot_rows_BT')
        )
        self.mask = SequenceMask(places, places, ids, ids)
        self.slots = jnp.int32(case['L'] if case['num'] is None else case['num']), *rest

    def run(self, parts, sums=None, fresh=True):
        """Return o, lse and all gradients; those of the slots as the new `sums`, if given.

        The last one is of the slots' queries, zeros if these are q.
        """
        case = self.case
        scale = case['H'] ** -0.5
        static = Static(case['window'], True, case['slot_window'], scale, True, parts, not fresh)

        def attend(q, k, v, kd, vd, qd, sums):
            slots, qd = Slots(kd, vd, *self.slots), qd if self.own_query else None
            o, lse, _, sums = joint_attention(static, q, k, v, self.mask, qd, slots, sums)
            return o, lse, sums

        found, pull = jax.vjp(attend, *self.inputs, sums)
        *of_tokens, dkd, dvd, dqd, dsums = pull((self.do, self.dlse, sums))
        of_slots = (dkd, dvd) if sums is None else dsums
        return [np.asarray(x) for x in (*found[:2], *of_tokens, *of_slots, dqd)]

    def by_a_query(self):
        """Return bool [L, B, R]: the slots that some query sees."""
        taken, _, slots = self.seen
        seen = np.zeros(self.inputs[3].shape[:3], bool)
        for b, t, slot in np.argwhere(slots):
            seen[slot, b, taken[b, t]] = True
        return seen


def check(fresh=True, **sizes):
    """In float32 o and lse are right to 2e-6, gradients to 1e-5; hidden slots (NaN) have 0."""
    call = Call(**sizes)
    results = call.run(OURS, fresh=fresh)
    for got, right, atol in zip(results, call.right, (2e-6,) * 2 + (1e-5,) * 6, strict=True):
        np.testing.assert_allclose(got, right, rtol=0, atol=atol * max(1, np.abs(right).max()))
    for got in results[5:7]:
        assert not got[~call.by_a_query()].any()


@pytest.fixture
def joined(monkeypatch):
    """Fails if the parts' own backward passes are called."""

    def fail(*arguments, **options):
        raise AssertionError('a part computes its own gradients')

    monkeypatch.setattr(sequence, 'sequence_backward', fail)
    monkeypatch.setattr(depth, 'depth_backward', fail)


@interpreted
@pytest.mark.parametrize('fresh', [True, False])
@pytest.mark.parametrize('name', CASES)
def test_equals_float64(name, fresh, joined):
    check(fresh, **CASES[name])


@interpreted
def test_fresh_gradients_are_sums_that_begin_at_zero(joined):
    """The bits are equal, also in a rerun."""
    call = Call('bfloat16', N=2, T=8, L=21, num=10, slot_window=2)
    found = [call.run(OURS, fresh=fresh) for fresh in (True, True, False)]
    first, again, added = ([x.tobytes() for x in results] for results in found)
    assert first == again == added


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize('name', LONG)
def test_equals_float64_in_several_blocks(name, joined):
    check(**LONG[name])


HALF = {
    'bfloat16': {'N': 4, 'K': 2, 'T': 24, 'L': 9, 'num': 6, 'segments': (1, 15, 8)},
    'float16': {'N': 3, 'T': 9, 'H': 128, 'L': 16, 'num': 11, 'mask': True, 'R': 11},
    'own_query': {'N': 2, 'T': 9, 'H': 128, 'L': 8, 'num': 5, 'own_query': True},
    'group_of_16': {'N': 16, 'T': 9, 'L': 9, 'num': 6},
}


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize('wide', ['float32', 'model'])
@pytest.mark.parametrize('name', HALF)
def test_half_precision_adds_to_the_sums_in_place(name, wide, joined):
    """The error is at most 3 times XLA's; hidden slots' sums keep their bits; reruns are equal."""
    dtype = name if name == 'float16' else 'bfloat16'
    call = Call(dtype, **HALF[name])
    rng, hidden, shape = np.random.default_rng(1), ~call.by_a_query(), call.inputs[3].shape
    sums = [rng.normal(size=shape).astype(jnp.dtype(dtype)) for _ in range(2)]
    for side in sums:
        odd = np.array([np.nan, -0.0, np.inf, 1e-5], side.dtype)
        side[hidden] = odd[rng.integers(0, 4, side[hidden].shape)]
    given = tuple(jnp.asarray(x, dtype if wide == 'model' else wide) for x in sums)
    ours, plain, again = (call.run(x, given) for x in (OURS, Parts(), OURS))
    assert [x.tobytes() for x in ours] == [x.tobytes() for x in again]
    exact_sums = [x + np.asarray(y, float) for x, y in zip(call.right[5:7], sums, strict=True)]
    right = [*call.right[2:5], *exact_sums, call.right[7]]
    for i, (got, theirs, exact_) in enumerate(zip(ours[2:], plain[2:], right, strict=True)):
        shown = ~hidden if i in (3, 4) else ...
        # In the model's dtype, to which the kernel rounds P and dS before it multiplies by them.
        rounded = (x[shown].astype(jnp.dtype(dtype)).astype(float) for x in (got, theirs))
        errors = [np.abs(x - exact_[shown]).max() for x in rounded]
        assert errors[0] <= 3 * errors[1], (i, errors)
    for got, before in zip(ours[5:7], given, strict=True):
        assert got.dtype == before.dtype
        assert got[hidden].tobytes() == np.asarray(before)[hidden].tobytes()


RACES = {
    'by_octet': {'N': 2, 'T': 9, 'L': 9, 'mask': True, 'R': 16},
    'one_buffer': {'N': 2, 'T': 16, 'L': 17, 'H': 128},
    'by_row': {'N': 2, 'T': 9, 'L': 9, 'R': 14},
    'hidden': {'N': 2, 'T': 16, 'L': 27, 'num': 18, 'slot_window': 4},
    'own_query': {'N': 5, 'T': 16, 'L': 9, 'own_query': True},
    'group_of_16': {'N': 16, 'T': 9, 'L': 9},
}


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize('fresh', [True, False])
@pytest.mark.parametrize('name', RACES)
def test_no_race(name, fresh, racing, joined, monkeypatch):  # noqa: F811
    """Barriers order copies, products and stores, with a ring of two stages."""
    monkeypatch.setattr(fused, 'MAX_STAGES', 2)
    check(fresh, **RACES[name])


def test_memory_has_room_for_the_stages():
    """There are at least three stages with any dtype of the sums, and they fit Hopper's memory."""
    for width, sums in ((56, 'float32'), (64, 'float32'), (128, 'bfloat16'), (128, 'float32')):
        q = jnp.zeros((1, 8, 2, width), jnp.bfloat16)
        static = Static(0, True, 0, 1.0, False, OURS)
        slots = Slots(jnp.zeros((1, 1, 8, 1, width)), None, 1)
        sizes, buffers = fused_backward.make_sizes(q, q[:, :, :1], None, q, slots, static, sums)
        pieces = 2 * buffers * 64 * 64 * jnp.dtype(sums).itemsize
        used = (4 * 64 + sizes.stages * 128) * sizes.width * 2 + 4 * 64 * 64 * 2 + pieces
        assert sizes.stages >= fused_backward.MIN_STAGES and used <= 224 * 1024
