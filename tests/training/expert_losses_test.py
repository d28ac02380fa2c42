"""Balance loss, z-loss and loads of experts are those worked out by hand."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.training.losses import expert_counts, expert_loss, expert_ratios

# 2 layers; top-2 of 3 routed experts and 1 that does nothing. Layer 0 saw 8 tokens, layer 1 four.
TOKENS = [8, 4]
PAIRS = [[8, 4, 0, 4], [2, 2, 2, 2]]
SCORES = [[4.0, 2.0, 0.5, 1.5], [1.0, 1.0, 0.5, 1.5]]
LOG_Z = [16.0, 2.0]


def made(pairs=PAIRS, scores=SCORES, tokens=TOKENS, log_z=LOG_Z, dropped=(0, 0), **lowest):
    """A record of these numbers, scores and log_z as float32."""
    return types.SimpleNamespace(
        tokens=jnp.asarray(tokens, jnp.int32),
        pairs_Z=jnp.asarray(pairs, jnp.int32),
        dropped=jnp.asarray(dropped, jnp.int32),
        scores_Z=jnp.asarray(scores, jnp.float32),
        log_z=jnp.asarray(log_z, jnp.float32),
        lowest_E=lowest.get('lowest_E'),
        rows=jnp.asarray(lowest.get('rows', [1, 1]), jnp.int32),
    )


@pytest.fixture
def hparams(tiny_config):
    """Of a model whose layers have the 3 + 1 experts above, balance weight 0.5, z-loss 0.25."""

    def build(**changes):
        knobs = {'choice': 'token', 'num_routed': 3, 'num_noop': 1, 'top_k': 2}
        knobs |= {'balance_weight': 0.5, 'z_loss': 0.25} | changes
        config = tiny_config(**{f'model.experts.{knob}': value for knob, value in knobs.items()})
        return from_config(config)

    return build


def test_losses_of_hand_made_counts(hparams):
    """sum f_i P_i is 23/16 and 1 in the two layers; the experts that do nothing count among the Z.

    Layer 0: f = 4 / (2 x 8) (8, 4, 0, 4) = (2, 1, 0, 1), P = (4, 2, 0.5, 1.5) / 8.
    Layer 1: f = 4 / (2 x 4) (2, 2, 2, 2) = (1, 1, 1, 1), P = (1, 1, 0.5, 1.5) / 4.
    """
    balance, z = expert_loss(hparams(), made())
    assert balance == 0.5 * (1.4375 + 1) / 2
    assert z == 0.25 * (16 / 8 + 2 / 4) / 2


def test_even_loads_and_scores_cost_the_weight(hparams):
    """Whatever k and the number of experts, the balance loss is then its weight."""
    for num_noop, top_k in ((0, 1), (1, 2), (5, 3)):
        choices = 3 + num_noop
        record = made(np.full((1, choices), 6 * top_k), np.full((1, choices), 6.0), [6 * choices])
        balance, _ = expert_loss(hparams(num_noop=num_noop, top_k=top_k), record)
        np.testing.assert_allclose(balance, 0.5, rtol=1e-6)


def test_a_layer_without_tokens_costs_nothing(hparams):
    """No division by 0, and no NaN in the gradient."""

    def total(scores_XZ):
        record = made([[0] * 4], [[0.0] * 4], [0], [0.0])
        record.scores_Z = scores_XZ
        return sum(expert_loss(hparams(), record))

    loss, slope_XZ = jax.value_and_grad(total)(jnp.zeros((1, 4)))
    assert loss == 0 and not slope_XZ.any()


def test_gradient_reaches_scores_and_log_partitions_alone(hparams):
    """d balance / d scores is weight f_i / (X n), so f_i / 32 and f_i / 16; soft pairs get none."""

    def total(scores_XZ, pairs_XZ, log_z_X):
        record = made()
        record.scores_Z, record.pairs_Z, record.log_z = scores_XZ, pairs_XZ, log_z_X
        return sum(expert_loss(hparams(), record))

    given = (jnp.asarray(values, jnp.float32) for values in (SCORES, PAIRS, LOG_Z))
    slopes = jax.grad(total, argnums=(0, 1, 2))(*given)
    expected_XZ = np.array([[2, 1, 0, 1], [1, 1, 1, 1]]) / np.array([[32], [16]])
    np.testing.assert_array_equal(slopes[0], expected_XZ)
    np.testing.assert_array_equal(slopes[1], np.zeros((2, 4)))
    np.testing.assert_array_equal(slopes[2], 0.25 / 2 / np.array(TOKENS))


def test_losses_of_micro_batches_sum_to_those_of_the_step(hparams):
    """So do their gradients, where each is given the pairs and tokens of the whole step.

    Divided by their own tokens, unequal ones, they would not.
    """
    random = np.random.default_rng(0)
    tokens = [(3, 7), (5, 1), (4, 4)]
    pairs = [random.integers(0, 9, (2, 4)) for _ in tokens]
    scores = [random.random((2, 4)) for _ in tokens]
    log_z = [random.random(2) * 9 for _ in tokens]
    parts = [made(*part) for part in zip(pairs, scores, tokens, log_z, strict=True)]
    whole = made(sum(pairs), sum(scores), np.sum(tokens, axis=0), sum(log_z))
    counts = jax.tree.map(lambda *leaves: sum(leaves), *map(expert_counts, parts))
    expected = expert_loss(hparams(), whole)
    losses = [expert_loss(hparams(), part, counts) for part in parts]
    np.testing.assert_allclose(np.sum(losses, axis=0), expected, rtol=1e-6)
    alone = [expert_loss(hparams(), part) for part in parts]
    assert (abs(np.sum(alone, axis=0) / expected - 1) > 0.1).all()

    def balance(scores_XZ, record, counts=None):
        record.scores_Z = scores_XZ
        return expert_loss(hparams(), record, counts)[0]

    slope_XZ = jax.grad(balance)(whole.scores_Z, whole)
    assert (abs(slope_XZ) > 0).all()
    for part in parts:
        np.testing.assert_allclose(jax.grad(balance)(part.scores_Z, part, counts), slope_XZ, 1e-6)


def test_who_has_which_loss(hparams):
    """Experts that choose have a z-loss and no balance loss."""
    balance, z = expert_loss(hparams(choice='expert', num_noop=0), made())
    assert (balance, z) == (0, 0.25 * (16 / 8 + 2 / 4) / 2)


def test_counts_are_those_of_the_record():
    """Each under its name, as float32; the lowest scores only where experts chose."""
    counts = expert_counts(made(dropped=[3, 0]))
    expected = {
        'tokens_X': TOKENS,
        'pairs_XZ': PAIRS,
        'dropped_X': [3, 0],
        'scores_XZ': SCORES,
        'log_z_X': LOG_Z,
    }
    assert {name: count.tolist() for name, count in counts.items()} == expected
    assert all(count.dtype == jnp.float32 for count in counts.values())
    lowest_E = jnp.array([[1.0, 0.5, 2.0]] * 2)
    counts = expert_counts(made(lowest_E=lowest_E, rows=[2, 3]))
    assert counts.keys() - expected.keys() == {'rows_X', 'lowest_XE'}
    np.testing.assert_array_equal(counts['lowest_XE'], lowest_E)
    assert counts['rows_X'].tolist() == [2, 3]


RATIOS = {
    'load': [[0.5, 0.25, 0, 0.25], [0.25] * 4],
    'largest_load': [2, 1],
    'noop_fraction': [0.25, 0.25],
    'dropped_fraction': [3 / 16, 0],
    'computed_fraction': [9 / 16, 6 / 8],
    'unused': [1, 0],
}


def test_ratios_follow_from_counts():
    """By hand: the 8 of layer 0's fullest expert are twice the mean 12 / 3 of the routed ones."""
    ratios = expert_ratios(expert_counts(made(dropped=[3, 0])), 2, 3)
    assert {name: values.tolist() for name, values in ratios.items()} == RATIOS


