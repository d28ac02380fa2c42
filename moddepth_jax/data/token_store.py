"""Prepared text: tokens in flat files that are mapped into memory, and what describes them."""

import bisect
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import platform
from collections.abc import Iterable, Sequence
from importlib import metadata

import numpy as np

from moddepth_jax.data.compression import read_small
from moddepth_jax.data.directory import write_atomically
from moddepth_jax.data.tokenizers.tokenizer import DIRECTORY as TOKENIZER_DIRECTORY
from moddepth_jax.data.tokenizers.tokenizer import Tokenizer, make_tokenizer

PREPARED_FILE = 'prepared.json'
PLAN_FILE = 'parts/plan.json'  # of a preparation that is not finished
SCHEMA_VERSION = 1
SPLITS = ('train', 'held_out')
_PACKAGES = ('moddepth-jax', 'numpy', 'tokenizers', 'sentencepiece', 'pyarrow')


def is_store(path: str | os.PathLike) -> bool:
    """Whether `path` is a directory with completely prepared text, of any version."""
    return (pathlib.Path(path).expanduser() / PREPARED_FILE).is_file()


def is_started(path: str | os.PathLike) -> bool:
    """Whether `path` is a directory with prepared text, complete or not."""
    return is_store(path) or (pathlib.Path(path).expanduser() / PLAN_FILE).is_file()


