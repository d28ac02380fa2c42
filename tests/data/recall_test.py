"""Near bytes of the recall corpus determine everything except draws and answers."""

import re

import numpy as np
import pytest

from moddepth_jax.data import recall
from moddepth_jax.data.pipeline import make_dataset
from tests.data.prepared_text import data_hparams

SEPARATOR = 256
DATA = data_hparams('recall', sequence_length=128, batch_size=64, held_out_fraction=0.05)
LINE = re.compile(rb'[A-U](?:[a-x]{4}|[0-7]{4}|\([a-x][YZ]\)) ')


@pytest.fixture(scope='module')
def batch():
    dataset = make_dataset(DATA, 0)
    batches = [dataset.train_batch(step) for step in range(16)]
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def drawn(tokens_BT, labels_BT):
    """bool: the label starts a word or a question, or is the x of one."""
    starts_BT = np.isin(tokens_BT, [*recall.LETTERS])
    return starts_BT | (tokens_BT == ord('('))


def test_documents_are_lines_as_described():
    for text in recall.make_recall(3, 200):
        assert len(text) == 127 and text[-1:] == b'.'
        lines = [text[i : i + 6] for i in range(0, 126, 6)]
        assert all(LINE.fullmatch(line) for line in lines)
        assert bytes(line[0] for line in lines) == recall.LETTERS
        words = b''.join(line[1:5] for line in lines[: recall.NUM_DIALECT_LINES])
        (dialect,) = (i for i in range(2) if set(words) <= set(recall.DIALECTS[i]))
        asked = [i for i, line in enumerate(lines) if line[1:2] == b'(']
        assert all(i >= recall.FIRST_QUESTION and i % 2 == 0 for i in asked)
        assert {lines[i][3] for i in asked} <= {recall.NAMES[dialect]}


def test_needed_positions_by_hand():
    """The x of a question is needed; brackets, answers, words and a row's first token are not."""
    tokens_BT = np.array([[*b'(aY) G(bZ) H012'], [*b'abcd (aaZ) Q01a']])
    needed_BT = recall.needs_far_context(tokens_BT)
    assert np.argwhere(needed_BT).tolist() == [[0, 1], [0, 7], [1, 6]]


def test_needed_positions_fit_the_capacity(batch):
    """Every row has fewer of them than an eighth of its tokens, and most rows have several."""
    counts_B = recall.needs_far_context(batch['tokens_BT']).sum(1)
    assert counts_B.max() <= 7 < 0.125 * 128
    assert np.mean(counts_B >= 4) > 0.9


def test_near_context_determines_all_but_draws_and_answers(batch):
    """The last NEAR tokens fix the next one, unless it was drawn or the position is needed.

    At needed positions the same few tokens are followed by either name.
    """
    tokens_BT, labels_BT = batch['tokens_BT'], batch['labels_BT']
    needed_BT = recall.needs_far_context(tokens_BT)
    determined_BT = ~needed_BT & ~drawn(tokens_BT, labels_BT)
    padded_BT = np.pad(tokens_BT, ((0, 0), (recall.NEAR - 1, 0)), constant_values=-1)
    near_BTN = np.lib.stride_tricks.sliding_window_view(padded_BT, recall.NEAR, axis=1)
    followers = {}
    for near, label in zip(near_BTN[determined_BT].tolist(), labels_BT[determined_BT], strict=True):
        followers.setdefault(tuple(near), set()).add(int(label))
    assert all(len(labels) == 1 for labels in followers.values())
    answers = {}
    for x, label in zip(tokens_BT[needed_BT], labels_BT[needed_BT], strict=True):
        answers.setdefault(int(x), set()).add(int(label))
    assert all(labels == {*recall.NAMES} for labels in answers.values()) and len(answers) == 24


def test_answers_are_determined_only_from_afar(batch):
    """The nearest token before an x that shows the dialect is MIN_DISTANCE before it."""
    tokens_BT = batch['tokens_BT']
    shows_BT = np.isin(tokens_BT, [*recall.NAMES, *b''.join(recall.DIALECTS)])
    needed_BT = recall.needs_far_context(tokens_BT)
    nearest = min(
        t - np.flatnonzero(shows_BT[row, :t] & ~needed_BT[row, :t])[-1]
        for row, t in np.argwhere(needed_BT)
    )
    assert nearest == recall.MIN_DISTANCE
