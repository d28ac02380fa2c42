"""The fused forward kernel on Hopper, interpreted and compared with float64."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import depth_attention
from kernels_pallas.backends import Parts
from kernels_pallas.mosaic import fused, tiles
from tests.kernels.cases import KINDS, draw, exact
from tests.kernels.depth_backends_test import interpreted, racing  # noqa: F401

SMALL = KINDS | {'B': 1, 'T': 5, 'N': 1, 'K': 1, 'H': 64, 'L': 1, 'num': None}
FUSED = Parts('xla', 'mosaic_gpu_fused', interpret=True)
# Documents of one token, and with a boundary inside, at the edge of and next to a block.
EDGES = (1, 126, 1, 1, 63, 8)
CASES = {
    'group_of_1': {'L': 7, 'num': 6},
    'group_of_2': {'N': 4, 'K': 2, 'T': 8, 'slot_window': 3, 'num': 7, 'L': 9},
    'group_of_3': {'N': 3, 'T': 17, 'H': 56, 'window': 5},
    'group_of_5': {'N': 5, 'T': 8, 'H': 96, 'L': 9, 'num': 4},
    'group_of_8': {'N': 8, 'T': 16, 'L': 8, 'own_query': True, 'H': 128},
    'group_of_12': {'N': 12, 'B': 2, 'own_query': True},
    'none_written': {'N': 2, 'T': 3, 'num': 0, 'L': 9},
    'masked': {'N': 8, 'T': 24, 'L': 10, 'mask': True},
    'rows': {'N': 2, 'T': 9, 'R': 14, 'L': 9, 'mask': True},
    'documents': {'N': 2, 'T': 24, 'segments': (1, 15, 3, 5), 'window': 4},
    'a_block_and_more': {'T': 131, 'segments': (40, 91)},
    'any_ids': {'N': 2, 'B': 2, 'T': 40, 'segments': 'any'},
}
LONG = {
    'edges_of_1': {'N': 2, 'K': 2, 'T': 200, 'segments': EDGES, 'L': 24, 'num': 20},
    'edges_of_3': {'N': 3, 'T': 200, 'segments': EDGES, 'L': 48, 'H': 96, 'mask': True},
    'edges_of_12': {'N': 12, 'T': 200, 'segments': EDGES, 'L': 7, 'window': 100},
    'any_ids_in_blocks': {'N': 2, 'B': 2, 'T': 200, 'segments': 'any', 'window': 150},
    'long': {'T': 1025, 'segments': (1, 383, 513, 128), 'L': 64},
    'long_window': {'N': 2, 'T': 1025, 'window': 300, 'L': 70, 'num': 66, 'slot_window': 30},
    'odd': {'N': 5, 'T': 97, 'L': 70, 'R': 99, 'H': 56, 'mask': True, 'own_query': True},
    'group_of_16': {'N': 32, 'K': 2, 'T': 37, 'L': 24, 'num': 18, 'H': 128, 'own_query': True},
    'group_of_32': {'N': 32, 'T': 141, 'segments': (99, 42), 'L': 9, 'R': 143, 'mask': True},
    'large': {'B': 2, 'N': 16, 'K': 2, 'T': 97, 'L': 40, 'num': 35, 'slot_window': 30, 'H': 128},
}
HALF = {
    'bfloat16': {'N': 2, 'T': 9, 'L': 9, 'segments': True},
    'float16': {'N': 3, 'T': 16, 'H': 96, 'mask': True, 'L': 8},
}
HALF_LONG = {
    'bfloat16': {'N': 4, 'K': 2, 'T': 200, 'H': 128, 'segments': EDGES, 'L': 70, 'num': 33},
    'float16': {'N': 8, 'T': 132, 'segments': True, 'mask': True, 'L': 24, 'own_query': True},
}


def run(implementation, inputs, arguments):
    """Return (o, lse), not jitted: an interpreted kernel must be alone in its program."""
    *arrays, q_depth = inputs
    options = {'implementation': implementation, 'return_lse': True, 'q_depth_BTNH': q_depth}
    return [np.asarray(x, float) for x in depth_attention(*arrays, **options, **arguments)]


def given(dtype='float32', **sizes):
    """Return (inputs, arguments, exact o, exact lse) of a case; hidden slots hold NaN."""
    case = SMALL | sizes
    inputs, cotangents, arguments, *seen = draw(**case)
    inputs = [jnp.asarray(x, dtype) for x in inputs]
    if not case['own_query']:
        inputs[5] = inputs[0]
    wide = [np.asarray(x.astype(jnp.float32)) for x in inputs]
    o, lse, _ = exact(wide, cotangents, *seen, case['scale'] or case['H'] ** -0.5)
    if not case['own_query']:
        inputs[5] = None
    arguments['num_slots'] = jnp.int32(case['L'] if case['num'] is None else case['num'])
    return inputs, arguments, o, lse


def check(**sizes):
    """Check float32 to 2e-6, so that rounding does not hide wrong masks, loads or sums."""
    inputs, arguments, o, lse = given(**sizes)
    got_o, got_lse = run(FUSED, inputs, arguments)
    np.testing.assert_allclose(got_o, o, rtol=0, atol=2e-6)
    np.testing.assert_allclose(got_lse, lse, rtol=0, atol=2e-6)


@interpreted
@pytest.mark.parametrize('name', CASES)
def test_equals_float64(name):
    check(**CASES[name])


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize('name', LONG)
def test_equals_float64_in_several_blocks(name):
    check(**LONG[name])


def check_half(dtype, sizes):
    inputs, arguments, o, lse = given(dtype, **sizes)
    (got_o, got_lse), (plain, _) = (
        run(name, inputs, arguments) for name in ('mosaic_gpu_fused', 'reference')
    )
    assert np.abs(got_o - o).max() <= 2 * np.abs(plain - o).max()
    np.testing.assert_allclose(got_lse, lse, rtol=0, atol=2e-6)


@interpreted
@pytest.mark.parametrize('dtype', HALF)
def test_half_precision_errs_at_most_twice_as_much_as_the_equation(dtype):
    check_half(dtype, HALF[dtype])


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize('dtype', HALF_LONG)
def test_half_precision_in_several_blocks(dtype):
    check_half(dtype, HALF_LONG[dtype])


@interpreted
def test_nan_of_another_document_does_not_show_and_a_rerun_has_the_same_bits():
    """Keys of documents that end before a tile are not loaded, not even within one block."""
    inputs, arguments, *_ = given(N=8, T=32, segments=(16, 16))
    before = run(FUSED, inputs, arguments)
    inputs[1:3] = (x.at[:, :16].set(jnp.nan) for x in inputs[1:3])
    after = run(FUSED, inputs, arguments)
    assert np.isnan(after[0][:, :16]).all() and np.isnan(after[1][:, :, :16]).all()
    assert before[0][:, 16:].tobytes() == after[0][:, 16:].tobytes()
    assert before[1][:, :, 16:].tobytes() == after[1][:, :, 16:].tobytes()


RACES = {
    'by_octet': {'N': 2, 'T': 9, 'L': 17, 'mask': True, 'R': 16},
    'by_row': {'N': 2, 'T': 9, 'L': 9, 'R': 14},
    'by_id': {'N': 2, 'B': 2, 'T': 40, 'segments': 'any'},
}


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize('name', RACES)
def test_no_race(name, racing, monkeypatch):  # noqa: F811
    """Barriers order copies, products and the clearing of hidden slots, with two stages."""
    monkeypatch.setattr(fused, 'MAX_STAGES', 2)
    check(**RACES[name])


def tiles_by_block(sizes, batch, ids_BT=None, bounds=(0, 0)):
    """Return the fields of `tile_of` for each block of the grid, as arrays by name."""
    refs = types.SimpleNamespace(q=jnp.zeros((batch, 1)), bounds=jnp.array(bounds, jnp.int32))
    if ids_BT is not None:
        refs.first = fused._documents(jnp.asarray(ids_BT, jnp.int32), sizes)['first']

    def one(item):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax.lax, 'axis_index', lambda name: item)
            return vars(tiles.tile_of(refs, sizes))

    items = sizes.blocks * batch * sizes.kv_heads
    return jax.tree.map(np.asarray, jax.vmap(one)(jnp.arange(items)))


def make_sizes(length, group, **changes):
    flags = dict.fromkeys(('documents', 'own_query', 'masked', 'copy_by_token', 'interpret'), False)
    numbers = {'kv_heads': 2, 'width': 64, 'stages': 8, 'window': 0, 'factor': 1.0}
    return tiles.Sizes(**{'length': length, 'group': group} | numbers | flags | changes)


def visible_ranges(length, window, ids_T):
    """Return the first visible key of each token of ascending ids, by search."""
    first = np.array([list(ids_T).index(x) for x in ids_T])
    return np.maximum(first, np.arange(length) - window + 1) if window else first


PLANS = {
    'one_document': {'group': 1},
    'group_of_2': {'group': 2, 'lengths': (1, 127, 512, 1, 59, 300)},
    'group_of_12': {'group': 12, 'lengths': (1, 1, 998)},
    'window': {'group': 1, 'window': 200},
    'window_in_documents': {'group': 2, 'window': 100, 'lengths': (50, 950)},
    'window_of_1': {'group': 8, 'window': 1},
}


@pytest.mark.parametrize('name', PLANS)
def test_blocks_hold_what_is_visible_and_little_else(name):
    """At most 7 keys before the first visible one are loaded; unmasked blocks hide nothing."""
    plan = {'lengths': (1000,), 'window': 0} | PLANS[name]
    length, window = sum(plan['lengths']), plan['window']
    ids = np.repeat(np.arange(len(plan['lengths'])), plan['lengths'])
    documents = len(plan['lengths']) > 1
    sizes = make_sizes(length, plan['group'], window=window, documents=documents)
    found = tiles_by_block(sizes, 2, np.tile(ids, (2, 1)) if documents else None)
    first, block = visible_ranges(length, window, ids), tiles.TILES * sizes.tokens
    assert set(zip(found['batch'], found['kv_head'], found['token'], strict=True)) == {
        (b, k, t) for b in range(2) for k in range(2) for t in range(0, length, block)
    }
    for i, token in enumerate(found['token']):
        last = min(token + block, length) - 1
        base, inside, causal, end = (found[x][i] for x in ('base', 'inside', 'causal', 'end'))
        lowest, highest = first[token : last + 1].min(), first[token : last + 1].max()
        assert base % 8 == 0 and 0 <= lowest - base < 8
        assert end == -(-(last + 1 - base) // tiles.KEYS)
        assert found['general'][i] == 0 and 0 <= inside <= causal <= end
        if inside < causal:
            assert base + inside * tiles.KEYS >= highest
            assert base + causal * tiles.KEYS <= token + 1
        # If all tokens see the same first key, at most one block is masked at either end.
        assert lowest != highest or inside <= (lowest % 8 > 0) and end - causal <= 2


def test_ids_that_come_back_have_every_block_compared():
    """Rows with ascending ids are masked by each query's first key, other rows by ids."""
    ids = np.array([[0] * 100 + [3] * 150, [7] * 100 + [2] * 100 + [7] * 50])
    sizes = make_sizes(250, 1, documents=True)
    found = tiles_by_block(sizes, 2, ids)
    np.testing.assert_array_equal(found['general'] == 0, found['batch'] == 0)
    last = found['batch'] == 1
    np.testing.assert_array_equal(found['general'][last], found['end'][last])
    assert not found['base'][last].any()


