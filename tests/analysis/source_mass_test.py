"""Weights of sources are the softmax of attention residuals, at the places of their sources."""

import json

import jax
import numpy as np
import pytest

from moddepth_jax.analysis.block_stats import MEASURES, Observations
from moddepth_jax.analysis.source_mass import SourceMass, source_mass, source_table
from moddepth_jax.conversion.transfer_params import transfer_params
from moddepth_jax.model import stack_scan
from moddepth_jax.model.stack import Stack, unstack_layers
from moddepth_jax.model.streams import layer_kinds
from tests.model import oracle
from tests.model.cases import (
    GROWS,
    ROUTED,
    SOURCES,
    SOURCES_OF_3,
    UNROLLED,
    random_variables,
    small_hparams,
    with_leaves,
)

TOKENS_BT = np.random.default_rng(0).integers(0, 32, (2, 8)).astype(np.int32)
SEGMENTS_BT = np.array([[1] * 3 + [2] * 5, [1] * 6 + [0] * 2], np.int32)
BATCH = {'tokens_BT': TOKENS_BT, 'segment_ids_BT': SEGMENTS_BT}
THREE = {'model.num_layers': 3}


def make_model(tiny_config, *knobs):
    """Return (variables, hparams) of a model whose softmaxes are not flat."""
    hparams = small_hparams(tiny_config, THREE, *knobs)
    return random_variables(hparams, TOKENS_BT), hparams


@pytest.mark.parametrize(
    ('knobs', 'sources', 'newest'),
    [
        (SOURCES, ['e', '0a', '0f', '1a', '1f', '2a', '2f'], range(7)),
        (SOURCES_OF_3, ['e', '0a', '1f'], [0, 1, 1, 1, 2, 2, 2]),
    ],
)
def test_zero_queries_read_all_existing_sources_alike(
    knobs, sources, newest, tiny_config, monkeypatch
):
    """As at initialization: n sources get 1 / n each. Unused capacity for slots has no weight."""
    monkeypatch.setattr(stack_scan, 'slot_buffer_size', lambda slots: slots + 3)
    variables, hparams = make_model(tiny_config, knobs)
    params = with_leaves(variables['params'], {'query': 0})
    mass = source_mass({'params': params}, hparams, BATCH, 'dense')
    assert mass.reads == ('0a', '0f', '1a', '1f', '2a', '2f', 'end')
    assert list(mass.sources) == sources and list(mass.newest_R) == list(newest)
    expected_RS = [(np.arange(len(sources)) <= last) / (last + 1) for last in newest]
    np.testing.assert_allclose(mass.weights_RS, expected_RS, atol=1e-6)


def oracle_table(variables, hparams, routing):
    """Return the table by the weights of single tokens, in float64 NumPy."""
    model, run, real_BT = hparams.model, oracle.Pass(routing), SEGMENTS_BT > 0
    layers = unstack_layers(Stack(model, routing), variables['params']['stack'])
    params = jax.device_get(variables['params'] | {'layers': [layer for _, layer in layers]})
    oracle.forward(params, TOKENS_BT, SEGMENTS_BT, model, run)
    kinds, reads = layer_kinds(model), iter(run.reads)
    weights_RS = np.zeros((2 * model.num_layers + 1, 1 + sum(kind.slots for kind in kinds)))
    counts_R = np.zeros(len(weights_RS))
    for b, real_T in enumerate(real_BT):
        written, slots_of = 0, [[] for _ in real_T]  # numbers of the slots that each token has
        for layer, kind in enumerate(kinds):
            runs_T = real_T
            if kind.routed:
                next(reads)  # of the router
                runs_T = real_T & run.choices[layer][b]['selected_BT']
            newest = written
            for i in range(1 if kind.part == 'exit' else 2):
                of_token, read = next(reads), 2 * layer + i
                for t in np.flatnonzero(runs_T):
                    places = [*slots_of[t], *range(written, newest + 1)]
                    weights_RS[read, places] += of_token[t]
                    counts_R[read] += 1
                newest += kind.opens[i]
            for t in np.flatnonzero(runs_T):
                slots_of[t] += range(written, written + kind.slots)
            written += kind.slots
    return weights_RS / counts_R[:, None]


