"""The base class of tokenizers from files: each id stands for some bytes."""

import abc
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterator

import numpy as np

from moddepth_jax.data.directory import read_json
from moddepth_jax.data.tokenizers.separators import find_separator

METADATA_FILE = 'tokenizer_about.json'
_METADATA_FIELDS = {'kind': str, 'name': str, 'separator': int, 'stops': list, 'sha256': str}
CHUNK_LENGTH = 1 << 19  # characters; a chunk ends at the next place where it may
BLOCK_LENGTH = 1 << 20  # ids that are decoded at a time
_BEFORE_WORD = re.compile(r'(?<=\S)(?= \S)|(?<=\S\n)(?=\S)')
_SPACE = re.compile(r'(?<=\S) (?=\S)')


def write_metadata(directory: str | os.PathLike, kind: str, tokenizer) -> None:
    """Write what a tokenizer's own file, `kind`, does not contain; makes `directory`."""
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    metadata = {'kind': kind}
    metadata |= {
        name: getattr(tokenizer, name) for name in ('name', 'separator', 'stops', 'sha256')
    }
    text = json.dumps(metadata, indent=2) + '\n'
    (directory / METADATA_FILE).write_text(text, encoding='utf-8')


def read_metadata(directory: str | os.PathLike) -> dict | None:
    """Read the file of `write_metadata`, or None; raises ValueError, one line, if damaged."""
    right = 'save the tokenizer again, or use its own file'
    return read_json(pathlib.Path(directory) / METADATA_FILE, right, _METADATA_FIELDS)


def check_ids(ids, vocab_size: int) -> np.ndarray:
    """Flatten `ids`; raises ValueError for an id outside [0, vocab_size)."""
    ids = np.asarray(ids).reshape(-1)
    unknown = ids[(ids < 0) | (ids >= vocab_size)]
    if unknown.size:
        raise ValueError(f'token id {unknown[0]}: must lie in [0, {vocab_size})')
    return ids


def chunk_text(text: str, prefixed: bool) -> Iterator[str]:
    """Split a long text into chunks that encode, one by one, to the tokens of the text.

    This saves memory: tokenizer libraries need dozens of bytes for each byte of text. Chunks end
    where common tokenizers end a token: before a single space or between two lines. If the
    tokenizer puts a space before its text (`prefixed`), they end at single spaces, which are
    dropped.
    """
    place, start = _SPACE if prefixed else _BEFORE_WORD, 0
    while found := place.search(text, start + CHUNK_LENGTH):
        yield text[start : found.start()]
        start = found.end()
    yield text[start:]


def _digest(separator, content):
    return hashlib.sha256(b'%d ' % separator + content).hexdigest()


class PieceTokenizer(abc.ABC):
    """A Tokenizer whose text is the concatenated bytes of its ids; subclasses encode.

    If the library puts a space before a document, `decode` removes the first space of each
    document. `token_bytes_V` counts that space, which is one byte too many per document.

    Args:
      kind: name of the file that `save` writes.
      content: content of that file.
      file: path that the tokenizer was read from.
      pieces: bytes of each id within a text, b'' for special ids and gaps.
      special, first, separator: as in `find_separator`.
      metadata: result of `read_metadata` for the folder of the file, or None.
      name: name of the tokenizer, by default that of the file.
    """

    def __init__(self, kind, content, file, pieces, special, first, separator, metadata, name=None):
        if metadata is not None and separator is None:
            self.separator, self.stops = metadata['separator'], tuple(metadata['stops'])
        else:
            self.separator, self.stops = find_separator(file, special, first, separator)
        names = (text for text, token in special.items() if token == self.separator)
        self.separator_text = next(names, '')
        if name is None:
            name = file.name if metadata is None else metadata['name']
        self.name, self.vocab_size = name, len(pieces)
        self.dtype = np.uint16 if len(pieces) <= 2**16 else np.uint32
        self.token_bytes_V = np.array([len(piece) for piece in pieces], np.int32)
        self.token_bytes_V.flags.writeable = False
        self.sha256 = _digest(self.separator, content)
        self._kind, self._content, self._pieces = kind, content, pieces
        ids = self._ids('a')
        self._prefixed = bool(ids) and pieces[ids[0]].startswith(b' ')
        stored = None if metadata is None else _digest(metadata['separator'], content)
        if metadata is not None and metadata['sha256'] != stored:
            right = 'restore the file, or prepare the text or train the model again'
            found = f'is not the file that {METADATA_FILE} next to it belongs to'
            raise ValueError(f'{file}: {found}, its sha256 is {stored}; {right}')
        if not all(stop in range(self.vocab_size) for stop in self.stops):
            right = f'must be ids below {self.vocab_size}'
            raise ValueError(f'{file}: stops {self.stops} of {METADATA_FILE}: {right}')

    def encode(self, data: bytes) -> np.ndarray:
        """As `Tokenizer.encode`; raises ValueError for invalid UTF-8, or if a separator results."""
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            right = 'save the text as UTF-8, or use data.tokenizer=bytes'
            found = f'byte {error.start} of the text is {data[error.start]:#04x}, which'
            raise ValueError(f'{found} is not UTF-8 there; {right}') from None
        chunks = chunk_text(text, self._prefixed) if text else ()
        empty = np.array([], self.dtype)
        ids_N = np.concatenate([empty, *(np.array(self._ids(c), self.dtype) for c in chunks)])
        if (ids_N == self.separator).any():
            right = 'use another separator or tokenizer'
            found = f'encodes a text to its separator, id {self.separator}'
            raise ValueError(f'{self.name}: {found}; {right}')
        return ids_N

    def decode(self, ids) -> bytes:
        """As `Tokenizer.decode`."""
        ids_N = check_ids(ids, self.vocab_size)
        text = []
        # In blocks, since a list takes dozens of bytes for each id.
        for start in range(0, len(ids_N), BLOCK_LENGTH):
            before = ids_N[start - 1] if start else self.separator
            text.append(b''.join(self._pieces_after(before, ids_N[start : start + BLOCK_LENGTH])))
        return b''.join(text)

    def pieces(self, ids) -> list[bytes]:
        """As `Tokenizer.pieces`."""
        return self._pieces_after(self.separator, check_ids(ids, self.vocab_size))

    def _pieces_after(self, before, ids_N):
        found = [self._pieces[token] for token in ids_N.tolist()]
        if self._prefixed:
            before_N = np.concatenate([[before], ids_N])[:-1]
            for place in np.flatnonzero(before_N == self.separator):
                found[place] = found[place].removeprefix(b' ')
        return found

    def save(self, directory: str | os.PathLike) -> None:
        """Write the file as it was read, then the metadata, into `directory`."""
        directory = pathlib.Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / self._kind).write_bytes(self._content)
        write_metadata(directory, self._kind, self)

    @abc.abstractmethod
    def _ids(self, text: str) -> list[int]:
        """Encode one chunk of text."""