# Shipped configs that run in bfloat16: T, K, G, H, slots held.
SHIPPED = {
    'moda_700m': (4096, 4, 2, 128, 70),
    'moda_1b5': (4096, 6, 2, 128, 70),
    'openmythos_moda': (4096, 8, 2, 128, 23),
}


@pytest.mark.parametrize('name', SHIPPED)
def test_each_visible_slot_is_read_once(name):
    """The copied slots exceed the written ones by at most 5%, or by one group of 8."""
    length, kv_heads, group, width, held = SHIPPED[name]
    sizes = make_sizes(length, group, kv_heads=kv_heads, width=width)
    for written in (held, held // 2, 8, 1, 0):
        found = tiles_by_block(sizes, 1, bounds=(0, written))
        stages = (found['steps'] - 2 * found['end']).sum()
        read, ideal = stages * tiles.KEYS * width * 2, 2 * written * length * kv_heads * width * 2
        assert ideal <= read <= max(1.05 * ideal, -(-written // 8) * 8 * ideal / max(written, 1))


# G, query heads with rows, tokens of a tile
ROWS_OF_A_TILE = [
    *((1, 1, 64), (2, 2, 32), (3, 3, 16), (4, 4, 16), (5, 5, 8), (8, 8, 8)),
    *((9, 16, 4), (16, 16, 4), (17, 32, 2), (32, 32, 2)),
]


@pytest.mark.parametrize(('group', 'heads', 'number'), ROWS_OF_A_TILE)
def test_rows_of_a_tile(group, heads, number):
    """They are in the order of heads, above 8 of tokens; each has the numbers of its query."""
    sizes = make_sizes(41, group)
    assert (sizes.heads, sizes.tokens) == (heads, number)
    row = np.arange(heads * number)
    token, head = (row // heads, row % heads) if group > 8 else (row % number, row // number)
    np.testing.assert_array_equal(sizes.token_of(row), token)
    tokens = np.asarray(fused._by_row(jnp.arange(1, 42)[None], sizes))[0]
    assert tokens.shape == (2 * sizes.blocks, 64)
    token = token + number * np.arange(len(tokens))[:, None]
    np.testing.assert_array_equal(tokens[:, : len(row)], np.where(token < 41, token + 1, 0))
    of_query = np.arange(2 * 2 * group * 41).reshape(2, 2 * group, 41)
    rows = np.asarray(fused.to_rows(jnp.asarray(of_query), sizes, -1))
    padded = np.full((2, 2, heads, token.max() + 1), -1)
    padded[:, :, :group, :41] = of_query.reshape(2, 2, group, 41)
    np.testing.assert_array_equal(rows[..., : len(row)], padded[:, :, head, token])
    assert (rows[..., len(row) :] == -1).all()
    np.testing.assert_array_equal(fused.from_rows(jnp.asarray(rows), sizes), of_query)


def test_stages_fit_into_shared_memory():
    """At any width the ring has as many stages as shared memory holds, and at least two."""
    for width in (8, 56, 64, 96, 128):
        q = jnp.zeros((1, 8, 2, width), jnp.bfloat16)
        static = types.SimpleNamespace(window=0, slot_window=0, scale=1.0, parts=FUSED)
        slots = types.SimpleNamespace(mask_LBR=None, rows_BT=None, k_LBRKH=jnp.zeros((1, 1, 8, 1)))
        for own in (None, q):
            sizes = fused.make_sizes(q, q[:, :, :1], None, own, slots, static)
            tile = sizes.width * q.dtype.itemsize
            used = sizes.stages * tiles.KEYS * tile + (1 + (own is not None)) * 128 * tile
            assert 3 <= sizes.stages <= fused.MAX_STAGES and used <= fused.SHARED_BYTES
