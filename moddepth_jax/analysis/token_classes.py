"""What kind of text a token is part of: in Python code by its lexer, in prose by its letters."""

import io
import keyword
import re
import tokenize

import numpy as np

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

# A string's prefix is not asked whether it is a lawful one: text that does not parse ends here.
_QUOTED = (
    r"""[rRbBuUfFtT]{0,2}(?:"(?:\\.|[^"\\\n])*(?:"|$|(?=\n))|'(?:\\.|[^'\\\n])*(?:'|$|(?=\n)))"""
)
_TRIPLE = r"""[rRbBuUfFtT]{0,2}(?:\"{3}[\s\S]*?(?:\"{3}|\Z)|'{3}[\s\S]*?(?:'{3}|\Z))"""
_DIGITS = r'(?:0[xXoObB][\w]+|(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d+)?[jJ]?)'
_PYTHON = re.compile(
    rf'(?P<comment>\#[^\n]*)|(?P<docstring>(?:(?<=\n)|\A)[ \t]*{_TRIPLE})'
    rf'|(?P<string>{_TRIPLE}|{_QUOTED})|(?P<number>{_DIGITS})|(?P<identifier>[^\W\d]\w*)'
    r'|(?P<whitespace>\n|[^\S\n]+)|(?P<operator>[!%&()*+,\-./:;<=>@\[\]^{|}~]|\\(?=\r?\n))|(?P<other>.)',
    re.DOTALL,
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


def guess_language(text: bytes) -> str:
    """python where more than a third of the lines that are not blank look like code, else prose."""
    lines = [line for line in text.decode('utf-8', 'replace').split('\n') if line.strip()]
    looks = sum(bool(_CODE_LINE.match(line)) for line in lines)
    return 'python' if looks > len(lines) / 3 else 'prose'


def byte_classes(text: bytes, language: str) -> np.ndarray:
    """The class of each byte of a text.

    `python`: whitespace, keyword, identifier, number, string, docstring (a string that is a
    statement), comment, operator and other, as Python's `tokenize` cuts the text, or, where that
    refuses it, by patterns which a broken or truncated text cannot stop. What is inside a string
    or a comment is all of its class, spaces too, and so is what stands between the braces of an
    f-string. `prose`: word, number, whitespace, punctuation and other (control characters, bytes
    that are not UTF-8).

    Args:
      text: any bytes.
      language: of LANGUAGES.

    Returns:
      uint8 [len(text)], indices into CLASSES.

    Raises:
      ValueError: an unknown language.
    """
    if language not in LANGUAGES:
        raise ValueError(f'language={language!r}: must be one of {", ".join(LANGUAGES)}')
    characters = text.decode('utf-8', 'surrogateescape')
    spans = None
    if language == 'python':
        spans = _lexed(characters)
    if spans is None:
        spans = _matched(_PYTHON if language == 'python' else _PROSE, characters)
    classes = np.full(len(characters), _NUMBER['whitespace'], np.uint8)
    for start, end, name in spans:
        classes[start:end] = _NUMBER[name]
    sizes = [len(character.encode('utf-8', 'surrogateescape')) for character in characters]
    return np.repeat(classes, sizes)


def token_classes(pieces: list[bytes], language: str) -> np.ndarray:
    """The class of each token: that of its first byte which is not whitespace, else whitespace.

    Args:
      pieces: the bytes of each token, b'' for the separator, which is the start of a text.
      language: of LANGUAGES.

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


def _matched(pattern, text):
    """(start, end, class) of everything in the text; a pattern that matches any character."""
    for match in pattern.finditer(text):
        name = match.lastgroup
        if name == 'identifier' and keyword.iskeyword(match[0]):
            name = 'keyword'
        start = match.start() + (len(match[0]) - len(match[0].lstrip(' \t')))
        yield start if name == 'docstring' else match.start(), match.end(), name


def _lexed(text):
    """(start, end, class) of the tokens that Python's lexer finds; None where it refuses."""
    if '\0' in text:  # on which some lexers stumble without a word
        return None
    starts = [0]
    for line in text.split('\n'):
        starts.append(starts[-1] + len(line) + 1)
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text, newline='\n').readline))
    except (SyntaxError, tokenize.TokenError, ValueError):  # ValueError: of surrogates
        return None
    spans, begins_statement, nested = [], True, []
    for i, token in enumerate(tokens):
        start, end = (starts[row - 1] + column for row, column in (token.start, token.end))
        if token.type in _OPENS:
            nested.append(start)
        elif token.type in _CLOSES:
            spans.append((nested.pop(), end, 'string'))
        elif not nested and (name := _class_of(token)) is not None:
            if text[start:end] != token.string:  # line ends of other systems may shift places
                return None
            if name == 'string' and begins_statement and _ends_statement(tokens, i):
                name = 'docstring'
            spans.append((start, end, name))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            begins_statement = token.type in _BEFORE_STATEMENT
    return spans


_BEFORE_STATEMENT = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
# Of f-strings and t-strings, which newer Pythons cut into pieces.
_OPENS, _CLOSES = (
    tuple(n for n, name in tokenize.tok_name.items() if re.fullmatch(f'[FT]STRING_{part}', name))
    for part in ('START', 'END')
)


def _ends_statement(tokens, i):
    after = next((t for t in tokens[i + 1 :] if t.type != tokenize.COMMENT), None)
    return after is None or after.type in (tokenize.NEWLINE, tokenize.ENDMARKER)


def _class_of(token):
    """None for what covers no text of its own, or whitespace."""
    if token.type == tokenize.NAME:
        return 'keyword' if keyword.iskeyword(token.string) else 'identifier'
    if token.type == tokenize.ERRORTOKEN:
        return 'other' if token.string.strip() else None
    names = {
        tokenize.NUMBER: 'number',
        tokenize.STRING: 'string',
        tokenize.COMMENT: 'comment',
        tokenize.OP: 'operator',
    }
    return names.get(token.type)
