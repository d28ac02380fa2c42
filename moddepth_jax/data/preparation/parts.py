"""Parts of the prepared text, each a file that exists completely or not at all, and their join."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable

import numpy as np

from moddepth_jax.data.split import name_hash, tail_start
from moddepth_jax.data.token_store import SPLITS, Store, StoreWriter
from moddepth_jax.data.tokenizers.tokenizer import Tokenizer

_MAX_EXAMPLES = 3  # messages kept for each reason why text is skipped
_HEADER_LENGTH = 8
_BATCH_BYTES = 1 << 20  # of text that is encoded at once, about


def _add_skipped(skipped, reason, count, first):
    """Counts, in `skipped`, what was left out for `reason`; see `Store.skipped`."""
    entry = skipped.setdefault(reason, {'count': 0, 'first': []})
    entry['count'] += count
    entry['first'] = (entry['first'] + first)[:_MAX_EXAMPLES]


@dataclasses.dataclass
class _Side:
    """The documents of one split."""

    lengths: list = dataclasses.field(default_factory=list)
    tokens: list = dataclasses.field(default_factory=list)
    bytes: int = 0
    # The one that crosses if the other split stays empty: (hash, number here, bytes).
    nearest: tuple | None = None


class PartWriter:
    """Encodes documents, keeps them in memory and writes them as one part.

    Args:
      tokenizer: of the tokens.
      held_out_fraction: as of the store.
      batch_bytes: of text that is encoded at once, about.
    """

    def __init__(
        self, tokenizer: Tokenizer, held_out_fraction: float, batch_bytes: int = _BATCH_BYTES
    ):
        self._tokenizer, self._fraction = tokenizer, held_out_fraction
        self._dtype = np.dtype(tokenizer.dtype).newbyteorder('<')
        self._batch, self._waiting = [], 0  # documents to encode, and their bytes
        self._batch_bytes = min(batch_bytes, _BATCH_BYTES)
        self._sides = {split: _Side() for split in SPLITS}
        self._skipped = {}

    @property
    def num_bytes(self) -> int:
        """Of the text that has been encoded."""
        return sum(side.bytes for side in self._sides.values())

    def add(self, name: str, text: bytes) -> None:
        """Adds a document."""
        self._batch.append((name, text))
        self._waiting += len(text)
        if self._waiting >= self._batch_bytes:
            self._encode()

    def skip(self, reason: str, message: str) -> None:
        """Counts a row that is left out."""
        _add_skipped(self._skipped, reason, 1, [message])

    def _encode(self):
        separator = np.array([self._tokenizer.separator], self._dtype)
        tokens = self._tokenizer.encode_batch([text for _, text in self._batch])
        for (name, text), ids in zip(self._batch, tokens, strict=True):
            number = name_hash(name)
            held_out = number < self._fraction
            side = self._sides['held_out' if held_out else 'train']
            nearest = (-number if held_out else number, len(side.lengths), len(text))
            side.nearest = min(side.nearest or nearest, nearest)
            side.lengths.append(1 + len(ids))
            side.tokens += [separator, ids]
            side.bytes += len(text)
        self._batch, self._waiting = [], 0

    def save(self, path: pathlib.Path, rows: int, last: bool) -> None:
        """Writes the part; a kill at any time leaves all of it or nothing.

        Args:
          path: of the file.
          rows: of its task that this part and those before it hold or skipped.
          last: whether the task ends with it.
        """
        self._encode()
        header = {'rows': rows, 'last': last, 'skipped': self._skipped, 'dtype': self._dtype.str}
        for split, side in self._sides.items():
            header[split] = {
                'documents': len(side.lengths),
                'tokens': sum(side.lengths),
                'bytes': side.bytes,
                'next': side.nearest,
            }
        text = json.dumps(header).encode()
        temporary = path.with_suffix('.tmp')
        try:
            with open(temporary, 'wb') as file:
                file.write(len(text).to_bytes(_HEADER_LENGTH, 'little') + text)
                for side in self._sides.values():
                    file.write(np.array(side.lengths, '<u8'))
                for side in self._sides.values():
                    if side.tokens:
                        file.write(np.concatenate(side.tokens, dtype=self._dtype))
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)  # it must not fill the disk
            raise


class Part:
    """A part that was written; only its header is read until `read`.

    Attributes:
      header: what `PartWriter.save` wrote.
      num_token_bytes: of all its tokens.

    Raises:
      ValueError: the file has another size than its header says, or no header.
      OSError: there is no such file, or it cannot be read.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        with open(path, 'rb') as file:
            length = int.from_bytes(file.read(_HEADER_LENGTH), 'little')
            self.header = json.loads(file.read(length))
        self._dtype = np.dtype(self.header['dtype'])
        self._start = _HEADER_LENGTH + length
        counts = [self.header[split] for split in SPLITS]
        self.num_token_bytes = self._dtype.itemsize * sum(count['tokens'] for count in counts)
        size = self._start + 8 * sum(count['documents'] for count in counts) + self.num_token_bytes
        if path.stat().st_size != size:
            raise ValueError(f'{path}: {path.stat().st_size} bytes; must be {size}')

    def read(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """(tokens_N, lengths_D) of each split, as `StoreWriter.add` takes them."""
        counts = [self.header[split] for split in SPLITS]
        with open(self._path, 'rb') as file:
            file.seek(self._start)
            lengths = [np.fromfile(file, '<u8', count['documents']) for count in counts]
            tokens = [np.fromfile(file, self._dtype, count['tokens']) for count in counts]
        return dict(zip(SPLITS, zip(tokens, lengths, strict=True), strict=True))


def join(
    directory: pathlib.Path,
    parts: list[Part],
    tokenizer: Tokenizer,
    held_out_fraction: float,
    advance: Callable[[int], None],
    **record,
) -> Store:
    """Writes the documents of all parts, in order, to the store in `directory`.

    No split stays empty, as in `split_documents`: the document nearest to the bound crosses, and a
    single document gives the last fraction of its bytes.

    Args:
      directory: of the store.
      parts: all of them, in order.
      tokenizer: of their tokens.
      held_out_fraction: as of the parts.
      advance: called with the bytes of tokens written since the last call.
      record: `inputs` and `arguments` of the store.

    Raises:
      ValueError: one line, if there is no document, or a single one of a single byte or character.
    """
    skipped = {}
    for part in parts:
        for reason, entry in part.header['skipped'].items():
            _add_skipped(skipped, reason, **entry)
    counts = {split: sum(part.header[split]['documents'] for part in parts) for split in SPLITS}
    if not any(counts.values()):
        left_out = sum(entry['count'] for entry in skipped.values())
        problem = f'no document with text, {left_out} rows left out'
        raise ValueError(f'--output={directory}: {problem}; give files that hold text')
    with StoreWriter(directory, tokenizer, held_out_fraction) as writer:
        if sum(counts.values()) == 1:
            _split_single(writer, parts, tokenizer, held_out_fraction)
        else:
            crossing = _crossing(parts, counts)
            for i, part in enumerate(parts):
                _copy(writer, part, crossing.get(i))
                advance(part.num_token_bytes)
        return writer.finish(skipped=skipped, **record)


def _crossing(parts, counts):
    """{number of the part: (its split, number there, bytes)} of the one document that crosses."""
    for empty, full in (SPLITS, SPLITS[::-1]):
        if not counts[empty]:
            candidates = [
                (*part.header[full]['next'], i)
                for i, part in enumerate(parts)
                if part.header[full]['next']
            ]
            _, number, num_bytes, i = min(candidates, key=lambda found: (found[0], found[3]))
            return {i: (full, number, num_bytes)}
    return {}


def _copy(writer, part, crossing):
    sides = part.read()
    num_bytes = {split: part.header[split]['bytes'] for split in SPLITS}
    if crossing is not None:
        full, number, moved = crossing
        (empty,) = set(SPLITS) - {full}
        tokens, lengths = sides[full]
        start = int(lengths[:number].sum())
        stop = start + int(lengths[number])
        sides = {
            full: (np.delete(tokens, np.s_[start:stop]), np.delete(lengths, number)),
            empty: (tokens[start:stop], lengths[number : number + 1]),
        }
        num_bytes = {full: num_bytes[full] - moved, empty: moved}
    for split in SPLITS:
        writer.add(split, *sides[split], num_bytes[split])


def _split_single(writer, parts, tokenizer, held_out_fraction):
    tokens = np.concatenate([tokens for part in parts for tokens, _ in part.read().values()])
    text = tokenizer.decode(tokens[1:])
    try:
        cut = tail_start(text, held_out_fraction, whole_characters=tokenizer.name != 'bytes')
    except ValueError as error:
        raise ValueError(f'a single document of {error}') from None
    for split, side in zip(SPLITS, (text[:cut], text[cut:]), strict=True):
        ids = np.concatenate([[tokenizer.separator], tokenizer.encode(side)])
        writer.add(split, ids, [len(ids)], len(side))
