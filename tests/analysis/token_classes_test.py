"""Classes of tokens: of Python code, also broken code, of prose, and of held-out windows."""

import numpy as np
import pytest

from moddepth_jax.analysis import token_classes as module
from moddepth_jax.analysis.token_classes import (
    CLASSES,
    byte_classes,
    held_out_classes,
    language_of,
    token_classes,
)
from moddepth_jax.data.corpus import Corpus
from moddepth_jax.data.pipeline import HeldOut, make_held_out
from moddepth_jax.data.tokenizers.tokenizer import ByteTokenizer
from tests.data.prepared_text import data_hparams, prepare

CODE = b'''"""Says what it is."""
import os  # of the system

def area(r):
    """Of a circle: 2 words."""
    return 3.14e0 * r ** 2, f"{r!r:>8}" + 'it is'
'''
PIECES = (
    ('docstring', b'"""Says what it is."""'),
    ('keyword', b'import'),
    ('identifier', b'os'),
    ('comment', b'# '),
    ('preposition', b'of'),
    ('comment', b' '),
    ('article', b'the'),
    ('comment', b' system'),
    ('keyword', b'def'),
    ('identifier', b'area'),
    ('operator', b'('),
    ('docstring', b'"""'),
    ('preposition', b'Of'),
    ('docstring', b' '),
    ('article', b'a'),
    ('docstring', b' circle: 2 words."""'),
    ('keyword', b'return'),
    ('number', b'3.14e0'),
    ('operator', b'**'),
    ('string', b'f"{r!r:>8}"'),
    ('string', b"'it is'"),
)


def named(text, language='python'):
    """(class, bytes) of each stretch of one class."""
    classes = byte_classes(text, language)
    assert classes.shape == (len(text),) and classes.dtype == np.uint8
    ends = [*(np.flatnonzero(np.diff(classes)) + 1), len(text)]
    starts = [0, *ends[:-1]]
    return [(CLASSES[classes[a]], text[a:b]) for a, b in zip(starts, ends, strict=True) if a < b]


def test_code_is_cut_into_known_pieces():
    found = named(CODE)
    assert set(PIECES) <= set(found)
    assert {name for name, _ in found} == {name for name, _ in PIECES} | {'whitespace'}


@pytest.mark.parametrize('broken', [b'def (:\n' + CODE, CODE + b'x = (', CODE + b'\xff\0'])
def test_broken_code_keeps_its_classes(broken):
    assert set(named(CODE)) <= set(named(broken))


@pytest.mark.parametrize(
    ('text', 'last'),
    [
        (b'x = """never closed\n y = 1', ('string', b'"""never closed\n y = 1')),
        (b"a b\nx = 'never closed\ny", ('identifier', b'y')),
        (b'def f(: # said \xff', ('comment', b'# said \xff')),
        (b'(\n0x1F', ('number', b'0x1F')),
        (b'(\n?', ('other', b'?')),
    ],
)
def test_code_may_end_anywhere(text, last):
    """An unclosed string ends with its line, a triple-quoted one with the text."""
    assert named(text)[-1] == last


def test_classes_of_prose():
    names = ['word', 'punctuation', 'whitespace', 'number', 'whitespace', 'word', 'other']
    texts = [text.encode() for text in ("Don't", ':', ' ', '3,50', ' ', 'café', '\x1b')]
    assert named(b''.join(texts), 'prose') == list(zip(names, texts, strict=True))


@pytest.mark.parametrize(
    ('text', 'found'),
    [
        (b'# The sum of x and y, for them.', [b'The', b'of', b'for']),
        (b'# AN a-b in_place of.it `to` a() often', [b'AN', b'of']),
        (b"s = 'in the end' if a in b else {}", []),
        (b"def f():\n    '''In an hour'''\n", [b'In', b'an']),
    ],
)
def test_articles_and_prepositions_are_those_of_english_text(text, found):
    """Parts of names, Python keywords and strings are not articles or prepositions."""
    assert [word for name, word in named(text) if name in ('article', 'preposition')] == found


@pytest.mark.parametrize('language', module.LANGUAGES)
def test_any_bytes_have_classes(language):
    for text in (bytes(range(256)) * 3, b'\xed\xa0\x80', b''):
        named(text, language)


def test_tokens_take_the_class_of_their_first_non_whitespace_byte():
    pieces = [b'', b'if', b' ab', b'  \n', b' # c']
    classes = [CLASSES[number] for number in token_classes(pieces, 'python')]
    assert classes == ['start of text', 'keyword', 'identifier', 'whitespace', 'comment']


TEXTS = [b'x = "def if 12"\n', b'# 3\n', b"'''for\nwhile x in y:\n'''\nreturn 45\n"]


def _check(dataset, length, num_rows):
    """Tokens inside a string or docstring have its class; separators are starts of text."""
    batches = [dataset.held_out_batch(i) for i in range(dataset.num_held_out_batches)]
    rows = np.concatenate([batch['tokens_BT'] for batch in batches])
    rows = rows[np.concatenate([batch['segment_ids_BT'] for batch in batches])[:, 0] > 0]
    found = held_out_classes(dataset, rows, 'python')
    assert found.shape == rows.shape and len(rows) == num_rows
    classes = [CLASSES[number] for number in found.flat]
    pairs = {(chr(token), name) for token, name in zip(rows.flat, classes, strict=True)}
    names = {name for _, name in pairs}
    assert 'identifier' in names and {n for c, n in pairs if c == chr(256)} == {'start of text'}
    assert {n for c, n in pairs if c == 'f'} == {'string', 'preposition'}
    assert {n for c, n in pairs if c == 'w'} == {'docstring'}
    assert {n for c, n in pairs if c in '12'} <= {'string'}
    assert {n for c, n in pairs if c == '3'} <= {'comment'}
    assert {n for c, n in pairs if c in '45'} <= {'number'}


def test_classes_are_those_of_the_documents():
    """For any window length."""
    for length in (3, 7, 20):
        data = data_hparams('python_environment', sequence_length=length)
        dataset = HeldOut(data, Corpus(data.source, [], TEXTS, '', ''), ByteTokenizer())
        _check(dataset, length, 57 // length)


def test_classes_are_found_in_prepared_text(tmp_path):
    names = [(f'{i}.py', text) for i, text in enumerate(TEXTS)]
    prepare(tmp_path / 'text', names, ByteTokenizer(), 0.5)
    for length in (3, 7):
        knobs = {'tokenizer': 'prepared', 'held_out_fraction': 0.5, 'sequence_length': length}
        dataset = make_held_out(data_hparams(tmp_path / 'text', **knobs))
        sizes = [(len(stream) - 1) // length for stream in dataset.held_out_streams]
        assert len(sizes) == 2 and min(sizes) > 0
        _check(dataset, length, sum(sizes))
        assert language_of(dataset.corpus) == 'python'


@pytest.mark.parametrize(
    ('source', 'texts', 'language'),
    [
        ('stdlib', [b'One day the rain came.\n'], 'python'),  # whatever it looks like
        ('a.txt', [b'One day the rain came.\n'], 'prose'),
        ('a.txt', TEXTS, 'python'),
        ('a.txt', [b'  return x\n\n  def f(a,\n        b):\n    """A phrase\n'], 'python'),
        ('a.txt', [b'You may copy this.\nIf you do, say so.\n\nNo warranty.'], 'prose'),
        ('a.txt', [b''], 'prose'),
    ],
)
def test_language_of_each_data_source(source, texts, language):
    assert language_of(Corpus(source, [], texts, '', '')) == language
