"""What kind of text each token of held-out windows is part of, told from the whole documents."""

import functools

import numpy as np

from moddepth_jax.analysis.token_classes import guess_language, token_classes
from moddepth_jax.data.pipeline import token_stream

_PYTHON = ('stdlib', 'python_environment')  # what `data.source` says need not be guessed


def language_of(corpus) -> str:
    """python or prose: what a Corpus holds out."""
    return 'python' if corpus.name in _PYTHON else guess_language(b'\n'.join(corpus.held_out))


def held_out_classes(dataset, tokens_XT, language: str) -> np.ndarray:
    """uint8 [X, T], indices into `token_classes.CLASSES`.

    A window may begin inside a string, which nothing in it tells: so each is found again in the
    documents that it was cut from. Of equal windows one is taken.

    Args:
      dataset: of `make_dataset` or `make_held_out`.
      tokens_XT: int, whole windows of its held-out batches.
      language: of `token_classes.LANGUAGES`.
    """
    stream, length = token_stream(dataset.corpus.held_out, dataset.tokenizer), tokens_XT.shape[1]
    places = {stream[at : at + length].tobytes(): at for at in range(0, len(stream), length)}
    begins = np.flatnonzero(stream == dataset.tokenizer.separator)

    @functools.cache
    def of_document(number):
        tokens = stream[begins[number] : [*begins, len(stream)][number + 1]]
        return token_classes([dataset.tokenizer.decode([token]) for token in tokens], language)

    classes = []
    for tokens_T in tokens_XT.astype(stream.dtype):
        at = places[tokens_T.tobytes()]
        first, end = np.searchsorted(begins, (at, at + length), side='right')
        documents = [of_document(number) for number in range(first - 1, end)]
        classes.append(np.concatenate(documents)[at - begins[first - 1] :][:length])
    return np.stack(classes)
