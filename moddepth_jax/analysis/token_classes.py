"""Classifies tokens by the kind of text: Python code with Pygments, prose by characters."""

import re

import numpy as np
from pygments.lexers.python import PythonLexer
from pygments.token import Token

from moddepth_jax.data.compression_baselines import MAX_BYTES, first_bytes

CLASSES = (
    *('start of text', 'whitespace', 'keyword', 'identifier', 'number', 'string', 'docstring'),
    *('comment', 'operator', 'article', 'preposition', 'word', 'punctuation', 'other'),
)
LANGUAGES = ('python', 'prose')
_NUMBER = {name: i for i, name in enumerate(CLASSES)}
# The first Pygments token type that matches decides.
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
_SHORT_WORDS = {
    'article': 'a an the',
    'preposition': 'about above across after against along among around as at before behind '
    'below beneath beside besides between beyond by despite during except for from in inside into '
    'near of on onto over per since through throughout to toward towards under until upon via with '
    'within without',
}
_WITH_WORDS = ('docstring', 'comment', 'word')  # classes of English text
# Not inside a name, a path or a call, such as `for-loop`, a.in or to().
_SHORT_WORD = re.compile(
    r'(?<![\w`.=/-])(?:'
    + '|'.join(f'(?P<{name}>{"|".join(words.split())})' for name, words in _SHORT_WORDS.items())
    + r")(?![\w`'’(=/-])",
    re.IGNORECASE,
)
_CODE_LINE = re.compile(
    r'\s*(?:(?:def|class|import|from|if|elif|for|while|with|except|async|lambda)\s.*[:(\w,]\s*$'
    r'|(?:return|else|try|finally|raise|yield|pass|self|print)\b[\s:.(]|[#@]\s*\w|[\w.\[\]]+\s*[-+]?=)'
    r'|.*[({\[:]\s*$|\s*[)\]}]'
)
_PYTHON_SOURCES = ('stdlib', 'python_environment')  # values of data.source that hold Python


def guess_language(text: bytes) -> str:
    """Return `python` if more than a third of the non-blank lines look like code, else `prose`."""
    lines = [line for line in text.decode('utf-8', 'replace').split('\n') if line.strip()]
    looks = sum(bool(_CODE_LINE.match(line)) for line in lines)
    return 'python' if looks > len(lines) / 3 else 'prose'


def language_of(corpus) -> str:
    """Return the language of the held-out text of a Corpus, judged by its first bytes."""
    if corpus.name in _PYTHON_SOURCES:
        return 'python'
    return guess_language(first_bytes(corpus.held_out, MAX_BYTES, b'\n'))


def byte_classes(text: bytes, language: str) -> np.ndarray:
    """Return the class of each byte of a text: uint8 [len(text)], indices into CLASSES.

    `python` text is parsed by Pygments. A string or comment is one class throughout, except for
    articles and prepositions in docstrings and comments. In `prose`, `other` are control characters
    and bytes that are not UTF-8. Raises ValueError for an unknown language.
    """
    if language not in LANGUAGES:
        raise ValueError(f'language={language!r}: must be one of {", ".join(LANGUAGES)}')
    characters = text.decode('utf-8', 'surrogateescape')
    if language == 'python':
        parts = list(_python_parts(characters))
    else:
        parts = [(match.lastgroup, match[0]) for match in _PROSE.finditer(characters)]
    parts = [piece for name, text in parts for piece in _short_words(name, text)]
    sizes = [len(part.encode('utf-8', 'surrogateescape')) for _, part in parts]
    return np.repeat(np.array([_NUMBER[name] for name, _ in parts], np.uint8), sizes)


def _short_words(name, text):
    """Split a part at its articles and prepositions; yields (class, text)."""
    end = 0
    for match in _SHORT_WORD.finditer(text) if name in _WITH_WORDS else ():
        yield name, text[end : match.start()]
        yield match.lastgroup, match[0]
        end = match.end()
    yield name, text[end:]


def _python_parts(text):
    """Yield (class, text) for each Pygments token."""
    inside_braces = False  # of an f-string
    for _, kind, part in PythonLexer().get_tokens_unprocessed(text):
        name = next((name for parent, name in _PYTHON_CLASSES if kind in parent), 'other')
        if kind in Token.String.Interpol:
            inside_braces = part.startswith('{') and not part.endswith('}')
        elif inside_braces:
            name = 'string'
        yield name, part


def token_classes(pieces: list[bytes], language: str) -> np.ndarray:
    """Return uint8 [N]: the class of each token's first non-whitespace byte; b'' starts a text."""
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
    """Return uint8 [X, T]: the class of each token of complete held-out windows.

    A window may begin inside a string, so classes come from the complete documents.
    """
    streams, length = dataset.held_out_streams, tokens_XT.shape[1]
    wanted = [tokens_T.tobytes() for tokens_T in tokens_XT.astype(streams[0].dtype)]
    found = dict.fromkeys(wanted)
    for stream in streams:
        bounds = np.append(np.flatnonzero(stream == dataset.tokenizer.separator), len(stream))
        documents = {}
        for start in range(0, len(stream), length):
            window = stream[start : start + length].tobytes()
            if window not in found:
                continue
            ends = (start, start + length - 1)
            first, last = np.searchsorted(bounds, ends, side='right') - 1
            for i in range(first, last + 1):
                if i not in documents:
                    pieces = dataset.tokenizer.pieces(stream[bounds[i] : bounds[i + 1]])
                    documents[i] = token_classes(pieces, language)
            classes = np.concatenate([documents[i] for i in range(first, last + 1)])
            found[window] = classes[start - bounds[first] :][:length]
    return np.stack([found[window] for window in wanted])
