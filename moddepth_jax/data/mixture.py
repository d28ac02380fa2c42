"""Prepared folders as one text: their shares of the rows, and whose turn it is."""

import bisect
import collections.abc
import dataclasses
import fractions
import itertools
import os
import pathlib

from moddepth_jax.data.preparation.plan import PLAN_FILE
from moddepth_jax.data.token_store import Store, is_store, open_store
from moddepth_jax.hparams import DataHparams


@dataclasses.dataclass(frozen=True)
class Member:
    """A prepared folder and its share.

    Attributes:
      name: the last part of its path, or as many as tell it from the other members.
      share: of the rows of training, exactly; 1 for a folder alone.
      store: what the folder holds.
      held_out: parts of the store to evaluate on.
    """

    name: str
    share: fractions.Fraction
    store: Store
    held_out: tuple[str, ...] = ('held_out',)


def is_prepared(source: str) -> bool:
    """Whether `data.source` means text of launch.prepare, finished or not."""
    begun = pathlib.Path(source).expanduser() / 'parts' / PLAN_FILE
    return source == 'mixture' or is_store(source) or begun.is_file()


def load_members(data: DataHparams) -> tuple[Member, ...]:
    """The members of `data.mixture`, or the one folder `data.source`; nothing of them is read.

    Raises:
      ValueError: one line, as `open_store` says, for members with tokenizers that differ, and for
        two members of the same text.
    """
    shares = data.members or {data.source: fractions.Fraction(1)}
    knob, value = ('mixture', data.mixture) if data.members else ('source', data.source)
    stores = {}
    for folder in shares:
        try:
            stores[folder] = open_store(folder)
        except ValueError as error:
            raise ValueError(f'data.{knob}={value!r}: {error}') from None
    for first, second in itertools.combinations(shares, 2):
        one, other = stores[first].tokenizer, stores[second].tokenizer
        if any(one[field] != other[field] for field in ('sha256', 'separator', 'vocab_size')):
            found = f'{first} was prepared with {told(one)} and {second} with {told(other)}'
            right = f'prepare both with one, as --tokenizer={pathlib.Path(first, "tokenizer")}'
            raise ValueError(f'data.{knob}={value!r}: {found}; {right}')
        if stores[first].fingerprint == stores[second].fingerprint:
            right = 'leave one out and add up their weights'
            raise ValueError(f'data.{knob}={value!r}: {first} and {second} are one text; {right}')
    names = _names(list(shares))
    return tuple(
        Member(name, share, stores[folder])
        for name, (folder, share) in zip(names, shares.items(), strict=True)
    )


def told(tokenizer: dict) -> str:
    """The tokenizer of a store by its name, and the first digits of its sha256 where it has one."""
    sha256 = tokenizer['sha256']
    return repr(tokenizer['name']) + f' (sha256 {sha256[:12]}..)' * bool(sha256)


def _names(folders):
    """The fewest last parts of each path that tell all of them apart."""
    parts = [pathlib.Path(os.path.abspath(os.path.expanduser(folder))).parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ['/'.join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return folders


class Documents(collections.abc.Sequence):
    """The documents of parts of stores, one after another; each is decoded when it is asked for.

    Args:
      parts: (Store, 'train' or 'held_out').
    """

    def __init__(self, parts: collections.abc.Iterable[tuple[Store, str]]):
        self._parts = list(parts)
        counts = (getattr(store, part)['documents'] for store, part in self._parts)
        self._ends = list(itertools.accumulate(counts))
        self._opened = {}  # a tokenizer takes a while to read, and most runs decode nothing

    def __len__(self):
        return self._ends[-1]

    def __getitem__(self, index: int) -> bytes:
        index = range(len(self))[index]
        at = bisect.bisect_right(self._ends, index)
        if at not in self._opened:
            store, part = self._parts[at]
            self._opened[at] = store.documents(part)
        return self._opened[at][index - self._ends[at]]  # counted from the end of the part


class Turns:
    """Which member each row is of: a pure function of the row's number, with exact shares.

    The first member gets floor(n s) of the first n rows, s its share, and the others share the rest
    in the same way. So each of them always has its share of rows to within their number.

    Args:
      shares: Fractions above 0 that sum to 1.
    """

    def __init__(self, shares):
        left = [sum(shares[i:]) for i in range(len(shares))]
        self._splits = [share / rest for share, rest in zip(shares, left, strict=True)]

    def at(self, row: int) -> tuple[int, int]:
        """The member of row `row`, and how many earlier rows are of that member."""
        for member, share in enumerate(self._splits):
            before, after = (n * share.numerator // share.denominator for n in (row, row + 1))
            if after > before:
                return member, before
            row -= before
        raise AssertionError('the last share of what is left is 1')

    def counts(self, rows: int) -> list[int]:
        """Of the first `rows` rows, those of each member."""
        counts = []
        for share in self._splits:
            counts.append(rows * share.numerator // share.denominator)
            rows -= counts[-1]
        return counts


def held_out_order(shares, sizes):
    """Yields (member, its batch) for each held-out batch: one of each member first, then by shares.

    A member whose batches are all out is passed over.

    Args:
      shares: Fractions above 0.
      sizes: batches of each member.
    """
    counts = [0] * len(sizes)
    for _ in range(sum(sizes)):
        left = [i for i, size in enumerate(sizes) if counts[i] < size]
        member = min(left, key=lambda i: counts[i] / shares[i])
        yield member, counts[member]
        counts[member] += 1
