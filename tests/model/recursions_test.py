"""Mixture-of-Recursions: equal models, which tokens go on, the cache, and the program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.model.attention import FirstKeys
from moddepth_jax.model.decoding import prefill, unroll
from moddepth_jax.model.kv_cache import cache_bytes
from moddepth_jax.model.layer import LayerArgs
from moddepth_jax.model.layers import embed, rms_norm
from moddepth_jax.model.mod.mixture_of_recursions import TokenChoice, loops_of
from moddepth_jax.model.routing import gather_tokens
from moddepth_jax.model.stack import Stack, unstack_layers
from moddepth_jax.model.transformer import Transformer, token_info
from tests.model.cases import (
    FIRST_KEYS,
    GROWS,
    LOOPED,
    RECURSIONS,
    SMALL_BT,
    SMALL_SEGMENTS_BT,
    TOKEN_CHOICE,
    equations,
    random_variables,
    small_hparams,
)

B, T = SMALL_BT.shape
AUX = {'model.routing.causal_rule': 'aux_loss'}
ALL_TOKENS = {'model.routing.capacity': 1.0, 'model.routing.gate': 'none'}
FLOAT64 = {'model.dtype': 'float64'}


@functools.cache
def jitted(hparams, method):
    return jax.jit(functools.partial(Transformer(hparams).apply, method=method))


def apply(hparams, variables, tokens_BT, segments_BT=None, method='__call__'):
    """Return what a method of the model gives, in NumPy."""
    segments_BT = np.ones_like(SMALL_SEGMENTS_BT) if segments_BT is None else segments_BT
    return jax.device_get(jitted(hparams, method)(variables, tokens_BT, segments_BT))


def test_all_tokens_through_all_loops_are_the_looped_model(tiny_config):
    """With gates of 1 and loop_update=change, logits and gradients are equal."""
    change = ALL_TOKENS | {'model.routing.loop_update': 'change'}
    with jax.enable_x64(True), jax.numpy_rank_promotion('allow'):
        routed = small_hparams(tiny_config, RECURSIONS, AUX, change, FLOAT64)
        looped = small_hparams(tiny_config, LOOPED, FLOAT64)
        variables = random_variables(routed, SMALL_BT)
        weights_BTV = np.random.default_rng(7).normal(size=(B, T, 32))
        weights_BTV *= (SMALL_SEGMENTS_BT > 0)[..., None]  # padding goes through no loop

        def loss(params, hparams):
            logits_BTV, _ = Transformer(hparams).apply(
                {'params': params}, SMALL_BT, SMALL_SEGMENTS_BT
            )
            return jnp.sum(jnp.tanh(logits_BTV) * weights_BTV)

        params = variables['params']
        plain = restacked(routed, looped, params)
        found, gradient = jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, routed)
        wanted, expected = jax.jit(jax.value_and_grad(loss), static_argnums=1)(plain, looped)
        gradient = restacked(routed, looped, gradient)
    np.testing.assert_allclose(found, wanted, rtol=1e-10)
    for one, other in zip(*map(jax.tree.leaves, (gradient, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-7, atol=1e-9)


def restacked(source, target, params):
    """Return the parameters of one model in the runs of another, without routers."""
    shapes = jax.eval_shape(Transformer(target).init, jax.random.key(0), SMALL_BT)['params']
    sources, places = (Stack(hparams.model, 'top_c').visits for hparams in (source, target))
    stack = jax.tree.map(lambda leaf: np.zeros(leaf.shape), shapes['stack'])
    for (place, to), (other, at) in zip(places, sources, strict=True):
        own, given = stack[place.run][place.layer], params['stack'][other.run][other.layer]
        for side, leaf in zip(jax.tree.leaves(own), jax.tree.leaves(given), strict=True):
            side[to.row] = leaf[at.row]
    return {name: leaf for name, leaf in params.items() if name != 'loop_routers'} | {
        'stack': stack
    }


def test_the_papers_update_adds_the_whole_output(tiny_config):
    """x + f(x) for each of two loops of one block, with gates of 1 for all tokens."""
    sizes = {'model.num_layers': 1, 'model.looped_layers': 'all', 'model.loops': 2}
    hparams = small_hparams(tiny_config, RECURSIONS, AUX, ALL_TOKENS, sizes)
    variables = random_variables(hparams, SMALL_BT)
    params = variables['params']
    found_BTD, _ = apply(hparams, variables, SMALL_BT, SMALL_SEGMENTS_BT, method='hidden_states')
    stack = Stack(hparams.model, 'top_c')
    ((kind, of_layer), _) = unstack_layers(stack, params['stack'])
    tokens = token_info(hparams, jnp.asarray(SMALL_BT), jnp.asarray(SMALL_SEGMENTS_BT))
    x_BTD = embed(params['embedding'], SMALL_BT, 'float32')
    for _ in range(2):
        x_BTD += stack.apply(kind, of_layer, x_BTD, None, tokens, LayerArgs()).x_BTD
    expected_BTD = rms_norm(x_BTD, params['final_norm']['scale'], hparams.model.norm_eps)
    real_BT = SMALL_SEGMENTS_BT > 0  # padding does not change
    np.testing.assert_allclose(found_BTD[real_BT], expected_BTD[real_BT], rtol=1e-5, atol=1e-5)


def test_the_gate_of_loops_is_positive_by_default(tiny_config):
    """Regression: the first loop selects all tokens, and had raw gates with a mean of 0."""
    for knobs, gate in (RECURSIONS, 'sigmoid'), (TOKEN_CHOICE, 'softmax'):
        routing = small_hparams(tiny_config, knobs, {'model.routing.gate': 'auto'}).model.routing
        assert routing.gate == gate


@pytest.mark.parametrize('loop_update', ['gated_loops', 'gated_exit'])
def test_token_choice_is_its_definition(loop_update, tiny_config):
    """Two loops of one block on all tokens, where tokens that have left are hidden."""
    sizes = {'model.num_layers': 1, 'model.looped_layers': 'all', 'model.loops': 2}
    knobs = sizes | {'model.routing.loop_update': loop_update}
    hparams = small_hparams(tiny_config, TOKEN_CHOICE, knobs)
    variables = random_variables(hparams, SMALL_BT)
    params, real_BT = variables['params'], SMALL_SEGMENTS_BT > 0
    found_BTD, records = apply(
        hparams, variables, SMALL_BT, SMALL_SEGMENTS_BT, method='hidden_states'
    )
    stack = Stack(hparams.model, 'top_c')
    ((kind, of_layer), _) = unstack_layers(stack, params['stack'])

    def f(x_BTD, segment_ids_BT):
        tokens = token_info(hparams, jnp.asarray(SMALL_BT), jnp.asarray(segment_ids_BT))
        return stack.apply(kind, of_layer, x_BTD, None, tokens, LayerArgs()).x_BTD

    x_BTD = first_BTD = embed(params['embedding'], SMALL_BT, 'float32')
    scores_BTN = first_BTD @ params['loop_routers']['router']['w'].T
    goes_on_BT = scores_BTN[..., 1] > scores_BTN[..., 0]
    assert 0.2 < goes_on_BT[real_BT].mean() < 0.8
    g_BTN = 2 * jax.nn.softmax(scores_BTN)  # gate_scale is 2
    one_BTD, goes_on_BT1 = f(x_BTD, SMALL_SEGMENTS_BT), goes_on_BT[..., None]
    gated_BTD = g_BTN[..., :1] * one_BTD
    through_BTD = gated_BTD if loop_update == 'gated_loops' else one_BTD
    x_BTD = jnp.where(goes_on_BT1, through_BTD, first_BTD + gated_BTD)
    two_BTD = f(x_BTD, np.where(goes_on_BT, SMALL_SEGMENTS_BT, 0))
    x_BTD = jnp.where(goes_on_BT1, first_BTD + g_BTN[..., 1:] * two_BTD, x_BTD)
    expected_BTD = rms_norm(x_BTD, params['final_norm']['scale'], hparams.model.norm_eps)
    np.testing.assert_allclose(found_BTD[real_BT], expected_BTD[real_BT], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(records.routing.selected_BT[1], goes_on_BT & real_BT)


def test_later_loops_read_the_keys_of_the_first(tiny_config):
    """Three loops of one block by hand: the keys are those of all tokens in the first loop."""
    sizes = {'model.num_layers': 1, 'model.looped_layers': 'all', 'model.loops': 3}
    knobs = sizes | FIRST_KEYS | GROWS | {'model.windows': (5,)}
    hparams = small_hparams(tiny_config, RECURSIONS, AUX, knobs)
    variables = random_variables(hparams, SMALL_BT)
    params = variables['params']
    found_BTD, records = apply(
        hparams, variables, SMALL_BT, SMALL_SEGMENTS_BT, method='hidden_states'
    )
    stack = Stack(hparams.model, 'top_c')
    (kind, of_layer), *_ = unstack_layers(stack, params['stack'])
    tokens = token_info(hparams, jnp.asarray(SMALL_BT), jnp.asarray(SMALL_SEGMENTS_BT))
    x_BTD, keys = embed(params['embedding'], SMALL_BT, 'float32'), None
    record = records.routing
    for gates_BT, selected_BT in zip(record.gates_BT, record.selected_BT, strict=True):
        first = None if keys is None else FirstKeys(keys, tokens)
        made = stack.apply(kind, of_layer, x_BTD, None, tokens, LayerArgs(), None, first)
        keys = made.aux.keys
        change_BTD = jnp.where(selected_BT[..., None], gates_BT[..., None] * made.x_BTD, 0)
        x_BTD = x_BTD + change_BTD
    sizes_R = record.selected_BT.sum(axis=(1, 2))
    assert 0 < sizes_R[2] < sizes_R[1] < sizes_R[0] == (SMALL_SEGMENTS_BT > 0).sum()
    expected_BTD = rms_norm(x_BTD, params['final_norm']['scale'], hparams.model.norm_eps)
    real_BT = SMALL_SEGMENTS_BT > 0
    np.testing.assert_allclose(found_BTD[real_BT], expected_BTD[real_BT], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('loops', [pytest.param(2, marks=pytest.mark.slow), 5])
def test_loops_select_among_those_of_the_loop_before(loops, tiny_config):
    """k_r = floor(c_r T) of T, not of the candidates, with c_r from 1 down to the capacity."""
    knobs = {'model.loops': loops, 'model.routing.capacity': 1 / loops}
    hparams = small_hparams(tiny_config, RECURSIONS, AUX, knobs)
    variables = random_variables(hparams, SMALL_BT)
    record = apply(hparams, variables, SMALL_BT)[1].routing
    selected_RBT = record.selected_BT
    shares = (np.arange(loops, 0, -1)) / loops  # (N - r + 1) / N, as in the paper
    sizes_R1 = np.floor(shares * T + 1e-9).astype(int)[:, None]
    np.testing.assert_array_equal(selected_RBT.sum(axis=2), np.broadcast_to(sizes_R1, (loops, B)))
    assert (selected_RBT[1:] <= selected_RBT[:-1]).all()
    scores_RBT = record.scores_BT
    for loop in range(1, loops):
        for b in range(B):
            before, now = selected_RBT[loop - 1, b], selected_RBT[loop, b]
            scores_T = scores_RBT[loop, b]
            assert scores_T[now].min() > scores_T[before & ~now].max(initial=-np.inf)


def test_tokens_that_cannot_be_chosen_do_not_bias_the_loss(tiny_config):
    """Where there is no choice, the rule's logits are certain and have no gradient."""
    knobs = {'model.loops': 5, 'model.routing.capacity': 1 / 5}
    hparams = small_hparams(tiny_config, RECURSIONS, AUX, knobs)
    variables = random_variables(hparams, SMALL_BT)
    record = apply(hparams, variables, SMALL_BT, SMALL_SEGMENTS_BT)[1].routing
    logits_RBT = record.rule_logits_BT
    free_RBT = np.abs(logits_RBT) < 1e8
    assert not free_RBT[0].any() and (logits_RBT[0] > 0).sum() == (SMALL_SEGMENTS_BT > 0).sum()
    np.testing.assert_array_equal(free_RBT[1:], record.selected_BT[:-1])