@dataclasses.dataclass(frozen=True)
class Store:
    """Prepared text; what `open_store` returns.

    Attributes:
      fingerprint: sha256 over the tokens of both splits and the tokenizer, hexadecimal.
      tokenizer, dtype: {name, sha256, vocab_size, separator}; 'uint16' or 'uint32'.
      train, held_out: {documents, tokens, bytes, sha256} of a split; tokens include one separator
        per document, bytes are those of the text, sha256 is that of its file of tokens.
      skipped: {reason: {'count': n, 'first': ['file, line 7: ...', ...]}} of what was left out.
      inputs: [{name, bytes, sha256, modified}] of the files; older stores lack the last, in ns.
      arguments: those of the command that decide the result.
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

    def tokens(self, split: str) -> np.ndarray:
        """[tokens] of self.dtype, mapped from the file, as `windows.token_stream` returns them."""
        return _map(self.directory / f'{split}.bin', self.dtype)

    def offsets(self, split: str) -> np.ndarray:
        """uint64 [documents + 1], mapped: document i is tokens[offsets[i]:offsets[i + 1]]."""
        return _map(self.directory / f'{split}.index', 'uint64')

    def documents(self, split: str) -> 'StoredDocuments':
        """The documents of one split, as bytes, each decoded on access."""
        return StoredDocuments([(self, split)])


class StoredDocuments(Sequence):
    """The documents of `splits`, (Store, 'train' or 'held_out') each, decoded on access."""

    def __init__(self, splits: Iterable[tuple[Store, str]]):
        self._splits = list(splits)
        counts = [getattr(store, split) for store, split in self._splits]
        self.num_bytes = sum(count['bytes'] for count in counts)
        self._ends = list(itertools.accumulate(count['documents'] for count in counts))
        self._opened = {}  # a tokenizer takes a while to read, and most runs decode nothing

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = range(len(self))[index]
        number = bisect.bisect_right(self._ends, index)
        if number not in self._opened:
            store, split = self._splits[number]
            tokenizer = make_tokenizer(str(store.directory / TOKENIZER_DIRECTORY))
            self._opened[number] = store.tokens(split), store.offsets(split), tokenizer
        tokens, offsets, tokenizer = self._opened[number]
        index -= self._ends[number]  # counted from the end of the split
        start, stop = int(offsets[index - 1]), int(offsets[index])
        return tokenizer.decode(tokens[start + 1 : stop])  # after the separator


def _little_endian(dtype):
    return np.dtype(dtype).newbyteorder('<')


def _map(path, dtype):
    if not os.path.getsize(path):  # an empty file cannot be mapped
        return np.empty(0, _little_endian(dtype))
    return np.memmap(path, _little_endian(dtype), 'r')


def open_store(directory: str | os.PathLike) -> Store:
    """The prepared text in `directory`; reads only prepared.json, which is written last.

    Raises ValueError, one line, if that is missing, unreadable or of another version, or if a file
    has another size than it says.
    """
    directory = pathlib.Path(directory).expanduser()
    file = directory / PREPARED_FILE
    again = f'remove {directory} and prepare the text again'
    try:
        content = json.loads(read_small(file, 1 << 30).decode())
        version = content['schema_version']
    except (FileNotFoundError, NotADirectoryError):
        right = 'must be a directory of launch.prepare'
        if (directory / PLAN_FILE).parent.is_dir():
            right = 'unfinished: run the same launch.prepare again'
        raise ValueError(f'{directory}: holds no {PREPARED_FILE}; {right}') from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f'{file}: unreadable ({type(error).__name__}); {again}') from None
    if version != SCHEMA_VERSION:
        right = f'must be {SCHEMA_VERSION}; another version of this code wrote it'
        raise ValueError(f'{file}: schema_version={version!r}; {right}: {again}')
    fields = {field.name for field in dataclasses.fields(Store)} - {'directory'}
    if missing := sorted(fields - content.keys()):
        raise ValueError(f'{file}: holds no {missing[0]!r}; {again}')
    store = Store(directory, **{name: content[name] for name in fields})
    sizes = {}
    for split in SPLITS:
        counts = getattr(store, split)
        sizes[f'{split}.bin'] = counts['tokens'] * np.dtype(store.dtype).itemsize
        sizes[f'{split}.index'] = (counts['documents'] + 1) * 8
    for name, expected in sizes.items():
        try:
            size = (directory / name).stat().st_size
        except OSError as error:
            raise ValueError(f'{directory / name}: {error.strerror}; {again}') from None
        if size != expected:
            wrong = f'{size} bytes, and {PREPARED_FILE} says {expected}'
            raise ValueError(f'{directory / name}: {wrong}; {again}')
    return store


class StoreWriter(contextlib.ExitStack):
    """Writes prepared text into an existing directory; a context manager.

    Until `finish` there is no prepared.json. What an earlier writer left is replaced.
    """

    def __init__(
        self, directory: str | os.PathLike, tokenizer: Tokenizer, held_out_fraction: float
    ):
        super().__init__()
        self._directory = pathlib.Path(directory)
        self._tokenizer, self._fraction = tokenizer, held_out_fraction
        self._dtype = _little_endian(tokenizer.dtype)
        (self._directory / PREPARED_FILE).unlink(missing_ok=True)
        self._files, self._digests, self._counts = {}, {}, {}
        for split in SPLITS:
            for kind in ('bin', 'index'):
                file = open(self._directory / f'{split}.{kind}', 'wb')
                self._files[split, kind] = self.enter_context(file)
            self._files[split, 'index'].write(np.zeros(1, '<u8'))
            self._digests[split] = hashlib.sha256()
            self._counts[split] = {'documents': 0, 'tokens': 0, 'bytes': 0}

    def add(self, split: str, tokens_N: np.ndarray, lengths_D: np.ndarray, num_bytes: int) -> None:
        """Appends documents of `num_bytes` of text: separator and tokens of each, its length."""
        tokens_N = np.ascontiguousarray(tokens_N, self._dtype)
        counts = self._counts[split]
        self._files[split, 'bin'].write(tokens_N)
        self._digests[split].update(tokens_N)
        offsets = counts['tokens'] + np.cumsum(lengths_D, dtype=np.uint64)
        self._files[split, 'index'].write(offsets.astype('<u8'))
        counts['documents'] += len(lengths_D)
        counts['tokens'] += len(tokens_N)
        counts['bytes'] += num_bytes

    def finish(
        self, skipped: dict | None = None, inputs: Sequence = (), arguments: dict | None = None
    ) -> Store:
        """Completes the text and opens it; the arguments are those of Store."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        if not (self._directory / TOKENIZER_DIRECTORY).exists():
            self._tokenizer.save(self._directory / TOKENIZER_DIRECTORY)
        names = ('sha256', 'vocab_size', 'separator')
        tokenizer = {name: getattr(self._tokenizer, name) for name in names}
        text = {'dtype': np.dtype(self._tokenizer.dtype).name}
        for split, counts in self._counts.items():
            text[split] = counts | {'sha256': self._digests[split].hexdigest()}
        # Without the tokenizer's name: another name for the same tokenizer is the same text.
        decisive = json.dumps({'tokenizer': tokenizer, **text}, sort_keys=True)
        packages = {d.name: d.version for d in metadata.distributions() if d.name in _PACKAGES}
        content = {
            'schema_version': SCHEMA_VERSION,
            'fingerprint': hashlib.sha256(decisive.encode()).hexdigest(),
            'tokenizer': {'name': self._tokenizer.name, **tokenizer},
            **text,
            'held_out_fraction': self._fraction,
            'skipped': skipped or {},
            'inputs': list(inputs),
            'arguments': arguments or {},
            'versions': {'python': platform.python_version()} | packages,
        }
        write_atomically(self._directory / PREPARED_FILE, json.dumps(content, indent=2) + '\n')
        return open_store(self._directory)
