"""A part of the prepared text while it is unfinished: one file, there as a whole or not at all."""

import dataclasses
import json
import os
import pathlib

import numpy as np

from moddepth_jax.data.split import place
from moddepth_jax.data.token_store import PARTS

MOST_EXAMPLES = 3  # messages kept of each reason for which text is left out
_HEADER_LENGTH = 8


def add_skipped(skipped: dict, reason: str, count: int, first: list[str]) -> None:
    """Counts, in `skipped`, what was left out for `reason`; see `Store.skipped`."""
    entry = skipped.setdefault(reason, {'count': 0, 'first': []})
    entry['count'] += count
    entry['first'] = (entry['first'] + first)[:MOST_EXAMPLES]


@dataclasses.dataclass
class _Side:
    """The documents of one side of the split."""

    lengths: list = dataclasses.field(default_factory=list)
    tokens: list = dataclasses.field(default_factory=list)
    bytes: int = 0
    # The one that crosses where the other side stays empty: (its place, its number here, bytes).
    next: tuple | None = None


class PartWriter:
    """Collects documents in memory and writes them as one part.

    Args:
      dtype: of the tokens.
      separator: the id that starts each document.
      held_out_fraction: as of the store.
    """

    def __init__(self, dtype, separator: int, held_out_fraction: float):
        self._dtype = np.dtype(dtype).newbyteorder('<')
        self._separator = np.array([separator], self._dtype)
        self._fraction = held_out_fraction
        self._sides = {part: _Side() for part in PARTS}
        self.skipped: dict = {}

    @property
    def num_bytes(self) -> int:
        """Of the text that is in it."""
        return sum(side.bytes for side in self._sides.values())

    def add(self, name: str, num_bytes: int, ids: np.ndarray) -> None:
        """Adds the document `name` of `num_bytes` of text and the tokens `ids`."""
        where = place(name)
        held_out = where < self._fraction
        side = self._sides['held_out' if held_out else 'train']
        near = (-where if held_out else where, len(side.lengths), num_bytes)
        side.next = min(side.next or near, near)
        side.lengths.append(1 + len(ids))
        side.tokens += [self._separator, ids]
        side.bytes += num_bytes

    def save(self, path: pathlib.Path, rows: int, last: bool) -> None:
        """Writes the part, killed anywhere, wholly or not at all.

        Args:
          path: of the file.
          rows: of its task that it and the parts before it hold or left out.
          last: whether the task ends with it.
        """
        header = {'rows': rows, 'last': last, 'skipped': self.skipped, 'dtype': self._dtype.str}
        for part, side in self._sides.items():
            header[part] = {
                'documents': len(side.lengths),
                'tokens': sum(side.lengths),
                'bytes': side.bytes,
                'next': side.next,
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
            temporary.unlink(missing_ok=True)  # on a full disk it would keep the rest from going on
            raise


class Part:
    """A part that was written; only its header is read until its documents are asked for.

    Attributes:
      header: what `PartWriter.save` put there.
      num_token_bytes: of all its tokens.

    Raises:
      ValueError: the file is not as long as its header says, or has none.
      OSError: there is no such file, or it cannot be read.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        with open(path, 'rb') as file:
            length = int.from_bytes(file.read(_HEADER_LENGTH), 'little')
            self.header = json.loads(file.read(length))
        self._dtype = np.dtype(self.header['dtype'])
        self._start = _HEADER_LENGTH + length
        counts = [self.header[part] for part in PARTS]
        self.num_token_bytes = self._dtype.itemsize * sum(count['tokens'] for count in counts)
        size = self._start + 8 * sum(count['documents'] for count in counts) + self.num_token_bytes
        if path.stat().st_size != size:
            raise ValueError(f'{path}: {path.stat().st_size} bytes; must be {size}')

    def read(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """(tokens_N, lengths_D) of each side, as `StoreWriter.add` takes them."""
        counts = [self.header[part] for part in PARTS]
        with open(self._path, 'rb') as file:
            file.seek(self._start)
            lengths = [np.fromfile(file, '<u8', count['documents']) for count in counts]
            tokens = [np.fromfile(file, self._dtype, count['tokens']) for count in counts]
        return dict(zip(PARTS, zip(tokens, lengths, strict=True), strict=True))