def test_ratios_of_experts_that_choose():
    """Sums over rows of the lowest score taken are divided by the rows; nothing is a no-op."""
    record = made([[4, 4, 4]], [[1.0] * 3], [6], [1.0], [0], lowest_E=[[1.0, 0.5, 2.0]], rows=[2])
    ratios = expert_ratios(expert_counts(record), 2, 3)
    assert ratios['lowest_taken'].tolist() == [[0.5, 0.25, 1.0]]
    assert (ratios['noop_fraction'], ratios['computed_fraction']) == (0, 1)


@pytest.mark.parametrize('float64', [False, True])
def test_nothing_to_divide_by_is_nan(float64):
    """A layer that no token reached has no shares, in JAX and in NumPy, and spoils no other."""
    counts = expert_counts(made([PAIRS[0], [0] * 4], tokens=[8, 0]))
    if float64:
        counts = {name: np.asarray(count, np.float64) for name, count in counts.items()}
    with np.errstate(invalid='ignore', divide='ignore'):
        ratios = expert_ratios(counts, 2, 3)
    assert ratios.pop('unused').tolist() == [1, 3]
    for name, values in ratios.items():
        assert np.isfinite(values[0]).all() and np.isnan(values[1]).all(), name


def test_a_run_where_every_token_does_nothing():
    """All pairs on no-op experts: a share of 1, no largest load, and nothing computed."""
    ratios = expert_ratios(expert_counts(made([[0, 0, 0, 16]], tokens=[8], dropped=[0])), 2, 3)
    assert ratios['noop_fraction'] == 1 and ratios['computed_fraction'] == 0
    assert np.isnan(ratios['largest_load']) and ratios['unused'] == 3
