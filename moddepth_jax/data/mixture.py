"""Mixtures of prepared folders: the share of each, and the folder of each training row."""

import dataclasses
import fractions
import itertools
import os
import pathlib

from moddepth_jax.data.token_store import Store, is_started, open_store
from moddepth_jax.hparams import DataHparams


@dataclasses.dataclass(frozen=True)
class Member:
    """A prepared folder, its share of the training rows, and the splits that are held out."""

    name: str
    share: fractions.Fraction
    store: Store
    held_out: tuple[str, ...] = ('held_out',)


def is_prepared(source: str) -> bool:
    """Return whether `data.source` is text of launch.prepare, finished or not."""
    return source == 'mixture' or is_started(source)


def load_members(data: DataHparams) -> tuple[Member, ...]:
    """Open the members of `data.mixture`, or the single folder `data.source`; reads no text.

    Raises ValueError, one line, like `open_store`, for different tokenizers, or for equal texts.
    """
    shares = data.members or {data.source: fractions.Fraction(1)}
    knob = f'data.mixture={data.mixture!r}' if data.members else f'data.source={data.source!r}'
    stores = {}
    for folder in shares:
        try:
            stores[folder] = open_store(folder)
        except ValueError as error:
            raise ValueError(f'{knob}: {error}') from None
    for first, second in itertools.combinations(shares, 2):
        one, other = stores[first].tokenizer, stores[second].tokenizer
        if any(one[field] != other[field] for field in ('sha256', 'separator', 'vocab_size')):
            right = f'prepare both with one, as --tokenizer={pathlib.Path(first, "tokenizer")}'
            found = f'{first} was prepared with {describe_tokenizer(one)} and {second}'
            raise ValueError(f'{knob}: {found} with {describe_tokenizer(other)}; {right}')
        if stores[first].fingerprint == stores[second].fingerprint:
            right = 'leave one out and add up their weights'
            raise ValueError(f'{knob}: {first} and {second} are the same text; {right}')
    names = _names(list(shares))
    return tuple(map(Member, names, shares.values(), stores.values()))


def describe_tokenizer(tokenizer: dict) -> str:
    """Return the name of a store's tokenizer, with the first digits of its sha256, if any."""
    sha256 = tokenizer['sha256']
    return repr(tokenizer['name']) + f' (sha256 {sha256[:12]}..)' * bool(sha256)


def _names(folders):
    """Return the shortest ends of the paths that are all different."""
    parts = [pathlib.Path(os.path.abspath(os.path.expanduser(folder))).parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ['/'.join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return folders


class RowSchedule:
    """Assigns each training row to a member, as a pure function of its number, in exact shares.

    The first member, with share s, gets floor(n s) of the first n rows. The others share the rest
    in the same way. `shares` are Fractions above 0 that sum to 1.
    """

    def __init__(self, shares):
        rests = [sum(shares[i:]) for i in range(len(shares))]
        self._splits = [share / rest for share, rest in zip(shares, rests, strict=True)]

    def member(self, row: int) -> tuple[int, int]:
        """Return the member of a row, and the number of earlier rows of that member."""
        for member, share in enumerate(self._splits):
            before, after = (n * share.numerator // share.denominator for n in (row, row + 1))
            if after > before:
                return member, before
            row -= before
        raise AssertionError('the last share of the rest is 1')

    def counts(self, rows: int) -> list[int]:
        """Count the rows of each member among the first `rows` rows."""
        counts = []
        for share in self._splits:
            counts.append(rows * share.numerator // share.denominator)
            rows -= counts[-1]
        return counts


def held_out_order(shares, sizes):
    """Yield (member, number of its batch): first one batch of each member, then by shares."""
    counts = [0] * len(sizes)
    for _ in range(sum(sizes)):
        unfinished = [i for i, size in enumerate(sizes) if counts[i] < size]
        member = min(unfinished, key=lambda i: counts[i] / shares[i])
        yield member, counts[member]
        counts[member] += 1
