"""Prepared text: tokens in flat files that are mapped into memory, and a description of them."""

import bisect
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from importlib import metadata

import numpy as np

from moddepth_jax.data.compression import open_file
from moddepth_jax.data.directory import cache_directory, check_fields, read_json, write_atomically
from moddepth_jax.data.tokenizers.tokenizer import DIRECTORY as TOKENIZER_DIRECTORY
from moddepth_jax.data.tokenizers.tokenizer import Tokenizer, make_tokenizer

PREPARED_FILE = 'prepared.json'
PLAN_FILE = 'parts/plan.json'  # exists while a preparation is not finished
SCHEMA_VERSION = 1
SPLITS = ('train', 'held_out')
_COUNTS = {'documents': int, 'tokens': int, 'bytes': int, 'sha256': str}
_FIELDS = {  # of prepared.json, as `check_fields` takes them
    'fingerprint': str,
    'tokenizer': {'name': str, 'sha256': str, 'vocab_size': int, 'separator': int},
    'dtype': str,
    'held_out_fraction': float,
    **dict.fromkeys(SPLITS, _COUNTS),
    **dict.fromkeys(('skipped', 'arguments', 'versions', 'tokenizer_files'), dict),
    'inputs': [{'name': str, 'bytes': int, 'sha256': str, 'modified': int}],
    'sha256': str,  # of all others
}
_MAX_JSON_BYTES = 1 << 30  # of prepared.json, which lists every input file
_VERIFIED_FILE = 'verified_stores.json'  # in the user's cache: the status of files, by directory
_MAX_VERIFIED = 256  # directories in it
_SMALL = 1 << 26  # smaller stores (bytes) are verified at each use
_CHUNK = 1 << 22  # tokens in memory while verifying
_QUIET_SECONDS = 2.0  # of verification before a line reports progress
_PACKAGES = ('moddepth-jax', 'numpy', 'tokenizers', 'sentencepiece', 'pyarrow')


def is_store(path: str | os.PathLike) -> bool:
    """Return whether `path` is a directory of completely prepared text, of any version."""
    return (pathlib.Path(path).expanduser() / PREPARED_FILE).is_file()


def is_started(path: str | os.PathLike) -> bool:
    """Return whether `path` is a directory of prepared text, complete or not, maybe damaged."""
    directory = pathlib.Path(path).expanduser()
    found = [os.path.lexists(directory / name) for name in ('train.bin', 'train.index')]
    return all(found) or any(os.path.lexists(directory / n) for n in (PREPARED_FILE, PLAN_FILE))


