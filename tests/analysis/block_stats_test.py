"""Measures of small models whose selected tokens are known."""

import json

import jax
import numpy as np
import optax
import pytest

from moddepth_jax.analysis import depth_mass as depth_mass_lib
from moddepth_jax.analysis.block_stats import (
    MEASURES,
    Observations,
    block_stats,
    layers,
    observe,
    rank_correlation,
)
from moddepth_jax.analysis.depth_mass import DepthMass
from moddepth_jax.data.corpus import Corpus
from moddepth_jax.data.pipeline import HeldOut
from moddepth_jax.data.tokenizers.tokenizer import ByteTokenizer
from moddepth_jax.model.transformer import Transformer
from tests.data.prepared_text import data_hparams
from tests.model.cases import ALL_LOOPED, MODA, RECURSIONS, random_variables, small_hparams

T = 16
TEXT = b'import math\nx = 777\nfor word in "ab cd":  # a\n    print(word, 12345)\n\n'


def _held_out(num_rows):
    text = (TEXT * num_rows)[: num_rows * T]
    data = data_hparams('stdlib', sequence_length=T)
    return HeldOut(data, Corpus('stdlib', [], [text], '', ''), ByteTokenizer())


def _measured(make_config, *knobs, num_batches=4):
    hparams = small_hparams(make_config, {'model.vocab_size': 257, 'model.num_layers': 3}, *knobs)
    variables = random_variables(hparams, np.zeros((1, T), np.int32))
    return block_stats(variables, hparams, _held_out(7), num_batches)


def test_measures_of_a_router_that_takes_odd_positions(tiny_config):
    """Counts by layer, number of blocks, class and position are those counted by hand.

    The result is the same each time and survives JSON.
    """
    knobs = {'model.routing.router': 'position', 'model.routing.capacity': 0.5}
    knobs |= {'model.routing.layers': '0,1', 'model.routing.overflow': 'grow'}
    result = _measured(tiny_config, knobs)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert result == _measured(tiny_config, knobs)

    assert (result['routing'], result['tokens'], result['language']) == ('threshold', 112, 'python')
    assert [row['routed'] for row in result['layers']] == [True, True, False]
    assert [row['tokens'] for row in result['layers']] == [56, 56, 112]
    by_chance = {'every_by_chance': 0.25, 'none_by_chance': 0.25}
    assert result['blocks_entered'] == {'every': 0.5, 'none': 0.5, **by_chance}
    assert -1 <= result['entropy']['correlation'] <= 1
    assert result['first_token'] == {
        'tokens': 7,
        'entered': 0.0,
        'others_entered': pytest.approx(56 / 105),
    }
    # The separator is the first token of the first window.
    digits = [i + 1 for i, byte in enumerate((TEXT * 7)[: 7 * T - 1]) if chr(byte).isdigit()]
    odd = sum(i % 2 for i in digits) / len(digits)
    expected = {'tokens': len(digits), 'entered': odd}
    assert result['classes']['number'] == expected and odd not in (0, 0.5, 1)
    assert sum(row['tokens'] for row in result['classes'].values()) == 112
    mass = result['depth_mass']
    assert min(mass['first_token']) > 0 == max(mass['depth']) and len(mass['depth']) == 3


def test_measures_of_a_dense_model(tiny_config):
    result = _measured(tiny_config, MODA, num_batches=2)
    assert (result['routing'], result['tokens']) == ('dense', 64)
    absent = ('blocks_entered', 'classes', 'language', 'first_token', 'source_mass')
    assert [result[name] for name in absent] == [None] * 5
    assert result['entropy']['correlation'] is None and 0 < result['entropy']['mean'] < np.log(257)
    assert all(row['probe_r2'] < 1 for row in result['layers'])
    mass = result['depth_mass']
    assert mass['depth'][0] == 0 < min(mass['depth'][1:])
    assert min(mass['first_token']) > 0 and min(result['gradient_norms']) > 0


def test_all_blocks_of_a_routed_loop_are_routed(tiny_config):
    """Regression: only the first of each loop was. Routed loops have no depth mass."""
    result = _measured(tiny_config, RECURSIONS, {'model.num_layers': 4}, num_batches=2)
    assert result['depth_mass'] is None
    assert [row['routed'] for row in result['layers']] == [False, *[True] * 6, False]
    assert all(row['score_correlation'] is not None for row in result['layers'][1:7])


