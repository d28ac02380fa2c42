"""A prompt and then token by token with experts: one causal pass over the whole text."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.inference.generate import generate
from moddepth_jax.model import kv_cache as cache_lib
from moddepth_jax.model.attention import TokenInfo
from moddepth_jax.model.decoding import decode_step, prefill, unroll
from moddepth_jax.model.kv_cache import LayerCache
from moddepth_jax.model.mod.mixture_of_depths import MixtureOfDepths, RoutingArgs
from moddepth_jax.model.moe import experts as experts_module
from moddepth_jax.model.moe.experts import Experts, ExpertState
from moddepth_jax.model.transformer import Transformer
from tests.model.cases import (
    CAUSAL,
    FAST,
    HALF_ROUTED,
    drawn_like,
    experts,
    idle_router,
    random_variables_with_thresholds,
    small_hparams,
)

LENGTH, PROMPT, SEPARATOR = 12, 4, 0
PROMPTS_B = np.array([3, 1, 4])  # tokens of each row's prompt


def model_of(make_config, name):
    knobs, rule = CAUSAL[name]
    sizes = {'model.num_layers': 2, 'data.sequence_length': LENGTH}
    routed = {'model.routing.layers': '1', 'model.routing.cache_capacity': 2.0}
    hparams = small_hparams(make_config, sizes, routed, knobs)
    return hparams, rule


def text():
    """tokens_BT, segment_ids_BT: a document ends in row 0 after its prompt, in row 2 within it."""
    tokens_BT = np.random.default_rng(5).integers(1, 32, (3, LENGTH)).astype(np.int32)
    tokens_BT[0, 6] = tokens_BT[2, 2] = SEPARATOR
    return tokens_BT, 1 + np.cumsum(tokens_BT == SEPARATOR, axis=1)


@functools.cache
def programs(hparams, rule):
    """Jitted prefill, decode_step and write."""
    how = {'hparams': hparams, 'routing': rule}
    slots = hparams.model.routing.cache_size(LENGTH, rule)
    first = functools.partial(prefill, **how, capacity=LENGTH, routed_capacity=slots)
    step = functools.partial(decode_step, **how)
    return tuple(jax.jit(f, compiler_options=FAST) for f in (first, step, cache_lib.update_cache))


def decoded(hparams, variables, rule, prompts_B, rows=slice(None)):
    """Logits of a prompt's last token and of each token after it, NaN before; and the cache."""
    first, step, write = programs(hparams, rule)
    tokens_BT, segments_BT = (side[rows] for side in text())
    real_BT = np.arange(PROMPT)[None] < prompts_B[:, None]
    unrolled, places = unroll(variables, hparams, rule), np.arange(len(prompts_B))
    logits_BV, cache = first(
        unrolled,
        np.where(real_BT, tokens_BT[:, :PROMPT], 7),
        np.where(real_BT, segments_BT[:, :PROMPT], 0),
    )
    out = np.full((*tokens_BT.shape, hparams.model.vocab_size), np.nan, np.float32)
    out[places, prompts_B - 1] = logits_BV
    at_B = prompts_B.copy()
    while (at_B < LENGTH).any():
        active_B = at_B < LENGTH
        token_B = tokens_BT[places, np.minimum(at_B, LENGTH - 1)]
        begins_B = token_B == SEPARATOR
        logits_BV, entries, dropped_B = step(unrolled, cache, token_B, begins_B, active_B)
        cache = write(cache, entries, begins_B, dropped_B, active_B)
        out[places[active_B], at_B[active_B]] = np.asarray(logits_BV)[active_B]
        at_B += active_B
    return out, cache


