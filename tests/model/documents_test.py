"""Packed documents: apart, or one text to attention and routing (`model.across_documents`)."""

import jax
import numpy as np
import pytest

from moddepth_jax.analysis.depth_mass import depth_mass
from moddepth_jax.model import attention
from moddepth_jax.model.decoding import prefill, unroll
from moddepth_jax.model.transformer import Transformer
from tests.model.cases import MODA, ROUTED, random_variables, small_hparams

LENGTH = 12
RNG = np.random.default_rng(3)
TOKENS_BT = RNG.integers(0, 32, (2, LENGTH)).astype(np.int32)
PACKED_BT = np.array([[1] * 5 + [2] * 7, [1] * 3 + [2] * 6 + [0] * 3])
ONE_BT = (PACKED_BT > 0).astype(np.int32)
ACROSS = {'model.across_documents': True}
KINDS = {'dense': {}, 'mod and moda': MODA | ROUTED | {'model.routing.select_per': 'segment'}}


def logits_of(hparams, variables, segments_BT):
    logits_BTV, _ = jax.jit(Transformer(hparams).apply)(variables, TOKENS_BT, segments_BT)
    return np.where(ONE_BT[:, :, None], logits_BTV, 0)


@pytest.mark.parametrize('kind', KINDS)
def test_one_text_or_many(kind, tiny_config, monkeypatch):
    """Across documents a row is one text, and its attention is told of no segments."""
    apart, across = (small_hparams(tiny_config, KINDS[kind], how) for how in ({}, ACROSS))
    variables = random_variables(apart, TOKENS_BT)
    one, many = (logits_of(apart, variables, segments) for segments in (ONE_BT, PACKED_BT))
    assert np.abs(one - many).max() > 0.1
    told = []

    def kernel(*given, **named):
        told.append(named['segment_ids_BT'])
        return depth_attention(*given, **named)

    depth_attention = attention.depth_attention
    monkeypatch.setattr(attention, 'depth_attention', kernel)
    np.testing.assert_allclose(logits_of(across, variables, PACKED_BT), one, rtol=0, atol=1e-5)
    assert told and all(segments is None for segments in told)


def test_prompt_of_several_documents_is_one_text(tiny_config):
    """The last logits of a prompt are the full forward's, and what comes is in its document."""
    hparams = small_hparams(tiny_config, ACROSS)
    variables = random_variables(hparams, TOKENS_BT)
    full_BTV = logits_of(hparams, variables, PACKED_BT)
    options = {'hparams': hparams, 'routing': 'dense', 'slots': LENGTH, 'routed_capacity': None}
    unrolled = unroll(variables, hparams, 'dense')
    logits_BV, cache = prefill(unrolled, TOKENS_BT, PACKED_BT, **options)
    last_B = ONE_BT.sum(axis=1) - 1
    np.testing.assert_allclose(logits_BV, full_BTV[[0, 1], last_B], rtol=0, atol=1e-5)
    assert not cache.documents_B.any()


def test_depth_mass_of_one_text(tiny_config):
    """Documents of a row share the first token of the first."""
    hparams = small_hparams(tiny_config, ACROSS, MODA | ROUTED)
    variables = random_variables(hparams, TOKENS_BT)
    batches = ({'tokens_BT': TOKENS_BT, 'segment_ids_BT': ids} for ids in (PACKED_BT, ONE_BT))
    masses = [depth_mass(variables, hparams, batch, 'top_c') for batch in batches]
    np.testing.assert_array_equal(masses[0].first_token_L, masses[1].first_token_L)
    assert masses[0].first_token_L.min() > 0
