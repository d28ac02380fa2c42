"""Writes prepared text: tokens as they come, and last of all what makes it whole."""

import hashlib
import json
import os
import pathlib
import platform
from importlib import metadata

import numpy as np

from moddepth_jax.data.directory import write_atomically
from moddepth_jax.data.store import (
    PARTS,
    PREPARED_FILE,
    SCHEMA_VERSION,
    TOKENIZER_DIRECTORY,
    Store,
    open_store,
)
from moddepth_jax.data.tokenizers.tokenizer import Tokenizer

_PACKAGES = ('moddepth-jax', 'numpy', 'tokenizers', 'sentencepiece', 'pyarrow')


class _Part:
    """The two files of one part, and the counts and the hash of what was written to them."""

    def __init__(self, directory, part):
        self._files = [open(directory / f'{part}.{kind}', 'wb') for kind in ('bin', 'index')]
        self._files[1].write(np.zeros(1, '<u8'))
        self._digest = hashlib.sha256()
        self.documents = self.tokens = self.bytes = 0

    def add(self, tokens_N, lengths_D, num_bytes):
        tokens, index = self._files
        tokens.write(tokens_N)
        self._digest.update(tokens_N)
        index.write((self.tokens + np.cumsum(lengths_D, dtype=np.uint64)).astype('<u8'))
        self.documents += len(lengths_D)
        self.tokens += len(tokens_N)
        self.bytes += num_bytes

    def sync(self):
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())

    def close(self):
        for file in self._files:
            file.close()

    def counts(self):
        counts = {'documents': self.documents, 'tokens': self.tokens, 'bytes': self.bytes}
        return {**counts, 'sha256': self._digest.hexdigest()}


class StoreWriter:
    """Writes prepared text into a directory; a context manager.

    Until `finish` has returned there is no prepared.json, and `open_store` refuses the directory.

    Args:
      directory: it is there; what an earlier writer left in it is replaced.
      tokenizer: the Tokenizer of all tokens, saved to the directory's tokenizer/ by `finish`.
      held_out_fraction: in (0, 1), the share of documents that goes to 'held_out'.

    Raises:
      OSError: the directory cannot be written, or the disk is full.
    """

    def __init__(
        self, directory: str | os.PathLike, tokenizer: Tokenizer, held_out_fraction: float
    ):
        self._directory = pathlib.Path(directory)
        self._tokenizer, self._fraction = tokenizer, held_out_fraction
        (self._directory / PREPARED_FILE).unlink(missing_ok=True)
        self._parts = {part: _Part(self._directory, part) for part in PARTS}

    def add(self, part: str, tokens_N: np.ndarray, lengths_D: np.ndarray, num_bytes: int) -> None:
        """Appends documents.

        Args:
          part: 'train' or 'held_out'.
          tokens_N: of any integer dtype; each document's tokens after one separator.
          lengths_D: how many of them each document has, with its separator; they sum to N.
          num_bytes: of the text.

        Raises:
          ValueError: lengths that do not sum to N.
          OSError: the disk is full.
        """
        if np.sum(lengths_D, dtype=np.uint64) != len(tokens_N):
            right = f'must sum to the {len(tokens_N)} tokens'
            raise ValueError(f'lengths of {np.sum(lengths_D)} tokens; {right}')
        dtype = np.dtype(self._tokenizer.dtype).newbyteorder('<')
        self._parts[part].add(np.ascontiguousarray(tokens_N, dtype), lengths_D, num_bytes)

    def finish(
        self, skipped: dict | None = None, inputs: tuple = (), arguments: dict | None = None
    ) -> Store:
        """Makes the text whole and opens it.

        Args:
          skipped: {reason: {'count': n, 'first': [message, ...]}} of what was left out.
          inputs: dicts of the files, as `Store.inputs` has them; not in the fingerprint.
          arguments: of the command, for the record.
        """
        for part in self._parts.values():
            part.sync()
            part.close()
        if not (self._directory / TOKENIZER_DIRECTORY).exists():
            self._tokenizer.save(self._directory / TOKENIZER_DIRECTORY)
        tokenizer = {
            name: getattr(self._tokenizer, name)
            for name in ('name', 'sha256', 'vocab_size', 'separator')
        }
        text = {
            'tokenizer': tokenizer,
            'dtype': np.dtype(self._tokenizer.dtype).name,
            **{name: part.counts() for name, part in self._parts.items()},
        }
        about = {
            'schema_version': SCHEMA_VERSION,
            'fingerprint': _fingerprint(text),
            **text,
            'held_out_fraction': self._fraction,
            'skipped': skipped or {},
            'inputs': list(inputs),
            'arguments': arguments or {},
            'versions': _versions(),
        }
        write_atomically(self._directory / PREPARED_FILE, json.dumps(about, indent=2) + '\n')
        return open_store(self._directory)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for part in self._parts.values():
            part.close()


def _fingerprint(text):
    # A tokenizer has the same ids under another name.
    tokenizer = {name: text['tokenizer'][name] for name in ('sha256', 'vocab_size', 'separator')}
    decisive = {**text, 'tokenizer': tokenizer}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def _versions():
    versions = {'python': platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # an extra, or our own tree without an install
            continue
    return versions
