"""Sequence and depth slots are one softmax: values, gradients, visibility and refusals."""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import backends, depth_attention
from kernels_pallas.mosaic.common import CAN_INTERPRET
from tests.kernels.cases import CASES, LONG, draw, drawn, exact, in_blocks, program

HOPPER = ('mosaic_gpu', 'mosaic_gpu_fused')
# depth_backends_test.py tests the kernels directly; here they get the public arguments.
MORE = ('group_of_5', 'newest', 'rows')


@pytest.mark.parametrize(
    ('implementation', 'block', 'name'),
    [(implementation, 128, name) for name in CASES for implementation in ('reference', 'xla')]
    + [('xla', block, name) for name in LONG for block in ('parts', 'tiles')]
    + [
        (name, block, case) for case in MORE for name, block in (('pallas', 128), ('xla', 'tokens'))
    ],
)
def test_equals_float64_softmax_over_the_concatenation(implementation, block, name, monkeypatch):
    """Output, logsumexp and all gradients are right; NaN in hidden slots changes nothing.

    By XLA in one block, in blocks for few heads at a time, in the loops over tiles of long
    sequences, and in tiles of tokens.
    """
    in_blocks(monkeypatch, block)
    run = None
    for num, inputs, cotangents, arguments, (o, lse, gradients) in drawn(name):
        if run is None:
            written, own_query = CASES[name].get('num'), CASES[name].get('own_query', False)
            options = {'implementation': implementation, **arguments}
            run = program(cotangents, written, own_query, **options)
        got = run(*inputs, num)
        np.testing.assert_allclose(got[0], o, rtol=0, atol=2e-6)
        np.testing.assert_allclose(got[1], lse, rtol=5e-7, atol=2e-6)
        assert got[0].dtype == got[1].dtype == np.float32
        for mine, right in zip(got[2], gradients, strict=True):
            np.testing.assert_allclose(mine, right, rtol=0, atol=1e-5)
        hidden = np.isnan(inputs[3])
        assert not got[2][3][hidden].any() and not got[2][4][hidden].any()


NARROW = {'B': 1, 'T': 11, 'K': 1, 'N': 8, 'H': 64, 'L': 9, 'num': 6, 'mask': True}
NAMES = ('o', 'q', 'k', 'v', 'k_depth', 'v_depth')


@functools.cache
def narrow_errors(implementation):
    """Return errors of o and five gradients in bfloat16, and the largest exact value of each."""
    inputs, (do, dlse), arguments, *seen = draw(**NARROW)
    inputs, do = [jnp.asarray(x, jnp.bfloat16) for x in inputs[:5]], jnp.asarray(do, jnp.bfloat16)
    rounded = [np.nan_to_num(np.asarray(x, float)) for x in (*inputs, inputs[0])]
    o, _, gradients = exact(rounded, (np.asarray(do, float), dlse), *seen, 64**-0.5)
    gradients[0] += gradients[5]
    options = arguments | {'num_slots': 6, 'implementation': implementation, 'return_lse': True}

    def results(*inputs):
        (o, _), pull = jax.vjp(functools.partial(depth_attention, **options), *inputs)
        return o, *pull((do, dlse))

    # Not jitted: interpreted kernels run in host callbacks, which can deadlock with the other
    # operations of a program on a machine with two cores.
    run = results if implementation in HOPPER else jax.jit(results)
    pairs = list(zip(run(*inputs), (o, *gradients[:5]), strict=True))
    assert all(x.dtype == jnp.bfloat16 for x, _ in pairs)
    errors = [np.abs(np.nan_to_num(np.asarray(x, float)) - y).max() for x, y in pairs]
    return errors, [np.abs(y).max() for _, y in pairs]


