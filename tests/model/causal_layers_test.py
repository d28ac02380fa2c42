"""The model under a causal rule: its thresholds, its static sizes, and layers that obey alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.model.transformer import Transformer, causal_routing, causal_sizes, check_routing

LENGTH, NUM_ROUTED = 16, 3
ROUTED = {
    'model.num_layers': 3,
    'model.routing.layers': 'every:1',
    'model.routing.router': 'learned',
    'model.routing.capacity': 0.25,
    'data.sequence_length': LENGTH,
}
TOKENS_BT = np.random.default_rng(0).integers(0, 257, (4, LENGTH))
# Unoptimised programs, of the same operations, compile in less than half the time.
jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})


def make(tiny_config, **knobs):
    """A model and random variables, thresholds of 0.5, 0.7, 0.9 among them."""
    model = Transformer(from_config(tiny_config(**ROUTED | knobs)))
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS_BT)
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        kind = path[-1].key
        if kind == 'thresholds_R':
            return np.float32([0.5, 0.7, 0.9])
        spread = {'embedding': 1.0, 'scale': 0.3, 'bias': 0.3}.get(kind, 0.2)
        return (float(kind == 'scale') + spread * rng.normal(size=leaf.shape)).astype(np.float32)

    return model, jax.tree_util.tree_map_with_path(draw, shapes)


def test_each_layer_compares_with_its_own_threshold(tiny_config):
    """Under `threshold` the rule is r > the layer's average, whatever rule the model was given."""
    model, variables = make(tiny_config)
    run = jit(functools.partial(model.apply, routing='threshold'))
    records = run(variables, TOKENS_BT)[1].routing
    thresholds_R11 = np.float32([0.5, 0.7, 0.9])[:, None, None]
    wanted_RBT = np.asarray(records.scores_BT) > thresholds_R11
    np.testing.assert_array_equal(records.selected_BT | records.dropped_BT, wanted_RBT)
    np.testing.assert_array_equal(
        records.selected_BT, wanted_RBT & (wanted_RBT.cumsum(axis=2) <= 1.5 * 4)
    )
    assert np.any(records.dropped_BT) and not wanted_RBT.all()


def test_averages_are_needed_by_the_threshold_alone(tiny_config):
    """Parameters alone run any other routing; the threshold rule says in a line what it misses."""
    model, variables = make(tiny_config)
    params = {'params': variables['params']}
    for routing in ('top_c', 'predictor', 'dense'):
        assert jax.eval_shape(lambda p, r=routing: model.apply(p, TOKENS_BT, routing=r), params)
    with pytest.raises(ValueError, match='averages') as error:
        jax.eval_shape(lambda p: model.apply(p, TOKENS_BT, routing='threshold'), params)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('router', ['random', 'position'])
def test_a_control_has_no_state(router, tiny_config):
    """Its threshold is known beforehand: no averages, and no parameters of a router."""
    _, variables = make(tiny_config, **{'model.routing.router': router})
    assert set(variables) == {'params'}
    assert set(variables['params']['stack']['run_0']['layer_0']) == {'block'}


