"""What kind of text a token is part of: in Python code by Pygments, in prose by its letters."""

import functools
import re

import numpy as np
from pygments.lexers.python import PythonLexer
from pygments.token import Token

from moddepth_jax.data.compression_baselines import MAX_BYTES, first_bytes

CLASSES = (
    'start of text',
    'whitespace',
    'keyword',
    'identifier',
    'number',
    'string',
    'docstring',
    'comment',
    'operator',
    'word',
    'punctuation',
    'other',
)
LANGUAGES = ('python', 'prose')
_NUMBER = {name: i for i, name in enumerate(CLASSES)}
# The first that a token of Pygments is a kind of decides.
_PYTHON_CLASSES = (
    (Token.Keyword, 'keyword'),
    (Token.Operator.Word, 'keyword'),
    (Token.Name, 'identifier'),
    (Token.Number, 'number'),
    (Token.String.Doc, 'docstring'),
    (Token.String, 'string'),
    (Token.Comment, 'comment'),
    (Token.Operator, 'operator'),
    (Token.Punctuation, 'operator'),
    (Token.Text, 'whitespace'),
)
_PROSE = re.compile(
    r"(?P<word>[^\W\d_]+(?:['’][^\W\d_]+)*)|(?P<number>\d+(?:[.,]\d+)*)|(?P<whitespace>\s+)"
    r'|(?P<other>[\x00-\x1f\x7f\ud800-\udfff])|(?P<punctuation>.)',
    re.DOTALL,
)
_CODE_LINE = re.compile(
    r'\s*(?:(?:def|class|import|from|if|elif|for|while|with|except|async|lambda)\s.*[:(\w,]\s*$'
    r'|(?:return|else|try|finally|raise|yield|pass|self|print)\b[\s:.(]|[#@]\s*\w|[\w.\[\]]+\s*[-+]?=)'
    r'|.*[({\[:]\s*$|\s*[)\]}]'
)
_PYTHON_SOURCES = ('stdlib', 'python_environment')  # values of data.source that hold Python
_BLOCK = 4096  # tokens searched at a time


def guess_language(text: bytes) -> str:
    """`python` if more than a third of the non-blank lines look like code, else `prose`."""
    lines = [line for line in text.decode('utf-8', 'replace').split('\n') if line.strip()]
    looks = sum(bool(_CODE_LINE.match(line)) for line in lines)
    return 'python' if looks > len(lines) / 3 else 'prose'


def language_of(corpus) -> str:
    """The language of the held-out text of a Corpus, judged by its first bytes."""
    if corpus.name in _PYTHON_SOURCES:
        return 'python'
    return guess_language(first_bytes(corpus.held_out, MAX_BYTES, b'\n'))


def byte_classes(text: bytes, language: str) -> np.ndarray:
    """The class of each byte of a text.

    `python`: whitespace, keyword, identifier, number, string, docstring, comment, operator and
    other, as the lexer of Pygments reads the text, which may be broken or truncated. Spaces inside
    a string or a comment have its class, and so has what stands between the braces of an f-string.
    `prose`: word, number, whitespace, punctuation and other (control characters, bytes that are
    not UTF-8).

    Args:
      text: any bytes.
      language: one of LANGUAGES.

    Returns:
      uint8 [len(text)], indices into CLASSES.

    Raises:
      ValueError: an unknown language.
    """
    if language not in LANGUAGES:
        raise ValueError(f'language={language!r}: must be one of {", ".join(LANGUAGES)}')
    characters = text.decode('utf-8', 'surrogateescape')
    if language == 'python':
        parts = list(_python_parts(characters))
    else:
        parts = [(match.lastgroup, match[0]) for match in _PROSE.finditer(characters)]
    sizes = [len(part.encode('utf-8', 'surrogateescape')) for _, part in parts]
    return np.repeat(np.array([_NUMBER[name] for name, _ in parts], np.uint8), sizes)


def _python_parts(text):
    """(class, text) of each token of Pygments."""
    inside_braces = False  # of an f-string
    for _, kind, part in PythonLexer().get_tokens_unprocessed(text):
        name = next((name for parent, name in _PYTHON_CLASSES if kind in parent), 'other')
        if kind in Token.String.Interpol:
            inside_braces = part.startswith('{') and not part.endswith('}')
        elif inside_braces:
            name = 'string'
        yield name, part


def token_classes(pieces: list[bytes], language: str) -> np.ndarray:
    """The class of each token: that of its first byte which is not whitespace, else whitespace.

    Args:
      pieces: the bytes of each token, b'' for the separator, which is the start of a text.
      language: one of LANGUAGES.

    Returns:
      uint8 [N], indices into CLASSES.
    """
    of_bytes = byte_classes(b''.join(pieces), language)
    ends = np.cumsum([len(piece) for piece in pieces])
    classes = np.full(len(pieces), _NUMBER['start of text'], np.uint8)
    for i, (end, piece) in enumerate(zip(ends, pieces, strict=True)):
        if piece:
            mine = of_bytes[end - len(piece) : end]
            solid = mine[mine != _NUMBER['whitespace']]
            classes[i] = solid[0] if len(solid) else _NUMBER['whitespace']
    return classes


def held_out_classes(dataset, tokens_XT, language: str) -> np.ndarray:
    """uint8 [X, T]: the class of each token of held-out windows, indices into CLASSES.

    A window may begin inside a string, which nothing in it shows, so each window is looked up in
    the documents that it was cut from. Of equal windows one is taken.

    Args:
      dataset: of `make_dataset` or `make_held_out`.
      tokens_XT: int, complete windows of its held-out batches.
      language: one of LANGUAGES.
    """
    streams, length = dataset.held_out_streams, tokens_XT.shape[1]
    tokens_XT = tokens_XT.astype(streams[0].dtype)
    wanted = {tokens_T.tobytes() for tokens_T in tokens_XT}
    places = {}  # of wanted windows only: more text may be held out than fits into memory
    for number, stream in enumerate(streams):
        for start in range(0, len(stream), length):
            window = stream[start : start + length].tobytes()
            if window in wanted:
                places[window] = (number, start)
    separator = dataset.tokenizer.separator

    @functools.cache
    def classes_of_document(number, start):
        tokens = streams[number][start : _next_separator(streams[number], start + 1, separator)]
        return token_classes(dataset.tokenizer.pieces(tokens), language)

    classes = []
    for tokens_T in tokens_XT:
        number, start = places[tokens_T.tobytes()]
        position = first = _last_separator(streams[number], start, separator)
        documents = []
        while position < start + length:
            documents.append(classes_of_document(number, position))
            position += len(documents[-1])
        classes.append(np.concatenate(documents)[start - first :][:length])
    return np.stack(classes)


def _last_separator(stream, position, separator):
    """The last position up to `position` with a separator; a stream begins with one."""
    while stream[position] != separator:
        block = stream[max(0, position - _BLOCK) : position]
        found = np.flatnonzero(block == separator)
        position -= len(block) - int(found[-1]) if len(found) else len(block)
    return position


def _next_separator(stream, position, separator):
    """The first position from `position` on with a separator, or the end."""
    while position < len(stream):
        block = stream[position : position + _BLOCK]
        found = np.flatnonzero(block == separator)
        if len(found):
            return position + int(found[0])
        position += len(block)
    return position
