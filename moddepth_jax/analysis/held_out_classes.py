"""What kind of text each token of held-out windows is part of, told from the whole documents."""

import functools

import numpy as np

from moddepth_jax.analysis.token_classes import guess_language, token_classes
from moddepth_jax.data.compression_baselines import MAX_BYTES, first_bytes

_PYTHON = ('stdlib', 'python_environment')  # what `data.source` says need not be guessed
_BLOCK = 4096  # tokens searched at a time


def language_of(corpus) -> str:
    """python or prose: what a Corpus holds out, by its first bytes."""
    if corpus.name in _PYTHON:
        return 'python'
    return guess_language(first_bytes(corpus.held_out, MAX_BYTES, b'\n'))


def held_out_classes(dataset, tokens_XT, language: str) -> np.ndarray:
    """uint8 [X, T], indices into `token_classes.CLASSES`.

    A window may begin inside a string, which nothing in it tells: so each is found again in the
    documents that it was cut from. Of equal windows one is taken.

    Args:
      dataset: of `make_dataset` or `make_held_out`.
      tokens_XT: int, whole windows of its held-out batches.
      language: of `token_classes.LANGUAGES`.
    """
    streams, length = dataset.held_out_streams, tokens_XT.shape[1]
    tokens_XT = tokens_XT.astype(streams[0].dtype)
    wanted = {tokens_T.tobytes() for tokens_T in tokens_XT}
    places = {}  # of prepared text more is held out than fits into memory: wanted windows alone
    for number, stream in enumerate(streams):
        for at in range(0, len(stream), length):
            window = stream[at : at + length].tobytes()
            if window in wanted:
                places[window] = (number, at)
    separator = dataset.tokenizer.separator

    @functools.cache
    def of_document(number, begin):
        tokens = streams[number][begin : _next(streams[number], begin + 1, separator)]
        return token_classes(dataset.tokenizer.pieces(tokens), language)

    classes = []
    for tokens_T in tokens_XT:
        number, at = places[tokens_T.tobytes()]
        begin = first = _last(streams[number], at, separator)
        documents = []
        while begin < at + length:
            documents.append(of_document(number, begin))
            begin += len(documents[-1])
        classes.append(np.concatenate(documents)[at - first :][:length])
    return np.stack(classes)


def _last(stream, at, separator):
    """The last place up to `at` that holds a separator; a stream begins with one."""
    while stream[at] != separator:
        block = stream[max(0, at - _BLOCK) : at]
        found = np.flatnonzero(block == separator)
        at -= len(block) - int(found[-1]) if len(found) else len(block)
    return at


def _next(stream, at, separator):
    """The first place from `at` on that holds a separator, or the end."""
    while at < len(stream):
        block = stream[at : at + _BLOCK]
        found = np.flatnonzero(block == separator)
        if len(found):
            return at + int(found[0])
        at += len(block)
    return at