@pytest.mark.parametrize(('more', 'share'), [({}, 2 / 3), (FIRST_KEYS | GROWS, 1 / 3)])
def test_the_cache_is_as_large_as_the_loops_are(more, share, tiny_config):
    """It is (N + 1) / (2 N) of the looped model's if capacities fall evenly to 1 / N; or 1 / N."""
    size = 24
    knobs = {'model.routing.capacity': 1 / 3, 'model.routing.cache_capacity': 1.0}
    knobs |= {'model.looped_layers': 'all', 'model.num_layers': 1, 'data.sequence_length': size}
    sizes = []
    for hparams in (
        small_hparams(tiny_config, RECURSIONS, AUX, knobs, more),
        small_hparams(tiny_config, LOOPED, knobs),
    ):
        routed = bool(hparams.model.routed_layers)
        how = {'hparams': hparams, 'routing': 'aux_loss' if routed else 'dense'}
        unrolled = unroll(random_variables(hparams, SMALL_BT), hparams, how['routing'])
        how |= {'capacity': size, 'routed_capacity': 1}
        _, cache = jax.eval_shape(
            lambda u, h=how: prefill(u, SMALL_BT, SMALL_SEGMENTS_BT, **h), unrolled
        )
        layers = [layer._replace(positions_BS=None, lengths_B=None) for layer in cache.layers]
        sizes.append(sum(map(cache_bytes, layers)))
    assert sizes[0] / sizes[1] == pytest.approx(share)


