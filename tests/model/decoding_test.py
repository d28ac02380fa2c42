"""A prompt in one pass and then token by token gives the logits of the causal forward pass."""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.hparams.rules import causal_routing
from moddepth_jax.model import kv_cache
from moddepth_jax.model.decoding import decode_step, extend, prefill, unroll
from moddepth_jax.model.flops import dot_general_flops
from moddepth_jax.model.layers import lm_head
from moddepth_jax.model.routing import batch_buckets
from moddepth_jax.model.transformer import Transformer
from tests.model.cases import (
    ALL_LOOKED_UP,
    ATTENTION,
    AVERAGE,
    BATCH,
    CASES,
    CONSTRAINED,
    DENSE,
    EMBEDDED,
    HEAD_NORM,
    HYPER,
    LENGTH,
    LOOKED_UP,
    LOOPED,
    MIXED,
    MODA,
    MUDD,
    RECENT,
    RECURSIONS,
    ROUTED,
    SOURCES,
    SOURCES_OF_3,
    SPARSE,
    STATIC,
    TOKENS_BT,
    UNROLLED,
    VALUES,
    build,
    equations,
    filled,
    parameters,
    small_hparams,
)

# A document ends after the prompt of row 0, and within the prompt of row 2.
SEGMENTS_BT = np.array([[1] * 8 + [2] * 8, [1] * LENGTH, [1] * 2 + [2] * 14])
CHUNK = 4


class Rows(NamedTuple):
    """Rows of tokens that begin with prompts."""

    tokens_BT: np.ndarray
    segments_BT: np.ndarray
    prompts_B: np.ndarray  # length of each row's prompt
    chunks_B: np.ndarray  # tokens that each row gets at a time; rows end with different lengths

    @property
    def begins_BT(self):
        return np.diff(self.segments_BT, axis=1, prepend=1) > 0


ROWS = Rows(TOKENS_BT, SEGMENTS_BT, np.array([3, 1, 4]), np.array([3, 4, 2]))
# A batch whose buckets do not have every size: three rows are computed as four.
FOUR_ROWS = Rows(
    np.concatenate([TOKENS_BT, TOKENS_BT[:1, ::-1]]),
    np.concatenate([SEGMENTS_BT, SEGMENTS_BT[1:2]]),
    np.array([3, 1, 4, 4]),
    np.array([3, 4, 2, 3]),
)
# Cases in which some tokens do not fit the cache.
DROPS = ('aux_loss', 'threshold', 'attention routed, aux_loss', 'mlp routed')
DROPS += ('mlp routed, threshold',)


@functools.cache
def programs(hparams, routing):
    """Return jitted (prefill, one-token step, extension). The last two also update the cache."""
    how = {'hparams': hparams, 'routing': routing}
    capacity = None if hparams.model.routing.overflow == 'grow' else cache_size(hparams, routing)
    first = functools.partial(prefill, **how, capacity=LENGTH, routed_capacity=capacity)

    def step(unrolled, cache, *inputs):  # [B, 1] each
        logits_BV, updates, dropped_BT = decode_step(
            unrolled, cache, *(side_B1[:, 0] for side_B1 in inputs), **how
        )
        _, begins_BT, active_BT = inputs
        cache = kv_cache.update_cache(cache, updates, begins_BT, dropped_BT, active_BT)
        return logits_BV[:, None], cache

    def several(unrolled, cache, tokens_BT, begins_BT, active_BT):
        inputs = unrolled, cache, tokens_BT, begins_BT, active_BT
        x_BTD, updates, dropped_BT = extend(*inputs, **how)
        cache = kv_cache.update_cache(cache, updates, begins_BT, dropped_BT, active_BT)
        return lm_head(x_BTD, unrolled), cache

    return jax.jit(first), jax.jit(step), jax.jit(several)


def cache_size(hparams, routing):
    return hparams.model.routing.cache_size(LENGTH, routing)


