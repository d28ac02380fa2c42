"""Packed documents are isolated bit for bit, or one text (`model.across_documents`)."""

import jax
import numpy as np
import pytest

from moddepth_jax.analysis.depth_mass import depth_mass
from moddepth_jax.model import attention
from moddepth_jax.model.decoding import prefill, unroll
from moddepth_jax.model.transformer import Transformer
from tests.model.cases import (
    ATTENTION,
    AVERAGE,
    CONSTRAINED,
    DENSE,
    EMBEDDED,
    HYPER,
    LENGTH,
    LOOKED_UP,
    MIXED,
    MODA,
    MUDD,
    OF_ATTENTION,
    OF_MLP,
    OTHER_BT,
    ROUTED,
    SHARED,
    SIZES,
    SOURCES,
    STATIC,
    TOKENS_BT,
    VALUES,
    parameters,
    random_variables,
    small_hparams,
)

PACKED_BT = np.tile(np.repeat([1, 2, 3, 0], [5, 4, 5, 2]), (len(TOKENS_BT), 1))
ONE_BT = (PACKED_BT > 0).astype(np.int32)
BY_SEGMENT = ROUTED | {'model.routing.select_per': 'segment', 'model.routing.capacity': 0.5}
ACROSS = {'model.across_documents': True}


def runner(make_config, *knobs, routing='top_c'):
    """Return (hparams, variables, jitted (tokens, segments) -> (logits, records))."""
    hparams = small_hparams(make_config, SIZES, *knobs)
    variables, model = random_variables(hparams, TOKENS_BT), Transformer(hparams)
    run = jax.jit(lambda *inputs: model.apply(variables, *inputs, routing=routing))
    return hparams, variables, lambda *inputs: jax.device_get(run(*inputs))


def changed(one_BTV, other_BTV):
    """Return a bool mask [B, T] of logits that differ."""
    return (one_BTV != other_BTV).any(-1)


MODELS = {
    'dense': {},
    'selected by segment': BY_SEGMENT,
    'moda': MODA,
    'moda selected by segment': MODA | BY_SEGMENT,
    'attention stream': ATTENTION,
    'dense stream': DENSE | BY_SEGMENT,
    'average stream': AVERAGE,
    'attention residual selected by segment': SOURCES | BY_SEGMENT,
    'hyper-connections selected by segment': HYPER | BY_SEGMENT,
    'static hyper-connections': STATIC,
    'mhc': CONSTRAINED,
    'mudd': MUDD,
    'value residual selected by segment': VALUES | BY_SEGMENT,
    'shared values': SHARED,
    'value attention selected by segment': MIXED | BY_SEGMENT,
    'embedding residual selected by segment': EMBEDDED | BY_SEGMENT,
    'value embeddings': LOOKED_UP | BY_SEGMENT,
    'attention routed by segment': OF_ATTENTION | BY_SEGMENT,
    'mlp routed by segment': OF_MLP | BY_SEGMENT,
}
FAST = ('dense', 'moda selected by segment', 'average stream', 'mudd')
FAST += ('attention residual selected by segment', 'hyper-connections selected by segment')
FAST += ('value attention selected by segment', 'shared values')


@pytest.mark.parametrize('name', parameters(FAST, MODELS))
def test_packed_documents_are_isolated(name, tiny_config):
    """A document's logits keep their bits when other documents of the row change.

    Under top-C this holds if tokens are selected per segment.
    """
    _, _, run = runner(tiny_config, MODELS[name])
    logits_BTV, _ = run(TOKENS_BT, PACKED_BT)
    for document in (1, 2, 3):
        inside_BT = PACKED_BT == document
        other_BTV, _ = run(np.where(inside_BT, TOKENS_BT, OTHER_BT), PACKED_BT)
        np.testing.assert_array_equal(changed(logits_BTV, other_BTV), ~inside_BT)


@pytest.fixture(scope='module')
def roomy(tiny_config):
    """Return a routed model under its predictor whose cache holds all tokens."""
    return runner(tiny_config, ROUTED | {'model.routing.cache_capacity': 4.0}, routing='predictor')[
        2
    ]


