"""A prompt in one pass and then token by token gives what the causal-routed full forward gives."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.model import kv_cache as cache_lib
from moddepth_jax.model.decoding import decode_step, prefill, unroll
from moddepth_jax.model.routing import batch_buckets
from moddepth_jax.model.transformer import Transformer

LENGTH, BATCH, SEPARATOR = 32, 4, 256
PROMPTS = np.array([3, 7, 1, 12])  # tokens of each row's prompt, padded to 16
FAST = {'xla_backend_optimization_level': 0}
GQA = {'model.num_heads': 4, 'model.num_kv_heads': 2, 'model.qk_norm': 'head'}
CASES = {
    'dense model': ('none', 'dense', {'model.windows': (5, 0)}),
    'predictor': ('learned', 'predictor', GQA),
    'aux_loss': ('learned', 'aux_loss', {'model.windows': (8, 0), 'model.tie_embeddings': True}),
    'aux_loss grows': ('learned', 'aux_loss', {'model.routing.overflow': 'grow'}),
    'threshold': ('learned', 'threshold', GQA | {'model.windows': (6, 9)}),
    'threshold grows': ('norm', 'threshold', {'model.routing.overflow': 'grow'}),
    'dense': ('norm', 'dense', {'model.norm_placement': 'post'}),
    'random': ('random', 'threshold', {'model.layer_loop': 'unrolled'}),
    'position': ('position', 'threshold', {'model.norm_placement': 'reordered'}),
    'straight_through': ('straight_through', 'threshold', {'model.routing.overflow': 'grow'}),
}


def random_weights(variables, seed=0):
    """As large as makes every part matter, logits being about 1; thresholds that let a third in."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name = path[-1].key
        fan = leaf.shape[-2] if leaf.ndim > 2 else leaf.shape[0]
        spread = {'scale': 0.1, 'kernel': 0.5 * fan**-0.5, 'w': 0.2}.get(name, 0.3)
        return (float(name == 'scale') + spread * rng.normal(size=leaf.shape)).astype(np.float32)

    return {'params': jax.tree_util.tree_map_with_path(draw, variables['params'])}


@functools.cache
def build(name, make_config):
    """(hparams, variables, tokens, segments, full logits, records) of a case."""
    router, rule, knobs = CASES[name]
    routing = {'model.routing.router': router, 'model.routing.capacity': 0.25}
    if router != 'none':
        routing['model.routing.causal_rule'] = rule
    shape = {'model.num_layers': 3, 'data.sequence_length': LENGTH}
    shape['model.routing.layers'] = '1,2'
    hparams = from_config(make_config(**shape, **routing, **knobs))
    rng = np.random.default_rng(5)
    tokens_BT = rng.integers(0, 256, (BATCH, LENGTH)).astype(np.int32)
    tokens_BT[1, 4] = tokens_BT[3, 20] = SEPARATOR  # a document ends in a prompt, one after it
    segments_BT = 1 + np.cumsum(tokens_BT == SEPARATOR, axis=1)
    model = Transformer(hparams)
    variables = random_weights(jax.eval_shape(model.init, jax.random.key(0), tokens_BT))
    if hparams.model.tracks_threshold:
        zeros = {'averages': {'thresholds_R': jnp.zeros(len(hparams.model.routed_layers))}}
        _, records = model.apply(variables | zeros, tokens_BT, segments_BT)
        quantile_R = jnp.quantile(records.routing.scores_BT, 0.6, axis=(1, 2))
        variables['averages'] = {'thresholds_R': quantile_R}
    full = jax.jit(functools.partial(model.apply, routing=rule), compiler_options=FAST)
    logits_BTV, records = full(variables, tokens_BT, segments_BT)
    return hparams, variables, tokens_BT, segments_BT, np.asarray(logits_BTV), records


@functools.cache
def programs(hparams, rule):
    """Jitted prefill, decode_step and write."""
    routing = hparams.model.routing
    slots = None if routing.overflow == 'grow' else routing.cache_size(LENGTH, rule)
    how = {'hparams': hparams, 'routing': rule}
    first = functools.partial(prefill, **how, capacity=LENGTH, routed_capacity=slots)
    step = functools.partial(decode_step, **how)
    return (
        jax.jit(first, compiler_options=FAST),
        jax.jit(step, compiler_options=FAST),
        jax.jit(cache_lib.update_cache, compiler_options=FAST),
    )


def start(hparams, variables, tokens_BT, segments_BT, rule, lengths_B):
    """(unrolled, logits, cache) of prompts of those lengths."""
    real = np.arange(16)[None] < lengths_B[:, None]
    unrolled = unroll(variables, hparams, rule)
    prompts_BT = np.where(real, tokens_BT[:, :16], 0)
    first, _, _ = programs(hparams, rule)
    logits_BV, cache = first(unrolled, prompts_BT, np.where(real, segments_BT[:, :16], 0))
    if hparams.model.routing.overflow == 'grow':
        slots = hparams.model.routing.cache_size(LENGTH, rule)
        cache = cache_lib.resize_cache(cache, max(slots, cache_lib.longest_routed_row(cache) + 1))
    return unrolled, logits_BV, cache


