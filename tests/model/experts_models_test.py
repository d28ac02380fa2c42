"""Whole models with experts: causal where they claim it, scanned as unrolled, and staged."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.model.attention import TokenInfo
from moddepth_jax.model.mod.mixture_of_depths import MixtureOfDepths, RoutingArgs
from moddepth_jax.model.moe.experts import ExpertState
from moddepth_jax.model.transformer import Transformer
from tests.model.cases import (
    CAUSAL,
    EXPERT_MODELS_MODA,
    FAST,
    HALF_ROUTED,
    POST,
    REORDERED,
    drawn_like,
    experts,
    random_variables_with_thresholds,
    small_experts,
    two_layer_hparams,
)

LENGTH, CUT, VOCABULARY = 12, 7, 48
# Every place of every row has a token of its own, so that its row of the embedding is its input.
TOKENS_BT = np.random.default_rng(1).permutation(2 * LENGTH).reshape(2, LENGTH)
OTHER_BT = TOKENS_BT + 2 * LENGTH
SEGMENTS_BT = np.array([[1] * 7 + [2] * 5, [1] * 9 + [0] * 3])


def jit(function):
    return jax.jit(function, compiler_options=FAST)


def runner(hparams, variables, rule, options):
    """tokens -> logits, records, and the gradient by the embedding of the first logits."""
    model = Transformer(hparams)

    def loss(params, tokens_BT):
        logits_BTV, records = model.apply(variables | {'params': params}, tokens_BT, routing=rule)
        return jnp.sum(jnp.tanh(logits_BTV[:, :CUT])), (logits_BTV, records)

    run = jax.jit(jax.grad(loss, has_aux=True), compiler_options=options)

    def with_embedding(tokens_BT):
        gradient, (logits_BTV, records) = jax.device_get(run(variables['params'], tokens_BT))
        return logits_BTV, records, gradient['embedding']

    return with_embedding


def varied(records, hparams):
    """Whether experts of every layer take some tokens and not all, and routed blocks too."""
    loads_XZ = records.experts.pairs_Z / records.experts.tokens[:, None]
    routed_XE = loads_XZ[:, : hparams.model.experts.num_routed]
    mixed = ((routed_XE > 0) & (routed_XE < 1)).sum(1).min() >= 2
    if records.routing is None:
        return mixed
    entered = records.routing.selected_BT.mean(axis=(1, 2))
    return mixed and ((entered > 0.1) & (entered < 0.9)).all()


def check_causality(make_config, name, options):
    knobs, rule = CAUSAL[name]
    hparams = two_layer_hparams(make_config, knobs)
    variables = random_variables_with_thresholds(hparams, TOKENS_BT)
    run = runner(hparams, variables, rule, options)
    logits_BTV, records, embedding_VD = run(TOKENS_BT)
    assert varied(records, hparams)
    if hparams.model.experts.row_capacity:
        assert (records.experts.dropped > 0).all()
    np.testing.assert_array_equal(
        embedding_VD[TOKENS_BT].any(-1), np.tile(np.arange(LENGTH) < CUT, (2, 1))
    )
    for first in (1, CUT, LENGTH - 1):
        other_BTV, _, _ = run(np.where(np.arange(LENGTH) >= first, OTHER_BT, TOKENS_BT))
        # Though tokens get other places in the sorted layout.
        np.testing.assert_array_equal(other_BTV[:, :first], logits_BTV[:, :first])
        assert (other_BTV[:, first:] != logits_BTV[:, first:]).any(-1).all()
    for row in (0, 1):
        mate = np.arange(2)[:, None] != row
        other_BTV, _, _ = run(np.where(mate, OTHER_BT, TOKENS_BT))
        np.testing.assert_allclose(other_BTV[row], logits_BTV[row], rtol=0, atol=1e-5)
        assert np.abs(other_BTV[1 - row] - logits_BTV[1 - row]).max() > 0.1


@pytest.mark.parametrize(
    'name',
    [pytest.param(name, marks=[pytest.mark.slow] * (name != 'thresholds')) for name in CAUSAL],
)
def test_the_future_changes_no_bit_of_the_past(name, tiny_config):
    """Nor do batch mates beyond rounding; and by gradient nothing later reaches a logit."""
    check_causality(tiny_config, name, FAST)


@pytest.mark.slow
@pytest.mark.parametrize('name', CAUSAL)
def test_the_future_changes_no_bit_of_the_past_in_optimised_programs(name, tiny_config):
    """As above, compiled as it is used."""
    check_causality(tiny_config, name, None)


def test_experts_that_choose_by_rows_look_ahead(tiny_config):
    """Under top-C a later token changes earlier logits, through what is taken alone."""
    hparams = two_layer_hparams(tiny_config, CAUSAL['thresholds'][0])
    variables = random_variables_with_thresholds(hparams, TOKENS_BT)
    run = jit(functools.partial(Transformer(hparams).apply, variables))
    logits_BTV, records = run(TOKENS_BT)
    other_BTV, _ = run(np.where(np.arange(LENGTH) >= CUT, OTHER_BT, TOKENS_BT))
    assert np.abs(other_BTV[:, :CUT] - logits_BTV[:, :CUT]).max() > 1e-2
    taken = hparams.model.experts.num_taken(LENGTH)
    np.testing.assert_array_equal(records.experts.pairs_Z, np.full((2, 5), 2 * taken))


def test_models_refuse_what_they_cannot_run(tiny_config):
    """By name: a rule that is not of their experts, thresholds that are not there."""
    hparams = two_layer_hparams(tiny_config, CAUSAL['thresholds'][0])
    variables = random_variables_with_thresholds(hparams, TOKENS_BT)
    apply = functools.partial(Transformer(hparams).apply, tokens_BT=TOKENS_BT)
    with pytest.raises(ValueError, match="routing='dense': its experts choose.*only threshold"):
        apply(variables, routing='dense')
    with pytest.raises(ValueError, match="routing='threshold': needs averages"):
        apply({'params': variables['params']}, routing='threshold')
    hparams = two_layer_hparams(tiny_config, CAUSAL['staged thresholds'][0])
    variables = random_variables_with_thresholds(hparams, TOKENS_BT)
    some = {'thresholds_R': variables['averages']['thresholds_R']}
    with pytest.raises(ValueError, match="routing='aux_loss': needs averages"):
        apply = Transformer(hparams).apply
        apply(variables | {'averages': some}, TOKENS_BT, routing='aux_loss')
    hparams = two_layer_hparams(tiny_config, CAUSAL['token'][0])
    with pytest.raises(ValueError, match="routing='threshold': no block of this model is routed"):
        Transformer(hparams).apply({'params': {}}, TOKENS_BT, routing='threshold')


# name: knobs; every form of experts with every kind of layer beside it.
SCANNED = {
    'all routed': experts(num_noop=2) | HALF_ROUTED,
    'staged': CAUSAL['staged'][0] | {'model.depth.slots': 'attention+ffn'},
    'token': experts(layers='every:2', product='ragged_dot'),
    'capacity with slots': CAUSAL['capacity with slots'][0] | POST,
    'experts choose': experts(choice='expert', layers='1,2,4')
    | HALF_ROUTED
    | EXPERT_MODELS_MODA
    | REORDERED,
    'integrated': CAUSAL['integrated'][0],
    'middle': experts(layers='middle:1:0', scores='sigmoid') | HALF_ROUTED | POST,
    'masked': CAUSAL['staged'][0] | {'model.depth.skipped_slots': 'masked'},
}


def loss_and_gradient(hparams, variables):
    """Of a loss on logits and on every differentiable number of the records; and the records."""
    model, rng = Transformer(hparams), np.random.default_rng(7)
    weights_BTV = rng.normal(size=(2, LENGTH, VOCABULARY))
    weights_Z = rng.normal(size=hparams.model.experts.num_choices)

    def loss(params):
        given = (variables | {'params': params}, TOKENS_BT, SEGMENTS_BT)
        logits_BTV, records = model.apply(*given)
        total = jnp.mean(logits_BTV * weights_BTV) + jnp.sum(records.experts.log_z) / 100
        total += jnp.sum(jnp.tanh(records.experts.scores_Z / 10) * weights_Z)
        if records.routing is not None:
            total += jnp.mean(jnp.tanh(records.routing.scores_BT))
        return total, records

    run = jit(jax.value_and_grad(loss, has_aux=True))
    return jax.device_get(run(variables['params']))


@pytest.mark.parametrize(
    'name',
    [pytest.param(name, marks=[pytest.mark.slow] * (i > 0)) for i, name in enumerate(SCANNED)],
)
def test_scanned_and_rematerialised_equals_unrolled(name, tiny_config):
    """Loss, records and all gradients, with packing and padding: float64."""
    forms = [('unrolled', 'none'), ('scan', 'block')]
    if name == 'capacity with slots':
        forms += [('unrolled', 'block'), ('scan', 'none')]
    with jax.enable_x64(True), jax.numpy_rank_promotion('allow'):
        found = []
        for loop, remat in forms:
            form = {'model.layer_loop': loop, 'model.remat': remat}
            deep = {'model.num_layers': 5, 'model.routing.layers': 'every:2'}
            if name == 'all routed':
                deep = {'model.num_layers': 2, 'model.routing.layers': 'every:1'}
            wide = {'model.dtype': 'float64'}
            hparams = two_layer_hparams(tiny_config, SCANNED[name], **deep, **form, **wide)
            variables = random_variables_with_thresholds(hparams, TOKENS_BT)
            found.append(loss_and_gradient(hparams, variables))
    ((loss, records), gradient), *others = found
    assert varied(records, hparams)
    for (mine, other), slopes in others:
        np.testing.assert_allclose(mine, loss, rtol=1e-12)
        for one, two in zip(jax.tree.leaves(records), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(two, one, rtol=1e-9)
        leaves = jax.tree_util.tree_leaves_with_path(gradient)
        for (path, leaf), slope in zip(leaves, jax.tree.leaves(slopes), strict=True):
            where, most = jax.tree_util.keystr(path), np.abs(leaf).max()
            assert most > 1e-7 and np.abs(slope - leaf).max() <= 1e-9 * most, where


def rankings(jaxpr):
    """How often a jaxpr, and those inside it, rank anything."""
    found = 0
    for eqn in jaxpr.eqns:
        found += eqn.primitive.name == 'top_k'
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, 'eqns')):
            if hasattr(value, 'eqns'):
                found += rankings(getattr(value, 'jaxpr', value))
    return found


@pytest.mark.parametrize('choice', ['token', 'expert'])
def test_rematerialisation_keeps_the_choice(choice, tiny_config):
    """The backward pass ranks nothing again: on a near-tie it could choose otherwise."""
    ranked = []
    for remat in ('none', 'block'):
        hparams = two_layer_hparams(tiny_config, experts(choice=choice), **{'model.remat': remat})
        variables = random_variables_with_thresholds(hparams, TOKENS_BT)

        def loss(params, hparams=hparams, variables=variables):
            variables = variables | {'params': params}
            return jnp.sum(Transformer(hparams).apply(variables, TOKENS_BT)[0])

        jaxpr = jax.make_jaxpr(jax.grad(loss))(variables['params']).jaxpr
        ranked.append(rankings(jaxpr))
    assert ranked == [1, 1]  # in the scan's body


def routed_block(hparams, segments_BT):
    """MixtureOfDepths by top-C, whose router reads component 0 alone: x -> y and both records."""
    block = MixtureOfDepths(hparams.model, 0, 'top_c', experts=True)
    positions_BT = np.tile(np.arange(LENGTH), (2, 1))
    tokens = TokenInfo(positions_BT, segments_BT, None)
    layer = RoutingArgs(np.int32(0), np.float32(0), np.bool_(True), ExpertState())
    x_BTD = np.zeros((2, LENGTH, hparams.model.d_model), np.float32)
    shapes = jax.eval_shape(block.init, jax.random.key(0), x_BTD, tokens, layer)['params']
    params = drawn_like(shapes)
    params['router']['w'] = np.eye(hparams.model.d_model, dtype=np.float32)[0]

    def run(x_BTD):
        y_BTD, left, _, record = block.apply({'params': params}, x_BTD, tokens, layer)
        return y_BTD, record, left.experts

    return jit(run)


@pytest.mark.parametrize('choice', ['token', 'expert'])
def test_experts_of_a_routed_block_meet_who_enters(choice, tiny_config):
    """They count the selected real tokens alone; others keep their bits and change no count."""
    noop = {'num_noop': 2} if choice == 'token' else {}
    hparams = small_experts(tiny_config, HALF_ROUTED, choice=choice, **noop)
    segments_BT = np.where(np.arange(LENGTH) < np.array([[12], [4]]), 1, 0)  # 4 are fewer than C
    run = routed_block(hparams, segments_BT)
    x_BTD = np.random.default_rng(0).normal(size=(2, LENGTH, 16)).astype(np.float32)
    x_BTD[1, 4:, 0] = 9  # padding scores highest
    y_BTD, record, met = run(x_BTD)
    selected_BT = np.asarray(record.selected_BT)
    np.testing.assert_array_equal(selected_BT.sum(1), [6, 4])
    assert not selected_BT[segments_BT == 0].any()
    same_BT = (np.asarray(y_BTD).view(np.uint32) == x_BTD.view(np.uint32)).all(-1)
    np.testing.assert_array_equal(same_BT, ~selected_BT)
    assert (met.tokens, met.rows) == (10, 2)
    # By experts: each takes 2 x 6 / 5 of the 6 places of a row.
    assert met.pairs_Z.sum() == (2 * 10 if choice == 'token' else 2 * 5 * 2)
    noise_BTD = np.random.default_rng(1).normal(size=x_BTD.shape).astype(np.float32)
    noise_BTD[..., 0] = x_BTD[..., 0]
    other_y_BTD, other_record, other_met = run(np.where(selected_BT[..., None], x_BTD, noise_BTD))
    np.testing.assert_array_equal(other_record.selected_BT, selected_BT)
    np.testing.assert_array_equal(np.asarray(other_y_BTD)[selected_BT], y_BTD[selected_BT])
    jax.tree.map(np.testing.assert_array_equal, other_met, met)
