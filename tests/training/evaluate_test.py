"""The reported loss is the mean over held-out targets, in nats and in bits per byte."""

import functools
import math

import jax
import numpy as np
import pytest

from moddepth_jax.data.tokenizer import make_tokenizer
from moddepth_jax.hparams import from_config
from moddepth_jax.model.transformer import Transformer
from moddepth_jax.training.evaluate import evaluate, evaluate_honestly
from moddepth_jax.training.sharding import make_mesh

FAST = {'xla_backend_optimization_level': 0}
SEPARATOR = 256


class HeldOut:
    """Three batches of 4 x 16; the last one is filled up with two rows of padding."""

    num_held_out_batches = 3
    tokenizer = make_tokenizer('bytes')

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


@pytest.fixture(scope='module')
def held_out():
    return HeldOut()


@pytest.fixture(scope='module')
def mesh():
    return make_mesh('data=1')


@pytest.fixture(scope='module')
def hparams(tiny_config):
    changes = {
        'model.num_layers': 1,
        'model.routing.router': 'learned',
        'model.routing.layers': '0',
        'model.routing.capacity': 0.25,
        'data.sequence_length': 16,
    }
    return from_config(tiny_config(**changes))


@pytest.fixture(scope='module')
def params(hparams):
    """Random, and so large that routing matters and the predictor lets in a part of the tokens."""
    tokens_BT = np.zeros((1, 16), np.int32)
    init = functools.partial(Transformer(hparams).init, jax.random.key(0), tokens_BT)
    params = jax.jit(lambda: init()['params'], compiler_options=FAST)()
    return jax.tree.map(lambda leaf: leaf * 12 if leaf.ndim > 1 else leaf, params)


def by_hand(params, hparams, batches, routing):
    """(nats, counted targets, bytes, entered, real tokens) of a forward pass, in float64."""
    apply = jax.jit(functools.partial(Transformer(hparams).apply, routing=routing))
    sums = np.zeros(5)
    for batch in batches:
        labels_BT, segment_ids_BT = batch['labels_BT'], batch['segment_ids_BT']
        logits_BTV, records = apply({'params': params}, batch['tokens_BT'], segment_ids_BT)
        logits_BTV = np.asarray(logits_BTV, np.float64)
        high_BT1 = logits_BTV.max(-1, keepdims=True)
        log_z_BT = np.log(np.exp(logits_BTV - high_BT1).sum(-1)) + high_BT1[..., 0]
        for b, t in np.argwhere((labels_BT != -100) & (segment_ids_BT > 0)):
            label = labels_BT[b, t]
            sums[:3] += log_z_BT[b, t] - logits_BTV[b, t, label], 1, label != SEPARATOR
        entered_BT = np.asarray(records.entered_BT[0]) & (segment_ids_BT > 0)
        sums[3:] += entered_BT.sum(), (segment_ids_BT > 0).sum()
    return sums


@pytest.mark.parametrize(('num_batches', 'used'), [(1, 1), (3, 3), (99, 3)])
def test_loss_is_the_sum_by_hand(params, hparams, held_out, mesh, num_batches, used):
    """Nats a target, bits a byte and selected fraction over the first batches, or all there are.

    Padded rows and ignored labels count nowhere; a separator costs nats and brings no byte.
    """
    batches = held_out.batches[:used]
    nats, targets, num_bytes, entered, real = by_hand(params, hparams, batches, 'predictor')
    result = evaluate(params, hparams, held_out, mesh, num_batches, 'predictor')
    assert result['targets'] == targets == {1: 63, 3: 63 * 2 + 31}[used]
    assert num_bytes < targets
    assert result['loss'] == pytest.approx(nats / targets, rel=1e-5)
    assert result['bits_per_byte'] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)
    assert result['routing']['selected_fraction'] == pytest.approx([entered / real], rel=1e-6)
    assert 0.05 < entered / real < 0.95


def test_routing_gap_is_causal_minus_top_c(params, hparams, held_out, mesh):
    """The loss is that of the causal rule; the gap is positive where the rule loses to top-C."""
    result = evaluate_honestly(params, hparams, held_out, mesh, 3)
    losses = {}
    for routing in ('predictor', 'top_c'):
        nats, targets, *_ = by_hand(params, hparams, held_out.batches, routing)
        losses[routing] = nats / targets
    gap = losses['predictor'] - losses['top_c']
    assert abs(gap) > 0.01
    assert result['loss'] == pytest.approx(losses['predictor'], rel=1e-5)
    assert result['loss_top_c'] == pytest.approx(losses['top_c'], rel=1e-5)
    assert result['routing_gap'] == pytest.approx(gap, abs=1e-4)


def test_routing_chooses_the_rule(params, hparams, held_out, mesh):
    """`dense` lets every real token in, `top_c` C of each row with as many real tokens."""
    dense = evaluate(params, hparams, held_out, mesh, 3, 'dense')
    top_c = evaluate(params, hparams, held_out, mesh, 3, 'top_c')
    assert dense['routing']['selected_fraction'] == [1.0]
    assert top_c['routing']['selected_fraction'] == [0.25]
    assert top_c['routing']['recall'] == pytest.approx(dense['routing']['recall'])


def test_a_dense_model_has_no_gap(tiny_config, params, held_out, mesh):
    """Without routed blocks there is one loss, and nothing about routing."""
    changes = {'model.num_layers': 1, 'data.sequence_length': 16}
    hparams = from_config(tiny_config(**changes))
    layer = params['stack']['run_0']['layer_0']['block']
    params = params | {'stack': {'run_0': {'layer_0': layer}}}
    result = evaluate_honestly(params, hparams, held_out, mesh, 3)
    assert set(result) == {'loss', 'bits_per_byte', 'targets'}
    assert result['targets'] == 63 * 2 + 31