def decode(hparams, variables, tokens_BT, segments_BT, rule, lengths_B=PROMPTS):
    """Logits of a prompt's last token and of each token after it, NaN before, and the cache."""
    unrolled, logits_BV, cache = start(hparams, variables, tokens_BT, segments_BT, rule, lengths_B)
    rows = np.arange(len(lengths_B))
    out = np.full((len(rows), LENGTH, hparams.model.vocab_size), np.nan, np.float32)
    out[rows, lengths_B - 1] = logits_BV
    _, step, write = programs(hparams, rule)
    position_B = lengths_B.copy()
    while (position_B < LENGTH).any():
        active_B = position_B < LENGTH
        token_B = tokens_BT[rows, np.minimum(position_B, LENGTH - 1)]
        begins_B = token_B == SEPARATOR
        logits_BV, entries, dropped_B = step(unrolled, cache, token_B, begins_B, active_B)
        cache = write(cache, entries, begins_B, dropped_B, active_B)
        out[rows[active_B], position_B[active_B]] = np.asarray(logits_BV)[active_B]
        position_B += active_B
        if hparams.model.routing.overflow == 'grow':
            used = cache_lib.longest_routed_row(cache)
            if used == max(layer.capacity for layer in cache.layers if layer.lengths_B is not None):
                cache = cache_lib.resize_cache(cache, used + 4)
    return out, cache


SLOW = ('aux_loss', 'aux_loss grows', 'threshold', 'straight_through', 'dense', 'random')


