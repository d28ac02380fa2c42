"""A routed block is its equation, written over all tokens with explicit masks, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.model.attention import Tokens
from moddepth_jax.model.mixture_of_depths import MixtureOfDepths

LENGTH, WIDTH, CAPACITY = 16, 32, 0.375
SHAPE = {
    'model.routing.router': 'learned',
    'model.routing.layers': 'every:1',
    'model.norm_eps': 1e-3,
    'model.rope_theta': 50.0,
}
# One row each: a document, packed documents, padding at the end, fewer real tokens than C, none.
SEGMENTS = np.array(
    [[1] * 16, [1] * 5 + [2] * 7 + [3] * 4, [1] * 10 + [0] * 6, [1] * 2 + [0] * 14, [0] * 16]
)
POSITIONS = np.tile(np.arange(LENGTH), (5, 1))
CASES = {
    'pre': ('pre', 'raw', CAPACITY, 0, {}),
    'pre_all': ('pre', 'tanh', 1.0, 3, {'model.qk_norm': 'head', 'model.use_bias': True}),
    'post_ties': ('post', 'sigmoid', CAPACITY, 4, {}),
    'post_one': ('post', 'none', 1 / LENGTH, 0, {}),
    'reordered': ('reordered', 'raw', 0.125, 6, {'model.qk_norm': 'full'}),
}
GATES = {
    'raw': lambda r: r,
    'sigmoid': lambda r: 1 / (1 + jnp.exp(-r)),
    'tanh': lambda r: (jnp.exp(2 * r) - 1) / (jnp.exp(2 * r) + 1),
    'none': jnp.ones_like,
}
# Unoptimised programs, of the same operations, compile in less than half the time.
jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})


def make_model(tiny_config, placement, gate, capacity, **knobs):
    routing = {'model.routing.gate': gate, 'model.routing.capacity': capacity}
    placed = {'model.norm_placement': placement}
    return from_config(tiny_config(**SHAPE, **placed, **routing, **knobs)).model


def random_params(params, seed=0):
    """Weights so large that every part of the block matters; norm scales around 1."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        spread = 0.3 if leaf.ndim < 2 else (leaf.size // leaf.shape[-1]) ** -0.5
        center = float(path[-1].key == 'scale')
        return (center + spread * rng.normal(size=leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, params)


def stream(seed=1, batch=5, ties=False):
    """A random residual stream; with ties, component 0 takes three values only."""
    x_BTD = np.random.default_rng(seed).normal(size=(batch, LENGTH, WIDTH)).astype(np.float32)
    if ties:
        x_BTD[:, :, 0] = np.random.default_rng(seed).integers(-1, 2, (batch, LENGTH))
    return x_BTD


def expert_choice(scores_BT, capacity, segments_BT):
    """bool [B, T]: the C best real tokens of each row, the earlier of equals, found one by one."""
    chosen_BT = np.zeros(scores_BT.shape, bool)
    num_selected = max(1, int(capacity * scores_BT.shape[1] + 1e-6))
    for row, scores_T in enumerate(scores_BT):
        real = [t for t in range(len(scores_T)) if segments_BT[row, t] > 0]
        best = sorted(real, key=lambda t: (-scores_T[t], t))[:num_selected]
        chosen_BT[row, best] = True
    return chosen_BT


def visible_pairs(entered_BT, segments_BT, window):
    """bool [B, T, T]: pairs that see each other in the block, drawn one by one."""
    grid_BTS = np.zeros((*entered_BT.shape, entered_BT.shape[1]), bool)
    for row, query, key in np.ndindex(grid_BTS.shape):
        near = 0 <= query - key and (window == 0 or query - key < window)
        same = segments_BT[row, query] == segments_BT[row, key]
        both = entered_BT[row, query] and entered_BT[row, key]
        grid_BTS[row, query, key] = near and same and both
    return grid_BTS


def equation(params, x_BTD, entered_BT, grid_BTS, model):
    """x + gate(r) (block(x) - x) where a token entered, x elsewhere, from the parameters alone."""
    block, attention = params['block'], params['block']['attention']

    def norm(x, scale):
        return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + model.norm_eps) * scale

    def project(equation, x, part):
        return jnp.einsum(equation, x, part['kernel']) + part.get('bias', 0)

    def queries_or_keys(x, name):
        y = project('btd,dnh->btnh', x, attention[name])
        if model.qk_norm != 'none':
            shape = y.shape
            y = y.reshape(*shape[:2], -1) if model.qk_norm == 'full' else y
            y = norm(y, attention[f'{name}_norm']['scale']).reshape(shape)
        half = model.head_dim // 2
        angle = np.arange(LENGTH)[:, None] / model.rope_theta ** (np.arange(half) / half)
        sin, cos = np.sin(angle)[:, None], np.cos(angle)[:, None]
        first, second = y[..., :half], y[..., half:]
        return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)

    def attend(x):
        group = model.num_heads // model.num_kv_heads
        query = queries_or_keys(x, 'query')
        key = jnp.repeat(queries_or_keys(x, 'key'), group, axis=2)
        value = jnp.repeat(project('btd,dnh->btnh', x, attention['value']), group, axis=2)
        scores = jnp.einsum('btnh,bsnh->bnts', query, key) / np.sqrt(model.head_dim)
        terms = jnp.where(grid_BTS[:, None], jnp.exp(scores), 0)
        weights = terms / jnp.maximum(terms.sum(-1, keepdims=True), 1e-300)
        o = jnp.einsum('bnts,bsnh->btnh', weights, value)
        return project('btnh,nhd->btd', o, attention['out'])

    def transform(x):
        gate, value = (project('btd,df->btf', x, block['mlp'][name]) for name in ('w1', 'w3'))
        return project('btf,fd->btd', gate / (1 + jnp.exp(-gate)) * value, block['mlp']['w2'])

    x = x_BTD
    for part, name in ((attend, 'attention_norm'), (transform, 'mlp_norm')):
        scale = block[name]['scale']
        if model.norm_placement == 'pre':
            x = x + part(norm(x, scale))
        elif model.norm_placement == 'post':
            x = norm(x + part(x), scale)
        else:
            x = x + norm(part(x), scale)
    gate_BT = GATES[model.routing.gate](x_BTD @ params['router']['w'])
    return jnp.where(entered_BT[..., None], x_BTD + gate_BT[..., None] * (x - x_BTD), x_BTD)


