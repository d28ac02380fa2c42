"""Baselines for a loss: the bits per byte of plain compressors on the training text."""

import lzma
import zlib
from collections.abc import Iterable

import numpy as np

from moddepth_jax.data.corpus import Corpus

MAX_BYTES = 16 * 2**20


def measure_baselines(corpus: Corpus) -> dict[str, float]:
    """Measure the bits per byte of the training text under three simple models; takes seconds.

    `unigram` is the entropy of the byte frequencies; `zlib` (level 9) and `xz` (preset 6) are
    compressed sizes. All are over the first 16 MiB of the concatenated training documents; for a
    mixture, over the first bytes of each member by their shares.
    """
    text = _sample(corpus)
    counts = np.bincount(np.frombuffer(text, np.uint8), minlength=256)
    shares = counts[counts > 0] / len(text)
    return {
        'unigram': -float(shares @ np.log2(shares)),
        'zlib': 8 * len(zlib.compress(text, 9)) / len(text),
        'xz': 8 * len(lzma.compress(text, preset=6)) / len(text),
    }


def describe_measured_text(corpus: Corpus) -> str:
    """Describe the text that `measure_baselines` measures."""
    if len(corpus.members) > 1:
        return f'first {_size(corpus) / 2**20:.1f} MiB of training text, mixed by its shares'
    if corpus.train_bytes() <= MAX_BYTES:
        return 'training text'
    return f'first {MAX_BYTES >> 20} MiB of training text'


def first_bytes(documents: Iterable[bytes], size: int, between: bytes = b'') -> bytes:
    """Return the first `size` bytes of the documents, joined by `between`; reads no later ones."""
    pieces, room = [], size
    for text in documents:
        pieces.append(text[:room])
        room -= len(pieces[-1])
        if not room:
            break
    return between.join(pieces)


def _size(corpus):
    """Return the bytes to measure; for a mixture, every member has enough for its share."""
    sizes = [member.store.train['bytes'] / member.share for member in corpus.members]
    return int(min(MAX_BYTES, *sizes, corpus.train_bytes()))


def _sample(corpus):
    if not corpus.members:
        return first_bytes(corpus.train, MAX_BYTES)
    size = _size(corpus)
    return b''.join(
        first_bytes(member.store.documents('train'), int(size * member.share))
        for member in corpus.members
    )