def start(model, rows=ROWS):
    """Return (unrolled variables, logits, cache) of the prompts."""
    hparams, variables, routing, _ = model
    first, *_ = programs(hparams, routing)
    real_BT = np.arange(rows.prompts_B.max())[None] < rows.prompts_B[:, None]
    tokens_BT, segments_BT = (
        side[:, : real_BT.shape[1]] for side in (rows.tokens_BT, rows.segments_BT)
    )
    unrolled = unroll(variables, hparams, routing)
    logits_BV, cache = first(
        unrolled, np.where(real_BT, tokens_BT, 7), np.where(real_BT, segments_BT, 0)
    )
    if hparams.model.routing.overflow == 'grow':
        most = max(cache_size(hparams, routing), kv_cache.longest_routed_row(cache) + 1)
        cache = kv_cache.resize_cache(cache, most)
    return unrolled, logits_BV, cache


def decode(model, rows=ROWS, in_chunks=False):
    """Return the logits of a prompt's last token and of each later token, and the cache.

    Earlier logits are NaN. Tokens come one by one, or `chunks_B` at a time.
    """
    unrolled, logits_BV, cache = start(model, rows)
    _, step, several = programs(model.hparams, model.routing)
    run, size = (several, CHUNK) if in_chunks else (step, 1)
    begins_BT = rows.begins_BT
    position_B, each = rows.prompts_B.copy(), np.arange(len(rows.prompts_B))
    out = np.full((*rows.tokens_BT.shape, model.hparams.model.vocab_size), np.nan, np.float32)
    out[each, position_B - 1] = logits_BV
    while (position_B < LENGTH).any():
        if model.hparams.model.routing.overflow == 'grow':
            cache = grown(cache, size)
        taken_B = np.minimum(LENGTH - position_B, rows.chunks_B if in_chunks else 1)
        active_BT = np.arange(size)[None] < taken_B[:, None]
        at_BT = each[:, None], np.minimum(position_B[:, None] + np.arange(size), LENGTH - 1)
        tokens_BT = np.where(active_BT, rows.tokens_BT[at_BT], 7)
        begins = begins_BT[at_BT] & active_BT
        logits_BTV, cache = run(unrolled, cache, tokens_BT, begins, active_BT)
        for row, taken in enumerate(taken_B):
            now = slice(position_B[row], position_B[row] + taken)
            out[row, now] = logits_BTV[row, :taken]
        position_B += taken_B
    return out, cache


def grown(cache, more):
    """Return the cache with more room in routed blocks, if it has less than all tokens need."""
    used = kv_cache.longest_routed_row(cache)
    routed = [layer for layer in cache.layers if layer.lengths_B is not None]
    too_small = routed and used + more > routed[0].capacity
    return kv_cache.resize_cache(cache, LENGTH) if too_small else cache


def decode_both(model, rows=ROWS):
    """Run `decode` in chunks, and assert that single steps give the same logits to 1e-5."""
    (in_chunks_BTV, cache), (by_steps_BTV, _) = decode(model, rows, True), decode(model, rows)
    np.testing.assert_allclose(in_chunks_BTV, by_steps_BTV, rtol=0, atol=1e-5)
    return in_chunks_BTV, cache


# Queries and keys are not normed, or blocks add up much: float32 rounds each of the
# two by 1e-5 already.
IN_FLOAT64 = ('attention stream', 'value embeddings, hyper-connections', 'value embeddings grow')
IN_FLOAT64 += ('adapters, looped moda', 'looped', 'recursions, aux_loss', 'token choice')
IN_FLOAT64 += ('embedding residual, values', 'looped, exits of a block with all')
IN_FLOAT64 += ('token choice, gated exit', 'looped hyper-connections', 'row capacity')
IN_FLOAT64 += ('aux_loss', 'mudd')
FAST = ('norm threshold grows', 'mudd', 'shared values', 'value attention, recent')
FAST += ('experts choose', 'recursions', 'value embeddings, attention residual')


@pytest.mark.parametrize('name', parameters(FAST))
def test_prompt_and_steps_equal_the_full_forward(name, tiny_config):
    check_decoding(name, tiny_config, decode)


WITH_STEPS = ('dense', 'aux_loss', 'mod and moda')
FAST_IN_CHUNKS = (*WITH_STEPS, 'row capacity', 'mlp routed', 'looped, exits')
FAST_IN_CHUNKS += ('token choice, first keys',)


