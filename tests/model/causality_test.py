"""No later token and no other row affects a token's logits, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.model.transformer import Transformer
from tests.model.cases import (
    BATCH,
    EXPERTS,
    FAMILIES,
    LENGTH,
    OPTIMIZED,
    OTHER_BT,
    TOKENS_BT,
    build,
    parameters,
)

CUT = 9


def changed(one_BTV, other_BTV):
    """Return a bool mask [B, T] of logits that differ in any bit."""
    one, other = (np.asarray(x).view(np.uint32) for x in (one_BTV, other_BTV))
    return (one != other).any(-1)


def swapped(places):
    """Return the tokens with other tokens at some places of all rows."""
    return np.where(np.isin(np.arange(LENGTH), places), OTHER_BT, TOKENS_BT)


def assert_varied(model, records):
    """Assert that the rule selects some but not all tokens, and that some experts take tokens."""
    if records is None:
        return
    if records.routing is not None and model.routing != 'dense':
        fractions = records.routing.selected_BT.mean(axis=(1, 2))
        fractions = fractions[int(model.hparams.model.routing.routes_loops) :]  # loop 0 takes all
        assert ((0.1 < fractions) & (fractions < 0.9)).all()
    if records.experts is not None:
        loads_XZ = records.experts.pairs_Z / records.experts.tokens[:, None]
        routed_XE = loads_XZ[:, : model.hparams.model.experts.num_routed]
        assert ((routed_XE > 0) & (routed_XE < 1)).sum(1).min() >= 2


def check_the_future(model):
    logits_BTV, records = model()
    assert_varied(model, records)
    for first in (1, CUT, LENGTH - 1):
        other_BTV, _ = model(swapped(range(first, LENGTH)))
        differs_BT = changed(logits_BTV, other_BTV)
        assert differs_BT[:, first:].all()
        if model.hparams.model.routing.overflow == 'grow':  # static sizes follow the fullest row
            past = [np.asarray(side)[:, :first] for side in (logits_BTV, other_BTV)]
            np.testing.assert_allclose(*past, atol=1e-5 * np.abs(logits_BTV).max())
        else:
            assert not differs_BT[:, :first].any()


FAST = ('dense', 'dense rule', 'aux_loss', 'norm dense', 'threshold', 'random', 'position')
FAST += ('recursions, aux_loss',)


@pytest.mark.parametrize('name', parameters((*FAST, 'mod and moda', 'experts choose')))
def test_future_tokens_do_not_change_past_logits(name, tiny_config):
    """Tokens at and after a place change no bit of the logits before it.

    This holds although earlier tokens then have other places among those of a block or an expert.
    """
    check_the_future(build(tiny_config, name))


@pytest.mark.parametrize('name', parameters(('predictor',), FAMILIES))
def test_future_tokens_do_not_change_past_logits_when_optimized(name, tiny_config):
    """The same for programs compiled as users run them: optimization may reorder sums."""
    check_the_future(build(tiny_config, name, options=tuple(OPTIMIZED.items())))


@pytest.mark.parametrize('name', parameters(('experts choose',), FAMILIES))
def test_past_logits_have_no_gradient_by_future_tokens(name, tiny_config):
    """The gradient is exactly 0 for the embeddings of all later tokens and of no earlier one.

    Of models without a tied table, which the logits of all tokens also read.
    """
    model = build(tiny_config, name)

    def loss(params):
        variables = model.variables | {'params': params}
        logits_BTV, _ = Transformer(model.hparams).apply(
            variables, TOKENS_BT, routing=model.routing
        )
        return jnp.sum(jnp.tanh(logits_BTV[:, :CUT]))

    gradient = jax.jit(jax.grad(loss))(model.variables['params'])
    used_BT = np.asarray(gradient['embedding'])[TOKENS_BT].any(-1)
    np.testing.assert_array_equal(used_BT, np.tile(np.arange(LENGTH) < CUT, (BATCH, 1)))


@pytest.mark.parametrize('name', ['predictor', 'experts choose'])
def test_top_c_looks_ahead(name, tiny_config):
    """Under top-C, later tokens change earlier logits, but only through the selection."""
    model = build(tiny_config, name, routing='top_c')
    logits_BTV, records = model()
    other_BTV, other = model(swapped(range(CUT, LENGTH)))
    assert np.abs(other_BTV[:, :CUT] - logits_BTV[:, :CUT]).max() > 1e-2
    if name == 'predictor':
        chosen_RBT = records.routing.top_c_BT
        assert (chosen_RBT != other.routing.top_c_BT)[:, :, :CUT].any()
        assert (chosen_RBT.sum(-1) == LENGTH // 4).all()
    else:
        taken = model.hparams.model.experts.num_taken(LENGTH)
        np.testing.assert_array_equal(records.experts.pairs_Z, np.full((3, 5), BATCH * taken))


def test_causal_layers_say_which_loops_use_the_rule(tiny_config):
    """In all of them it is the causal rule, in none it is top-C, and those differ.

    tests/training/evaluate_test.py has this for routed blocks, layer by layer.
    """
    model = build(tiny_config, 'recursions, threshold')
    num_routed = len(model.hparams.model.routed_layers)

    @functools.partial(jax.jit, static_argnums=1)
    def run(causal_R, routing):
        apply = functools.partial(Transformer(model.hparams).apply, model.variables, TOKENS_BT)
        return apply(routing=routing, causal_layers_R=causal_R)[0]

    rule_BTV, _ = model()
    top_c_BTV = run(None, 'top_c')
    assert np.abs(rule_BTV - top_c_BTV).max() > 0.1
    for of_all, expected_BTV in ((True, rule_BTV), (False, top_c_BTV)):
        found_BTV = run(np.full(num_routed, of_all), model.routing)
        np.testing.assert_allclose(found_BTV, expected_BTV, rtol=0, atol=1e-5)


def check_rows(model, name):
    logits_BTV, _ = model()
    for row in range(BATCH):
        others_B1 = np.arange(BATCH)[:, None] != row
        other_BTV, _ = model(np.where(others_B1, OTHER_BT, TOKENS_BT))
        if name in EXPERTS:
            np.testing.assert_allclose(other_BTV[row], logits_BTV[row], rtol=0, atol=1e-5)
            assert np.abs(other_BTV - logits_BTV).max() > 0.1
        elif model.hparams.model.routing.overflow != 'grow':  # the fullest row decides sizes there
            expected_BT = np.tile(others_B1, LENGTH)
            np.testing.assert_array_equal(changed(logits_BTV, other_BTV), expected_BT)


@pytest.mark.parametrize('name', parameters(('aux_loss', 'random', 'experts choose')))
def test_rows_do_not_depend_on_each_other(name, tiny_config):
    """Other rows of the batch change no bit; with experts, only the rounding."""
    check_rows(build(tiny_config, name), name)


def test_rows_do_not_depend_on_each_other_under_top_c(tiny_config):
    """Tokens are selected within a row, never across the batch."""
    check_rows(build(tiny_config, 'predictor', routing='top_c'), 'predictor')


def test_a_growing_cache_changes_bits_only_by_its_size(tiny_config):
    """Under `grow`, future tokens and other rows may change the static size, and so the last bits.

    Selections stay the same, logits stay within 1e-5, and all bits stay if no size changes.
    """
    model = build(tiny_config, 'aux_loss grows')
    logits_BTV, records = model()
    fullest_R = records.routing.selected_BT.sum(2).max(1)
    scale, sizes = np.abs(logits_BTV).max(), np.array([2, 4, 8, LENGTH])
    same_sizes = []
    for seed, first in enumerate((1, 4, 9, 12, LENGTH - 1)):
        for others in (False, True):
            future_BT = (np.arange(LENGTH) >= first)[None] | np.array([[False], [others], [others]])
            future = np.random.default_rng(seed).integers(0, 96, TOKENS_BT.shape)
            other_BTV, other = model(np.where(future_BT, future, TOKENS_BT))
            kept_BT = ~future_BT
            np.testing.assert_array_equal(
                other.routing.selected_BT[:, kept_BT], records.routing.selected_BT[:, kept_BT]
            )
            assert np.abs(other_BTV - logits_BTV)[kept_BT].max() < 1e-5 * scale
            full_R = other.routing.selected_BT.sum(2).max(1)
            same = (np.searchsorted(sizes, full_R) == np.searchsorted(sizes, fullest_R)).all()
            assert not (same and changed(logits_BTV, other_BTV)[kept_BT].any())
            same_sizes.append(same)
    assert any(same_sizes) and not all(same_sizes)
    assert not records.routing.dropped_BT.any()
