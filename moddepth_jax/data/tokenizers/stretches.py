"""A long text in stretches, as libraries of tokenizers take dozens of bytes for each byte of it."""

import re
from collections.abc import Iterator

LENGTH = 1 << 19  # characters; a stretch goes on to the next place where it may end
_WORD = re.compile(r'(?<=\S)(?= \S)|(?<=\S\n)(?=\S)')
_SPACE = re.compile(r'(?<=\S) (?=\S)')


def stretches(text: str, prefixed: bool) -> Iterator[str]:
    """`text` in stretches that have, encoded one by one, the tokens of the whole.

    Each ends where the tokenizers of the field end a token: before a single space, or between two
    lines. For one that puts a space before what it is given, only the former, and the space is left
    out as it comes again.

    Args:
      text: of any length; a shorter one than `LENGTH` stays whole.
      prefixed: whether a space is put before each stretch.
    """
    place, start = _SPACE if prefixed else _WORD, 0
    while found := place.search(text, start + LENGTH):
        yield text[start : found.start()]
        start = found.end()
    yield text[start:]