@pytest.mark.parametrize('name', parameters(FAST_IN_CHUNKS))
def test_several_tokens_at_a_time_equal_steps_and_the_full_forward(name, tiny_config, monkeypatch):
    """Three models are compared with single steps too, the others with the full forward alone.

    With four rows, a loop computes more rows than have a token in it.
    """
    # Several blocks of keys; the capacity cuts off the last one.
    monkeypatch.setattr('kernels_pallas.decode._block', lambda: (5, 3))
    monkeypatch.setattr('kernels_pallas.decode._IN_PLACE', 1)
    by_loops = 'loops' in CASES[name][0].values() or 'exits' in name
    in_chunks = functools.partial(decode, in_chunks=True)
    decoded = decode_both if name in WITH_STEPS else in_chunks
    check_decoding(name, tiny_config, decoded, FOUR_ROWS if by_loops else ROWS)


BRANCHES_BT = np.array([[1, 1, 2, 2, 2, 3, 0], [1, 2, 2, 2, 2, 3, 3], [1, 1, 1, 2, 3, 3, 3]])

# Experts with a `row_capacity` count the tokens of a whole row, so `extend` wants one branch there.
SEVERAL_BRANCHES = [
    name for name, (knobs, _) in CASES.items() if not knobs.get('model.experts.row_capacity')
]


@pytest.mark.parametrize('name', parameters(('aux_loss', 'mod and moda'), SEVERAL_BRANCHES))
def test_branches_continue_from_the_cache_independently(name, tiny_config):
    """Also if a branch fills a routed block's cache."""
    model = build(tiny_config, name)
    unrolled, _, cache = start(model)
    cache = kv_cache.resize_cache(cache, kv_cache.longest_routed_row(cache) + 1)
    if model.hparams.model.routing.part == 'mlp':
        used_B = np.full(BATCH, cache_size(model.hparams, model.routing) - 1, np.int32)
        counted = (layer.selected_B is not None for layer in cache.layers)
        layers = [
            layer._replace(selected_B=used_B) if counts else layer
            for layer, counts in zip(cache.layers, counted, strict=True)
        ]
        cache = cache._replace(layers=tuple(layers))
    how = {'hparams': model.hparams, 'routing': model.routing}
    run = jax.jit(functools.partial(extend, **how))
    tokens_BT, begins_BT, drops = TOKENS_BT[:, :7] ^ 1, np.zeros((BATCH, 7), bool), 0
    together_BTD, _, dropped_BT = run(unrolled, cache, tokens_BT, begins_BT, BRANCHES_BT)
    for branch in (1, 2, 3):
        mine_BT = BRANCHES_BT == branch
        first_BT = np.arange(7)[None] < mine_BT.sum(axis=1, keepdims=True)
        alone_BT = np.zeros_like(tokens_BT)
        alone_BT[first_BT] = tokens_BT[mine_BT]
        inputs = alone_BT, begins_BT, first_BT.astype(int)
        alone_BTD, _, of_branch_BT = run(unrolled, cache, *inputs)
        np.testing.assert_allclose(together_BTD[mine_BT], alone_BTD[first_BT], rtol=0, atol=1e-5)
        np.testing.assert_array_equal(dropped_BT[mine_BT], of_branch_BT[first_BT])
        drops += of_branch_BT[first_BT].sum()
    assert drops or name not in DROPS