def check(make_config, name):
    hparams, rule = model_of(make_config, name)
    tokens_BT, segments_BT = text()
    variables = random_variables_with_thresholds(hparams, tokens_BT, seed=2)
    full = functools.partial(Transformer(hparams).apply, routing=rule)
    full_BTV, records = jax.jit(full, compiler_options=FAST)(variables, tokens_BT, segments_BT)
    found_BTV, cache = decoded(hparams, variables, rule, PROMPTS_B)
    known_BT = np.arange(LENGTH)[None] >= PROMPTS_B[:, None] - 1
    assert np.isnan(found_BTV[~known_BT]).all() and 0.5 < np.abs(full_BTV).max() < 16
    np.testing.assert_allclose(found_BTV[known_BT], full_BTV[known_BT], rtol=0, atol=1e-5)
    if name not in FEW:
        alone_BTV, _ = decoded(hparams, variables, rule, PROMPTS_B[2:], slice(2, 3))
        np.testing.assert_allclose(alone_BTV, found_BTV[2:], rtol=0, atol=1e-5)
    if records.routing is not None:
        selected_RBT = np.asarray(records.routing.selected_BT)
        assert 0.1 < selected_RBT[:, known_BT].mean() < 0.9
    if hparams.model.experts.row_capacity:
        assert (np.asarray(records.experts.dropped) > 0).all()
        pairs_XE = np.sum([layer.taken_BE for layer in cache.layers], axis=1)
        np.testing.assert_array_equal(pairs_XE, records.experts.pairs_Z)
    else:
        assert all(layer.taken_BE is None for layer in cache.layers)


FEW = ('row capacity', 'staged thresholds')


@pytest.mark.parametrize(
    'name',
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in FEW)) for name in CAUSAL],
)
def test_prompt_and_steps_equal_the_full_forward(name, tiny_config):
    """At most 1e-5 apart, for rows of different lengths and documents; the slow ones for a row by
    itself too.

    What the cache counts under `row_capacity` is what the whole text chose.
    """
    check(tiny_config, name)


@pytest.fixture
def filled(monkeypatch):
    """A list to which every run of experts appends the blocks of its layout that hold some."""
    seen, whole = [], experts_module.make_layout

    def watched(expert_Nk, num_experts, *rest):
        layout = whole(expert_Nk, num_experts, *rest)
        count = (layout.expert_M < num_experts).sum()
        jax.debug.callback(lambda count: seen.append(int(count)), count)
        return layout

    monkeypatch.setattr(experts_module, 'make_layout', watched)
    return seen


@pytest.mark.parametrize('batch', [1, 9])
def test_a_row_that_skips_runs_no_expert(batch, filled, tiny_config):
    """Where no row enters, the block's experts are not reached; where one of nine does, in a bucket
    of two, only its own are.
    """
    one = {'model.routing.layers': '0', 'model.num_layers': 1}
    hparams = small_hparams(tiny_config, HALF_ROUTED, one, experts()).model
    block = MixtureOfDepths(hparams, 0, 'aux_loss', experts=True)
    positions_B1, ones_B1 = np.full((batch, 1), 3), np.ones((batch, 1), np.int32)
    layer = RoutingArgs(np.int32(0), np.float32(0), np.bool_(True), ExpertState())
    keys_BKHS = np.zeros((batch, hparams.num_kv_heads, hparams.head_dim, 4), np.float32)
    none_B, x_B1D = np.zeros(batch, np.int32), np.zeros((batch, 1, hparams.d_model), np.float32)
    cache = LayerCache(keys_BKHS, keys_BKHS, np.zeros((batch, 4), np.int32), none_B)
    tokens = TokenInfo(positions_B1, ones_B1, None)
    given = (tokens, layer, cache, none_B, np.ones(batch, bool), None)
    given = jax.tree.map(jnp.asarray, given)
    whole = MixtureOfDepths(hparams, 0, 'top_c', experts=True)
    init = (jax.random.key(0), x_B1D, tokens, layer)
    params = drawn_like(jax.eval_shape(whole.init, *init)['params'])
    params['router']['w'] = np.eye(hparams.d_model, dtype=np.float32)[0]
    step = jax.jit(
        lambda x_B1D: block.apply({'params': params}, x_B1D, *given, method='decode')[::2],
        compiler_options=FAST,
    )
    x_B1D = np.random.default_rng(0).normal(size=x_B1D.shape).astype(np.float32)
    for entering, expected in (([], []), ([batch - 1], [2])):
        del filled[:]  # tracing the shapes runs nothing
        x_B1D[..., 0] = np.where(np.isin(np.arange(batch), entering), 1, -1)[:, None]
        y_B1D, entry = jax.block_until_ready(step(x_B1D))
        jax.effects_barrier()
        assert filled == expected
        assert np.flatnonzero(entry.selected_B).tolist() == entering
        same_B = (np.asarray(y_B1D) == x_B1D).all((1, 2))
        np.testing.assert_array_equal(same_B, ~np.asarray(entry.selected_B))