def value_and_gradients(function, params, x_BTD, weights_BTD):
    """function(params, x) and the gradients of its inner product with `weights`, under one jit."""

    def loss(params, x_BTD):
        y_BTD, record = function(params, x_BTD)
        return jnp.vdot(y_BTD, weights_BTD), (y_BTD, record)

    run = jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, (y_BTD, record)), gradients = run(params, x_BTD)
    return jax.tree.map(np.asarray, (y_BTD, gradients)), record


def assert_close(got, exact, tolerance):
    """Every leaf within `tolerance` of its largest element, or of 1% of the largest of all."""
    assert jax.tree.structure(got) == jax.tree.structure(exact)
    size = max(np.abs(leaf).max() for leaf in jax.tree.leaves(exact))
    for one, right in zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True):
        atol = tolerance * max(np.abs(right).max(), 0.01 * size)
        np.testing.assert_allclose(one, right, rtol=0, atol=atol)


def routed(model, window=0, routing='top_c', seed=0):
    """The module, random parameters, and the function (params, x, segments, positions) -> y."""
    module = MixtureOfDepths(model, window, routing)
    x_BTD, tokens = stream(), Tokens(POSITIONS, SEGMENTS)
    params = jax.eval_shape(module.init, jax.random.key(0), x_BTD, tokens)['params']
    params = random_params(params, seed)

    def apply(params, x_BTD, segments_BT=SEGMENTS):
        positions_BT = POSITIONS[: len(x_BTD)]
        return module.apply({'params': params}, x_BTD, Tokens(positions_BT, segments_BT))

    return params, apply


@pytest.mark.parametrize('name', CASES)
def test_gathered_form_is_the_equation(name, tiny_config):
    """Outputs, and gradients of parameters and stream, equal the masked float64 equation's."""
    placement, gate, capacity, window, knobs = CASES[name]
    model = make_model(tiny_config, placement, gate, capacity, **knobs)
    params, apply = routed(model, window)
    x_BTD, weights_BTD = stream(ties='ties' in name), stream(seed=2)
    if 'ties' in name:
        params['router']['w'] = np.eye(WIDTH, dtype=np.float32)[0] * 0.75
    got, record = value_and_gradients(apply, params, x_BTD, weights_BTD)
    scores_BT = x_BTD.astype(float) @ params['router']['w']
    entered_BT = expert_choice(scores_BT, capacity, SEGMENTS)
    np.testing.assert_array_equal(record.top_c_BT, entered_BT)
    np.testing.assert_array_equal(record.entered_BT, entered_BT)
    np.testing.assert_allclose(record.scores_BT, scores_BT, rtol=0, atol=1e-5)
    grid_BTS = visible_pairs(entered_BT, SEGMENTS, window)
    with jax.enable_x64(True), jax.numpy_rank_promotion('allow'):
        wide = jax.tree.map(np.float64, (params, x_BTD, weights_BTD))
        exact, _ = value_and_gradients(
            lambda params, x: (equation(params, x, entered_BT, grid_BTS, model), None), *wide
        )
    assert_close(got[0], exact[0], 1e-6)
    assert_close(got[1], exact[1], 2e-6)  # rounding reaches 1.4e-6 in the scale of a QK-norm
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got))


