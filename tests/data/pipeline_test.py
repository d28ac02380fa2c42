"""Batches are a pure function of the step and lose no token of the corpus."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from moddepth_jax.data.corpus import Corpus
from moddepth_jax.data.pipeline import (
    check_fingerprint,
    check_held_out,
    fractions_of_texts,
    make_dataset,
)
from moddepth_jax.data.tokenizers.tokenizer import ByteTokenizer, make_tokenizer
from moddepth_jax.data.windows import Windows, token_stream
from tests.data.prepared_text import data_hparams, refusal

S = 256
DATA = data_hparams('hand-made', sequence_length=4, batch_size=3)
HAND_MADE = Corpus('hand-made', [b'abc', b'd', b'efgh'], [b'uv', b'wxyz'], 'f00d', 'by hand')
STREAM = [S, *b'abc', S, *b'd', S, *b'efgh']

_text = np.random.default_rng(0).integers(0, 256, 997, np.uint8).tobytes()
_cuts = [0, 1, 40, 333, 334, 900, 997]
RANDOM = Corpus(
    'random', [_text[i:j] for i, j in itertools.pairwise(_cuts)], [_text[:203]], 'beef', 'random'
)


def _dataset(seed=0, corpus=RANDOM, **changes):
    return make_dataset(dataclasses.replace(DATA, **changes), seed, corpus)


def _bytes(batch):
    return b''.join(batch[name].tobytes() for name in sorted(batch))


def _epoch(dataset, epoch):
    """Return the first token and the labels of each window of an epoch, in order."""
    n, size = dataset.num_train_windows, dataset.fingerprint['batch_size']
    first, last = epoch * n, (epoch + 1) * n
    steps = range(first // size, -(-last // size))
    batches = [dataset.train_batch(step) for step in steps]
    rows = [
        np.concatenate([batch['tokens_BT'][:, :1], batch['labels_BT']], axis=1) for batch in batches
    ]
    rows = np.concatenate(rows)[first - steps[0] * size :][:n]
    return [tuple(row) for row in rows.tolist()]


def test_stream_puts_a_separator_before_each_document():
    stream = token_stream(HAND_MADE.train, make_tokenizer('bytes'))
    assert stream.dtype == np.uint16 and stream.tolist() == STREAM


def test_text_that_cannot_be_encoded_is_numbered():

    class Strict(ByteTokenizer):
        def encode(self, data):
            if b'\xff' in data:
                raise ValueError('byte 1 is not UTF-8')
            return super().encode(data)

    documents = [b'a', b'a\xff']
    assert refusal(token_stream, documents, Strict()) == 'document 2: byte 1 is not UTF-8'


def test_windows_equal_a_drawing():

    def cut(stream, numbers, length):
        batch = Windows([np.array(stream, np.uint16)], length, S).cut(numbers)
        assert all(array.dtype == np.int32 for array in batch.values())
        return [batch[name].tolist() for name in ('tokens_BT', 'labels_BT', 'segment_ids_BT')]

    a, b, c, d, e, f = b'abcdef'
    assert cut(STREAM, [0, 1], 4) == [
        [[S, a, b, c], [S, d, S, e]],
        [[a, b, c, S], [d, S, e, f]],
        [[1, 1, 1, 1], [1, 1, 2, 2]],
    ]
    assert cut(STREAM[1:], [0], 6) == [
        [[a, b, c, S, d, S]],
        [[b, c, S, d, S, e]],
        [[1, 1, 1, 2, 2, 3]],
    ]


def test_held_out_batches_are_the_same_for_every_seed_and_filled_up():
    corpus = dataclasses.replace(HAND_MADE, held_out=[b'uv', b'wxyzwxyz12345678'])
    dataset = _dataset(0, corpus)
    u, v, w, x, y, z = b'uvwxyz'
    assert dataset.num_held_out_batches == 2
    first, last = dataset.held_out_batch(0), dataset.held_out_batch(1)
    assert _bytes(first) == _bytes(_dataset(7, corpus).held_out_batch(0))

    def rows(name):
        return first[name].tolist() + last[name].tolist()

    windows = [
        ([S, u, v, S], [u, v, S, w], [1, 1, 1, 2]),
        ([w, x, y, z], [x, y, z, w], [1] * 4),
        ([w, x, y, z], [x, y, z, ord('1')], [1] * 4),
        ([*b'1234'], [*b'2345'], [1] * 4),
    ]
    filling = ([0] * 4, [-100] * 4, [0] * 4)
    found = list(zip(*map(rows, ('tokens_BT', 'labels_BT', 'segment_ids_BT')), strict=True))
    assert sorted(found[:4]) == sorted(windows)
    assert found[4:] == [filling, filling]
    assert all(array.dtype == np.int32 for array in last.values())
    for index in (-1, 2):
        message = refusal(dataset.held_out_batch, index)
        assert message == f'index={index}: must lie in [0, 2)'


@pytest.mark.parametrize('batch_size', [1, 3, 500])
def test_an_epoch_visits_each_window_once(batch_size):
    dataset = _dataset(batch_size=batch_size)
    stream = token_stream(RANDOM.train, dataset.tokenizer).tolist()
    windows = [tuple(stream[i : i + 5]) for i in range(0, len(stream) - 4, 4)]
    assert dataset.num_train_windows == len(windows) > 200
    epochs = [_epoch(dataset, epoch) for epoch in range(3)]
    assert all(sorted(epoch) == sorted(windows) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [windows, *epochs]}) == 4
    assert dataset.epochs(10) == 10 * batch_size / len(windows)


def test_batch_is_a_function_of_the_step():
    dataset, fresh, steps = _dataset(), _dataset(), [0, 1, 2, 200, 10**9]
    expected = [_bytes(dataset.train_batch(step)) for step in steps]
    assert len(set(expected)) == len(steps)
    assert [_bytes(fresh.train_batch(np.int64(step))) for step in steps[::-1]] == expected[::-1]
    dataset.train_batch(1)['tokens_BT'][:] = 0
    assert _bytes(dataset.train_batch(1)) == expected[1]
    assert refusal(dataset.train_batch, -1) == 'step=-1: must be 0 or more'


def test_seeds_have_different_orders():
    """No epoch of a seed equals one of the next seed, and large seeds work."""
    orders = {
        tuple(_epoch(_dataset(seed), epoch)) for seed in (0, 1, 2, 2**40) for epoch in range(3)
    }
    assert len(orders) == 12


@pytest.mark.parametrize(('part', 'side'), [('training', 'train'), ('held-out', 'held_out')])
def test_too_short_a_text_is_refused(part, side):
    start = f'data.sequence_length=4: the {part} text has 4 tokens and one window needs 5; set it'
    message = refusal(_dataset, 0, dataclasses.replace(HAND_MADE, **{side: [b'abc']}))
    assert message.startswith(f'{start} to 3')
    dataset = _dataset(0, dataclasses.replace(HAND_MADE, **{side: [b'abcd']}))
    assert part != 'training' or dataset.train_batch(5)['tokens_BT'].tolist() == [[S, *b'abc']] * 3


def test_fingerprint_survives_json_and_names_what_differs():
    fingerprint = _dataset(0, HAND_MADE).fingerprint
    check_fingerprint(json.loads(json.dumps(fingerprint)), fingerprint)
    others = [
        _dataset(1, HAND_MADE),
        _dataset(0, dataclasses.replace(HAND_MADE, sha256='beef')),
        _dataset(0, HAND_MADE, sequence_length=3),
        _dataset(0, HAND_MADE, batch_size=2),
        _dataset(0, HAND_MADE, held_out_fraction=0.5),
        _dataset(0, HAND_MADE, source='other'),
    ]
    named = set()
    for other in others:
        (field,) = (k for k in fingerprint if fingerprint[k] != other.fingerprint[k])
        was, now = fingerprint[field], other.fingerprint[field]
        message = refusal(check_fingerprint, fingerprint, other.fingerprint)
        assert f'{field} was {was!r} and is {now!r} now' in message
        named.add(field)
    assert named == set(fingerprint) - {'tokenizer'}
    latin = _dataset(0, HAND_MADE, encoding='Latin-1').fingerprint
    assert latin == fingerprint | {'encoding': 'iso8859-1'}
    assert 'encoding was missing and is' in refusal(check_fingerprint, fingerprint, latin)
    made, unread = (_dataset(0, HAND_MADE, source='recall', encoding=e) for e in ('utf-8', 'utf-7'))
    assert made.fingerprint == unread.fingerprint
    older = {field: value for field, value in fingerprint.items() if field != 'tokenizer'}
    for stored, current in ((older, fingerprint), (fingerprint, older)):
        message = refusal(check_fingerprint, stored, current)
        assert 'tokenizer was ' in message and 'missing' in message


def test_a_run_holds_out_no_text_of_its_parents():
    """Regression: with a larger fraction, text that the parent was trained on was held out."""
    parent = fractions_of_texts(_dataset(0, HAND_MADE, held_out_fraction=0.25).fingerprint)
    assert parent == {HAND_MADE.sha256: 0.25}
    for fraction in (0.2, 0.25, 0.3):
        fingerprint = _dataset(0, HAND_MADE, held_out_fraction=fraction).fingerprint
        check_held_out(fingerprint, {'other': 0.1})
        if fraction <= 0.25:
            check_held_out(fingerprint, parent)
    words = 'data.held_out_fraction=0.3: must be at most 0.25, as the model was trained on the rest'
    assert words in refusal(check_held_out, fingerprint, parent)


def test_packages_are_recorded_but_may_differ():
    """The same text from other packages is accepted."""

    def fingerprint(sha256, *packages):
        return _dataset(
            0, dataclasses.replace(HAND_MADE, sha256=sha256, packages=packages)
        ).fingerprint

    first = fingerprint('beef', 'a==1', 'b==1')
    assert first['packages'] == 'a==1 b==1' and json.loads(json.dumps(first)) == first
    check_fingerprint(first, fingerprint('beef', 'a==1', 'b==2'))
    message = refusal(check_fingerprint, first, fingerprint('cafe', 'a==1', 'b==2'))
    assert "is 'cafe' now; resume" in message
