"""Scanned and rematerialized layers equal unrolled ones, and programs do not grow with depth."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.model.transformer import Transformer
from tests.model.cases import (
    BLOCK_SLOT,
    CASES,
    FAMILIES,
    MASKED,
    MODA,
    NEWEST,
    POST,
    RECENT,
    ROUTED,
    SMALL_BT,
    SMALL_SEGMENTS_BT,
    SOURCES,
    STATIC_WAYS,
    UNROLLED,
    at_size,
    equations,
    experts,
    parameters,
    random_variables,
    routed_by,
    small_hparams,
)

VOCABULARY = 32
# Readers of a single slot or source, with weight 1, whose queries have no gradient.
ALONE = {
    'attention': "['run_0']['layer_0']['stream']['query']['kernel']",
    'attention_residual': "['run_0']['layer_0']['attention_connection']",
}
BY_POSITION = routed_by('position', 'threshold')
PLAIN = UNROLLED | {'model.remat': 'none'}
# Runs of two repeats and a last layer that writes no slot.
FIVE = {'model.num_layers': 5, 'model.routing.layers': 'every:2'}
MORE = {
    'every layer routed': experts(num_noop=2)
    | ROUTED
    | {'model.num_layers': 2, 'model.routing.layers': 'every:1'},
    'experts in the middle': experts(layers='middle:1:0', scores='sigmoid') | ROUTED | POST,
    'experts of some layers': experts(choice='expert', layers='1,2,4') | ROUTED | MODA,
    'masked and staged': experts(num_noop=2) | ROUTED | MODA | MASKED,
    'block slots': MODA | BLOCK_SLOT | POST | NEWEST,
    'seven layers': MODA | ROUTED | {'model.num_layers': 7},
}
# Streams that read all earlier outputs are not scanned.
SCANNED = {
    name: at_size(knobs, FIVE)
    for name, (knobs, _) in CASES.items()
    if knobs.get('model.depth.stream') not in ('dense', 'average')
} | {name: FIVE | knobs for name, knobs in MORE.items()}


def loss_and_gradient(hparams, variables):
    """Return loss and gradients on the logits and all differentiable records, and the records."""
    model, rng = Transformer(hparams), np.random.default_rng(7)
    weights_BTV = jnp.asarray(rng.normal(size=(*SMALL_BT.shape, VOCABULARY)))
    weights_Z = jnp.asarray(rng.normal(size=hparams.model.experts.num_choices))

    def loss(params):
        given = variables | {'params': params}
        logits_BTV, records = model.apply(given, SMALL_BT, SMALL_SEGMENTS_BT)
        total = jnp.mean(logits_BTV * weights_BTV)
        if records is not None and records.routing is not None:
            for i, leaf in enumerate(('scores_BT', 'rule_logits_BT', 'gates_BT')):
                leaf_RBT = getattr(records.routing, leaf)
                total += jnp.mean(jnp.tanh(leaf_RBT) * weights_BTV[None, :, :, i])
        if records is not None and records.experts is not None:
            total += jnp.sum(records.experts.log_z) / 100
            total += jnp.sum(jnp.tanh(records.experts.scores_Z / 10) * weights_Z)
        return total, records

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    return jax.device_get(run(variables['params']))


def has_no_gradient(model, where):
    """Return whether a leaf gets no gradient: those of ALONE, and the last mixture of streams."""
    if model.depth.hyper_form == 'constrained':
        return "['run_1']['layer_0']['mlp_connection']" in where and 'mix' in where
    return ALONE.get(model.depth.stream, where + ' is not') in where


FORMS = {
    'both': {},
    'scanned': {'model.remat': 'none'},
    'rematerialized': UNROLLED,
    'block': {'model.remat': 'block'},
}


# `both` is for all models; the other forms are for one model of each family.
EQUAL = [(name, 'both') for name in SCANNED]
EQUAL += [(name, form) for name in SCANNED if name in FAMILIES for form in FORMS if form != 'both']


@pytest.mark.parametrize(('name', 'form'), parameters((('mod and moda', 'both'),), EQUAL))
def test_scanned_and_rematerialized_equals_unrolled(name, form, tiny_config):
    """Loss, records and all gradients, with packing and padding, in float64."""
    knobs = SCANNED[name] | {'model.dtype': 'float64'}
    hparams = small_hparams(tiny_config, knobs, PLAIN)
    with jax.enable_x64(True), jax.numpy_rank_promotion('allow'):
        variables = random_variables(hparams, SMALL_BT)
        (expected, records), gradient = loss_and_gradient(hparams, variables)
        hparams = small_hparams(tiny_config, knobs, FORMS[form])
        (found, other_records), other = loss_and_gradient(hparams, variables)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
    jax.tree.map(close, other_records, records)
    leaves = jax.tree_util.tree_leaves_with_path(gradient)
    for (path, leaf), mine in zip(leaves, jax.tree.leaves(other), strict=True):
        largest, where = np.abs(leaf).max(), jax.tree_util.keystr(path)
        if has_no_gradient(hparams.model, where) and len(leaf) == 1:
            assert np.abs(mine).max() < 1e-9
            continue
        assert largest > 1e-7 and leaf.dtype == mine.dtype, where
        assert np.abs(leaf - mine).max() <= 1e-9 * largest, where


@pytest.mark.slow
@pytest.mark.parametrize(
    'stream',
    [MODA | MASKED | BY_POSITION, SOURCES | BY_POSITION, STATIC_WAYS, RECENT | BY_POSITION],
    ids=['moda', 'attention residual', 'static mudd', 'value attention'],
)
@pytest.mark.parametrize(
    ('dtype', 'remat'),
    [*(('float32', remat) for remat in ('block', 'elementwise', 'none')), ('model', 'block')],
)
def test_gradients_of_bfloat16_slots(dtype, remat, stream, tiny_config):
    """With sums in the slots' dtype or another, each is near that of unrolled layers."""
    knobs = stream | {'model.dtype': 'bfloat16', 'model.remat': remat}
    knobs |= {'model.depth.gradient_dtype': dtype}
    unrolled = small_hparams(tiny_config, knobs, UNROLLED)
    variables = random_variables(unrolled, SMALL_BT)
    _, gradient = loss_and_gradient(unrolled, variables)
    scanned = small_hparams(tiny_config, knobs)
    _, mine = loss_and_gradient(scanned, variables)
    leaves = jax.tree_util.tree_leaves_with_path(gradient)
    for (path, leaf), other in zip(leaves, jax.tree.leaves(mine), strict=True):
        error = np.linalg.norm(leaf - other) / np.linalg.norm(leaf)
        assert error < 0.03, (jax.tree_util.keystr(path), error)