def check_decoding(name, tiny_config, decode, rows=ROWS):
    """Assert equality to 1e-5 at every token, for rows of different lengths and documents.

    The cache has the selected tokens. It counts dropped tokens and, under `row_capacity`, the
    tokens that each expert took.
    """
    wide = name in IN_FLOAT64
    with jax.enable_x64(wide), jax.numpy_rank_promotion('allow' if wide else 'raise'):
        in_float64 = functools.partial(tiny_config, **{'model.dtype': 'float64'})
        model = build(in_float64 if wide else tiny_config, name)
        full_BTV, records = model(rows.tokens_BT, rows.segments_BT)
        decoded_BTV, cache = decode(model, rows)
    known_BT = np.arange(LENGTH)[None] >= rows.prompts_B[:, None] - 1
    assert np.isnan(decoded_BTV[~known_BT]).all() and 0.5 < np.abs(full_BTV).max() < 20
    np.testing.assert_allclose(decoded_BTV[known_BT], full_BTV[known_BT], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(cache.lengths_B, [LENGTH] * len(rows.prompts_B))
    if model.hparams.model.routed_layers:
        check_routed(name, model, records.routing, cache, rows)
    if model.hparams.model.experts.row_capacity:
        assert (records.experts.dropped > 0).all()
        pairs_XE = np.sum([layer.taken_BE for layer in cache.layers], axis=1)
        np.testing.assert_array_equal(pairs_XE, records.experts.pairs_Z)
    else:
        assert all(layer.taken_BE is None for layer in cache.layers)


def check_routed(name, model, record, cache, rows):
    layers = [layer for layer in cache.layers if layer.lengths_B is not None]
    selected_LBT = record.selected_BT
    if model.hparams.model.routing.part == 'mlp':  # dense caches, which count
        counts_LB = [layer.selected_B for layer in cache.layers if layer.selected_B is not None]
        np.testing.assert_array_equal(counts_LB, selected_LBT.sum(axis=2))
        assert not layers and all(layer.capacity == LENGTH for layer in cache.layers)
        selected_LBT = selected_LBT[:0]
    if model.hparams.model.routing.routes_loops:  # the first loop caches all tokens in order
        size = len(model.hparams.model.looped_range)
        selected_LBT = selected_LBT[1:].repeat(size, axis=0)
        if model.hparams.model.routing.loop_keys == 'first':
            selected_LBT = ()  # only this loop has caches
            assert len(cache.layers) == model.hparams.model.num_layers
    for layer, selected_BT in zip(layers, selected_LBT, strict=True):
        np.testing.assert_array_equal(layer.lengths_B, selected_BT.sum(axis=1))
        for row in range(len(rows.prompts_B)):
            positions = np.asarray(layer.positions_BS)[row, : selected_BT[row].sum()]
            np.testing.assert_array_equal(positions, np.flatnonzero(selected_BT[row]))
    np.testing.assert_array_equal(cache.dropped_B, record.dropped_BT.sum((0, 2)))
    if model.routing != 'dense':
        later_BT = np.arange(LENGTH) >= rows.prompts_B[:, None]
        assert 0.1 < record.selected_BT[:, later_BT].mean() < 0.9
    assert name not in DROPS or record.dropped_BT.any()
    assert 'grows' not in name or not record.dropped_BT.any()
    if name == 'norm threshold grows':
        assert record.selected_BT.sum(axis=2).max() > cache_size(model.hparams, model.routing)


def test_a_step_changes_no_bit_of_an_inactive_row(tiny_config):
    """Rows that have ended keep their cache bit for bit while others continue."""
    model = build(tiny_config, 'aux_loss')
    unrolled, _, before = start(model)
    active_B, no_B = np.array([True, False, False]), np.zeros(BATCH, bool)
    _, step, _ = programs(model.hparams, model.routing)
    _, after = step(unrolled, before, TOKENS_BT[:, 12:13], no_B[:, None], active_B[:, None])
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(old[~active_B], new[~active_B])
    np.testing.assert_array_equal(after.lengths_B - before.lengths_B, active_B)


def test_a_prompt_longer_than_the_context_is_refused(tiny_config):
    """Regression: all further tokens had the position of the last one."""
    hparams = from_config(tiny_config())
    tokens_BT = np.zeros((1, hparams.data.sequence_length + 1), int)
    with pytest.raises(ValueError, match='33 tokens; must be at most data.sequence_length=32'):
        prefill({}, tokens_BT, tokens_BT, hparams=hparams, routing='dense', capacity=40,
                routed_capacity=None)  # fmt: skip


def test_buckets_are_few_and_hold_any_number():
    """Buckets are 0, an eighth, a quarter, a half and all of the rows."""
    assert batch_buckets(1) == (0, 1)
    assert batch_buckets(4) == (0, 1, 2, 4)
    assert batch_buckets(64) == (0, 8, 16, 32, 64)
    assert batch_buckets(10) == (0, 2, 3, 5, 10)


def shapes_of_prefill(hparams, capacity, batch):
    """Return prefill, its abstract arguments, and the Cache that it returns."""
    routing = causal_routing(hparams)
    how = {'hparams': hparams, 'routing': routing}
    routed_capacity = hparams.model.routing.cache_size(capacity, routing)
    init = functools.partial(Transformer(hparams).init, jax.random.key(0))
    variables = jax.eval_shape(init, jnp.zeros((1, 8), jnp.int32))
    unrolled = jax.eval_shape(functools.partial(unroll, **how), variables)
    prompts = jax.ShapeDtypeStruct((batch, 8), 'int32')
    first = functools.partial(prefill, **how, capacity=capacity, routed_capacity=routed_capacity)
    _, cache = jax.eval_shape(first, unrolled, prompts, prompts)
    return first, (unrolled, prompts, prompts), cache


def shapes_of_programs(hparams, capacity, batch=8):
    """Return (function, abstract arguments) of prefill, decode_step and update_cache."""
    first, inputs, cache = shapes_of_prefill(hparams, capacity, batch)
    how = {'hparams': hparams, 'routing': causal_routing(hparams)}
    row, flag = (jax.ShapeDtypeStruct((batch,), dtype) for dtype in ('int32', 'bool'))
    flag_B1 = jax.ShapeDtypeStruct((batch, 1), 'bool')
    step, of_step = functools.partial(decode_step, **how), (inputs[0], cache, row, flag, flag)
    _, updates, dropped_B1 = jax.eval_shape(step, *of_step)
    of_update = (cache, updates, flag_B1, dropped_B1, flag_B1)
    return (
        (first, inputs),
        (step, of_step),
        (kv_cache.update_cache, of_update),
    )


# What a step computes for skipped rows, in each of the last two loops of two blocks.
SKIPS = {
    'recursions': (RECURSIONS | {'model.routing.causal_rule': 'aux_loss'}, 'nothing'),
    'exits': (LOOPED | HEAD_NORM | {'model.loop_exit_threshold': 0.5}, 'keys and values'),
}


@pytest.mark.parametrize('name', SKIPS)
def test_a_step_computes_only_the_rows_of_a_loop(name, tiny_config):
    """A loop runs on the smallest bucket of rows: none, a part of the batch, or all."""
    batch, (knobs, skipped) = 8, SKIPS[name]
    hparams = small_hparams(tiny_config, knobs, {'data.sequence_length': 16})
    model = hparams.model
    _, (step, of_step), _ = shapes_of_programs(hparams, 16, batch)
    program = jax.make_jaxpr(step)(*of_step)
    branches = [
        eqn.params['branches'] for eqn in equations(program.jaxpr) if eqn.primitive.name == 'cond'
    ]
    buckets = [each for each in branches if len(each) == len(batch_buckets(batch))]
    assert len(buckets) == 2  # the first of three loops has all tokens
    projected = 2 * batch * model.d_model * model.num_kv_heads * model.head_dim
    of_skipped = {'nothing': 0, 'keys and values': 2 * 2 * projected}[skipped]
    for each in buckets:
        costs = [dot_general_flops(branch) for branch in each]
        assert costs[0] == of_skipped and costs == sorted(costs)
        assert costs[-1] > 4 * (costs[1] - of_skipped) > 0
    cache = of_step[1]
    sizes = {layer.capacity for layer in cache.layers if layer.lengths_B is not None}
    assert sizes == ({15, 6} if name == 'recursions' else set())  # 1.5 times 10 and 4 of 16 tokens


@pytest.mark.parametrize('routing', [{}, pytest.param(ROUTED, marks=pytest.mark.slow)])
def test_no_slot_outlives_its_token(routing, tiny_config):
    """The cache equals that of the plain model: depth slots are not stored in it."""

    def shapes(*stream):
        hparams = small_hparams(tiny_config, {'model.num_layers': 2}, routing, *stream)
        *_, cache = shapes_of_prefill(hparams, 16, batch=3)
        return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(cache)]

    expected = shapes()
    dense_only = () if routing else (MUDD, MUDD | UNROLLED)
    kept = ATTENTION, AVERAGE, DENSE, MODA, SOURCES, SOURCES_OF_3, MIXED, EMBEDDED, LOOKED_UP
    kept += VALUES, SPARSE, RECENT | {'model.depth.value_stride': 2}
    kept += HYPER, STATIC, CONSTRAINED, ALL_LOOKED_UP
    for stream in (*kept, *dense_only):
        assert shapes(stream) == expected


