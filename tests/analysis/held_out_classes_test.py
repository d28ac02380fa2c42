"""Windows' tokens have the classes that they have in the documents which they were cut from."""

import numpy as np
import pytest

from moddepth_jax.analysis import held_out_classes as module
from moddepth_jax.analysis.held_out_classes import held_out_classes, language_of
from moddepth_jax.analysis.token_classes import CLASSES
from moddepth_jax.data.corpus import Corpus
from moddepth_jax.data.pipeline import HeldOut, make_held_out
from moddepth_jax.data.tokenizers.tokenizer import ByteTokenizer
from moddepth_jax.hparams import DataHparams
from tests.data.prepared_text import prepare

TEXTS = [b'x = "def if 12"\n', b'# 3\n', b"'''for\nwhile x in y:\n'''\nreturn 45\n"]


def _held_out(texts, length, source='python_environment'):
    knobs = dict(
        mixture='', text_field='text', tokenizer='bytes', held_out_fraction=0.5, batch_size=2
    )
    data = DataHparams(source=source, sequence_length=length, log_windows=False, **knobs)
    return HeldOut(data, Corpus(source, [], texts, '', ''))


def _check(dataset, length, num_rows):
    """What is inside a string or a docstring is told to be so, separators are starts of text."""
    batches = [dataset.held_out_batch(i) for i in range(dataset.num_held_out_batches)]
    rows = np.concatenate([batch['tokens_BT'] for batch in batches])
    rows = rows[np.concatenate([batch['segment_ids_BT'] for batch in batches])[:, 0] > 0]
    found = held_out_classes(dataset, rows, 'python')
    assert found.shape == rows.shape and len(rows) == num_rows
    classes = [CLASSES[number] for number in found.flat]
    told = {(chr(token), name) for token, name in zip(rows.flat, classes, strict=True)}
    names = {name for _, name in told}
    assert 'identifier' in names and {n for c, n in told if c == chr(256)} == {'start of text'}
    assert {n for c, n in told if c == 'f'} <= {'string', 'docstring'}
    assert {n for c, n in told if c in '12'} <= {'string'}
    assert {n for c, n in told if c == '3'} <= {'comment'}
    assert {n for c, n in told if c in '45'} <= {'number'}


@pytest.mark.parametrize('block', [1, 3, 4096])
def test_classes_are_those_of_the_documents(monkeypatch, block):
    """Whatever the windows' length, and however much is searched at a time."""
    monkeypatch.setattr(module, '_BLOCK', block)
    for length in (3, 7, 20):
        _check(_held_out(TEXTS, length), length, 57 // length)


def test_classes_are_found_in_prepared_text(tmp_path):
    """In each of the streams that its windows are cut from, and no more of it is decoded."""
    names = [(f'{i}.py', text) for i, text in enumerate(TEXTS)]
    prepare(tmp_path / 'text', names, ByteTokenizer(), 0.5)
    knobs = dict(mixture='', text_field='text', tokenizer='prepared', held_out_fraction=0.5)
    for length in (3, 7):
        knobs |= dict(batch_size=2, log_windows=False, sequence_length=length)
        dataset = make_held_out(DataHparams(source=str(tmp_path / 'text'), **knobs))
        sizes = [(len(stream) - 1) // length for stream in dataset.held_out_streams]
        assert len(sizes) == 2 and min(sizes) > 0
        _check(dataset, length, sum(sizes))
        assert language_of(dataset.corpus) == 'python'


def test_the_languages_of_sources():
    """The text of a Python is Python, whatever it looks like; other text is looked at."""
    prose = [b'One day the rain came.\nIt did not stop.\n']
    sources = {'stdlib': 'python', 'python_environment': 'python', 'a.txt': 'prose'}
    for source, language in sources.items():
        assert language_of(Corpus(source, [], prose, '', '')) == language
    assert language_of(Corpus('a.txt', [], TEXTS, '', '')) == 'python'
