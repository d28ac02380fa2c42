"""Classes of tokens: Python's lexer on code, patterns on what it refuses, letters on prose."""

import pathlib

import numpy as np
import pytest

from moddepth_jax.analysis import token_classes as module
from moddepth_jax.analysis.token_classes import CLASSES, byte_classes, guess_language, token_classes
from moddepth_jax.data import pipeline

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
    ('comment', b'# of the system'),
    ('keyword', b'def'),
    ('identifier', b'area'),
    ('operator', b'('),
    ('docstring', b'"""Of a circle: 2 words."""'),
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


def test_code_is_cut_as_python_cuts_it():
    """Each piece has its class; what is not listed of the code is space or an operator."""
    found = named(CODE)
    for piece in PIECES:
        assert piece in found
    assert {name for name, _ in found} == {name for name, _ in PIECES} | {'whitespace'}


@pytest.mark.parametrize(
    'broken', [b'def (:\n' + CODE, CODE + b'x = (', CODE + b'\xff', CODE + b'\0']
)
def test_broken_code_keeps_its_classes(broken, monkeypatch):
    """What a lexer refuses is classed the same, but for what is broken."""
    expected = named(CODE)
    found = named(broken)
    assert [piece for piece in expected if piece not in found] == []


def test_patterns_agree_with_the_lexer():
    """On the source of another module both give all but a few bytes the same class."""
    text = pathlib.Path(pipeline.__file__).read_text(encoding='utf-8')
    sides = []
    for spans in (module._lexed(text), module._matched(module._PYTHON, text)):
        classes = np.zeros(len(text), int)
        for start, end, name in spans:
            classes[start:end] = CLASSES.index(name)
        classes[[character.isspace() for character in text]] = 0
        sides.append(classes)
    assert np.mean(sides[0] == sides[1]) > 0.99


@pytest.mark.parametrize(
    ('text', 'last'),
    [
        (b'x = """never closed\n y = 1', ('string', b'"""never closed\n y = 1')),
        (b"a b\nx = 'never closed\ny", ('identifier', b'y')),
        (b'a b\n"""never closed', ('docstring', b'"""never closed')),
        (b'def f(: # said \xff', ('comment', b'# said \xff')),
        (b'(\n0x1F', ('number', b'0x1F')),
        (b'(\n?', ('other', b'?')),
    ],
)
def test_text_that_ends_anywhere(text, last):
    """A string that nobody closes runs to the end of its line, a triple one to that of the text."""
    assert named(text)[-1] == last


@pytest.mark.parametrize('newline', [b'\r\n', b'\n', b'\r'])
def test_line_ends_shift_no_class(newline):
    """Classes follow the bytes whatever ends the lines."""
    pairs = (('number', b'3.14e0'), ('string', b"'it is'"), ('operator', b'**'))
    assert set(pairs) <= set(
        named(CODE.replace(b'  # of the system\n', b'\n').replace(b'\n', newline))
    )


def test_prose():
    """Words may hold an apostrophe and letters of several bytes; numbers a comma."""
    text = "Don't: 3,50 for café…\x1b".encode()
    assert named(text, 'prose') == [
        ('word', b"Don't"),
        ('punctuation', b':'),
        ('whitespace', b' '),
        ('number', b'3,50'),
        ('whitespace', b' '),
        ('word', b'for'),
        ('whitespace', b' '),
        ('word', 'café'.encode()),
        ('punctuation', '…'.encode()),
        ('other', b'\x1b'),
    ]


@pytest.mark.parametrize('language', module.LANGUAGES)
def test_any_bytes_have_classes(language):
    """All 256 bytes, surrogates and nothing at all."""
    for text in (bytes(range(256)) * 3, b'\xed\xa0\x80', b''):
        named(text, language)


def test_tokens_take_the_class_of_their_first_solid_byte():
    """So a word with its leading space is a word; the separator starts a text."""
    pieces = [b'', b'if', b' ab', b'  \n', b' # c']
    classes = [CLASSES[number] for number in token_classes(pieces, 'python')]
    assert classes == ['start of text', 'keyword', 'identifier', 'whitespace', 'comment']


def test_languages_are_told_apart():
    """Code by its lines, even cut out of its middle; a licence is prose."""
    assert guess_language(CODE) == 'python'
    assert guess_language(b'  return x\n\n  def f(a,\n        b):\n    """A phrase\n') == 'python'
    assert guess_language(b'You may copy this.\nIf you do, say so.\n\nNo warranty.') == 'prose'
    assert guess_language(b'') == 'prose'


def test_unknown_language():
    """The error names the language and what there is."""
    with pytest.raises(ValueError, match="language='c': must be one of python, prose"):
        byte_classes(b'x', 'c')
