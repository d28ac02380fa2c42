"""A synthetic corpus of exactly known entropy, whose unpredictable tokens are known.

A text is a sequence of words drawn independently from a known distribution p. Each of the S words
has its own start byte (A to P) and a fixed continuation of 1 to 6 bytes (a to h), so the start
determines the rest of the word and its end. One more word, the full stop, ends the document: the
separator always follows it, and the next word after the separator is drawn from the same p.

Each token is either a word start (hard: its surprisal is -log p(word) in any context) or determined
by its word (easy: its surprisal is 0). Over any targets y_1..y_n

    floor = 1/n sum_i [y_i is a word start] (-log p(word of y_i))     in nats per target.

A predictor that knows the words and p scores exactly this, from the first word start or separator
on. In a window that begins inside a word, the floor is a lower bound.
"""

import itertools
import math
import typing

import numpy as np

NUM_WORDS = 16
MAX_CONTINUATION = 6
STARTS = b'ABCDEFGHIJKLMNOP'
CONTINUATIONS = b'abcdefgh'
END = b'.'

SEED = 0
NUM_DOCUMENTS = 8000
DOCUMENT_BYTES = 1000


class Language(typing.NamedTuple):
    """The words, the last of which ends a document, and their probabilities at a word start."""

    words: tuple[bytes, ...]
    probabilities: tuple[float, ...]


def make_language(seed: int = SEED, document_bytes: float = DOCUMENT_BYTES) -> Language:
    """Make the language of `seed`: the continuation of each word, and its share of a Zipf law.

    `document_bytes`, above 1, is the mean size of a document with its full stop.
    """
    # Uniform draws only: NumPy may change other distributions between versions.
    random = np.random.Generator(np.random.PCG64([seed, 0])).random
    lengths = 1 + np.argsort(random(NUM_WORDS)) % MAX_CONTINUATION
    ranks = 1 + np.argsort(random(NUM_WORDS))
    letters = (random((NUM_WORDS, MAX_CONTINUATION)) * len(CONTINUATIONS)).astype(int)
    words = [
        STARTS[i : i + 1] + bytes(CONTINUATIONS[j] for j in letters[i, : lengths[i]])
        for i in range(NUM_WORDS)
    ]
    total = math.fsum(1 / ranks)
    shares = [float(1 / rank / total) for rank in ranks]
    words_per_document = (document_bytes - 1) / math.fsum(np.multiply(shares, 1 + lengths))
    end = 1 / (1 + words_per_document)
    probabilities = [share * (1 - end) for share in shares]
    return Language((*words, END), (*probabilities, end))


def make_synthetic(
    seed: int = SEED, num_documents: int = NUM_DOCUMENTS, document_bytes: float = DOCUMENT_BYTES
) -> list[bytes]:
    """Make `num_documents` texts of `make_language(seed, document_bytes)`.

    Words are drawn one after another until the full stop, so the number of words is geometric.
    """
    language = make_language(seed, document_bytes)
    generator = np.random.Generator(np.random.PCG64([seed, 1]))
    thresholds = np.cumsum(language.probabilities)[:-1]
    blocks, num_ends = [], 0
    while num_ends < num_documents:
        block = np.searchsorted(thresholds, generator.random(1 << 16), side='right')
        blocks.append(block)
        num_ends += int(np.sum(block == NUM_WORDS))
    drawn = np.concatenate(blocks)
    ends = 1 + np.flatnonzero(drawn == NUM_WORDS)[:num_documents]
    drawn = drawn[: ends[-1]]
    text = b''.join(map(language.words.__getitem__, drawn.tolist()))
    ends = np.cumsum(np.array([len(word) for word in language.words])[drawn])[ends - 1]
    return [text[start:end] for start, end in itertools.pairwise([0, *ends.tolist()])]