def traced(make_config, *knobs, routing='top_c', gradient=True):
    """Return the equations of a model's gradient, or of its initialization."""
    hparams = small_hparams(make_config, *knobs)
    model, tokens_BT = Transformer(hparams), np.zeros((1, 12), np.int32)

    def loss(params, rest):
        return jnp.sum(model.apply({'params': params} | rest, tokens_BT, routing=routing)[0])

    if not gradient:
        return list(equations(jax.make_jaxpr(model.init)(jax.random.key(0), tokens_BT).jaxpr))
    rest = jax.eval_shape(model.init, jax.random.key(0), tokens_BT)
    params = rest.pop('params')
    return list(equations(jax.make_jaxpr(jax.grad(loss))(params, rest).jaxpr))


@pytest.mark.parametrize('dtype', ['float32', 'model'])
def test_unrolled_layers_sum_the_gradients_of_slots_in_the_chosen_dtype(dtype, tiny_config):
    """Sums that have the shape of a slot; those of attention over the sequence are bfloat16."""
    knobs = {'model.dtype': 'bfloat16', 'model.depth.gradient_dtype': dtype}
    model = small_hparams(tiny_config, MODA, UNROLLED, knobs).model
    sums = [
        eqn.outvars[0].aval.dtype
        for eqn in traced(tiny_config, MODA, UNROLLED, knobs)
        if eqn.primitive.name == 'add_any'
        and eqn.outvars[0].aval.shape == (1, 12, model.num_kv_heads, model.head_dim)
    ]
    assert jnp.bfloat16 in sums
    assert (jnp.float32 in sums) == (dtype == 'float32')


def test_each_form_is_another_program(tiny_config):
    """Unrolled layers have no scan over layers, and `remat` none recomputes nothing."""
    forms = ('scan', 'block'), ('scan', 'elementwise'), ('scan', 'none'), ('unrolled', 'block')
    for loop, remat in forms:
        form = {'model.layer_loop': loop, 'model.remat': remat}
        names = {eqn.primitive.name for eqn in traced(tiny_config, ROUTED, form)}
        assert ('scan' in names) == (loop == 'scan')
        assert bool(names & {'checkpoint', 'remat', 'remat2'}) == (remat != 'none')


@pytest.mark.parametrize('knobs, again', [({}, False), (ROUTED, False), (MODA, True)])
def test_attention_is_computed_again_only_with_slots(knobs, again, tiny_config):
    """Without slots, a rematerialized model has only the exponentials of a plain one."""
    counts = [
        sum(eqn.primitive.name == 'exp' for eqn in traced(tiny_config, knobs, form))
        for form in ({'model.remat': 'none'}, {'model.remat': 'block'})
    ]
    assert (0 < counts[0] < counts[1]) if again else (0 < counts[0] == counts[1])


@pytest.mark.parametrize(
    'knobs',
    [{}, ROUTED, experts(product='ragged_dot')],
    ids=['dense', 'routed', 'experts'],
)
def test_elementwise_computes_no_matrix_product_again(knobs, tiny_config):
    found = {
        remat: [eqn.primitive.name for eqn in traced(tiny_config, knobs, {'model.remat': remat})]
        for remat in ('none', 'elementwise', 'block')
    }
    none, elementwise, block = (
        sum('dot_general' in name for name in names) for names in found.values()
    )
    assert 0 < none == elementwise < block
    none, elementwise, block = (names.count('rsqrt') for names in found.values())  # of the norms
    assert 0 < none < elementwise == block


@pytest.mark.parametrize(
    'stream',
    parameters(
        ('moda',),
        ('moda', 'residual', 'value_residual', 'attention_residual', 'mudd'),
    ),
)
def test_initialization_does_not_grow_with_depth(stream, tiny_config):
    """24 layers have as many equations as 6. streams_test.py compiles the gradient."""
    knobs = {} if stream == 'mudd' else ROUTED  # which is refused
    knobs = knobs | {'model.depth.stream': stream}
    six, many = (
        len(traced(tiny_config, knobs, {'model.num_layers': layers}, gradient=False))
        for layers in (6, 24)
    )
    assert six == many


@pytest.mark.parametrize('choice', ['token', pytest.param('expert', marks=pytest.mark.slow)])
def test_rematerialization_keeps_the_choice_of_experts(choice, tiny_config):
    """The backward pass ranks nothing again: on a near-tie it could choose differently."""
    for remat in ('none', 'elementwise', 'block'):
        found = traced(tiny_config, experts(choice=choice), {'model.remat': remat})
        assert sum(eqn.primitive.name == 'top_k' for eqn in found) == 1  # in the scan's body
