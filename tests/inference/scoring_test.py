"""Scores are sums of the model's own log p, whatever else is in a batch."""

import numpy as np
import pytest

from moddepth_jax.inference import scoring
from moddepth_jax.inference.scoring import score
from tests.data.prepared_text import refusal
from tests.inference.conftest import CONTEXT


@pytest.fixture(scope='module')
def by_hand(small_model, log_p_of):
    """Return log-likelihood and greediness of one request, from the logits of its padded row."""

    def one(name, context, continuation):
        length = small_model(name)[1].data.sequence_length
        tokens = np.array([*context, *continuation], np.int32)[-length - 1 :]
        log_p_TV = log_p_of(name, tokens[:-1])[-len(continuation) :]
        total = log_p_TV[np.arange(len(continuation)), np.array(continuation)].sum()
        return total, bool((log_p_TV.argmax(-1) == continuation).all())

    return one


MANY_OPTIONS = ((1, 1, 1, 1, 1), (4, 4), (1, 4), (3, 1, 5, 2, 2))
FEW_OPTIONS = ((1, 1), (3, 1, 5))  # of few shapes, for models that compile longer


def questions(context, of_questions):
    """Questions of 11 tokens with options of several lengths, and rows as long as the context."""
    draw = np.random.default_rng(0)
    requests = []
    for options in of_questions:
        question = [256, *draw.integers(0, 256, 10)]
        requests += [(question, draw.integers(0, 256, length)) for length in options]
    full = [256, *draw.integers(0, 256, 15)]  # no room is left in its row of 16
    requests += [(full, draw.integers(0, 256, context - 15)) for _ in range(2)]
    requests.append((draw.integers(0, 256, 4), draw.integers(0, 256, context - 3)))
    requests.append((draw.integers(0, 256, 60), draw.integers(0, 256, 3)))
    requests.append((draw.integers(0, 256, 12), draw.integers(0, 256, 3)))
    return requests


SLOW = [('both', 1), ('longer mod', 1), ('longer mod', 3)]


@pytest.mark.parametrize(
    ('name', 'batch_size'),
    [
        *(('dense', 1), ('dense', 3), ('both', 3), ('loops', 3)),
        *(pytest.param(*of, marks=pytest.mark.slow) for of in SLOW),
    ],
)
def test_scores_are_those_by_hand(small_model, by_hand, name, batch_size):
    """Each equals the sum over the logits of its own row, for any batch size."""
    context = small_model(name)[1].data.sequence_length
    requests = questions(context, MANY_OPTIONS if name == 'dense' else FEW_OPTIONS)
    want = [by_hand(name, *request) for request in requests]
    assert score(*small_model(name), []) == []
    found = score(*small_model(name), requests, batch_size=batch_size)
    for got, (log_likelihood, greedy) in zip(found, want, strict=True):
        assert got.log_likelihood == pytest.approx(log_likelihood, abs=1e-5, rel=1e-5)
        assert got.greedy == greedy
    assert [one.cut for one in found][-3:] == [0, 60 + 3 - context - 1, 0]
    assert not any(one.cut for one in found[:-3])


def test_the_most_likely_tokens_are_greedy(small_model):
    """A continuation of most likely tokens is greedy; with another token in it, it is not."""
    row = [256, *range(9)]
    for _ in range(3):
        options = [(row, [token]) for token in range(257)]
        likely = score(*small_model('dense'), options, batch_size=3)
        assert [one.greedy for one in likely].count(True) == 1
        best = max(range(257), key=lambda token: likely[token].log_likelihood)
        assert likely[best].greedy
        row.append(best)
    other = [*row[:11], (row[11] + 1) % 256, row[12]]
    asked = [(tokens[:10], tokens[10:]) for tokens in (row, other)]
    assert [one.greedy for one in score(*small_model('dense'), asked)] == [True, False]


def test_a_context_of_several_options_is_computed_once(small_model, monkeypatch):
    """A batch has two of its options; if they have one token, also another context."""
    read, real = [], scoring._score_options

    def counted(unrolled, options, **how):
        read.append(int(options.exists_BT.sum()))
        return real(unrolled, options, **how)

    monkeypatch.setattr(scoring, '_score_options', counted)
    done, requests = [], [([256, *range(9)], [i, 2, 3]) for i in range(4)]
    requests += [([1, 2, context], [label]) for context in (3, 4) for label in (5, 6)]
    score(*small_model('dense'), requests, batch_size=2, on_scored=done.append)
    assert (read, done) == ([10, 10, 6], [2, 2, 4])


def test_batches_share_shapes(small_model):
    """A batch reuses an earlier shape that fits and has at most a 12th more places."""
    hparams, shapes = small_model('longer mod')[1], []  # of 40 tokens

    def shape(context, labels):
        tokens = (0,) * (context + labels - 1)
        return scoring._shape([[scoring._Request(tokens, tokens[:labels], 0)]], hparams, shapes)

    assert shape(23, 30) == (24, 32)
    assert shape(24, 28) == (24, 32)  # of its own (24, 28), 56 places are 52 and less than a 12th
    assert shape(21, 18) == (24, 20)
    assert shape(25, 18) == (28, 20)
    assert shape(18, 20) == (20, 20)
    assert shapes == [(24, 32), (24, 20), (28, 20), (20, 20)]


@pytest.mark.parametrize(
    ('requests', 'how', 'words'),
    [
        ([([1], [2]), ([], [2])], {}, ['request 1', 'context', 'separator']),
        ([([1], [])], {}, ['request 0', 'continuation']),
        ([([1], [2] * (CONTEXT + 1))], {}, ['request 0', f'{CONTEXT + 1} tokens', f'={CONTEXT}']),
        ([([1], [300])], {}, ['300', 'request 0', '[0, 300)']),
        ([([1], [2])], {'batch_size': 0}, ['batch_size=0', '1 or more']),
        ([([1], [2])], {'routing': 'top_c'}, ['top_c', 'later tokens']),
        ([([1], [2])], {'routing': 'aux_loss'}, ['aux_loss', 'predictor']),
    ],
)
def test_bad_requests_are_one_line(small_model, requests, how, words):
    message = refusal(score, *small_model('both'), requests, **how)
    assert all(word in message for word in words), message