def test_random_choices_follow_the_given_key(tiny_config):
    """Another key, another choice in each layer; without one the choice is always the same."""
    model, variables = make(tiny_config, **{'model.routing.router': 'random'})

    @jit
    def choices(key):
        return model.apply(variables, TOKENS_BT, rngs={'routing': key})[1].routing.scores_BT

    one, same, other = (np.asarray(choices(jax.random.key(seed))) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert (one != other).all()
    assert all((one[i] != one[j]).all() for i in range(NUM_ROUTED) for j in range(i))
    without, again = (
        jit(lambda x: model.apply(x, TOKENS_BT)[1].routing.scores_BT)(variables) for _ in range(2)
    )
    np.testing.assert_array_equal(without, again)


@pytest.mark.parametrize(('loop', 'overflow'), [('scan', 'grow'), ('unrolled', 'skip')])
def test_only_the_named_layers_obey_the_rule(loop, overflow, tiny_config):
    """The others stay with top-C; with none named the model is that of top_c, with all the rule's.

    Layers before the first named one see the stream of top_c, and so decide as it does.
    """
    knobs = {'model.layer_loop': loop, 'model.routing.overflow': overflow}
    model, variables = make(tiny_config, **knobs)
    run = jit(functools.partial(model.apply, routing='threshold'))
    of_top_c = jit(functools.partial(model.apply, routing='top_c'))(variables, TOKENS_BT)
    most = 6 if overflow == 'skip' else LENGTH
    seen = []
    for named in ([0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]):
        causal_layers_R = np.array(named, bool)
        logits_BTV, records = run(
            variables, TOKENS_BT, None, causal_layers_R=jnp.asarray(causal_layers_R)
        )
        for layer in range(NUM_ROUTED):
            by_rule_BT = np.asarray(records.routing.rule_logits_BT[layer]) > 0
            by_rule_BT &= by_rule_BT.cumsum(axis=1) <= most
            assert (by_rule_BT != records.routing.top_c_BT[layer]).any()
            expected_BT = by_rule_BT if named[layer] else records.routing.top_c_BT[layer]
            np.testing.assert_array_equal(records.routing.selected_BT[layer], expected_BT)
            if not any(named[:layer]):
                np.testing.assert_array_equal(
                    records.routing.top_c_BT[layer], of_top_c[1].routing.top_c_BT[layer]
                )
        assert (np.asarray(records.routing.dropped_BT).any(axis=(1, 2)) <= causal_layers_R).all()
        seen.append(np.asarray(logits_BTV))
    np.testing.assert_allclose(seen[0], of_top_c[0], rtol=0, atol=1e-4)
    np.testing.assert_array_equal(run(variables, TOKENS_BT)[0], seen[-1])
    for i, one in enumerate(seen):
        assert all(np.abs(one - other).max() > 0.1 for other in seen[:i])


def test_static_sizes_of_the_model(tiny_config):
    """A cache with an end gives one size, by the context of the run; one that grows gives several.

    A row that is longer than the run's is its own context.
    """

    def sizes(length, rule='predictor', **knobs):
        return causal_sizes(from_config(tiny_config(**ROUTED | knobs)), length, rule)

    grow = {'model.routing.overflow': 'grow'}
    assert sizes(16) == (6,) and sizes(4) == (4,) and sizes(64) == (24,)
    assert sizes(16, 'dense') == (16,) and sizes(16, 'dense', **grow) == (2, 4, 8, 16)
    assert sizes(16, **grow) == (2, 4, 8, 16) and sizes(64, **grow) == (8, 16, 32, 64)


@pytest.mark.parametrize(
    ('router', 'rule', 'runs'),
    [
        ('learned', 'auto', ['predictor', 'threshold', 'dense']),
        ('learned', 'aux_loss', ['aux_loss', 'threshold', 'dense']),
        ('learned', 'threshold', ['threshold', 'dense']),
        ('norm', 'auto', ['dense', 'threshold']),
        ('random', 'auto', ['threshold']),
        ('position', 'auto', ['threshold']),
        ('straight_through', 'predictor', ['predictor', 'threshold']),
    ],
)
def test_rules_that_a_model_does_not_have_are_refused_by_name(router, rule, runs, tiny_config):
    """The line names the routing, the router and what it can run; a typo lists all there are."""
    knobs = {'model.routing.router': router, 'model.routing.causal_rule': rule}
    hparams = from_config(tiny_config(**ROUTED | knobs))
    assert causal_routing(hparams) == runs[0]
    for routing in ('top_c', *runs):
        check_routing(hparams, routing)
    refused = {'predictor', 'aux_loss', 'threshold', 'dense', 'topc', ''} - {*runs}
    for routing in refused:
        with pytest.raises(ValueError) as error:
            check_routing(hparams, routing)
        message = str(error.value)
        assert message.startswith(f'routing={routing!r}: ') and '\n' not in message
        assert 'top_c, ' + ', '.join(runs) in message or 'must be one of top_c' in message
        assert f'{router} router' in message or routing in ('topc', '')
    dense = from_config(tiny_config())
    check_routing(dense, causal_routing(dense))


@pytest.mark.slow
def test_rematerialised_switch_has_the_same_gradient(tiny_config):
    """Under a rule, with several static sizes: blocks recomputed or not, the gradient is one."""
    gradients = []
    for remat in ('block', 'none'):
        knobs = {'model.remat': remat, 'model.attention': 'reference'}
        model, variables = make(tiny_config, **knobs, **{'model.routing.overflow': 'grow'})

        def loss(params, model=model, variables=variables):
            given = variables | {'params': params}
            return jnp.sum(jnp.tanh(model.apply(given, TOKENS_BT, routing='threshold')[0]))

        gradients.append(jit(jax.grad(loss))(variables['params']))
    for one, other in zip(*map(jax.tree.leaves, gradients), strict=True):
        atol = 1e-5 * max(np.abs(one).max(), 1)
        np.testing.assert_allclose(other, one, rtol=0, atol=atol)
    assert np.any(gradients[0]['stack']['run_0']['layer_0']['router']['w'])
