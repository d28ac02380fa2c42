"""The whole model: scan, remat, capacity 1, tied embeddings and rules change what they should."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.model.transformer import Transformer, causal_routing, check_attention

ROUTED = {'model.routing.router': 'learned', 'model.routing.capacity': 0.375}
TOKENS_BT = np.random.default_rng(0).integers(0, 257, (2, 16))
# Unoptimised programs, of the same operations, compile in less than half the time.
jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})


def make(tiny_config, **knobs):
    """A model, and parameters so large and so random that each of them shows in the logits."""
    model = Transformer(from_config(tiny_config(**knobs)))
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS_BT)['params']
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        kind = path[-1].key
        spread = {'embedding': 1.0, 'scale': 0.3, 'bias': 0.3}.get(kind, 0.2)
        return (float(kind == 'scale') + spread * rng.normal(size=leaf.shape)).astype(np.float32)

    return model, jax.tree_util.tree_map_with_path(draw, shapes)


def primitives(jaxpr):
    """Names of the primitives of a jaxpr, at any depth."""
    names = {eqn.primitive.name for eqn in jaxpr.eqns}
    for eqn in jaxpr.eqns:
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, 'eqns')):
            if hasattr(value, 'eqns'):
                names |= primitives(getattr(value, 'jaxpr', value))
    return names


def test_scan_and_remat_change_the_program_and_not_its_result(tiny_config):
    """Scanned or unrolled, rematerialised or not: other programs, the same output and gradient."""
    results, programs = [], set()
    for loop, remat in (('scan', 'block'), ('scan', 'none'), ('unrolled', 'block')):
        way = {'model.num_layers': 4, 'model.layer_loop': loop, 'model.remat': remat}
        model, params = make(tiny_config, **ROUTED, **way)

        def loss(params, model=model):
            logits_BTV, records = model.apply({'params': params}, TOKENS_BT)
            return jnp.sum(jnp.tanh(logits_BTV)), (logits_BTV, records)

        traced = jit(jax.value_and_grad(loss, has_aux=True)).trace(params)
        names = primitives(traced.jaxpr.jaxpr)
        assert ('scan' in names) == (loop == 'scan')
        assert bool(names & {'checkpoint', 'remat', 'remat2'}) == (remat == 'block')
        programs.add(str(traced.jaxpr))
        results.append(jax.tree.map(np.asarray, traced.lower().compile()(params)))
    assert len(programs) == 3
    ((_, (logits_BTV, records)), gradients), *others = results
    for (_, (other_logits_BTV, other_records)), other_gradients in others:
        np.testing.assert_allclose(other_logits_BTV, logits_BTV, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(
            other_records.routing.selected_BT, records.routing.selected_BT
        )
        np.testing.assert_allclose(
            other_records.routing.scores_BT, records.routing.scores_BT, rtol=0, atol=1e-5
        )
        pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(other_gradients), strict=True)
        for one, other in pairs:
            atol = 2e-6 * max(np.abs(one).max(), 1)
            np.testing.assert_allclose(other, one, rtol=0, atol=atol)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        in_predictor = any(getattr(key, 'key', None) == 'predictor' for key in path)
        assert np.any(leaf) != in_predictor


@pytest.mark.parametrize('placement', ['pre', 'post', 'reordered'])
def test_capacity_one_without_gate_is_the_dense_model(placement, tiny_config):
    """With every token selected and no gate, all blocks routed, the model is the dense model."""
    knobs = {'model.norm_placement': placement, 'model.windows': (0, 5)}
    routing = {
        'model.routing.layers': 'every:1',
        'model.routing.capacity': 1.0,
        'model.routing.gate': 'none',
    }
    dense, _ = make(tiny_config, **knobs)
    routed, params = make(tiny_config, **knobs, **ROUTED | routing)
    runs = {
        run: {name: layer['block'] for name, layer in layers.items()}
        for run, layers in params['stack'].items()
    }
    expected, none = jit(dense.apply)({'params': params | {'stack': runs}}, TOKENS_BT)
    logits_BTV, records = jit(routed.apply)({'params': params}, TOKENS_BT)
    assert none is None and np.asarray(records.routing.selected_BT).all()
    np.testing.assert_allclose(logits_BTV, expected, rtol=0, atol=1e-5)
    assert np.std(expected) > 0.5


def test_records_are_in_order_of_depth(tiny_config):
    """Records of a stack of several runs and groups come layer by layer, as a loop has them."""
    knobs = {'model.num_layers': 7, 'model.routing.layers': '1,2,4,5,6'}
    model, marked = make(tiny_config, **ROUTED | knobs)
    layer = 0
    for run in sorted(marked['stack'], key=lambda name: int(name.split('_')[1])):
        group = marked['stack'][run]
        for repeat in range(len(jax.tree.leaves(group)[0])):
            for name in sorted(group):
                if 'router' in group[name]:
                    # Each router reads one component of its own, which no layer changes.
                    group[name]['router']['w'][repeat] = np.eye(32)[layer]
                layer += 1
    for path, leaf in jax.tree_util.tree_leaves_with_path(marked['stack']):
        if path[-2].key in ('out', 'w2') and path[-3].key != 'predictor':
            leaf[:] = 0
    _, records = jit(model.apply)({'params': marked}, TOKENS_BT)
    x_BTD = marked['embedding'][TOKENS_BT]
    for scores_BT, layer in zip(
        records.routing.scores_BT, model.hparams.model.routed_layers, strict=True
    ):
        np.testing.assert_allclose(scores_BT, x_BTD[:, :, layer], rtol=1e-6)


def test_tied_head_is_the_embedding(tiny_config):
    """A tied model has no head, and the logits of one whose head is the transposed table."""
    tied, params = make(tiny_config, **{'model.tie_embeddings': True})
    untied, untied_params = make(tiny_config)
    assert 'head' not in params and 'head' in untied_params
    table = {'head': {'kernel': params['embedding'].T}}
    logits_BTV, _ = jit(tied.apply)({'params': params}, TOKENS_BT)
    expected, _ = jit(untied.apply)({'params': params | table}, TOKENS_BT)
    np.testing.assert_allclose(logits_BTV, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize('trained', ['predictor', 'aux_loss', 'dense'])
def test_rule_that_was_not_trained_is_refused(trained, tiny_config):
    """A model runs top_c, dense and its own rule; another one, or a typo, is refused by name."""
    model, params = make(tiny_config, **ROUTED | {'model.routing.causal_rule': trained})

    def run(routing):
        return jax.eval_shape(
            lambda params: model.apply({'params': params}, TOKENS_BT, routing=routing), params
        )

    for routing in ('top_c', 'dense', trained):
        logits_BTV, records = run(routing)
        assert logits_BTV.shape == (2, 16, 257) and records.routing.selected_BT.shape == (1, 2, 16)
    for routing in {'predictor', 'aux_loss', 'topc'} - {trained}:
        with pytest.raises(ValueError, match=f"'{routing}'.*top_c.*{trained}") as error:
            run(routing)
        assert '\n' not in str(error.value)
    assert causal_routing(model.hparams) == trained


def test_bfloat16_model_keeps_float32_parameters_and_logits(tiny_config):
    """In bfloat16 only activations are: the logits differ from float32's by rounding alone."""
    knobs = ROUTED | {'model.routing.capacity': 1.0}
    half, params = make(tiny_config, **knobs, **{'model.dtype': 'bfloat16'})
    full, _ = make(tiny_config, **knobs)
    shapes = jax.eval_shape(half.init, jax.random.key(0), TOKENS_BT)
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {np.dtype(np.float32)}
    logits_BTV, _ = jit(half.apply)({'params': params}, TOKENS_BT)
    expected, _ = jit(full.apply)({'params': params}, TOKENS_BT)
    assert logits_BTV.dtype == jnp.float32
    error = np.abs(logits_BTV - expected).max() / np.std(expected)
    assert 1e-4 < error < 0.1