@pytest.mark.parametrize(
    'more',
    [pytest.param({}, marks=pytest.mark.slow), FIRST_KEYS],
    ids=['own keys', 'first keys'],
)
def test_a_document_does_not_see_another(more, tiny_config):
    """Under the causal rule, the first document does not change the results of the second."""
    hparams = small_hparams(tiny_config, RECURSIONS, AUX, GROWS, more)
    variables = random_variables(hparams, SMALL_BT)
    other_BT = np.where(np.arange(T)[None] < 7, (SMALL_BT + 5) % 32, SMALL_BT)
    run = jax.jit(
        lambda tokens: Transformer(hparams).apply(variables, tokens, SMALL_SEGMENTS_BT, 'aux_loss')[
            0
        ]
    )
    one_BTV, other_BTV = run(SMALL_BT), run(other_BT)
    # The first document affects where tokens of the second are gathered, and so their rounding.
    np.testing.assert_allclose(one_BTV[0, 7:], other_BTV[0, 7:], rtol=0, atol=1e-5)
    assert (one_BTV[1, 7:10] != other_BTV[1, 7:10]).any()


def test_bfloat16(tiny_config):
    """The stream has the dtype of the model, scores are float32, and logits near float32 ones."""
    wide, narrow = (
        small_hparams(tiny_config, RECURSIONS, AUX, ALL_TOKENS, {'model.dtype': dtype})
        for dtype in ('float32', 'bfloat16')
    )
    variables = random_variables(wide, SMALL_BT)
    (expected_BTV, _), (found_BTV, records) = (
        apply(hparams, variables, SMALL_BT) for hparams in (wide, narrow)
    )
    assert records.routing.scores_BT.dtype == np.float32
    hidden = functools.partial(Transformer(narrow).apply, method='hidden_states')
    assert jax.eval_shape(hidden, variables, SMALL_BT)[0].dtype == jnp.bfloat16
    error = np.linalg.norm(found_BTV - expected_BTV) / np.linalg.norm(expected_BTV)
    assert error < 0.05


