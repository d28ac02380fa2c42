"""Checks and times decode_attention on this device."""

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import decode_attention
from kernels_pallas.autotune_decoding import hidden_number
from kernels_pallas.autotune_trial import on_cold_copies
from moddepth_jax.benchmarks.attention_check import allowed_errors, errors_of
from moddepth_jax.benchmarks.kernel_cases import exact
from moddepth_jax.benchmarks.timing import time_interleaved
from moddepth_jax.benchmarks.worker import WrongError

# The cache has B rows of S places, of which the first `length` are filled. C rows decode T tokens.
DEFAULTS = {'B': 2, 'T': 1, 'K': 2, 'G': 2, 'H': 64, 'S': 128, 'length': 100, 'L': 0}
DEFAULTS |= {'window': 0, 'document': 0, 'slot_window': 0, 'mask': False, 'own_query': False}
DEFAULTS |= {'rows': None, 'scattered': False}
CASES = {
    'usual': {'G': 8, 'H': 128, 'S': 1024, 'length': 1000, 'L': 64},
    'one_place': {'G': 1, 'S': 16, 'length': 1},
    'length_97': {'G': 3, 'H': 56, 'S': 112, 'length': 97, 'L': 7, 'document': 41},
    'length_200': {'K': 1, 'G': 5, 'H': 96, 'S': 208, 'length': 200, 'L': 24, 'window': 50},
    'length_1025': {'K': 1, 'G': 12, 'H': 128, 'S': 1040, 'length': 1025, 'L': 70},
    'long_window': {'K': 1, 'S': 1040, 'length': 1025, 'window': 300, 'document': 640},
    'rows': {'B': 5, 'rows': (4, 0, 2, 7), 'L': 1, 'own_query': True},
    'slots': {'K': 1, 'G': 8, 'L': 70, 'mask': True, 'own_query': True, 'length': 0},
    'newest': {'L': 20, 'slot_window': 9, 'scattered': True},
    'tokens': {'T': 3, 'G': 5, 'L': 7, 'window': 40, 'mask': True, 'own_query': True},
    'branches': {'T': 16, 'G': 4, 'K': 1, 'L': 3, 'scattered': True},
}


def _visible(case, rng):
    """bool [C, T, S] and [C, T, T]: whether new tokens see places of the cache and each other."""
    rows, tokens = len(case['rows'] or range(case['B'])), case['T']
    # Rows have different lengths; the last row sees all places.
    lengths = np.linspace(0.6, 1, rows).round(1) * case['length']
    positions = lengths.astype(int)[:, None] + np.arange(tokens)
    first = np.full(positions.shape, case['document'])
    if case['window']:
        first = np.maximum(first, positions - case['window'] + 1)

    def seen(index):
        return index[..., None, :] >= first[:, :, None]

    index = np.arange(case['S'])
    cached = seen(index) & (index < positions[:, :1])[:, None]
    own = seen(positions) & np.tri(tokens, dtype=bool)
    if case['scattered']:
        cached &= rng.random(cached.shape) < 0.6
        own &= rng.random(own.shape) < 0.6
    return cached, own | np.eye(tokens, dtype=bool)


def make_case(case: dict, dtype: str, hidden: float):
    """Return arguments of decode_attention, the exact o [C, T, N, H] in float64, and valid rows.

    `hidden` is the number that fills the places and slots that no token may see.
    """
    case = DEFAULTS | case
    rng, rows = np.random.default_rng(case['S'] + case['L']), case['rows']
    tokens, width, num_rows = case['T'], case['H'], len(rows or range(case['B']))
    heads, places = case['K'] * case['G'], case['S']

    def normal(*shape):
        return np.asarray(jnp.asarray(rng.normal(size=shape), dtype), np.float64)

    new, cached = (num_rows, tokens, case['K'], width), (case['B'], places, case['K'], width)
    q, q_depth = (normal(num_rows, tokens, heads, width) for _ in range(2))
    k, v, k_cache, v_cache = normal(*new), normal(*new), normal(*cached), normal(*cached)
    k_depth, v_depth = (normal(case['L'], *new) for _ in range(2))
    visible_CTS, visible_CTT = _visible(case, rng)
    mask = rng.random((case['L'], num_rows, tokens)) < (0.6 if case['mask'] else 2)
    shown = mask.copy()
    shown[: max(0, case['L'] - case['slot_window']) if case['slot_window'] else 0] = False
    chosen = np.arange(num_rows) if rows is None else np.array(rows, np.int32)
    counted = chosen < case['B']
    unseen = np.ones((case['B'], places), bool)
    unseen[chosen[counted]] = ~visible_CTS[counted].any(axis=1)
    for side in (k_cache, v_cache):
        side[unseen] = hidden
    for side in (k_depth, v_depth):
        side[~shown] = hidden
    of_row = np.minimum(chosen, case['B'] - 1)
    keys, values = (
        np.concatenate([cache[of_row], own], axis=1) for cache, own in ((k_cache, k), (v_cache, v))
    )
    grid = np.concatenate([visible_CTS, visible_CTT], axis=2)
    inputs = q, keys, values, k_depth, v_depth, q_depth if case['own_query'] else q
    cotangents = np.zeros(q.shape), np.zeros((num_rows, heads, tokens))
    taken = np.tile(np.arange(tokens), (num_rows, 1))
    right = exact(inputs, cotangents, taken, grid, np.moveaxis(shown, 0, 2), width**-0.5)[0]
    arrays = {'q_CTNH': q, 'k_CTKH': k, 'v_CTKH': v}
    arrays |= {'k_BKHS': np.moveaxis(k_cache, 1, 3), 'v_BKHS': np.moveaxis(v_cache, 1, 3)}
    if case['L']:
        arrays |= {'k_depth_LCTKH': k_depth, 'v_depth_LCTKH': v_depth}
        arrays |= {'q_depth_CTNH': q_depth} if case['own_query'] else {}
    given = {name: jnp.asarray(x, dtype) for name, x in arrays.items()}
    given |= {'visible_CTS': jnp.asarray(visible_CTS), 'visible_CTT': jnp.asarray(visible_CTT)}
    if rows is not None:
        given['rows_C'] = jnp.asarray(chosen)
    if case['mask']:
        given['slot_mask_LCT'] = jnp.asarray(mask)
    return given, right, counted