@pytest.mark.parametrize(
    'knobs',
    [
        {},
        {'model.tie_embeddings': True, 'model.qk_norm': 'head', 'model.use_bias': True},
        ROUTED | {'model.num_layers': 5, 'model.qk_norm': 'full'},
        ROUTED | {'model.routing.predictor_width': 0, 'model.routing.layers': 'every:1'},
        ROUTED | {'model.routing.causal_rule': 'aux_loss'},
    ],
)
def test_parameter_count_is_the_formula(knobs, tiny_config):
    """Embedding, head, blocks, norms, biases, routers and predictors, and nothing else."""
    model, params = make(tiny_config, **knobs)
    m = model.hparams.model
    D, F, N, K, H, V = m.d_model, m.d_ff, m.num_heads, m.num_kv_heads, m.head_dim, m.vocab_size
    block = D * N * H + 2 * D * K * H + N * H * D + 3 * D * F + 2 * D
    block += {'none': 0, 'head': 2 * H, 'full': N * H + K * H}[m.qk_norm]
    block += (N * H + 2 * K * H + D + 2 * F + D) if m.use_bias else 0
    routed = D
    if m.routing.causal_rule == 'predictor':
        P = m.routing.predictor_width
        routed += D * P + P + P + 1 if P else D + 1
    expected = V * D * (1 if m.tie_embeddings else 2) + D
    expected += m.num_layers * block + len(m.routed_layers) * routed
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == expected
    assert set(params) <= {'embedding', 'stack', 'final_norm', 'head'}


def test_a_kernel_that_cannot_run_here_is_refused_before_a_run_begins(tiny_config):
    """In one line that names the knob; an interpreted kernel, and those of XLA, are let through."""
    changes = {'model.depth.stream': 'moda'}
    for name in ('auto', 'xla', 'reference', 'pallas'):
        check_attention(from_config(tiny_config(**changes, **{'model.attention': name})))
    wide = changes | {'model.head_dim': 512, 'model.attention': 'pallas'}
    with pytest.raises(ValueError, match="model.attention='pallas': ") as caught:
        check_attention(from_config(tiny_config(**wide)))
    assert '512' in str(caught.value) and '\n' not in str(caught.value)
