"""The prepared text: tokens in flat files that are mapped into memory, and what they are."""

import dataclasses
import hashlib
import json
import os
import pathlib
import platform
from collections.abc import Sequence
from importlib import metadata

import numpy as np

from moddepth_jax.data.directory import write_atomically
from moddepth_jax.data.tokenizers.tokenizer import Tokenizer, make_tokenizer

PREPARED_FILE = 'prepared.json'
TOKENIZER_DIRECTORY = 'tokenizer'
SCHEMA_VERSION = 1
PARTS = ('train', 'held_out')
DTYPES = ('uint16', 'uint32')


def is_store(path: str | os.PathLike) -> bool:
    """Whether `path` is a directory with prepared text, whole and of any version."""
    return (pathlib.Path(path).expanduser() / PREPARED_FILE).is_file()


class DocumentsOfStore(Sequence):
    """The documents of one part of a store as bytes, decoded when they are asked for.

    An index gives bytes, a slice a list of them. Equal to the text that was prepared, unless its
    tokenizer normalises text.
    """

    def __init__(self, tokens: np.ndarray, offsets: np.ndarray, tokenizer: Tokenizer):
        self._tokens, self._offsets, self._tokenizer = tokens, offsets, tokenizer

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        i = range(len(self))[index]
        start, stop = int(self._offsets[i]), int(self._offsets[i + 1])
        return self._tokenizer.decode(self._tokens[start + 1 : stop])  # after the separator


@dataclasses.dataclass(frozen=True)
class Store:
    """Prepared text; what `open_store` returns.

    Attributes:
      directory: where it lies.
      fingerprint: sha256 over the tokens of both parts, the tokenizer and the split, hexadecimal.
      tokenizer: {name, sha256, vocab_size, separator}.
      dtype: 'uint16' or 'uint32'.
      held_out_fraction: of the documents, by the hash of their names.
      train: {documents, tokens, bytes, sha256}; tokens count one separator a document, bytes are
        those of the text, sha256 is that of its file of tokens.
      held_out: likewise.
      skipped: what was left out: {reason: {'count': n, 'first': ['file, line 7: ...', ...]}}.
      inputs: [{name, bytes, sha256, modified}] of the files, in order; modified: when each was
        written last, nanoseconds, which older stores do not tell.
      arguments: of the command that decide the result.
      versions: of what wrote it.
    """

    directory: pathlib.Path
    fingerprint: str
    tokenizer: dict
    dtype: str
    held_out_fraction: float
    train: dict
    held_out: dict
    skipped: dict
    inputs: list
    arguments: dict
    versions: dict

    def tokens(self, part: str) -> np.ndarray:
        """[tokens] of self.dtype, mapped from the file: as `pipeline.token_stream` lays them out.

        `part` is 'train' or 'held_out'.
        """
        return _map(self.directory / f'{part}.bin', self.dtype)

    def offsets(self, part: str) -> np.ndarray:
        """uint64 [documents + 1], mapped: document i is tokens[offsets[i]:offsets[i + 1]]."""
        return _map(self.directory / f'{part}.index', 'uint64')

    def documents(self, part: str) -> DocumentsOfStore:
        """The documents of `part`, as bytes, each decoded when it is asked for."""
        tokenizer = make_tokenizer(str(self.directory / TOKENIZER_DIRECTORY))
        return DocumentsOfStore(self.tokens(part), self.offsets(part), tokenizer)


def _little_endian(dtype):
    return np.dtype(dtype).newbyteorder('<')


def _map(path, dtype):
    if not os.path.getsize(path):  # nothing can be mapped there
        return np.empty(0, _little_endian(dtype))
    return np.memmap(path, _little_endian(dtype), 'r')


_AGAIN = 'run the same launch.prepare again'


def open_store(directory: str | os.PathLike) -> Store:
    """The prepared text in `directory`; nothing of it is read but prepared.json.

    Raises:
      ValueError: one line, where there is no prepared.json (it is written last, so the text is not
        whole), it is unreadable or of another version, or a file is not as long as it says.
    """
    directory = pathlib.Path(directory).expanduser()
    file = directory / PREPARED_FILE
    try:
        about = json.loads(file.read_text(encoding='utf-8'))
        version = about['schema_version']
    except (FileNotFoundError, NotADirectoryError):
        started = (directory / 'parts').is_dir()
        right = f'unfinished: {_AGAIN}' if started else 'must be a directory of launch.prepare'
        raise ValueError(f'{directory}: holds no {PREPARED_FILE}; {right}') from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f'{file}: unreadable ({type(error).__name__}); {_new(directory)}'
        ) from None
    if version != SCHEMA_VERSION:
        right = f'must be {SCHEMA_VERSION}; another version of this code wrote it'
        raise ValueError(f'{file}: schema_version={version!r}; {right}: {_new(directory)}')
    fields = {field.name for field in dataclasses.fields(Store)} - {'directory'}
    if missing := sorted(fields - about.keys()):
        raise ValueError(f'{file}: holds no {missing[0]!r}; {_new(directory)}')
    store = Store(directory, **{name: about[name] for name in fields})
    for part in PARTS:
        _check_sizes(store, part)
    return store


def _new(directory):
    return f'remove {directory} and prepare the text again'


def _check_sizes(store, part):
    counts = getattr(store, part)
    sizes = {
        f'{part}.bin': counts['tokens'] * np.dtype(store.dtype).itemsize,
        f'{part}.index': (counts['documents'] + 1) * 8,
    }
    for name, expected in sizes.items():
        path = store.directory / name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ValueError(f'{path}: {error.strerror}; {_new(store.directory)}') from None
        if size != expected:
            wrong = f'{size} bytes, and {PREPARED_FILE} says {expected}'
            raise ValueError(f'{path}: {wrong}; {_new(store.directory)}')


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