def program(implementation: str, slot_window: int = 0):
    """Return a jitted function from a dict of arguments to o_CTNH."""
    options = {'implementation': implementation, 'slot_window': slot_window}
    return jax.jit(lambda given: decode_attention(**given, **options))


def check(implementation: str, case: str, toy: bool = False) -> dict:
    """Compare an implementation in bfloat16 with the softmax in float64.

    The error must be at most twice that of XLA, a rerun must give equal bits, and `hidden_number`
    must change nothing. Raises WrongError if not, and ValueError if the device does not support it.
    """
    sizes, dtype = CASES[case], 'bfloat16'
    if toy:
        most = {'K': 1, 'G': 2, 'L': 5}
        cut = {name: min((DEFAULTS | sizes)[name], size) for name, size in most.items()}
        sizes = sizes | cut | {'S': 64, 'length': 40, 'document': 0}
    window = sizes.get('slot_window', 0)
    given, right, counted = make_case(sizes, dtype, hidden_number(implementation))
    run = program(implementation, window)
    first, second = (np.asarray(run(given), np.float64)[counted] for _ in range(2))
    plain = np.asarray(program('xla', window)(make_case(sizes, dtype, 0.0)[0]), np.float64)
    exact_o = {'o': right[counted]}
    allowed = allowed_errors(exact_o, {'o': plain[counted]}, dtype)
    errors, wrong = errors_of({'o': first}, exact_o, allowed)
    if not (first == second).all():
        wrong.append('o differs in a rerun')
    if wrong:
        raise WrongError('; '.join(wrong))
    return {'errors': errors, 'allowed': allowed}


def _find_wrong(run, given):
    """What is wrong with a program's result, compared with XLA's in float32; or None."""
    wide = {
        name: x.astype('float32') if x.dtype == jnp.bfloat16 else x for name, x in given.items()
    }
    with jax.default_matmul_precision('highest'):
        right = program('xla')(wide)
    results = run(given), program('xla')(given), right
    found, plain, right = ({'o': np.asarray(x, np.float64)} for x in results)
    wrong = errors_of(found, right, allowed_errors(right, plain, 'bfloat16'))[1]
    return wrong[0] if wrong else None


def least_bytes(case: dict) -> int:
    """Return the bytes of a bfloat16 call that reads visible keys, values and queries once."""
    tokens, kv_heads = case['T'], case['K']
    keys = case['length'] + tokens * (1 + case['L'])
    numbers = 2 * kv_heads * keys + 2 * tokens * kv_heads * case['G']
    return 2 * case['B'] * case['H'] * numbers


def time_one(implementation: str, sizes: dict, toy: bool = False) -> dict:
    """Time a call over full caches that are not in the L2 cache, interleaved with XLA's.

    Returns the median milliseconds of both, and the GB/s that follow from `least_bytes`. Raises
    WrongError, by the rule of `check`, if the result at this size is wrong.
    """
    case = DEFAULTS | sizes
    case |= {'B': 2, 'S': 64, 'length': 64, 'L': min(case['L'], 3)} if toy else {}
    batch, (tokens, kv_heads, width) = case['B'], (case['T'], case['K'], case['H'])
    new, heads = (batch, tokens, kv_heads, width), kv_heads * case['G']
    cache, slots = (batch, kv_heads, width, case['S']), (case['L'], *new)
    shapes = {'q_CTNH': (batch, tokens, heads, width), 'k_CTKH': new, 'v_CTKH': new}
    shapes |= {'k_BKHS': cache, 'v_BKHS': cache}
    shapes |= {'k_depth_LCTKH': slots, 'v_depth_LCTKH': slots} if case['L'] else {}
    given = {
        name: jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
        for i, (name, shape) in enumerate(shapes.items())
    }
    seen = np.arange(case['S']) < case['length']
    given['visible_CTS'] = jnp.asarray(np.tile(seen, (batch, tokens, 1)))
    given['visible_CTT'] = jnp.asarray(np.tile(np.tri(tokens, dtype=bool), (batch, 1, 1)))
    if wrong := _find_wrong(program(implementation), given):
        raise WrongError(wrong)
    calls, parts = {}, 1
    for name in (implementation, 'xla'):
        calls[name], parts = on_cold_copies(program(name), given)
    # Several calls per sample, so that clock resolution and launch overhead do not matter.
    counts = dict.fromkeys(calls, 1 if toy else -(-20 // parts))
    seconds = time_interleaved(calls, 2 if toy else 21, counts=counts)
    seconds = {name: each / parts for name, each in seconds.items()}
    ideal, mine = least_bytes(case), float(np.median(seconds[implementation]))
    ratio = float(np.median(seconds['xla'] / seconds[implementation]))
    row = {'sizes': case, 'milliseconds': 1e3 * mine, 'ideal_bytes': ideal}
    row |= {'xla_milliseconds': 1e3 * float(np.median(seconds['xla']))}
    return row | {'gigabytes_per_second': ideal / mine / 1e9, 'times_as_fast_as_xla': ratio}