@pytest.mark.parametrize('length', [1, pytest.param(5, marks=pytest.mark.slow)])
def test_experts_that_do_nothing_run_nothing(length, filled, tiny_config):
    """No block of the layout holds an expert where all tokens chose no-op experts, in a row of one
    token as of several; nor where an expert's room in the row is used up.
    """
    x_BTD = np.random.default_rng(0).normal(size=(1, length, 16)).astype(np.float32)
    real_BT = np.ones((1, length), bool)
    for knobs, taken_BE, computed in (
        ({'num_noop': 4}, None, 0),
        ({'top_k': 5, 'row_capacity': 3}, np.array([[3, 4, 3, 2, 3]]), 1),
    ):
        hparams = small_hparams(tiny_config, experts(**knobs)).model
        module, limits = Experts(hparams, ahead=False), ExpertState(None, taken_BE)
        shapes = jax.eval_shape(module.init, jax.random.key(0), x_BTD, real_BT, limits)['params']
        params, choices = drawn_like(shapes), hparams.experts.num_choices
        params['router']['kernel'] = idle_router(16, choices)
        run = jax.jit(module.apply, compiler_options=FAST)
        del filled[:]
        y_BTD, record, _ = run({'params': params}, x_BTD, real_BT, limits)
        jax.block_until_ready(y_BTD)
        jax.effects_barrier()
        assert filled == [computed]
        assert record.tokens == length


def test_generation_is_refused_without_a_causal_rule(tiny_config):
    """By name: top-C of experts looks at whole rows; thresholds are never made up."""
    hparams, _ = model_of(tiny_config, 'thresholds')
    variables = jax.eval_shape(
        Transformer(hparams).init, jax.random.key(0), jax.ShapeDtypeStruct((1, 4), np.int32)
    )
    with pytest.raises(ValueError, match="routing='top_c'"):
        generate(variables, hparams, [[1, 2]], 2, routing='top_c')
    with pytest.raises(ValueError, match="routing='dense': its experts choose"):
        generate(variables, hparams, [[1, 2]], 2, routing='dense')
    params = {
        'params': random_variables_with_thresholds(hparams, np.zeros((1, 4), np.int32))['params']
    }
    for refuse in (
        lambda: generate(params, hparams, [[1, 2]], 2),
        lambda: unroll(params, hparams, 'threshold'),
    ):
        with pytest.raises(ValueError, match="routing='threshold': needs averages"):
            refuse()


@pytest.mark.slow
@pytest.mark.parametrize('name', CAUSAL)
def test_generated_text_is_that_of_the_full_forward(name, tiny_config):
    """Each token drawn at temperature 0 is the most likely one of one causal pass over all."""
    hparams, rule = model_of(tiny_config, name)
    variables = random_variables_with_thresholds(hparams, np.zeros((1, LENGTH), np.int32), seed=2)
    prompts = [[5, 6, 7], [9]]
    made = generate(variables, hparams, prompts, 8, temperature=0.0, num_samples=2)
    for i, tokens in enumerate(made.tokens):
        prompt = len(prompts[i // 2])
        assert len(tokens) == prompt + 8
        logits_BTV, _ = Transformer(hparams).apply(variables, tokens[None], routing=rule)
        likely_T = np.argmax(logits_BTV[0], axis=-1)
        np.testing.assert_array_equal(tokens[prompt:], likely_T[prompt - 1 : -1])