def test_no_program_copies_a_cache(tiny_config):
    """Neither the reading step nor the donated update has a copy as large as a layer's cache."""
    # A capacity that differs from all other sizes.
    config = tiny_config(**{'model.routing.router': 'learned', 'data.sequence_length': 1208})
    _, (step, of_step), (update, of_update) = shapes_of_programs(from_config(config), 1208)
    reading = jax.jit(step).lower(*of_step).compile()
    updating = jax.jit(update, donate_argnums=0).lower(*of_update).compile()
    for compiled in (reading, updating):
        text = compiled.as_text()
        assert re.search(r'f32\[8,2,8,1208\]', text) and re.search(r'f32\[8,2,8,226\]', text)
        copies = re.findall(r'= f32\[8,2,8,(?:1208|226)\]\S* copy\(', text)
        assert not copies, copies
    # The smallest cache of a block in bytes. All temporary arrays together are smaller.
    assert updating.memory_analysis().temp_size_in_bytes < 8 * 2 * 8 * 226 * 4


def test_programs_lower_for_gpus(tiny_config, monkeypatch):
    """Prefill, step and update lower to StableHLO for CUDA, with the forms that GPUs use."""
    monkeypatch.setattr('jax.default_backend', lambda: 'gpu')
    config = tiny_config(**{'model.routing.router': 'learned', 'model.dtype': 'bfloat16'})
    for function, arguments in shapes_of_programs(from_config(config), 32):
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=('cuda',))
        assert 'stablehlo' in lowered.as_text()


