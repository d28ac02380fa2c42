"""The reported loss is the mean over held-out targets, in nats and in bits per byte."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest

from moddepth_jax.data.tokenizers.tokenizer import make_tokenizer
from moddepth_jax.hparams import from_config
from moddepth_jax.model.cross_entropy import cross_entropy
from moddepth_jax.model.transformer import Transformer
from moddepth_jax.training.evaluate import evaluate, evaluate_causal, num_passes, perplexity
from moddepth_jax.training.mesh import make_mesh
from tests.training.toy_steps import forward

SEPARATOR = 256


class HeldOut:
    """Three held-out batches of 4 x 16; the last one has two rows of padding."""

    num_held_out_batches = 3
    tokenizer = make_tokenizer('bytes')
    domains = {}

    def __init__(self):
        random = np.random.default_rng(0)
        self.batches = []
        for real_rows in (4, 4, 2):
            tokens_BT = random.integers(0, 256, (4, 17)).astype(np.int32)
            tokens_BT[:, 9] = SEPARATOR
            labels_BT = tokens_BT[:, 1:].copy()
            segment_ids_BT = np.ones((4, 16), np.int32)
            segment_ids_BT[:, 9:] = 2
            labels_BT[real_rows:], segment_ids_BT[real_rows:] = -100, 0
            labels_BT[0, 3] = -100
            batch = {'tokens_BT': tokens_BT[:, :-1], 'labels_BT': labels_BT}
            self.batches.append(batch | {'segment_ids_BT': segment_ids_BT})

    def held_out_batch(self, index):
        return self.batches[index]

    def domain(self, index):
        return None


class Mixture(HeldOut):
    """The same, where the first and last batch are of one domain and the second of another."""

    domains = {'web': 0.25, 'code': 0.75}

    def domain(self, index):
        return ('web', 'code', 'web')[index]


@pytest.fixture(scope='module')
def held_out():
    return HeldOut()


@pytest.fixture(scope='module')
def mesh():
    return make_mesh('data=1')


@pytest.fixture(scope='module')
def hparams(tiny_config):
    changes = {
        'model.num_layers': 2,
        'model.routing.router': 'learned',
        'model.routing.layers': 'every:1',
        'model.routing.capacity': 0.25,
        'data.sequence_length': 16,
    }
    return from_config(tiny_config(**changes))


@pytest.fixture(scope='module')
def variables(hparams):
    """Random variables, so large that routing matters and the predictor selects some tokens."""
    tokens_BT = np.zeros((1, 16), np.int32)
    init = functools.partial(Transformer(hparams).init, jax.random.key(0), tokens_BT)
    variables = jax.jit(init)()
    return jax.tree.map(lambda leaf: leaf * 12 if leaf.ndim > 1 else leaf, variables)


def by_hand(variables, hparams, batches, routing, **layers):
    """Return (nats, targets, bytes, tokens, selected in each layer) of a pass, in float64."""
    sums = np.zeros(6)
    for batch in batches:
        labels_BT, segment_ids_BT = batch['labels_BT'], batch['segment_ids_BT']
        logits_BTV, records = forward(hparams, variables, batch, routing, **layers)
        logits_BTV = np.asarray(logits_BTV, np.float64)
        high_BT1 = logits_BTV.max(-1, keepdims=True)
        log_z_BT = np.log(np.exp(logits_BTV - high_BT1).sum(-1)) + high_BT1[..., 0]
        for b, t in np.argwhere((labels_BT != -100) & (segment_ids_BT > 0)):
            label = labels_BT[b, t]
            sums[:3] += log_z_BT[b, t] - logits_BTV[b, t, label], 1, label != SEPARATOR
        real_BT = segment_ids_BT > 0
        sums[3] += real_BT.sum()
        sums[4:] += (np.asarray(records.routing.selected_BT) & real_BT).sum((1, 2))
    return sums


def test_losses_of_a_mixture_are_separate_and_weighted_by_its_shares(
    variables, hparams, held_out, mesh
):
    result = evaluate_causal(variables, hparams, Mixture(), mesh, 3)
    batches = {'web': held_out.batches[::2], 'code': held_out.batches[1:2]}
    sums = {name: by_hand(variables, hparams, own, 'predictor') for name, own in batches.items()}
    assert list(result['domains']) == ['web', 'code']
    for name, own in result['domains'].items():
        nats, targets, num_bytes, *_ = sums[name]
        assert own['loss'] == pytest.approx(nats / targets, rel=1e-5)
        assert own['perplexity'] == pytest.approx(math.exp(nats / targets), rel=1e-4)
        assert own['bits_per_byte'] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)
        assert own['targets'] == targets
    web, code = (own / own[1] for own in sums.values())
    nats, _, num_bytes, real, *selected_R = 0.25 * web + 0.75 * code
    assert result['loss'] == pytest.approx(nats, rel=1e-5)
    assert result['targets'] == sum(own[1] for own in sums.values())
    assert result['bits_per_byte'] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)
    fractions_R = np.array(selected_R) / real
    np.testing.assert_allclose(result['routing']['selected_fraction'], fractions_R, rtol=1e-5)
    for name, own in result['domains'].items():
        nats, targets, *_ = by_hand(variables, hparams, batches[name], 'top_c')
        assert own['loss_top_c'] == pytest.approx(nats / targets, rel=1e-5)
        assert own['routing_gap'] == pytest.approx(own['loss'] - nats / targets, abs=1e-4)


def test_fewer_batches_than_domains_are_refused(variables, hparams, mesh):
    """Regression: the loss of the evaluated members was reported as that of the mixture."""
    with pytest.raises(ValueError, match='num_batches=1: must be at least 2'):
        evaluate(variables, hparams, Mixture(), mesh, 1, 'predictor')
    assert perplexity(1e4) == math.inf and math.isnan(perplexity(math.nan))


@pytest.mark.parametrize(
    ('num_batches', 'used', 'chunk', 'parts'), [(1, 1, 0, 1), (99, 3, 10, 1), (99, 3, 10, 4)]
)
def test_loss_is_the_sum_by_hand(
    variables, hparams, held_out, mesh, num_batches, used, chunk, parts, monkeypatch
):
    """Regression: a run in micro-batches evaluated a batch in one piece, and ran out of memory."""
    rows_traced = set()

    def loss_of(x_BTD, *rest):
        rows_traced.add(len(x_BTD))
        return cross_entropy(x_BTD, *rest)

    monkeypatch.setattr('moddepth_jax.training.evaluate.cross_entropy', loss_of)
    training = dataclasses.replace(hparams.training, loss_chunk=chunk, accumulate_steps=parts)
    hparams = dataclasses.replace(hparams, training=training)
    batches = held_out.batches[:used]
    sums = by_hand(variables, hparams, batches, 'predictor')
    nats, targets, num_bytes, real, *selected_R = sums
    result = evaluate(variables, hparams, held_out, mesh, num_batches, 'predictor')
    assert parts == 1 or rows_traced == {1}
    assert result['targets'] == targets == {1: 63, 3: 63 * 2 + 31}[used]
    assert num_bytes < targets
    assert result['loss'] == pytest.approx(nats / targets, rel=1e-5)
    assert result['bits_per_byte'] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)
    fractions_R = np.array(selected_R) / real
    np.testing.assert_allclose(result['routing']['selected_fraction'], fractions_R, rtol=1e-6)
    assert ((0.05 < fractions_R) & (fractions_R < 0.95)).all()


def test_routing_gap_is_causal_minus_top_c(variables, hparams, held_out, mesh):
    """The loss is that of the causal rule; the gap is positive if top-C has a lower loss."""
    result = evaluate_causal(variables, hparams, held_out, mesh, 3)
    losses = {}
    for routing in ('predictor', 'top_c'):
        nats, targets, *_ = by_hand(variables, hparams, held_out.batches, routing)
        losses[routing] = nats / targets
    gap = losses['predictor'] - losses['top_c']
    assert abs(gap) > 0.01
    assert result['loss'] == pytest.approx(losses['predictor'], rel=1e-5)
    assert result['loss_top_c'] == pytest.approx(losses['top_c'], rel=1e-5)
    assert result['routing_gap'] == pytest.approx(gap, abs=1e-4)


def test_the_gap_of_a_layer_is_the_cost_of_its_causal_rule(
    variables, hparams, held_out, mesh, monkeypatch
):
    """It is the loss with the rule in that layer and top-C elsewhere, minus that of top-C.

    Both are of the first `batches_per_layer` batches.

    Regression: the progress bar of launch.evaluate expected one pass more.
    """
    read, held_out_batch = [], held_out.held_out_batch
    monkeypatch.setattr(held_out, 'held_out_batch', lambda i: read.append(i) or held_out_batch(i))
    result = evaluate_causal(variables, hparams, held_out, mesh, 3, batches_per_layer=2)
    assert num_passes(hparams.model, True) == 4 and len(read) == 2 * 3 + 2 * 2
    few = held_out.batches[:2]
    nats, targets, *_ = by_hand(variables, hparams, few, 'top_c')
    gaps = []
    for layer in range(2):
        named = {'causal_layers_R': np.arange(2) == layer}
        alone, *_ = by_hand(variables, hparams, few, 'predictor', **named)
        gaps.append((alone - nats) / targets)
    np.testing.assert_allclose(result['routing']['routing_gap'], gaps, rtol=0, atol=2e-4)
    assert np.abs(gaps).min() > 2e-3 and len({round(gap, 3) for gap in gaps}) == 2
    read.clear()
    plain = evaluate_causal(variables, hparams, held_out, mesh, 3)
    assert len(read) == 3 * num_passes(hparams.model, False) == 6
    assert 'routing_gap' not in plain['routing']
    assert plain['loss'] == result['loss'] and plain['routing_gap'] == result['routing_gap']