@dataclasses.dataclass(frozen=True)
class Store:
    """Prepared text; the result of `open_store`.

    Attributes:
      directory: directory of the store.
      fingerprint: hex sha256 of the tokens of both splits and the tokenizer.
      tokenizer: {name, sha256, vocab_size, separator}.
      dtype: 'uint16' or 'uint32'.
      held_out_fraction: fraction of the documents that is held out.
      train, held_out: {documents, tokens, bytes, sha256} of a split. `tokens` counts one separator
        per document, `bytes` are those of the text, `sha256` is that of the file of tokens.
      skipped: {reason: {'count': n, 'first': ['file, line 7: ...', ...]}} of skipped text.
      inputs: [{name, bytes, sha256, modified}] of the files; `modified` is in nanoseconds.
      arguments: arguments of the command that determine the result.
      versions: versions of Python and packages.
      tokenizer_files: {name: sha256} of the tokenizer's files.
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
    tokenizer_files: dict

    def tokens(self, split: str) -> np.ndarray:
        """Map the tokens of a split, [tokens] of self.dtype, as in `windows.token_stream`."""
        return _map(self.directory / f'{split}.bin', self.dtype)

    def offsets(self, split: str) -> np.ndarray:
        """Map uint64 [documents + 1]: document i is tokens[offsets[i]:offsets[i + 1]]."""
        return _map(self.directory / f'{split}.index', 'uint64')

    def documents(self, split: str) -> 'StoredDocuments':
        """Return the documents of one split as bytes, decoded on access."""
        return StoredDocuments([(self, split)])


class StoredDocuments(Sequence):
    """The documents of some splits, (Store, 'train' or 'held_out') each, decoded on access."""

    def __init__(self, splits: Iterable[tuple[Store, str]]):
        self._splits = list(splits)
        counts = [getattr(store, split) for store, split in self._splits]
        self.num_bytes = sum(count['bytes'] for count in counts)
        self._ends = list(itertools.accumulate(count['documents'] for count in counts))
        self._opened = {}  # filled on access: a tokenizer loads slowly, and most runs need none

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = range(len(self))[index]
        number = bisect.bisect_right(self._ends, index)
        if number not in self._opened:
            store, split = self._splits[number]
            tokenizer = make_tokenizer(store.directory / TOKENIZER_DIRECTORY)
            self._opened[number] = store.tokens(split), store.offsets(split), tokenizer
        tokens, offsets, tokenizer = self._opened[number]
        index -= self._ends[number]  # counted from the end of the split
        start, stop = int(offsets[index - 1]), int(offsets[index])
        return tokenizer.decode(tokens[start + 1 : stop])  # after the separator


def _little_endian(dtype):
    return np.dtype(dtype).newbyteorder('<')


class _Watch:
    """Watches a file that must not change while it is open."""

    def __init__(self, path):
        self._path, self._descriptor = path, os.open(path, os.O_RDONLY)
        self._before = self._state()

    def __del__(self):
        os.close(self._descriptor)

    def _state(self):
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns

    def check(self):
        if self._state() != self._before:
            right = 'start again, which checks it'
            raise ValueError(f'{self._path}: was changed while it was read; {right}')


class MappedFile(np.memmap):
    """The numbers in a file; reading them raises ValueError, one line, if the file has changed.

    Without this check, reading a page that was cut off would kill the process by a signal, and
    other changes would go unnoticed.
    """

    watch = None

    def __array_finalize__(self, base):
        super().__array_finalize__(base)
        self.watch = getattr(base, 'watch', None)

    def __getitem__(self, index):
        if self.watch is not None:
            self.watch.check()
        found = super().__getitem__(index)
        return found.view(np.ndarray) if isinstance(found, np.ndarray) else found


def _map(path, dtype):
    if not os.path.getsize(path):  # an empty file cannot be mapped
        return np.empty(0, _little_endian(dtype))
    watch = _Watch(path)
    mapped = MappedFile(path, _little_endian(dtype), 'r')
    mapped.watch = watch
    return mapped


def open_store(directory: str | os.PathLike) -> Store:
    """Open the prepared text in `directory` and check that all files are as they were written.

    Each call checks prepared.json, which is written last, and the sizes of the files. The content
    of a small store is also checked at each call; that of a large one once per machine, and again
    after one of its files has been written to. Raises ValueError, one line, if a file is missing,
    unreadable, damaged or of another version.
    """
    directory = pathlib.Path(directory).expanduser()
    file = directory / PREPARED_FILE
    again = f'remove {directory} and prepare again'
    content = read_json(file, again, {'schema_version': int}, _MAX_JSON_BYTES)
    if content is None:
        right = 'must be a directory of launch.prepare'
        if (directory / PLAN_FILE).parent.is_dir():
            right = 'it is unfinished: run the same launch.prepare again'
        raise ValueError(f'{directory}: holds no {PREPARED_FILE}; {right}')
    if (version := content['schema_version']) != SCHEMA_VERSION:
        right = f'must be {SCHEMA_VERSION}; another version of this code wrote it'
        raise ValueError(f'{file}: schema_version={version}; {right}: {again}')
    check_fields(content, _FIELDS, file, again)
    own = content.pop('sha256')
    if own != _sha256(content) or content['fingerprint'] != _fingerprint(content):
        raise ValueError(f'{file}: was changed: its digests do not match its content; {again}')
    known = {field.name for field in dataclasses.fields(Store)} & content.keys()
    store = Store(directory, **{name: content[name] for name in known})
    try:
        _verify_once(store)
    except OSError as error:
        raise ValueError(f'{error.filename or file}: {error.strerror}; {again}') from None
    except ValueError as error:
        raise ValueError(f'{error}; {again}') from None
    return store


def _sha256(content):
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _fingerprint(content):
    # Without the name of the tokenizer: under another name it is the same text.
    tokenizer = {name: value for name, value in content['tokenizer'].items() if name != 'name'}
    return _sha256({'tokenizer': tokenizer} | {name: content[name] for name in ('dtype', *SPLITS)})


def _verify_once(store):
    """Verify a store, unless it is large and was verified here and no file changed since."""
    names = [PREPARED_FILE, *(f'{TOKENIZER_DIRECTORY}/{name}' for name in store.tokenizer_files)]
    sizes, status = dict.fromkeys(names), {}
    for split in SPLITS:
        counts = getattr(store, split)
        sizes[f'{split}.bin'] = counts['tokens'] * np.dtype(store.dtype).itemsize
        sizes[f'{split}.index'] = (counts['documents'] + 1) * 8
    for name, size in sizes.items():
        found = os.stat(store.directory / name)
        status[name] = [found.st_size, found.st_mtime_ns, found.st_ctime_ns]
        if size not in (None, found.st_size):
            wrong = f'{found.st_size} bytes; must be {size}, as in {PREPARED_FILE}'
            raise ValueError(f'{store.directory / name}: {wrong}')
    total, known = sum(size for size, *_ in status.values()), {}
    key = str(store.directory.resolve())
    file = (cache_directory() or pathlib.Path(os.devnull)) / _VERIFIED_FILE
    with contextlib.suppress(ValueError):
        known = read_json(file, '') or {}
    if total >= _SMALL and known.pop(key, None) == status:
        return
    _verify(store, total)
    if total >= _SMALL:
        with contextlib.suppress(OSError):  # without a cache, each use verifies
            file.parent.mkdir(parents=True, exist_ok=True)
            recent = [*known.items(), (key, status)][-_MAX_VERIFIED:]
            write_atomically(file, json.dumps(dict(recent)))


def _verify(store, total):
    """Raise ValueError unless tokens and tokenizer have their digests and the index fits."""
    done, report, intact = 0, time.monotonic() + _QUIET_SECONDS, {}
    for name, sha256 in store.tokenizer_files.items():
        with open_file(store.directory / TOKENIZER_DIRECTORY / name) as file:
            intact[file.name] = hashlib.file_digest(file, 'sha256').hexdigest() == sha256
    for split in SPLITS:
        sha256, position, is_index = hashlib.sha256(), 0, True
        names = (store.directory / f'{split}.{kind}' for kind in ('bin', 'index'))
        with open_file(next(names)) as tokens, open_file(next(names)) as index:
            while len(chunk := np.fromfile(tokens, _little_endian(store.dtype), _CHUNK)):
                sha256.update(chunk)
                # A document begins at each separator; text never encodes to a separator.
                starts = position + np.flatnonzero(chunk == store.tokenizer['separator'])
                is_index &= np.array_equal(np.fromfile(index, '<u8', len(starts)), starts)
                position += len(chunk)
                done += chunk.nbytes
                if (now := time.monotonic()) > report:
                    report = now + 5 * _QUIET_SECONDS
                    size = f'{done / 1e9:.1f} of {total / 1e9:.1f} GB'
                    print(f'checking {store.directory}, once: {size}', file=sys.stderr, flush=True)
            is_index &= np.fromfile(index, '<u8').tolist() == [position]
            intact[tokens.name] = sha256.hexdigest() == getattr(store, split)['sha256']
            intact[index.name] = is_index
    for name in (name for name, same in intact.items() if not same):
        raise ValueError(f'{name}: was changed after it was written')


class StoreWriter(contextlib.ExitStack):
    """Writes prepared text into an existing directory; a context manager.

    `finish` writes prepared.json. Files of an earlier writer are replaced.
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
        """Append documents: their tokens, each after a separator, and their lengths in tokens.

        `num_bytes` is the size of their text.
        """
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
        """Complete the store and open it; the arguments are fields of Store."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        if not (self._directory / TOKENIZER_DIRECTORY).exists():
            self._tokenizer.save(self._directory / TOKENIZER_DIRECTORY)
        files = sorted((self._directory / TOKENIZER_DIRECTORY).iterdir())
        names = _FIELDS['tokenizer']
        versions = {'python': platform.python_version()}
        for name in _PACKAGES:
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions[name] = metadata.version(name)
        content = {
            'schema_version': SCHEMA_VERSION,
            'tokenizer': {name: getattr(self._tokenizer, name) for name in names},
            'tokenizer_files': {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files},
            'dtype': np.dtype(self._tokenizer.dtype).name,
            **{
                split: counts | {'sha256': self._digests[split].hexdigest()}
                for split, counts in self._counts.items()
            },
            'held_out_fraction': self._fraction,
            'skipped': skipped or {},
            'inputs': list(inputs),
            'arguments': arguments or {},
            'versions': versions,
        }
        content['fingerprint'] = _fingerprint(content)
        content['sha256'] = _sha256(content)
        write_atomically(self._directory / PREPARED_FILE, json.dumps(content, indent=2) + '\n')
        return open_store(self._directory)