# Under `threshold`, the last block drops the last token of row 0 and selects that of row 1.
# That of row 2 begins a document. Two earlier tokens are within every window.
LONG_B = np.array([16, 4, 3])
AT_ONCE = ('dense', 'predictor', 'threshold', 'norm threshold grows', 'mod and moda', 'mudd')
AT_ONCE += ('attention routed', 'attention routed, aux_loss', 'mlp routed', 'mlp routed, threshold')
AT_ONCE += ('value residual', 'shared values', 'hyper-connections', 'attention residual', 'random')
AT_ONCE += ('recursions, threshold',)
OVERFLOWS = ('threshold', 'recursions, threshold')


@pytest.mark.parametrize('name', parameters(('dense', 'threshold', 'mudd'), AT_ONCE))
def test_a_prompt_equals_an_extension_of_an_empty_cache(name, tiny_config):
    """Both give the same last logits and cache, also if the last block drops tokens."""
    model = build(tiny_config, name)
    first, _, several = programs(model.hparams, model.routing)
    variables = model.variables
    if name == 'recursions, threshold':  # all tokens go on, and only some fit
        thresholds_R = variables['averages']['thresholds_R']
        variables = variables | {'averages': {'thresholds_R': thresholds_R - 5}}
    unrolled = unroll(variables, model.hparams, model.routing)
    real_BT = np.arange(LENGTH)[None] < LONG_B[:, None]
    tokens_BT = np.where(real_BT, TOKENS_BT, 7)
    logits_BV, cache = first(unrolled, tokens_BT, np.where(real_BT, SEGMENTS_BT, 0))
    empty = jax.tree.map(jnp.zeros_like, cache)
    logits_BTV, extended = several(unrolled, empty, tokens_BT, ROWS.begins_BT & real_BT, real_BT)
    expected_BV = np.asarray(logits_BTV)[np.arange(BATCH), LONG_B - 1]
    np.testing.assert_allclose(logits_BV, expected_BV, rtol=0, atol=1e-5)
    for found, expected in zip(filled(cache), filled(extended), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert name not in OVERFLOWS or np.asarray(cache.dropped_B).any()


@pytest.mark.parametrize('stream', [{}, MODA, MUDD])
def test_the_last_block_of_a_prompt_runs_its_mlp_on_the_last_token_only(stream, tiny_config):
    """The program has no mlp for the other tokens, because nothing reads it."""
    hparams = small_hparams(tiny_config, {'model.num_layers': 3, 'model.d_ff': 40}, stream)
    (first, inputs), *_ = shapes_of_programs(hparams, 16, batch=3)
    text = jax.jit(first).lower(*inputs).as_text()
    wide = re.findall(r'dot_general.*-> tensor<(\d+)x40xf32>', text)
    assert sorted(map(int, wide)) == [3, 3, 24, 24, 24, 24]  # 3 rows of 8 tokens
