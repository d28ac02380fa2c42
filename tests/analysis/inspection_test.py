"""An inspection reports for each token what the model's own forward pass computes."""

import jax
import numpy as np
import pytest

from moddepth_jax.analysis.inspection import Inspection, inspect_tokens, totals
from moddepth_jax.analysis.token_classes import CLASSES, token_classes
from moddepth_jax.data.tokenizers.tokenizer import ByteTokenizer
from moddepth_jax.data.windows import token_stream
from moddepth_jax.hparams import from_config
from moddepth_jax.model.routing import RoutingRecord
from moddepth_jax.model.transformer import Transformer
from tests.model.cases import random_variables

T = 16
TEXT = b'def f(x): return x\n'  # with its separator a window of 16 tokens and one of 4


def make_model(tiny_config, **changes):
    """(variables, hparams): any weights, so that scores and gates differ from token to token."""
    hparams = from_config(tiny_config(**{'data.sequence_length': T, **changes}))
    return random_variables(hparams, np.zeros((1, T), np.int32)), hparams


@pytest.fixture(scope='module')
def routed(tiny_config):
    return make_model(
        tiny_config, **{'model.routing.router': 'learned', 'model.routing.capacity': 0.25}
    )


@pytest.fixture(scope='module')
def inspected(routed):
    tokens_N = token_stream([TEXT], ByteTokenizer())
    windows = []
    inspection = inspect_tokens(
        *routed, tokens_N, ByteTokenizer(), 'predictor', on_window=lambda: windows.append(1)
    )
    assert len(windows) == 2
    return inspection, tokens_N


def test_each_window_is_one_forward_pass_of_the_model(routed, inspected):
    """Decisions, entropies and losses are those of the Transformer on each window by itself.

    The short window at the end counts its top C by its own length.
    """
    variables, hparams = routed
    inspection, tokens_N = inspected
    assert inspection.tokens_N.tolist() == tokens_N.tolist()
    assert inspection.pieces == (b'', *[TEXT[i : i + 1] for i in range(len(TEXT))])
    model = Transformer(hparams)
    forward = jax.jit(lambda *given: model.apply(variables, *given, 'predictor'))
    for part in (slice(0, T), slice(T, None)):
        tokens_BT = tokens_N[None, part].astype(np.int32)
        ones_BT = np.ones_like(tokens_BT)
        logits_BTV, records = forward(tokens_BT, ones_BT)
        for name in RoutingRecord._fields:
            mine_RN = getattr(inspection.routing, name)[:, part]
            np.testing.assert_allclose(mine_RN, getattr(records.routing, name)[:, 0], atol=1e-5)
        log_p_TV = np.asarray(jax.nn.log_softmax(logits_BTV[0].astype(float)))
        entropy_T = -(np.exp(log_p_TV) * log_p_TV).sum(-1)
        np.testing.assert_allclose(inspection.entropy_N[part], entropy_T, atol=1e-4)
        following_N = tokens_N[part.start + 1 :][: len(entropy_T)]
        loss_N = -log_p_TV[np.arange(len(following_N)), following_N]
        np.testing.assert_allclose(inspection.loss_N[part][: len(loss_N)], loss_N, atol=1e-4)
    assert np.isnan(inspection.loss_N).tolist() == [False] * len(TEXT) + [True]
    assert inspection.routing.top_c_BT.sum(axis=1).tolist() == [T // 4 + 1]


def test_only_tokens_that_entered_have_a_change(inspected):
    inspection, _ = inspected
    changed_LN = np.isfinite(inspection.change_LN)
    assert inspection.routers == (None, 0) and 0 < inspection.routing.selected_BT.sum() < 20
    assert changed_LN[0].all() and np.array_equal(changed_LN[1], inspection.routing.selected_BT[0])
    assert (inspection.change_LN[changed_LN] > 0).all()


def test_dense_model_without_routing(tiny_config):
    variables, hparams = make_model(tiny_config, **{'model.num_layers': 1})
    inspection = inspect_tokens(variables, hparams, [256, 97, 98], ByteTokenizer(), 'dense')
    assert inspection.routing.scores_BT.shape == inspection.routing.selected_BT.shape == (0, 3)
    assert np.isfinite(inspection.change_LN).all() and np.isfinite(inspection.entropy_N).all()
    summed = totals(inspection, token_classes(inspection.pieces, 'python'))
    assert summed['blocks_entered'][0]['tokens'] == 3 and np.isnan(summed['enter_all'])
    assert summed['entropy_correlation'] is None


def test_totals_of_a_constructed_inspection():
    """Four tokens, three layers, of which 0 and 2 are routed; every sum is counted by hand."""
    selected_RN = np.array([[1, 1, 0, 0], [0, 1, 0, 1]]) > 0
    top_c_RN = np.array([[1, 0, 1, 0], [0, 1, 0, 1]]) > 0
    change_LN = np.array([[0.5, 0.1, 0, 0], [1, 2, 3, 4], [0, 0.2, 0, 0.4]], np.float32)
    change_LN[[0, 2]] = np.where(selected_RN, change_LN[[0, 2]], np.nan)
    scores_RN = np.array([[1, 2, 3, 4], [4, 3, 2, 1]], np.float32)
    dropped_RN = np.array([[0, 0, 0, 1], [0, 0, 0, 0]]) > 0
    entropy_N = np.array([2, 4, 1, 3], np.float32)
    loss_N = np.array([1, 2, 3, np.nan], np.float32)
    routing = RoutingRecord(scores_RN, scores_RN, top_c_RN, selected_RN, dropped_RN, scores_RN)
    pieces = (b'', b'i', b'f', b' ')
    tokens_N = np.arange(4)
    inspection = Inspection((0, None, 1), tokens_N, pieces, routing, change_LN, entropy_N, loss_N)
    found = totals(inspection, token_classes(inspection.pieces, 'python'))
    assert (found['tokens'], found['entropy'], found['loss']) == (4, 2.5, 2)
    assert (found['enter_all'], found['enter_none']) == (0.25, 0.25)
    assert found['blocks_entered'] == [
        {'tokens': 1, 'entropy': 1},
        {'tokens': 2, 'entropy': 2.5},
        {'tokens': 1, 'entropy': 4},
    ]
    assert found['entropy_correlation'] == pytest.approx(0.9487, abs=1e-4)  # ranks 2.5 4 1 2.5
    first, middle, last = found['layers']
    assert (first['layer'], first['routed'], first['entered']) == (0, True, 0.5)
    assert (first['top_c'], first['both'], first['refused']) == (0.5, 0.25, 0.25)
    assert first['relative'] == pytest.approx([0.3, 0.14, 0.3, 0.46])
    assert (middle['routed'], middle['entered'], middle['relative'][0]) == (False, 1, 2.5)
    assert last['relative'][0] == pytest.approx(0.3) and last['both'] == 0.5
    assert last['score_correlation'] is None  # of two tokens
    by_class = {row['class']: row for row in found['classes']}
    assert list(by_class) == [name for name in CLASSES if name in by_class]
    assert by_class['keyword'] == {
        'class': 'keyword',
        'tokens': 2,
        'entered': [0.5, 0.5],
        'entropy': 2.5,
        'loss': 2.5,
    }
    assert np.isnan(by_class['whitespace']['loss'])