def test_batches_in_which_a_layer_has_no_token_do_not_count(tiny_config, monkeypatch):
    """Regression: they counted as a depth mass of 0. Without any batch, the value is null."""
    nan, hparams = np.nan, small_hparams(tiny_config)
    depths = iter([np.array([0.25, nan, nan]), np.array([0.75, 0.5, nan])])

    def measured(*_):
        depth_L = next(depths)
        return DepthMass((), (), np.zeros((3, 0)), depth_L, depth_L / 2)

    monkeypatch.setattr(depth_mass_lib, 'depth_mass', measured)
    observed = Observations({}, hparams, None, [{}, {}], 'dense', None, [], [])
    expected = {'depth': [0.5, 0.5, None], 'first_token': [0.25, 0.25, None]}
    assert MEASURES['depth_mass'](observed) == expected


def test_scores_of_routed_blocks_are_correlated_with_their_changes(tiny_config):
    """A dense block has no score."""
    knobs = {'model.routing.router': 'learned', 'model.routing.capacity': 0.5}
    hparams = small_hparams(tiny_config, {'model.vocab_size': 257, 'model.num_layers': 2}, knobs)
    variables = random_variables(hparams, np.zeros((1, T), np.int32))
    dense, routed = layers(observe(variables, hparams, _held_out(7), 4))
    assert dense['score_correlation'] is None and -1 <= routed['score_correlation'] <= 1


@pytest.mark.parametrize(
    'knobs', [pytest.param({}, marks=pytest.mark.slow), ALL_LOOPED], ids=['dense', 'looped']
)
def test_gradient_norms_equal_those_of_one_plain_gradient(knobs, tiny_config):
    """The reference takes the gradient of the loss from the logits of all held-out rows at once."""
    hparams = small_hparams(tiny_config, {'model.vocab_size': 257, 'model.num_layers': 3}, knobs)
    variables = random_variables(hparams, np.zeros((1, T), np.int32))
    held_out = _held_out(7)
    result = block_stats(variables, hparams, held_out, 4)
    rows = [held_out.held_out_batch(i) for i in range(4)]
    batch = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    tokens, real_BT = (batch['tokens_BT'], batch['segment_ids_BT']), batch['segment_ids_BT'] > 0

    def loss(params):
        logits_BTV, _ = Transformer(hparams).apply({'params': params}, *tokens)
        nll_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, batch['labels_BT'])
        return jax.numpy.sum(nll_BT * real_BT) / real_BT.sum()

    gradients = jax.device_get(jax.jit(jax.grad(loss))(variables['params'])['stack'])
    leaves = jax.tree.leaves(gradients['run_0']['layer_0'])
    squares = np.sum([(leaf.reshape(3, -1) ** 2).sum(1) for leaf in leaves], axis=0)
    expected = np.sqrt(squares)[list(hparams.model.block_order)]
    np.testing.assert_allclose(result['gradient_norms'], expected, rtol=1e-4)
    embedded_ND = variables['params']['embedding'][batch['tokens_BT'][real_BT]]
    rms = np.sqrt(np.mean(np.square(embedded_ND), axis=-1)).mean()
    assert result['layers'][0]['input_rms'] == pytest.approx(rms, rel=1e-4)


def test_one_batch_is_not_enough(tiny_config):
    with pytest.raises(ValueError, match='num_batches=1, .*: must be 2'):
        _measured(tiny_config, num_batches=1)


def test_a_diverged_model_is_refused(tiny_config):
    hparams = small_hparams(tiny_config, {'model.vocab_size': 257, 'model.num_layers': 1})
    variables = random_variables(hparams, np.zeros((1, T), np.int32))
    variables = jax.tree.map(lambda leaf: leaf * np.nan, variables)
    with pytest.raises(ValueError, match='logits: not finite'):
        block_stats(variables, hparams, _held_out(7), 2)


@pytest.mark.parametrize(
    ('a', 'b', 'expected'),
    [
        ([1.0, 2.0, 30.0, np.nan, 4.0], [1, 8, 2e4, 9, 64], 1),  # depends on ranks; NaN is left out
        ([1, 2, 3], [3, 2, -9], -1),
        ([1, 1, 2, 3], [1, 2, 3, 3], 8 / 9),  # ties at the mean of their ranks
        ([1, 1, 1], [1, 2, 3], None),
        ([1, 2, 3], [1, 1, 1], None),
        ([], [], None),
        ([1, 2], [1, 2], None),
    ],
)
def test_rank_correlation(a, b, expected):
    """It is None for constant values, because JSON has no NaN."""
    found = rank_correlation(np.array(a), np.array(b))
    assert found is None if expected is None else found == pytest.approx(expected)
