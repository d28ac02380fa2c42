"""The synthetic corpus has the entropy it states, and the floor can be reached."""

import numpy as np
import pytest

from moddepth_jax.data import synthetic
from moddepth_jax.data.pipeline import make_dataset
from tests.data.prepared_text import data_hparams

SEPARATOR = 256
DATA = data_hparams('synthetic', sequence_length=64, batch_size=32, held_out_fraction=0.05)


def hard_mask(tokens):
    return np.isin(tokens, np.frombuffer(synthetic.STARTS + synthetic.END, np.uint8))


def entropy_floor(language, labels):
    """Mean nats per target that the ideal predictor scores on exactly these labels."""
    surprisal_V = np.zeros(257)
    surprisal_V[[word[0] for word in language.words]] = -np.log(language.probabilities)
    return surprisal_V[labels[labels >= 0]].mean()


def _words(text):
    starts = np.flatnonzero(hard_mask(np.frombuffer(text, np.uint8)))
    return [text[i:j] for i, j in zip(starts, [*starts[1:], len(text)], strict=True)]


def _ideal_nll(language, tokens_BT, labels_BT):
    """Nats of each target under the exact Bayes filter over the states a text can be in.

    A state is the token just read: byte j of word i, or the separator. The filter starts from the
    states' long-run frequencies, since a window may begin anywhere.
    """
    spelled = [[*word] for word in language.words]
    spelled[-1].append(SEPARATOR)
    states = [(i, j) for i, word in enumerate(spelled) for j in range(len(word))]
    token_S = np.array([spelled[i][j] for i, j in states])
    step_SS = np.zeros((len(states), len(states)))
    for s, (i, j) in enumerate(states):
        if j + 1 < len(spelled[i]):
            step_SS[s, states.index((i, j + 1))] = 1
        else:
            for k, p in enumerate(language.probabilities):
                step_SS[s, states.index((k, 0))] = p
    belief_BS = np.tile([language.probabilities[i] for i, _ in states], (len(tokens_BT), 1))
    nll_BT = np.zeros(tokens_BT.shape)
    for t in range(tokens_BT.shape[1]):
        belief_BS = belief_BS * (token_S == tokens_BT[:, t, None])
        belief_BS = belief_BS / belief_BS.sum(1, keepdims=True) @ step_SS
        nll_BT[:, t] = -np.log((belief_BS * (token_S == labels_BT[:, t, None])).sum(1))
    return nll_BT


@pytest.fixture(scope='module')
def batches():
    dataset = make_dataset(DATA, 0)
    batches = [dataset.train_batch(step) for step in range(8)]
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def test_documents_are_words_of_the_language_and_end_once():
    language = synthetic.make_language(3, 40)
    documents = synthetic.make_synthetic(3, 200, 40)
    assert len(documents) == 200
    for text in documents:
        words = _words(text)
        assert b''.join(words) == text and set(words) <= set(language.words)
        assert words.index(synthetic.END) == len(words) - 1


def test_words_occur_as_often_as_stated():
    language = synthetic.make_language(1, 100)
    documents = synthetic.make_synthetic(1, 3000, 100)
    drawn = np.array([language.words.index(word) for text in documents for word in _words(text)])
    n, p_S = len(drawn), np.array(language.probabilities)
    count_S = np.bincount(drawn, minlength=17)
    assert np.all(np.abs(count_S - n * p_S) < 5 * np.sqrt(n * p_S * (1 - p_S)))
    pair_SS = np.bincount(17 * drawn[:-1] + drawn[1:], minlength=17 * 17).reshape(17, 17)
    p_SS = p_S[:, None] * p_S
    assert np.all(np.abs(pair_SS - n * p_SS) < 6 * np.sqrt(n * p_SS) + 1)
    mean = np.mean([len(text) for text in documents])
    assert abs(mean - 100) < 5 * 100 / np.sqrt(len(documents))


def test_ideal_predictor_reaches_the_floor(batches):
    """From a row's first word start or separator on, the Bayes filter's loss is the floor, exactly.

    It pays -log p of the word at hard targets and nothing at easy ones, separators among them.
    """
    language = synthetic.make_language()
    tokens_BT, labels_BT = batches['tokens_BT'], batches['labels_BT']
    nll_BT = _ideal_nll(language, tokens_BT, labels_BT)
    known_BT = np.cumsum(hard_mask(tokens_BT) | (tokens_BT == SEPARATOR), axis=1) > 0
    hard_BT = hard_mask(labels_BT)
    assert known_BT.mean() > 0.9 and not known_BT.all()
    assert np.any(known_BT & (labels_BT == SEPARATOR))
    assert np.max(nll_BT[known_BT & ~hard_BT]) < 1e-9
    known_labels_BT = np.where(known_BT, labels_BT, -100)
    floor = entropy_floor(language, known_labels_BT)
    assert abs(nll_BT[known_BT].mean() - floor) < 1e-9