@pytest.mark.parametrize(
    ('rule', 'placement'), [('predictor', 'pre'), ('aux_loss', 'post'), ('dense', 'reordered')]
)
def test_causal_rule_is_the_equation_over_its_own_tokens(rule, placement, tiny_config):
    """Under a rule the equation holds for the tokens that the rule names; padding never enters."""
    knobs = {'model.routing.causal_rule': rule}
    model = make_model(tiny_config, placement, 'raw', CAPACITY, **knobs)
    params, apply = routed(model, window=5, routing=rule, seed=3)
    x_BTD = stream()
    y_BTD, record = jit(apply)(params, x_BTD)
    logits_BT = x_BTD @ params['router']['w'] if rule == 'aux_loss' else np.ones(SEGMENTS.shape)
    if rule == 'predictor':
        hidden, out = params['predictor']['hidden'], params['predictor']['out']
        before = x_BTD @ hidden['kernel'] + hidden['bias']
        logits_BT = (before / (1 + np.exp(-before)) @ out['kernel'] + out['bias'])[..., 0]
    entered_BT = (logits_BT > 0) & (SEGMENTS > 0)
    assert rule == 'dense' or 0.2 < entered_BT[0].mean() < 0.8
    np.testing.assert_array_equal(record.entered_BT, entered_BT)
    scores_BT = x_BTD.astype(float) @ params['router']['w']
    np.testing.assert_array_equal(record.top_c_BT, expert_choice(scores_BT, CAPACITY, SEGMENTS))
    grid_BTS = visible_pairs(entered_BT, SEGMENTS, 5)
    with jax.enable_x64(True), jax.numpy_rank_promotion('allow'):
        wide = jax.tree.map(np.float64, (params, x_BTD))
        exact = jit(lambda p, x: equation(p, x, entered_BT, grid_BTS, model))(*wide)
    assert_close(y_BTD, np.asarray(exact), 1e-6)
    np.testing.assert_array_equal(y_BTD[~entered_BT], x_BTD[~entered_BT])


@pytest.fixture(scope='module')
def plain(tiny_config):
    """The block of the remaining tests, jitted once: (params, apply, gradients of a fixed sum)."""
    params, apply = routed(make_model(tiny_config, 'pre', 'raw', CAPACITY))
    weights_BTD = stream(seed=3)

    def loss(params, x_BTD, segments_BT):
        return jnp.vdot(apply(params, x_BTD, segments_BT)[0], weights_BTD)

    return params, jax.jit(apply), jax.jit(jax.grad(loss, argnums=(0, 1)))


def bits(x):
    return np.asarray(x).view(np.uint32)


def test_skipped_rows_keep_their_bits(plain):
    """A token that does not enter leaves with the bits it came with, padding with its values."""
    params, apply, _ = plain
    x_BTD = stream()
    x_BTD[:, :, 5] = -0.0
    y_BTD, record = apply(params, x_BTD, SEGMENTS)
    entered_BT = np.asarray(record.entered_BT)
    np.testing.assert_array_equal(entered_BT.sum(1), [6, 6, 6, 2, 0])
    same_BT, real_BT = (bits(y_BTD) == bits(x_BTD)).all(-1), SEGMENTS > 0
    np.testing.assert_array_equal(same_BT[real_BT], ~entered_BT[real_BT])
    np.testing.assert_array_equal(y_BTD[~real_BT], x_BTD[~real_BT])


def test_padding_is_never_attended(plain):
    """What stands in padded places changes no bit of a real token, and gets no gradient by one."""
    params, apply, gradients = plain
    x_BTD, padded_BT = stream(), SEGMENTS == 0
    other_BTD = np.where(padded_BT[..., None], 1e3 * stream(seed=9), x_BTD)
    y_BTD, _ = apply(params, x_BTD, SEGMENTS)
    other_y_BTD, _ = apply(params, other_BTD, SEGMENTS)
    np.testing.assert_array_equal(bits(y_BTD)[~padded_BT], bits(other_y_BTD)[~padded_BT])
    np.testing.assert_array_equal(other_y_BTD[padded_BT], other_BTD[padded_BT])
    dx_BTD = gradients(params, x_BTD, SEGMENTS)[1]
    np.testing.assert_array_equal(dx_BTD[padded_BT], stream(seed=3)[padded_BT])