@pytest.mark.parametrize(
    'name', [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES]
)
def test_prompt_and_steps_equal_the_full_forward(name, tiny_config):
    """At most 1e-5 apart at every token, for rows of different lengths and packed documents."""
    hparams, variables, tokens_BT, segments_BT, full_BTV, records = build(name, tiny_config)
    rule = CASES[name][1]
    decoded_BTV, cache = decode(hparams, variables, tokens_BT, segments_BT, rule)
    known_BT = np.arange(LENGTH)[None] >= PROMPTS[:, None] - 1
    assert np.isnan(decoded_BTV[~known_BT]).all()
    assert 0.5 < np.abs(full_BTV).max() < 8
    np.testing.assert_allclose(decoded_BTV[known_BT], full_BTV[known_BT], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(cache.lengths_B, [LENGTH] * BATCH)
    if records is None:
        return
    entered = np.asarray(records.routing.selected_BT)
    layers = [layer for layer in cache.layers if layer.lengths_B is not None]
    for layer, selected_BT in zip(layers, entered, strict=True):
        np.testing.assert_array_equal(layer.lengths_B, selected_BT.sum(axis=1))
        for row in range(BATCH):
            positions = np.asarray(layer.positions_BS)[row, : selected_BT[row].sum()]
            np.testing.assert_array_equal(positions, np.flatnonzero(selected_BT[row]))
    np.testing.assert_array_equal(
        cache.dropped_B, np.asarray(records.routing.dropped_BT).sum((0, 2))
    )
    if rule != 'dense':
        assert (0.05 < entered.mean(axis=(1, 2))).all() and entered.mean() < 0.6


def test_the_cases_fill_caches_and_refuse_tokens(tiny_config):
    """The cases above meet what they are for: full caches under `skip`, growth beyond them."""
    refused = {name: np.asarray(build(name, tiny_config)[-1].routing.dropped_BT).sum() for name in (
        'aux_loss', 'threshold', 'aux_loss grows', 'threshold grows')}  # fmt: skip
    assert refused['aux_loss'] > 0 and refused['threshold'] > 0
    assert refused['aux_loss grows'] == refused['threshold grows'] == 0
    hparams, *_, records = build('threshold grows', tiny_config)
    most = np.asarray(records.routing.selected_BT).sum(axis=2).max()
    assert most > hparams.model.routing.cache_size(LENGTH, 'threshold')


@pytest.mark.parametrize('name', ['predictor', 'threshold'])
def test_a_row_decodes_alone_as_among_others(name, tiny_config):
    """Batch mates change rounding at most, whatever bucket size their entering rows need."""
    hparams, variables, tokens_BT, segments_BT, *_ = build(name, tiny_config)
    rule = CASES[name][1]
    together, _ = decode(hparams, variables, tokens_BT, segments_BT, rule)
    for row in (1, 3):
        mine = slice(row, row + 1)
        alone, _ = decode(
            hparams, variables, tokens_BT[mine], segments_BT[mine], rule, PROMPTS[mine]
        )
        np.testing.assert_allclose(together[mine], alone, rtol=0, atol=1e-5)


def test_a_step_changes_no_bit_of_an_inactive_row(tiny_config):
    """Rows that have ended keep their cache bit for bit while others go on."""
    hparams, variables, tokens_BT, segments_BT, *_ = build('predictor', tiny_config)
    unrolled, _, before = start(hparams, variables, tokens_BT, segments_BT, 'predictor', PROMPTS)
    active_B = np.array([True, False, True, False])
    no_B = np.zeros(BATCH, bool)
    _, step, write = programs(hparams, 'predictor')
    _, entries, dropped_B = step(unrolled, before, tokens_BT[:, 12], no_B, active_B)
    after = write(before, entries, no_B, dropped_B, active_B)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(old[~active_B], new[~active_B])
    np.testing.assert_array_equal(after.lengths_B - before.lengths_B, active_B)


def test_a_threshold_is_never_made_up(tiny_config):
    """Without the averages of its scores, a learned router's threshold rule is refused by name."""
    hparams, variables, *_ = build('threshold', tiny_config)
    without = {'params': variables['params']}
    for refuse in (
        lambda: unroll(without, hparams, 'threshold'),
        lambda: Transformer(hparams).apply(without, np.zeros((1, 4), np.int32), None, 'threshold'),
    ):
        with pytest.raises(ValueError, match="routing='threshold': needs averages"):
            refuse()
    hparams, variables, *_ = build('random', tiny_config)
    assert 'averages' not in variables and len(unroll(variables, hparams, 'threshold')['layers'])


def test_buckets_are_few_and_hold_any_number():
    """0, an eighth, a quarter, a half and all of the rows; at batch 1 a conditional."""
    assert batch_buckets(1) == (0, 1)
    assert batch_buckets(4) == (0, 1, 2, 4)
    assert batch_buckets(64) == (0, 8, 16, 32, 64)
    assert batch_buckets(10) == (0, 2, 3, 5, 10)


def shapes_of_programs(hparams, slots, batch=8):
    """(function, abstract arguments) of prefill, decode_step and write for a learned router."""
    how = {'hparams': hparams, 'routing': 'predictor'}
    routed_capacity = hparams.model.routing.cache_size(slots, 'predictor')
    init = functools.partial(Transformer(hparams).init, jax.random.key(0))
    variables = jax.eval_shape(init, jnp.zeros((1, 8), jnp.int32))
    unrolled = jax.eval_shape(functools.partial(unroll, **how), variables)
    prompts = jax.ShapeDtypeStruct((batch, 16), 'int32')
    first = functools.partial(prefill, **how, capacity=slots, routed_capacity=routed_capacity)
    _, cache = jax.eval_shape(first, unrolled, prompts, prompts)
    row, flag = (jax.ShapeDtypeStruct((batch,), dtype) for dtype in ('int32', 'bool'))
    step, of_step = functools.partial(decode_step, **how), (unrolled, cache, row, flag, flag)
    _, entries, _ = jax.eval_shape(step, *of_step)
    of_write = (cache, entries, flag, row, flag)
    return (
        (first, (unrolled, prompts, prompts)),
        (step, of_step),
        (cache_lib.update_cache, of_write),
    )


def test_no_program_copies_a_cache(tiny_config):
    """Neither the reading step nor the donated write holds a copy as large as a layer's cache."""
    # Slots that no other array's size resembles, and full optimisation.
    config = tiny_config(**{'model.routing.router': 'learned', 'data.sequence_length': 1208})
    _, (step, of_step), (write, of_write) = shapes_of_programs(from_config(config), 1208)
    reading = jax.jit(step).lower(*of_step).compile()
    writing = jax.jit(write, donate_argnums=0).lower(*of_write).compile()
    for compiled in (reading, writing):
        text = compiled.as_text()
        assert re.search(r'f32\[8,2,8,1208\]', text) and re.search(r'f32\[8,2,8,226\]', text)
        copies = re.findall(r'= f32\[8,2,8,(?:1208|226)\]\S* copy\(', text)
        assert not copies, copies
    # The smallest cache of a block, in bytes; all temporary arrays together are less.
    assert writing.memory_analysis().temp_size_in_bytes < 8 * 2 * 8 * 226 * 4


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_programs_lower_for_gpus(dtype, tiny_config, monkeypatch):
    """Prefill, step and write become StableHLO for CUDA, in the forms that are not for CPUs."""
    monkeypatch.setattr('jax.default_backend', lambda: 'gpu')
    config = tiny_config(**{'model.routing.router': 'learned', 'model.dtype': dtype})
    for function, arguments in shapes_of_programs(from_config(config), 32):
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=('cuda',))
        assert 'stablehlo' in lowered.as_text()