def test_packed_documents_under_a_rule_share_only_places(roomy):
    """Later documents change no bit, and earlier ones no selection if no token is dropped.

    Earlier documents do move the places of tokens in a block, and so the last bits of sums.
    """
    logits_BTV, records = roomy(TOKENS_BT, PACKED_BT)
    assert not records.routing.dropped_BT.any()
    for document in (1, 2, 3):
        inside_BT = PACKED_BT == document
        other_BTV, other = roomy(np.where(inside_BT, TOKENS_BT, OTHER_BT), PACKED_BT)
        np.testing.assert_array_equal(
            other.routing.selected_BT[:, inside_BT], records.routing.selected_BT[:, inside_BT]
        )
        assert changed(logits_BTV, other_BTV)[~inside_BT].all()
        atol = 1e-5 * np.abs(logits_BTV).max()
        np.testing.assert_allclose(other_BTV[inside_BT], logits_BTV[inside_BT], rtol=0, atol=atol)
        later_BTV, _ = roomy(np.where(PACKED_BT > document, OTHER_BT, TOKENS_BT), PACKED_BT)
        assert not changed(logits_BTV, later_BTV)[inside_BT].any()


@pytest.mark.parametrize('name', ['dense', 'roomy'])
def test_a_packed_document_is_as_it_is_alone(name, roomy, tiny_config):
    """Its logits equal those of a row with this document only, and not those of one long text."""
    run = roomy if name == 'roomy' else runner(tiny_config)[2]
    logits_BTV, _ = run(TOKENS_BT, PACKED_BT)
    first_four_BT = np.broadcast_to(np.arange(LENGTH) < 4, TOKENS_BT.shape).astype(np.int32)
    alone_BTV, _ = run(np.roll(TOKENS_BT, -5, axis=1), first_four_BT)
    np.testing.assert_allclose(alone_BTV[:, :4], logits_BTV[:, 5:9], rtol=0, atol=1e-4)
    unpacked_BTV, _ = run(TOKENS_BT, np.ones_like(PACKED_BT))
    assert changed(logits_BTV, unpacked_BTV)[:, 5:9].all()


@pytest.mark.parametrize(
    'knobs',
    [{}, pytest.param(MODA | ROUTED, marks=pytest.mark.slow)],
    ids=['dense', 'mod and moda'],
)
def test_across_documents_a_row_is_one_text(knobs, tiny_config, monkeypatch):
    """The logits equal those of one document, and attention gets no segment ids."""
    _, _, apart = runner(tiny_config, knobs)
    one, many = (apart(TOKENS_BT, segments)[0] for segments in (ONE_BT, PACKED_BT))
    assert np.abs(one - many)[ONE_BT > 0].max() > 0.1
    given = []

    def kernel(*arrays, **named):
        given.append(named['segment_ids_BT'])
        return depth_attention(*arrays, **named)

    depth_attention = attention.depth_attention
    monkeypatch.setattr(attention, 'depth_attention', kernel)
    found = runner(tiny_config, knobs, ACROSS)[2](TOKENS_BT, PACKED_BT)[0]
    np.testing.assert_allclose(found[ONE_BT > 0], one[ONE_BT > 0], rtol=0, atol=1e-5)
    assert given and all(segments is None for segments in given)


def test_no_token_sees_the_unused_places_of_a_block(tiny_config):
    """Regression: they had position 0 and, in one text, the id of all tokens."""
    knobs = ROUTED | ACROSS | {'model.routing.causal_rule': 'threshold'}
    forms = ({'model.attention': name} for name in ('reference', 'xla'))
    found = [runner(tiny_config, knobs, form, routing='threshold') for form in forms]
    logits = [run(TOKENS_BT, PACKED_BT)[0][ONE_BT > 0] for _, _, run in found]
    np.testing.assert_allclose(*logits, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_prompt_of_several_documents_is_one_text(tiny_config):
    """The last logits equal the full forward pass, and later tokens are in the last document."""
    hparams, variables, run = runner(tiny_config, ACROSS)
    full_BTV, _ = run(TOKENS_BT, PACKED_BT)
    options = {'hparams': hparams, 'routing': 'dense', 'capacity': LENGTH, 'routed_capacity': None}
    unrolled = unroll(variables, hparams, 'dense')
    logits_BV, cache = prefill(unrolled, TOKENS_BT, PACKED_BT, **options)
    last_BV = full_BTV[:, ONE_BT[0].sum() - 1]
    np.testing.assert_allclose(logits_BV, last_BV, rtol=0, atol=1e-5)
    assert not cache.documents_B.any()


@pytest.mark.slow
def test_depth_mass_of_one_text(tiny_config):
    """All documents of a row share the first token of the first document."""
    hparams, variables, _ = runner(tiny_config, ACROSS, MODA | ROUTED)
    batches = ({'tokens_BT': TOKENS_BT, 'segment_ids_BT': ids} for ids in (PACKED_BT, ONE_BT))
    masses = [depth_mass(variables, hparams, batch, 'top_c') for batch in batches]
    np.testing.assert_array_equal(masses[0].first_token_L, masses[1].first_token_L)
    assert masses[0].first_token_L.min() > 0
