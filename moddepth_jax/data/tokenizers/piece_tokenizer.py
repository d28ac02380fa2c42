"""What all tokenizers from files share: ids that each stand for some bytes."""

import abc
import hashlib
import os
import pathlib

import numpy as np

from moddepth_jax.data.tokenizers import about as about_file
from moddepth_jax.data.tokenizers.stretches import stretches
from moddepth_jax.data.tokenizers.tokenizer import check_ids


class PieceTokenizer(abc.ABC):
    """A Tokenizer whose text is its ids' bytes, one after another; subclasses encode.

    Of one that puts a space before a document (`prefixed`), `decode` takes the first space of each
    document away again. Its `token_bytes_V` counts that space: one byte a document too many.

    Args:
      kind: name of the file that `save` writes.
      name: what to call it.
      content: the bytes of that file.
      pieces: the bytes of each id within a text, b'' for special ids and gaps.
      separator: id, its piece is b''.
      stops: ids.
      prefixed: whether a space is put before a document.
    """

    def __init__(self, kind, name, content, pieces, separator, stops, prefixed):
        self.name, self.vocab_size = name, len(pieces)
        self.separator, self.stops = separator, stops
        self.dtype = np.uint16 if len(pieces) <= 2**16 else np.uint32
        self.token_bytes_V = np.array([len(piece) for piece in pieces], np.int32)
        self.token_bytes_V.flags.writeable = False
        self.sha256 = hashlib.sha256(b'%d ' % separator + content).hexdigest()
        self._kind, self._content, self._prefixed = kind, content, prefixed
        self._pieces = pieces

    def encode(self, data: bytes) -> np.ndarray:
        """Ids of `data` as one document, `dtype` [N], none of them special.

        Raises:
          ValueError: one line that names the first byte that is not UTF-8; text that this tokenizer
            cannot tell from its separator.
        """
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            right = 'save the text as UTF-8, or take data.tokenizer=bytes'
            found = f'byte {error.start} of the text is {data[error.start]:#04x}, which'
            raise ValueError(f'{found} is not UTF-8 there; {right}') from None
        parts = stretches(text, self._prefixed) if text else ()
        empty = np.array([], self.dtype)
        ids_N = np.concatenate([empty, *(np.array(self._ids(p), self.dtype) for p in parts)])
        if (ids_N == self.separator).any():
            right = 'take another separator or tokenizer'
            found = f'cannot tell a text from its separator, id {self.separator}'
            raise ValueError(f'{self.name}: {found}; {right}')
        return ids_N

    def encode_batch(self, texts: list[bytes]) -> list[np.ndarray]:
        """`encode` of each of `texts`."""
        return [self.encode(text) for text in texts]

    def decode(self, ids) -> bytes:
        """The bytes of `ids`, integers of any shape read in order; special ids are skipped.

        Raises:
          ValueError: an id outside [0, V).
        """
        return b''.join(self.pieces(ids))

    def pieces(self, ids) -> list[bytes]:
        """The bytes of each of `ids` in their text, b'' for special ids; joined they are `decode`.

        Raises:
          ValueError: an id outside [0, V).
        """
        ids_N = check_ids(ids, self.vocab_size)
        found = [self._pieces[token] for token in ids_N.tolist()]
        if self._prefixed:
            for place in (0, *(np.flatnonzero(ids_N == self.separator) + 1)):
                found[place : place + 1] = [b.removeprefix(b' ') for b in found[place : place + 1]]
        return found

    def save(self, directory: str | os.PathLike) -> None:
        """Writes the file as it was read, and the note, last, into `directory`."""
        directory = pathlib.Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / self._kind).write_bytes(self._content)
        about_file.write(directory, self._kind, self)

    @abc.abstractmethod
    def _ids(self, text: str) -> list[int]:
        """Ids of text that is not long."""

    def _check_about(self, about, file):
        """Raises ValueError where the file is not the one that the note was written for."""
        if about is not None and about['sha256'] != self.sha256:
            right = 'put the file back, or prepare the text or train the model again'
            found = f'is not the file that {about_file.FILE} beside it was written for'
            raise ValueError(f'{file}: {found}, its sha256 is {self.sha256}; {right}')
        if not all(stop in range(self.vocab_size) for stop in self.stops):
            right = f'must be ids below {self.vocab_size}'
            raise ValueError(f'{file}: stops {self.stops} of {about_file.FILE}: {right}')