@pytest.mark.parametrize(
    ('knobs', 'routing'),
    [
        (SOURCES, 'dense'),
        pytest.param(SOURCES_OF_3, 'dense', marks=pytest.mark.slow),
        pytest.param(SOURCES | ROUTED | GROWS, 'top_c', marks=pytest.mark.slow),
        (SOURCES_OF_3 | ROUTED | GROWS | {'model.routing.capacity': 0.5}, 'top_c'),
    ],
)
def test_weights_are_those_of_the_oracle(knobs, routing, tiny_config):
    """Only real tokens that the block runs on count, at the sources that they have."""
    variables, hparams = make_model(tiny_config, knobs)
    mass = source_mass(variables, hparams, BATCH, routing)
    expected_RS = oracle_table(variables, hparams, routing)
    np.testing.assert_allclose(mass.weights_RS, expected_RS, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(mass.weights_RS.sum(1), 1, rtol=1e-5)
    assert mass.weights_RS[-1].std() > 0.01


def test_scanned_and_unrolled_models_agree(tiny_config):
    variables, hparams = make_model(tiny_config, SOURCES)
    unrolled = small_hparams(tiny_config, THREE, SOURCES, UNROLLED)
    params, _ = transfer_params(hparams.model, variables['params'], unrolled)
    masses = [
        source_mass(of_model, of, BATCH, 'dense').weights_RS
        for of_model, of in ((variables, hparams), ({'params': params}, unrolled))
    ]
    np.testing.assert_array_equal(*masses)


def test_the_table_has_means_over_batches_and_totals():
    """The first read has only the embedding, so the totals leave it out."""
    names = ('0a', '0f', 'end'), ('e', '0a', '0f'), np.arange(3)
    masses = [
        SourceMass(names[0], names[1], np.array(rows), names[2])
        for rows in (
            [[1, 0, 0], [0.25, 0.75, 0], [0.25, 0.5, 0.25]],
            [[1, 0, 0], [0.75, 0.25, 0], [0.25, 0.25, 0.5]],
        )
    ]
    assert source_table(masses) == {
        'reads': ['0a', '0f', 'end'],
        'sources': ['e', '0a', '0f'],
        'weights': [[1, 0, 0], [0.5, 0.5, 0], [0.25, 0.375, 0.375]],
        'embedding': 0.375,
        'newest': 0.4375,
        'rest': 0.1875,
    }


def test_reads_without_tokens_do_not_enter_the_means(tiny_config):
    """Regression: their weights were 0, which `source_table` took for reads of the rest."""
    nan, names = np.nan, (('0a', '0f', 'end'), ('e', '0a', '0f'))
    rows = (
        [[1, 0, 0], [nan, nan, nan], [0.25, 0.5, 0.25]],
        [[nan, nan, nan], [nan, nan, nan], [0.75, 0.25, 0]],
    )
    found = source_table([SourceMass(*names, np.array(row), np.arange(3)) for row in rows])
    assert found['weights'] == [[1, 0, 0], [None] * 3, [0.5, 0.375, 0.125]]
    assert (found['embedding'], found['newest'], found['rest']) == (0.5, 0.125, 0.375)
    json.dumps(found, allow_nan=False)

    knobs = (SOURCES_OF_3, ROUTED, GROWS, {'model.routing.capacity': 0.5})
    variables, hparams = make_model(tiny_config, *knobs)
    mass = source_mass(variables, hparams, BATCH, 'bypass')
    known_R = np.isfinite(mass.weights_RS).all(axis=1)
    routed_R = [n for layer in hparams.model.routed_layers for n in (2 * layer, 2 * layer + 1)]
    assert np.flatnonzero(~known_R).tolist() == routed_R and routed_R
    assert not np.isfinite(mass.weights_RS[routed_R]).any()


def test_a_study_measures_sources_and_not_depth_mass(tiny_config):
    variables, hparams = make_model(tiny_config, SOURCES)
    batches = [BATCH, BATCH | {'tokens_BT': TOKENS_BT[::-1]}]
    observed = Observations(variables, hparams, None, batches, 'dense', None, [], [])
    assert MEASURES['depth_mass'](observed) is None
    found = MEASURES['source_mass'](observed)
    assert json.loads(json.dumps(found)) == found
    assert found == source_table(
        [source_mass(variables, hparams, batch, 'dense') for batch in batches]
    )


def test_streams_without_sources_are_refused(tiny_config):
    hparams = small_hparams(tiny_config)
    with pytest.raises(ValueError, match="^model.depth.stream='residual': .* attention_residual$"):
        source_mass({}, hparams, BATCH, 'dense')
