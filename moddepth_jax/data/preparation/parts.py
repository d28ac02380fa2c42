"""Parts of the prepared text, each a file that is complete or missing, and how they are joined."""

import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Callable

import numpy as np

from moddepth_jax.data.directory import parse_object
from moddepth_jax.data.split import name_hash, tail_start
from moddepth_jax.data.token_store import SPLITS, Store, StoreWriter
from moddepth_jax.data.tokenizers.tokenizer import Tokenizer

_MAX_EXAMPLES = 3  # messages that are kept for each reason to skip text
_HEADER_LENGTH = 8
_DIGEST_LENGTH = 32  # of sha256, at the end of a part


def _add_skipped(skipped, reason, count, first):
    entry = skipped.setdefault(reason, {'count': 0, 'first': []})
    entry['count'] += count
    entry['first'] = (entry['first'] + first)[:_MAX_EXAMPLES]


class PartWriter:
    """Encodes documents into memory and writes them as one part; `num_bytes` is their text."""

    def __init__(self, tokenizer: Tokenizer, held_out_fraction: float):
        self._tokenizer, self._fraction = tokenizer, held_out_fraction
        self._dtype = np.dtype(tokenizer.dtype).newbyteorder('<')
        self._separator = np.array([tokenizer.separator], self._dtype)
        # `next` is the document that moves if the other split is empty: [hash, number, bytes].
        start = {'documents': 0, 'tokens': 0, 'bytes': 0, 'next': None}
        self._counts = {split: dict(start) for split in SPLITS}
        self._lengths, self._tokens = ({split: [] for split in SPLITS} for _ in range(2))
        self._skipped = {}
        self.num_bytes = 0

    def add(self, name: str, text: bytes) -> None:
        """Add a document."""
        ids = self._tokenizer.encode(text)
        number = name_hash(name)
        split = 'held_out' if number < self._fraction else 'train'
        counts = self._counts[split]
        nearest = [number if split == 'train' else -number, counts['documents'], len(text)]
        counts['next'] = min(counts['next'] or nearest, nearest)
        counts['documents'] += 1
        counts['tokens'] += 1 + len(ids)
        counts['bytes'] += len(text)
        self._lengths[split].append(1 + len(ids))
        self._tokens[split] += [self._separator, ids]
        self.num_bytes += len(text)

    def skip(self, reason: str, message: str) -> None:
        """Count a row that is skipped."""
        _add_skipped(self._skipped, reason, 1, [message])

    def save(self, path: pathlib.Path, rows: int, last: bool) -> None:
        """Write the part, all or nothing.

        `rows` is the number of rows of the task that are written or skipped so far; `last` says
        whether this part completes the task.
        """
        header = {'rows': rows, 'last': last, 'skipped': self._skipped, 'dtype': self._dtype.str}
        text = json.dumps(header | self._counts).encode()
        head = len(text).to_bytes(_HEADER_LENGTH, 'little') + text
        lengths = (np.array(lengths, '<u8') for lengths in self._lengths.values())
        filled = filter(None, self._tokens.values())
        tokens = (np.concatenate(pieces, dtype=self._dtype) for pieces in filled)
        temporary, sha256 = path.with_suffix('.tmp'), hashlib.sha256()
        try:
            with open(temporary, 'wb') as file:
                for content in itertools.chain([head], lengths, tokens):
                    file.write(content)
                    sha256.update(content)
                file.write(sha256.digest())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)  # it must not fill the disk
            raise