@pytest.mark.parametrize('implementation', ['reference', 'xla', 'pallas', *HOPPER])
def test_bfloat16_error_is_near_that_of_xla(implementation):
    """Errors are at most twice those of `xla`, three times in gradients, and at most 2%.

    With a cotangent of the logsumexp.
    """
    if implementation in HOPPER and not CAN_INTERPRET:
        pytest.skip('the Mosaic GPU interpreter before JAX 0.11.2 lacks primitives')
    (plain, _), (found, largest) = narrow_errors('xla'), narrow_errors(implementation)
    limits = zip(NAMES, found, plain, largest, (2, *5 * (3,)), strict=True)
    for name, error, xla_error, value, most in limits:
        assert error <= most * xla_error and error <= 0.02 * value, name


@pytest.mark.parametrize('implementation', ['reference', 'xla'])
def test_visibility_is_the_drawn_grid(implementation):
    """T = 5, L = 4, and layer l sees the l slots before it. Columns: keys 0 to 4, slots 0 to 3."""
    layers = {0: '0000', 2: '1100', 4: '1111'}
    arrays = [normal(seed, (1, 5, 1, 4)) for seed in range(3)]
    arrays += [normal(seed, (4, 1, 5, 1, 4)) for seed in (3, 4)]

    def values(keys_moved, slots_moved, num_slots):
        q, k, v, kd, vd = arrays
        v, vd = v + keys_moved[None, :, None, None], vd + slots_moved[:, None, :, None, None]
        options = {'num_slots': num_slots, 'implementation': implementation}
        return depth_attention(q, k, v, kd, vd, **options)[0, :, 0, 0]

    jacobian = jax.jit(jax.jacrev(values, argnums=(0, 1)))
    for num_slots, seen in layers.items():
        by_keys, by_slots = jacobian(jnp.zeros(5), jnp.zeros((4, 5)), num_slots)
        np.testing.assert_array_equal(by_keys != 0, np.tri(5))
        for token in range(5):
            grid = np.zeros((5, 4), int)
            grid[token] = [int(c) for c in seen]
            np.testing.assert_array_equal(by_slots[:, :, token] != 0, grid)


