"""Tokenizers: the protocol, the byte tokenizer, and how a tokenizer is found."""

import os
import pathlib
import shutil
import typing

import numpy as np

from moddepth_jax.data.compression import read_small
from moddepth_jax.data.tokenizers.piece_tokenizer import (
    METADATA_FILE,
    check_ids,
    read_metadata,
    write_metadata,
)
from moddepth_jax.hparams import DataHparams

DIRECTORY = 'tokenizer'  # folder with the tokenizer of a run or a prepared text
FILES = ('tokenizer.json', 'tokenizer.model', METADATA_FILE, 'tokenizer_config.json')  # of a folder
_MAX_BYTES = 1 << 28  # of a tokenizer's file
_DECODING_CONTEXT = 8  # tokens before a token that are decoded with it


class Tokenizer(typing.Protocol):
    """What the data pipeline, evaluation and generation use of a tokenizer.

    Attributes:
      name: 'bytes', the name of its file, or 'bpe:4096' if it was trained here.
      sha256: hex digest of everything that determines its ids; '' for bytes.
      vocab_size: V; ids lie in [0, V), possibly with gaps.
      separator: the id that starts every document; `encode` never returns it.
      separator_text: the name of that token, '' for bytes.
      stops: ids that end a document in generation: the separator, perhaps an end-of-text id.
      token_bytes_V: int32 [V], the number of bytes of each id, 0 for special ids and gaps.
      dtype: dtype of ids, np.uint16 if that can hold them, otherwise np.uint32.
    """

    name: str
    sha256: str
    vocab_size: int
    separator: int
    separator_text: str
    stops: tuple[int, ...]
    token_bytes_V: np.ndarray
    dtype: type

    def encode(self, data: bytes) -> np.ndarray:
        """Encode `data` to ids, `dtype` [N]; none is special, even if the text spells one."""

    def decode(self, ids) -> bytes:
        """Decode `ids`, integers of any shape, to bytes; special ids are skipped.

        Like `pieces`, raises ValueError for an id outside [0, vocab_size).
        """

    def pieces(self, ids) -> list[bytes]:
        """Return the bytes of each id, b'' for special ones; joined, they equal `decode`."""

    def save(self, directory: str | os.PathLike) -> None:
        """Write the files from which `make_tokenizer(directory)` makes this tokenizer again."""


class ByteTokenizer(Tokenizer):
    """One id per byte, 0 to 255, and the separator 256."""

    name = 'bytes'
    sha256 = ''
    vocab_size = 257
    separator = 256
    separator_text = ''
    stops = (256,)
    dtype = np.uint16

    def __init__(self):
        self.token_bytes_V = np.ones(self.vocab_size, np.int32)
        self.token_bytes_V[self.separator] = 0
        self.token_bytes_V.flags.writeable = False

    def encode(self, data):
        return np.frombuffer(data, np.uint8).astype(np.uint16)

    def decode(self, ids):
        ids = check_ids(ids, self.vocab_size)
        return ids[ids != self.separator].astype(np.uint8).tobytes()

    def pieces(self, ids):
        return [self.decode([token]) for token in check_ids(ids, self.vocab_size)]

    def save(self, directory):
        write_metadata(directory, 'bytes', self)


class TokenStream:
    """Decodes the tokens after a prompt one by one.

    Only a few tokens before each one are decoded with it: some tokenizers drop the space before the
    first word of a document.
    """

    def __init__(self, tokenizer: Tokenizer, prompt):
        self._decode, self._last = tokenizer.decode, list(prompt[-_DECODING_CONTEXT:])

    def add(self, token: int) -> bytes:
        """Return the bytes that a token adds to the text."""
        before, self._last = self._last, [*self._last, token]
        new = self._decode(self._last)[len(self._decode(before)) :]
        self._last = self._last[-_DECODING_CONTEXT:]
        return new


def is_bytes(name: str | os.PathLike) -> bool:
    """Return whether `name`, as in `make_tokenizer`, is bytes; raises ValueError like that."""
    path = pathlib.Path(os.path.expanduser(name))
    metadata = read_metadata(path) if name != 'bytes' and path.is_dir() else None
    return name == 'bytes' or (metadata is not None and metadata['kind'] == 'bytes')


def make_tokenizer(name: str | os.PathLike, separator: str | None = None) -> Tokenizer:
    """Make the tokenizer `name`.

    That is bytes, a tokenizer.json, a SentencePiece .model, or a folder with one. `separator` is
    the text of the special token that starts every document, by default that of `find_separator`.
    Raises ValueError, one line with the file and what would be right.
    """
    if is_bytes(name):
        if name == 'bytes' and separator is not None:
            right = 'leave it out: bytes have their own separator, id 256'
            raise ValueError(f'separator={separator!r}: {right}')
        return ByteTokenizer()
    file, metadata = pathlib.Path(os.path.expanduser(name)), None
    if file.is_dir():
        folder, metadata = file, read_metadata(file)
        names = [n for n in ('tokenizer.json', 'tokenizer.model') if os.path.lexists(folder / n)]
        if not names:
            right = 'must hold tokenizer.json or tokenizer.model'
            raise ValueError(f'{folder}: no tokenizer in this folder; {right}')
        file = folder / names[0]
    try:
        content = read_small(file, _MAX_BYTES)
    except FileNotFoundError:
        right = 'must be bytes, a tokenizer.json, a SentencePiece .model, or a folder with one'
        raise ValueError(f'{file}: no such tokenizer; {right}') from None
    except OSError as error:
        right = 'must be the file of a tokenizer'
        raise ValueError(f'{file}: cannot be read ({error.strerror}); {right}') from None
    # Imported here, since their libraries are not always needed; sentencepiece is an extra.
    if file.suffix.lower() == '.model':
        from moddepth_jax.data.tokenizers.sentence_piece import SentencePieceTokenizer as kind
    else:
        from moddepth_jax.data.tokenizers.json_tokenizer import JsonTokenizer as kind
    return kind(content, file, separator, metadata)


def save_atomically(tokenizer: Tokenizer, directory: pathlib.Path) -> None:
    """Save a tokenizer, all or nothing, to `directory`, which must not exist."""
    temporary = directory.with_name(directory.name + '.tmp')
    shutil.rmtree(temporary, ignore_errors=True)
    tokenizer.save(temporary)
    os.rename(temporary, directory)


def tokenizer_of(data: DataHparams, workdir: str | os.PathLike | None = None) -> Tokenizer:
    """Return the tokenizer of a run: the one in its `workdir`, if any, or the one of `data`.

    Raises ValueError, one line, like `make_tokenizer`, or for text that was not prepared.
    """
    if data.tokenizer == 'bytes':
        return ByteTokenizer()
    if workdir is not None:
        saved = pathlib.Path(workdir) / DIRECTORY
        if saved.is_dir():
            return make_tokenizer(saved)
    if data.tokenizer != 'prepared':
        try:
            return make_tokenizer(data.tokenizer)
        except ValueError as error:
            raise ValueError(f'data.tokenizer={data.tokenizer!r}: {error}') from None
    prepared = pathlib.Path(os.path.expanduser(data.folders[0])) / DIRECTORY
    if prepared.is_dir():
        return make_tokenizer(prepared)
    right = 'must be a folder that launch.prepare wrote; or name the tokenizer'
    raise ValueError(f"data.tokenizer='prepared': data.source={data.source!r} {right}")