@pytest.mark.parametrize('loop_update', ['gated_loops', 'gated_exit'])
def test_the_new_x_of_token_choice_is_rounded_once(loop_update, tiny_config):
    """Regression: x + (new - x) lost digits where gates are small, in whole rows and new tokens."""
    knobs = {'model.dtype': 'bfloat16', 'model.routing.loop_update': loop_update}
    hparams = small_hparams(tiny_config, TOKEN_CHOICE, knobs)
    rng = np.random.default_rng(0)
    x_BTD, y_BTD, first_BTD = jnp.bfloat16(rng.normal(size=(3, B, T, 16)))
    scores_NBT = jnp.float32(rng.normal(size=(hparams.model.loops, B, T)) * 3)
    choice = TokenChoice(first_BTD, scores_NBT, jnp.argmax(scores_NBT, axis=0))
    loop = loops_of(hparams, 'top_c')[1]
    tokens = token_info(hparams, jnp.asarray(SMALL_BT), jnp.asarray(SMALL_SEGMENTS_BT))

    def blocks(_, tokens_BC):
        return gather_tokens(y_BTD, tokens_BC.positions_BT), ()

    tokens = tokens._replace(positions_BT=jnp.broadcast_to(jnp.arange(T), (B, T)))
    found_BTD, record, *_ = loop.run(blocks, None, None, x_BTD, tokens, (), choice)
    selected_BT1, last_BT1 = record.selected_BT[..., None], (choice.depth_BT == 1)[..., None]
    assert 0 < (selected_BT1 & last_BT1).sum() < selected_BT1.sum() < selected_BT1.size
    gates_BT1 = 2 * jax.nn.softmax(scores_NBT, axis=0)[1][..., None]  # gate_scale is 2
    if loop_update == 'gated_exit':
        gates_BT1 = jnp.where(last_BT1, gates_BT1, 1)
    new_BTD = gates_BT1 * jnp.float32(y_BTD) + jnp.where(last_BT1, jnp.float32(first_BTD), 0)
    expected_BTD = jnp.where(selected_BT1, jnp.bfloat16(new_BTD), x_BTD)
    np.testing.assert_array_equal(found_BTD, expected_BTD)
    *_, update = loop.decide(None, x_BTD, tokens, None, choice)
    new_BTD = jnp.where(selected_BT1, loop.new_x(x_BTD, y_BTD, update), x_BTD)
    np.testing.assert_array_equal(new_BTD, expected_BTD)


@pytest.mark.slow
def test_the_program_grows_by_one_scan_for_each_loop(tiny_config):
    """The parameters do not grow."""

    def count(loops, layers):
        knobs = {'model.loops': loops, 'model.num_layers': layers + 2}
        hparams = small_hparams(tiny_config, RECURSIONS, AUX, knobs)
        variables = random_variables(hparams, SMALL_BT)

        def loss(params):
            return jnp.sum(Transformer(hparams).apply({'params': params}, SMALL_BT)[0])

        program = jax.make_jaxpr(jax.grad(loss))(variables['params']).jaxpr
        stored = sum(leaf.size for leaf in jax.tree.leaves(variables['params']['stack']))
        return len(list(equations(program))), stored

    (two, stored), (four, same), (six, _) = (count(loops, 3) for loops in (2, 4, 6))
    assert stored == same and six - four == four - two
    assert count(4, 9)[0] == four
