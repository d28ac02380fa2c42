"""Tokenizers: bytes to ids and back. One table, by name."""

import typing

import numpy as np


class Tokenizer(typing.Protocol):
    """What the pipeline and the evaluation ask of a tokenizer.

    Attributes:
      name: its name in `data.tokenizer`.
      vocab_size: V, ids lie in [0, V).
      separator: the id that starts every document; `encode` never returns it.
      token_bytes_V: int32 [V], the bytes each id stands for, 0 for the separator; turns nats per
        token into bits per byte.
    """

    name: str
    vocab_size: int
    separator: int
    token_bytes_V: np.ndarray

    def encode(self, data: bytes) -> np.ndarray: ...

    def decode(self, ids) -> bytes: ...


class ByteTokenizer:
    """One id a byte, 0 to 255, and the separator 256."""

    name = 'bytes'
    vocab_size = 257
    separator = 256

    def __init__(self):
        self.token_bytes_V = np.ones(self.vocab_size, np.int32)
        self.token_bytes_V[self.separator] = 0
        self.token_bytes_V.flags.writeable = False

    def encode(self, data: bytes) -> np.ndarray:
        """uint16 [N] ids of the N bytes of `data`, without a separator."""
        return np.frombuffer(data, np.uint8).astype(np.uint16)

    def decode(self, ids) -> bytes:
        """The bytes of `ids` (integers of any shape, read in order); separators are skipped.

        Raises:
          ValueError: an id outside [0, 257).
        """
        ids = np.asarray(ids).reshape(-1)
        unknown = ids[(ids < 0) | (ids >= self.vocab_size)]
        if unknown.size:
            raise ValueError(f'token id {unknown[0]}: must lie in [0, {self.vocab_size})')
        return ids[ids != self.separator].astype(np.uint8).tobytes()


_TOKENIZERS = {'bytes': ByteTokenizer}


def make_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called `name`. Raises ValueError for a name that is not in the table."""
    if name not in _TOKENIZERS:
        raise ValueError(f'data.tokenizer={name!r}: must be one of {", ".join(_TOKENIZERS)}')
    return _TOKENIZERS[name]()
