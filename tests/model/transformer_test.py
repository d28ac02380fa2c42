"""The whole model: logits, parameters and records, and which routings it runs or refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.hparams.registry import CAUSAL_RULES
from moddepth_jax.hparams.rules import causal_routing, check_routing
from moddepth_jax.inference.generate import generate
from moddepth_jax.model.decoding import unroll
from moddepth_jax.model.layers import _flat_dot_general, rms_norm
from moddepth_jax.model.mod.mixture_of_recursions import causal_sizes
from moddepth_jax.model.transformer import Transformer, check_attention, layer_args
from tests.model.cases import GROWS, build, parameters, random_like, routed_by

ROUTED = {'model.routing.router': 'learned', 'model.routing.capacity': 0.375}
LENGTH = 16
TOKENS_BT = np.random.default_rng(0).integers(0, 257, (4, LENGTH))


def make(tiny_config, **knobs):
    """Return a model, and random variables large enough that each one affects the logits."""
    model = Transformer(from_config(tiny_config(**knobs)))
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS_BT)
    return model, random_like(shapes)


def run(model, variables, **how):
    """Return logits and records of one compiled pass."""
    apply = jax.jit(lambda variables: model.apply(variables, TOKENS_BT, **how))
    return jax.device_get(apply(variables))


@pytest.mark.parametrize('placement', parameters(('pre',), ('pre', 'post', 'reordered')))
def test_capacity_one_without_gate_is_the_dense_model(placement, tiny_config):
    """If all blocks are routed, all tokens selected and gates 1, the model is the dense model."""
    knobs = {'model.norm_placement': placement, 'model.windows': (0, 5)}
    routing = {
        'model.routing.layers': 'every:1',
        'model.routing.capacity': 1.0,
        'model.routing.gate': 'none',
    }
    dense, _ = make(tiny_config, **knobs)
    routed, variables = make(tiny_config, **knobs, **ROUTED | routing)
    params = variables['params']
    blocks = {
        run: {name: layer['block'] for name, layer in layers.items()}
        for run, layers in params['stack'].items()
    }
    expected, none = run(dense, {'params': params | {'stack': blocks}})
    logits_BTV, records = run(routed, variables)
    assert none is None and records.routing.selected_BT.all()
    np.testing.assert_allclose(logits_BTV, expected, rtol=0, atol=1e-5)
    assert np.std(expected) > 0.5


def test_bfloat16_model_keeps_float32_parameters_and_logits(tiny_config):
    """Only activations are bfloat16, so logits differ from float32 ones only by rounding."""
    knobs = ROUTED | {'model.routing.capacity': 1.0}
    half, variables = make(tiny_config, **knobs, **{'model.dtype': 'bfloat16'})
    full, _ = make(tiny_config, **knobs)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {np.dtype(np.float32)}
    variables = jax.tree.map(lambda leaf: leaf * np.float32(0.6), variables)
    logits_BTV, _ = run(half, variables)
    expected, _ = run(full, variables)
    assert logits_BTV.dtype == jnp.float32
    error = np.abs(logits_BTV - expected).max() / np.std(expected)
    assert 1e-4 < error < 0.1


def test_rms_norm_of_bfloat16_is_taken_in_float32():
    """A bfloat16 input is normed in float32 and rounded once, so squares do not lose bits."""
    rng = np.random.default_rng(0)
    x, scale = jnp.asarray(rng.normal(size=(4, 64)), jnp.bfloat16), rng.normal(size=64)
    result = rms_norm(x, np.float32(scale), 1e-6)
    assert result.dtype == jnp.bfloat16
    once = rms_norm(x.astype(jnp.float32), np.float32(scale), 1e-6).astype(jnp.bfloat16)
    np.testing.assert_array_equal(result, once)


@pytest.mark.parametrize(
    'knobs',
    [
        {'model.tie_embeddings': True, 'model.qk_norm': 'head', 'model.use_bias': True},
        ROUTED | {'model.num_layers': 5, 'model.qk_norm': 'full', 'model.attention_bias': 'qkv'},
        {'model.attention_bias': 'qkvo'},
        ROUTED | {'model.routing.predictor_width': 0, 'model.routing.layers': 'every:1'},
        {'model.routing.router': 'random', 'model.routing.layers': 'every:1'},
    ],
)
def test_parameter_count_is_the_formula(knobs, tiny_config):
    """Embedding, head, blocks, norms, biases, routers and predictors, and nothing else."""
    model, variables = make(tiny_config, **knobs)
    m, params = model.hparams.model, variables['params']
    D, F, N, K, H, V = m.d_model, m.d_ff, m.num_heads, m.num_kv_heads, m.head_dim, m.vocab_size
    block = D * N * H + 2 * D * K * H + N * H * D + 3 * D * F + 2 * D
    block += {'none': 0, 'head': 2 * H, 'full': N * H + K * H}[m.qk_norm]
    block += (2 * F + D) if m.use_bias else 0
    biases = {'none': 0, 'qkv': N * H + 2 * K * H, 'qkvo': N * H + 2 * K * H + D}
    block += biases['qkvo' if m.use_bias else m.attention_bias]
    learned, P = m.routing.router == 'learned', m.routing.predictor_width
    routed = D + (D * P + P + P + 1 if P else D + 1) if learned else 0
    expected = V * D * (1 if m.tie_embeddings else 2) + D
    expected += m.num_layers * block + len(m.routed_layers) * routed
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == expected
    # A control has a known threshold and no averages.
    assert ('averages' in variables) == learned


def test_a_kernel_that_cannot_run_here_is_refused_before_a_run_begins(tiny_config):
    """The error is one line with the knob. Interpreted kernels and those of XLA are accepted."""
    changes = {'model.depth.stream': 'moda'}
    for name in ('auto', 'xla', 'reference', 'pallas'):
        check_attention(from_config(tiny_config(**changes, **{'model.attention': name})))
    wide = changes | {'model.head_dim': 512, 'model.attention': 'pallas'}
    with pytest.raises(ValueError, match="model.attention='pallas': ") as caught:
        check_attention(from_config(tiny_config(**wide)))
    assert '512' in str(caught.value) and '\n' not in str(caught.value)


THREE = {
    'model.num_layers': 3,
    'model.routing.layers': 'every:1',
    'data.sequence_length': LENGTH,
}


def test_random_choices_follow_the_given_key(tiny_config):
    """Another key changes the selection in each layer. Without a key it is always the same."""
    model, variables = make(tiny_config, **THREE | {'model.routing.router': 'random'})

    @jax.jit
    def choices(key):
        return model.apply(variables, TOKENS_BT, rngs={'routing': key})[1].routing.scores_BT

    one, same, other = (np.asarray(choices(jax.random.key(seed))) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert (one != other).all()
    assert all((one[i] != one[j]).all() for i in range(3) for j in range(i))
    without, again = (run(model, variables)[1].routing.scores_BT for _ in range(2))
    np.testing.assert_array_equal(without, again)


@pytest.mark.parametrize('loop', parameters(('unrolled',), ('scan', 'unrolled')))
def test_only_the_named_layers_obey_the_rule(loop, tiny_config):
    """The others use top-C. With no named layer the model equals top_c; with all, the rule.

    Layers before the first named one see the stream of top_c, so they select as it does. Records of
    a stack of several runs are in order of depth.
    """
    layers = {'model.num_layers': 4, 'model.routing.layers': '0,2,3', 'model.layer_loop': loop}
    knobs = layers | routed_by('learned', 'auto') | {'data.sequence_length': LENGTH}
    model, variables = make(tiny_config, **knobs)
    variables['averages']['thresholds_R'][:] = [0.5, 0.7, 0.9]
    apply = jax.jit(lambda causal_R: model.apply(variables, TOKENS_BT, None, 'threshold', causal_R))
    top_c_BTV, of_top_c = run(model, variables)
    seen = []
    for named in ([0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]):
        logits_BTV, records = jax.device_get(apply(jnp.asarray(named, bool)))
        found = records.routing
        by_rule_RBT = found.rule_logits_BT > 0
        by_rule_RBT &= by_rule_RBT.cumsum(axis=2) <= 6
        assert (by_rule_RBT != found.top_c_BT).any(axis=(1, 2)).all()
        expected_RBT = np.where(np.reshape(named, (3, 1, 1)), by_rule_RBT, found.top_c_BT)
        np.testing.assert_array_equal(found.selected_BT, expected_RBT)
        same = [*named, 1].index(1) + 1
        np.testing.assert_array_equal(found.top_c_BT[:same], of_top_c.routing.top_c_BT[:same])
        assert (found.dropped_BT.any(axis=(1, 2)) <= named).all()
        seen.append(logits_BTV)
    np.testing.assert_allclose(seen[0], top_c_BTV, rtol=0, atol=1e-4)
    every_BTV, _ = run(model, variables, routing='threshold')
    np.testing.assert_allclose(every_BTV, seen[-1], rtol=0, atol=1e-4)
    for i, one in enumerate(seen):
        assert all(np.abs(one - other).max() > 0.1 for other in seen[:i])


def test_static_sizes_of_the_model(tiny_config):
    """A limited cache gives one size, from the context of the run or of a longer row."""

    def sizes(length, rule='predictor', **knobs):
        knobs = THREE | routed_by('learned', 'auto') | knobs
        return causal_sizes(from_config(tiny_config(**knobs)), length, rule)

    assert sizes(16) == (6,) and sizes(4) == (4,) and sizes(64) == (24,)
    assert sizes(16, 'dense') == (16,) and sizes(16, 'dense', **GROWS) == (2, 4, 8, 16)
    assert sizes(16, **GROWS) == (2, 4, 8, 16) and sizes(64, **GROWS) == (8, 16, 32, 64)


@pytest.mark.parametrize(
    ('router', 'rule', 'runs'),
    [
        ('learned', 'auto', ['predictor', 'threshold', 'dense']),
        ('learned', 'aux_loss', ['aux_loss', 'threshold', 'dense']),
        ('learned', 'threshold', ['threshold', 'dense']),
        ('norm', 'auto', ['dense', 'threshold']),
        ('random', 'auto', ['threshold']),
        ('position', 'auto', ['threshold']),
        ('straight_through', 'predictor', ['predictor', 'threshold', 'positive']),
    ],
)
def test_rules_that_a_model_does_not_have_are_refused_by_name(router, rule, runs, tiny_config):
    """The line has the routing, the router and what it can run. A typo lists all routings."""
    hparams = from_config(tiny_config(**THREE | routed_by(router, rule)))
    assert causal_routing(hparams) == runs[0]
    runs = [*runs, 'bypass']
    for routing in ('top_c', *runs):
        check_routing(hparams, routing)
        if 'threshold' not in (routing, rule):  # parameters alone are enough
            layer_args(hparams.model, None, routing)
    for routing in {*CAUSAL_RULES, 'topc', ''} - {*runs}:
        with pytest.raises(ValueError) as error:
            Transformer(hparams).apply({}, TOKENS_BT, routing=routing)
        message = str(error.value)
        assert message.startswith(f'routing={routing!r}: ') and '\n' not in message
        assert 'top_c, ' + ', '.join(runs) in message
        assert f'{router} router' in message or routing in ('topc', '')


@pytest.mark.parametrize(
    ('name', 'routing', 'message'),
    [
        ('threshold', 'threshold', "routing='threshold': needs averages"),
        ('experts choose', 'threshold', "routing='threshold': needs averages"),
        ('staged, experts choose', 'aux_loss', "routing='aux_loss': needs averages"),
        ('experts choose', 'dense', "routing='dense': .*experts choose.*only the threshold rule"),
        ('experts', 'threshold', "routing='threshold': no block of this model is routed"),
        ('experts choose', 'top_c', "routing='top_c': looks at later tokens"),
    ],
)
def test_a_rule_without_its_averages_or_experts_is_refused(name, routing, message, tiny_config):
    """By the model, by decoding and by generation: a threshold is never made up.

    Top-C of experts looks at whole rows, so it generates nothing.
    """
    hparams, variables, own, _ = build(tiny_config, name)
    assert causal_routing(hparams) == own
    without = {'params': variables['params']}
    if name.startswith('staged'):
        without['averages'] = {'thresholds_R': variables['averages']['thresholds_R']}
    refusals = [lambda: generate(without, hparams, [[1, 2]], 2, routing=routing)]
    if routing != 'top_c':
        model = Transformer(hparams)
        refusals.append(lambda: model.apply(without, TOKENS_BT % 9, None, routing))
    if 'averages' in message:
        refusals.append(lambda: unroll(without, hparams, routing))
    for refuse in refusals:
        with pytest.raises(ValueError, match=message):
            refuse()


def test_a_missing_threshold_of_the_own_rule_is_named_as_that(tiny_config):
    """Top-C needs no average, but records the logits of the model's own rule."""
    model, variables = make(tiny_config, **routed_by('learned', 'threshold'))
    with pytest.raises(ValueError, match="^model.routing.causal_rule='threshold': needs averages"):
        model.apply({'params': variables['params']}, TOKENS_BT)


@pytest.mark.parametrize(
    'dimensions', [(((1,), (0,)), ((), ())), (((2,), (1,)), ((), ())), (((2,), (0,)), ((0,), (1,)))]
)
def test_flat_products_contract_last_axes_with_first_ones(dimensions):
    """Other axes and batch axes are refused, because their product would be another one."""
    x_BTD, kernel_DNH = jnp.ones((3, 3, 3)), jnp.ones((3, 3, 3))
    with pytest.raises(ValueError, match='must contract') as error:
        _flat_dot_general(x_BTD, kernel_DNH, dimensions)
    assert '\n' not in str(error.value)