def normal(seed, shape=(2, 16, 4, 8)):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize('own', [False, True])
@pytest.mark.parametrize(
    'implementation', ['reference', 'xla', pytest.param('pallas', marks=pytest.mark.slow)]
)
def test_cotangents_of_the_returned_slots_are_added_to(implementation, own):
    """The slots' gradients are the incoming cotangents plus the exact ones, rounded once.

    Or those of sums of their own, in their own dtype, whose values are not used.
    """
    if implementation == 'reference' and not own:
        pytest.skip('the reference is differentiated by JAX, which adds as it likes')
    x, wide = normal(0), [normal(seed, (5, 2, 16, 2, 8)) for seed in (1, 2)]
    keys = x[:, :, :2], x[:, :, 2:]
    slots = [side.astype(jnp.bfloat16) for side in wide] if own else wide
    incoming = [normal(seed, slots[0].shape) for seed in (3, 4)]
    passed_on = [side.astype(jnp.bfloat16) for side in incoming] if own else incoming
    options = {'implementation': implementation, 'num_slots': 3}

    def threaded(slots, sums):
        o, *rest = depth_attention(x, *keys, *slots, thread_slots=True, slot_sums=sums, **options)
        return o, rest[:2], rest[2:] or None

    def plain(slots):
        return depth_attention(x, *keys, *slots, **options)

    @jax.jit
    def results():
        sums = [jnp.full_like(wide[0], jnp.nan)] * 2 if own else None
        (_, returned, _), pull = jax.vjp(threaded, slots, sums)
        _, plain_pull = jax.vjp(plain, [side.astype(jnp.float32) for side in slots])
        found = pull((normal(5), passed_on, incoming if own else None))
        return returned, *found, *plain_pull(normal(5))

    returned, of_slots, of_sums, right = results()
    jax.tree.map(np.testing.assert_array_equal, returned, slots)
    if own:
        jax.tree.map(np.testing.assert_array_equal, of_slots, passed_on)
    for got, base, exact_one in zip(of_sums or of_slots, incoming, right, strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, base + exact_one, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(got[3:], base[3:])


def test_the_shapes_of_a_call_are_recorded():
    """The choice sees all properties: slots, their rows, mask, queries and sums, and lse."""
    q, k = np.zeros((2, 8, 4, 8), np.float32), np.zeros((2, 8, 2, 8), np.float32)
    slots, rows = np.zeros((5, 2, 11, 2, 8), np.float32), np.tile(np.arange(8), (2, 1))
    options = {'slot_window': 3, 'slot_rows_BT': rows, 'slot_sums': (slots, slots)}
    options |= {'q_depth_BTNH': q, 'slot_mask_LBR': np.ones((5, 2, 11), bool), 'return_lse': True}
    half = slots[:, :, :8].astype('float16')
    with backends.recorded() as found:
        depth_attention(q, k, k, slots, slots, **options)
        depth_attention(q, k, k)
        depth_attention(q, k, k, half, half, thread_slots=True)
        depth_attention(q, k, k, half, half)
    full, plain, threaded, fresh = found
    assert full[:3] == (q.shape, k.shape, 5)
    assert full[8:] == (8**-0.5, 3, 11, True, True, 'float32', True, 0)
    assert plain[2] == 0 and plain[9:] == (0, 0, False, False, '', False, 0)
    assert (threaded.sums, fresh.sums) == ('float16', '')


def zeros(*shape):
    return np.zeros(shape, np.float32)


QUERIES, KEYS, SLOTS = zeros(2, 5, 6, 4), zeros(2, 5, 3, 4), zeros(7, 2, 5, 3, 4)
SEQUENCE, GIVEN = (QUERIES, KEYS, KEYS), (QUERIES, KEYS, KEYS, SLOTS, SLOTS)
ROWS, IDS = np.zeros((2, 5), np.int32), np.zeros((2, 5), int)
OTHERS = (QUERIES, zeros(2, 7, 3, 4), zeros(2, 7, 3, 4))
REFUSED = [
    ((QUERIES, KEYS, zeros(2, 4, 3, 4)), {}, r'\(2, 4, 3, 4\)'),
    ((QUERIES, zeros(2, 5, 3, 8), zeros(2, 5, 3, 8)), {}, r'\(2, 5, 3, 8\)'),
    ((QUERIES, zeros(2, 5, 4, 4), zeros(2, 5, 4, 4)), {}, r'4 key/value heads .* 6'),
    (OTHERS, {}, r'7 keys for 5 .*key_positions'),
    (SEQUENCE, {'window': -3}, r'window=-3'),
    (SEQUENCE, {'window': 2.5}, r'window=2.5 must be an int'),
    (SEQUENCE, {'window': 2**31}, r'window=2147483648 must be an int below'),
    ((QUERIES.astype(int), KEYS, KEYS), {}, r'q_BTNH of dtype int64 must be floating'),
    (SEQUENCE, {'positions_BT': IDS * 1.0}, r'positions_BT of dtype float64 must be an integer'),
    (GIVEN, {'slot_rows_BT': IDS * 1.0}, r'slot_rows_BT of dtype float64 must be an integer'),
    (
        GIVEN,
        {'slot_mask_LBR': np.ones((7, 2, 5), int)},
        r'slot_mask_LBR of dtype int64 must be bool',
    ),
    ((QUERIES[..., :0], KEYS[..., :0], KEYS[..., :0]), {}, r'q has H=0'),
    (SEQUENCE, {'implementation': 'xal'}, r"'xal' must be None or one of .*xla"),
    (SEQUENCE, {'positions_BT': IDS[:, :4]}, r'positions.*\(2, 4\)'),
    (SEQUENCE, {'segment_ids_BT': IDS[:, :4]}, r'segment.*\(2, 4\)'),
    (
        OTHERS,
        {'key_positions_BS': np.zeros((2, 7), int), 'segment_ids_BT': IDS},
        r'need key_segment_ids',
    ),
    (SEQUENCE, {'key_segment_ids_BS': IDS}, r'key_segment_ids'),
    (
        SEQUENCE,
        {'segment_ids_BT': IDS, 'key_segment_ids_BS': IDS},
        r'key_segment_ids_BS need key_positions_BS',
    ),
    ((*SEQUENCE, SLOTS[:, :, :4], SLOTS[:, :, :4]), {}, r'k_depth.*\(7, 2, 4, 3, 4\)'),
    ((*SEQUENCE, SLOTS[:, :1], SLOTS), {'slot_rows_BT': ROWS}, r'k_depth.*\[L, 2, R, 3, 4\]'),
    ((*GIVEN[:4], SLOTS[:6]), {}, r'v_depth.*\(6, 2, 5, 3, 4\).*\[7, 2, 5, 3, 4\]'),
    ((*GIVEN[:4], SLOTS[0]), {}, r'v_depth.*\(2, 5, 3, 4\)'),
    (GIVEN[:4], {}, r'v_depth_LBRKH is None'),
    (SEQUENCE, {'num_slots': 1}, r'num_slots needs k_depth_LBRKH'),
    (GIVEN, {'num_slots': 8}, r'num_slots=8 .* 7 slots'),
    (GIVEN, {'slot_window': -2}, r'slot_window=-2'),
    (GIVEN, {'slot_sums': (SLOTS, SLOTS[:6])}, r'slot_sums .*\(6, 2, 5, 3, 4\)'),
    (GIVEN, {'slot_sums': (SLOTS.astype(np.float16),) * 2}, r'slot_sums .*both float32'),
    (GIVEN, {'num_slots': 2.0}, r'num_slots .*float32 must be one integer'),
    (GIVEN, {'scale': 'a'}, r"scale='a' must be a finite number, or None"),
    (GIVEN, {'scale': float('inf')}, r'scale=inf must be a finite number'),
    (GIVEN, {'num_slots': np.ones(1, int)}, r'num_slots of shape \(1,\)'),
    ((QUERIES[0], KEYS, KEYS), {}, r'q_BTNH of shape \(5, 6, 4\)'),
    ((QUERIES, KEYS[:, :, :0], KEYS[:, :, :0]), {}, r'0 key/value heads'),
    (SEQUENCE, {'slot_sums': (SLOTS, SLOTS)}, r'slot_sums needs k_depth_LBRKH'),
    (GIVEN, {'slot_mask_LBR': np.ones((7, 2, 4), bool)}, r'slot_mask.*\(7, 2, 4\)'),
    (GIVEN, {'slot_rows_BT': ROWS[:, :4]}, r'slot_rows.*\(2, 4\)'),
    (GIVEN, {'q_depth_BTNH': KEYS}, r'q_depth.*\(2, 5, 3, 4\)'),
    *((GIVEN, {'implementation': name}, 'supported: reference, xla, pallas') for name in HOPPER),
]


@pytest.mark.parametrize(('inputs', 'arguments', 'named'), REFUSED)
def test_wrong_arguments_are_refused(inputs, arguments, named):
    """Wrong shapes, unknown names and negative windows raise one line before compilation."""
    with pytest.raises(ValueError, match=named) as error:
        depth_attention(*inputs, **arguments)
    assert '\n' not in str(error.value)


def test_numbers_of_numpy_and_narrow_integers_are_numbers(monkeypatch):
    """Regression: a loop refused uint8, and the name of a measurement could not be written."""
    module, shapes = sys.modules[depth_attention.__module__], []

    def choose(implementation, found):
        shapes.append(json.dumps(found))
        return backends.choose(implementation, found)

    monkeypatch.setattr(module, 'choose', choose)

    def run(num_slots, scale, window):
        how = {'scale': scale, 'window': window, 'slot_window': window}
        return depth_attention(*GIVEN, num_slots=num_slots, implementation='xla', **how)

    by_numpy = jax.jit(lambda num: run(num, np.float32(0.25), np.int64(3)))
    by_python = jax.jit(lambda num: run(num, 0.25, 3))
    np.testing.assert_array_equal(by_numpy(jnp.uint8(5)), by_python(5))
    assert shapes[0] == shapes[1]


def test_a_traced_scale_is_refused():
    """Regression: it was an UnexpectedTracerError about custom_vjp."""
    with pytest.raises(ValueError, match='scale is traced and must be a number'):
        jax.eval_shape(lambda scale: depth_attention(*SEQUENCE, scale=scale), 1.0)