def test_rows_do_not_depend_on_batch_mates(plain):
    """Other sequences beside it change no bit of a row's output, choice or input gradient."""
    params, apply, gradients = plain
    x_BTD, mates_BTD = stream(), stream(seed=8)
    mates_BTD[1] = x_BTD[1]
    segments_BT = SEGMENTS[[0, 1, 0, 0, 0]]
    y_BTD, record = apply(params, x_BTD, SEGMENTS)
    mates_y_BTD, mates_record = apply(params, mates_BTD, segments_BT)
    np.testing.assert_array_equal(bits(y_BTD)[1], bits(mates_y_BTD)[1])
    np.testing.assert_array_equal(record.entered_BT[1], mates_record.entered_BT[1])
    assert (bits(y_BTD)[0] != bits(mates_y_BTD)[0]).any()
    one, other = gradients(params, x_BTD, SEGMENTS)[1], gradients(params, mates_BTD, segments_BT)[1]
    np.testing.assert_array_equal(bits(one)[1], bits(other)[1])


def test_silent_router_learns_and_its_block_does_not(plain):
    """With w = 0 and a raw gate the block's gradient is exactly zero and the router's is not."""
    params, apply, gradients = plain
    silent = params | {'router': {'w': np.zeros_like(params['router']['w'])}}
    (gradient, _), x_BTD = gradients(silent, stream(), SEGMENTS), stream()
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient['block']))
    assert np.linalg.norm(gradient['router']['w']) > 1
    y_BTD, record = apply(silent, x_BTD, SEGMENTS)
    np.testing.assert_array_equal(y_BTD, x_BTD)
    np.testing.assert_array_equal(record.entered_BT[0], np.arange(LENGTH) < 6)


def test_gate_scales_the_delta_and_not_the_residual(plain):
    """Doubling the router doubles what is added; a block that adds nothing leaves x as it is."""
    params, apply, gradients = plain
    x_BTD = stream()
    once, _ = apply(params, x_BTD, SEGMENTS)
    twice, _ = apply(params | {'router': {'w': 2 * params['router']['w']}}, x_BTD, SEGMENTS)
    np.testing.assert_allclose(twice - x_BTD, 2 * (once - x_BTD), rtol=0, atol=1e-5)
    assert np.abs(once - x_BTD).max() > 1
    mute = jax.tree.map(np.copy, params)
    mute['block']['attention']['out']['kernel'][:] = 0
    mute['block']['mlp']['w2']['kernel'][:] = 0
    np.testing.assert_array_equal(apply(mute, x_BTD, SEGMENTS)[0], x_BTD)
    dx_BTD = gradients(mute, x_BTD, SEGMENTS)[1]
    np.testing.assert_array_equal(dx_BTD, stream(seed=3))


def test_predictor_and_model_do_not_touch_each_other(plain):
    """The output gives the predictor no gradient, and its logits give none to anything else."""
    params, apply, gradients = plain
    of_output, _ = gradients(params, stream(), SEGMENTS)
    of_logits, dx_BTD = jit(
        jax.grad(lambda *inputs: jnp.sum(apply(*inputs)[1].rule_logits_BT), argnums=(0, 1))
    )(params, stream())
    assert set(of_output) == {'block', 'router', 'predictor'}
    assert not np.any(dx_BTD)
    for part in of_output:
        for gradient, reached in (
            (of_output, part != 'predictor'),
            (of_logits, part == 'predictor'),
        ):
            assert all(np.any(leaf) == reached for leaf in jax.tree.leaves(gradient[part]))


def test_auxiliary_rule_is_the_router_itself(tiny_config):
    """Under aux_loss the rule's logits are the scores, whose gradient reaches router and trunk."""
    knobs = {'model.routing.causal_rule': 'aux_loss'}
    params, apply = routed(make_model(tiny_config, 'pre', 'raw', CAPACITY, **knobs))
    _, record = jit(apply)(params, stream())
    np.testing.assert_array_equal(record.rule_logits_BT, record.scores_BT)
    gradient, dx_BTD = jit(
        jax.grad(lambda *inputs: jnp.sum(apply(*inputs)[1].rule_logits_BT), argnums=(0, 1))
    )(params, stream())
    assert set(params) == {'block', 'router'}
    np.testing.assert_allclose(gradient['router']['w'], stream().sum((0, 1)), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dx_BTD, np.tile(params['router']['w'], (5, LENGTH, 1)))