class Part:
    """A part that was written; the constructor reads only the header of `PartWriter.save`.

    Raises OSError if it cannot be read, and ValueError if its header is missing or does not fit the
    size of the file.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        with open(path, 'rb') as file:
            length = int.from_bytes(file.read(_HEADER_LENGTH), 'little')
            self.header = parse_object(file.read(min(length, path.stat().st_size)))
        self._dtype = np.dtype(self.header['dtype'])
        self._start = _HEADER_LENGTH + length
        counts = [self.header[split] for split in SPLITS]
        self.num_token_bytes = self._dtype.itemsize * sum(count['tokens'] for count in counts)
        size = self._start + 8 * sum(count['documents'] for count in counts)
        size += self.num_token_bytes + _DIGEST_LENGTH
        if path.stat().st_size != size:
            raise ValueError(f'{path}: {path.stat().st_size} bytes; must be {size}')

    def read(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Read (tokens_N, lengths_D) of each split, as `StoreWriter.add` takes them.

        Raises ValueError, one line, if the part was changed.
        """
        content = memoryview(self._path.read_bytes())
        if hashlib.sha256(content[:-_DIGEST_LENGTH]).digest() != content[-_DIGEST_LENGTH:]:
            right = 'remove it, and the same command continues'
            raise ValueError(f'{self._path}: was changed after it was written; {right}')
        train, held_out = (self.header[split] for split in SPLITS)
        documents, tokens = (train[name] + held_out[name] for name in ('documents', 'tokens'))
        lengths = np.frombuffer(content, '<u8', documents, self._start)
        tokens = np.frombuffer(content, self._dtype, tokens, self._start + lengths.nbytes)
        lengths = np.split(lengths, [train['documents']])
        tokens = np.split(tokens, [train['tokens']])
        return dict(zip(SPLITS, zip(tokens, lengths, strict=True), strict=True))


def join(
    directory: pathlib.Path,
    parts: list[Part],
    tokenizer: Tokenizer,
    held_out_fraction: float,
    advance: Callable[[int], None],
    left_out: list[pathlib.Path],
    **record,
) -> Store:
    """Write the documents of all parts, in order, to the store in `directory`.

    No split is empty, as in `split_documents`. `advance` takes the bytes of tokens that are written
    since its last call. `left_out` are files without text. `record` is for `StoreWriter.finish`.
    Raises ValueError, one line, if there is no document, or only one with a single byte or
    character.
    """
    skipped = {}
    if left_out:
        _add_skipped(skipped, 'no text', len(left_out), list(map(str, left_out)))
    for part in parts:
        for reason, entry in part.header['skipped'].items():
            _add_skipped(skipped, reason, **entry)
    counts = {split: sum(part.header[split]['documents'] for part in parts) for split in SPLITS}
    if not any(counts.values()):
        num_skipped = sum(entry['count'] for entry in skipped.values())
        problem = f'no document with text, {num_skipped} rows left out'
        raise ValueError(f'--output={directory}: {problem}; give files that hold text')
    with StoreWriter(directory, tokenizer, held_out_fraction) as writer:
        if sum(counts.values()) == 1:
            _split_single(writer, parts, tokenizer, held_out_fraction)
        else:
            _copy(writer, parts, counts, advance)
        return writer.finish(skipped=skipped, **record)


def _copy(writer, parts, counts, advance):
    crossing = None  # (part with the document that moves, its split, the empty split)
    for empty, full in (SPLITS, SPLITS[::-1]):
        if not counts[empty]:
            found = [part for part in parts if part.header[full]['next']]
            crossing = min(found, key=lambda part: part.header[full]['next'][0]), full, empty
    for part in parts:
        sides = part.read()
        num_bytes = {split: part.header[split]['bytes'] for split in SPLITS}
        if crossing and part is crossing[0]:
            _, full, empty = crossing
            _, number, num_bytes[empty] = part.header[full]['next']
            num_bytes[full] -= num_bytes[empty]
            tokens, lengths = sides[full]
            start = int(lengths[:number].sum())
            stop = start + int(lengths[number])
            sides = {
                full: (np.delete(tokens, np.s_[start:stop]), np.delete(lengths, number)),
                empty: (tokens[start:stop], lengths[number : number + 1]),
            }
        for split in SPLITS:
            writer.add(split, *sides[split], num_bytes[split])
        advance(part.num_token_bytes)


def _split_single(writer, parts, tokenizer, held_out_fraction):
    tokens = np.concatenate([tokens for part in parts for tokens, _ in part.read().values()])
    text = tokenizer.decode(tokens[1:])
    try:
        cut = tail_start(text, held_out_fraction, whole_characters=tokenizer.name != 'bytes')
    except ValueError as error:
        raise ValueError(f'a single document of {error}') from None
    for split, side in zip(SPLITS, (text[:cut], text[cut:]), strict=True):
        ids = np.insert(tokenizer.encode(side), 0, tokenizer.separator)
        writer.add(split, ids, [len(ids)], len(side))
