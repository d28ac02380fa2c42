"""Byte-level BPE, trained on the text at hand."""

import pathlib
from collections.abc import Iterator

from moddepth_jax.data.tokenizers.tokenizer import Tokenizer
from moddepth_jax.data.tokenizers.tokenizer_file import FileTokenizer, without_threads

SEPARATOR = '<|endoftext|>'
_LEAST = 257  # the bytes and the separator


def train_bpe(documents: Iterator[bytes], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of `vocab_size` ids, the bytes and the separator among them.

    Sennrich et al. 2016, arXiv 1508.07909, on bytes as in GPT-2, split into words by its pattern.
    The same documents give the same tokenizer, in any order and with any number of threads.

    Args:
      documents: UTF-8 texts; read once, and not kept but for the count of each word.
      vocab_size: 257 or more.

    Raises:
      ValueError: one line, for too small a size, a text that is not UTF-8 (by its place among the
        documents), or text that has not that many pieces that occur twice.
    """
    name = f'bpe:{vocab_size}'
    if vocab_size < _LEAST:
        raise ValueError(f'{name}: must be {_LEAST} ids or more, 256 bytes and a separator')
    without_threads()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator(_texts(documents), trainer)
    found = library.get_vocab_size()
    if found < vocab_size:
        right = f'take bpe:{found} or give more text'
        raise ValueError(f'{name}: the text has pieces for {found} ids only; {right}')
    return FileTokenizer(library.to_str().encode(), pathlib.Path(name), SEPARATOR, name=name)


def _texts(documents):
    for number, document in enumerate(documents, 1):
        try:
            yield document.decode()
        except UnicodeDecodeError as error:
            right = 'save it as UTF-8 or leave it out'
            raise ValueError(
                f'document {number} for training BPE: byte {error.start} is not UTF-8; {right}'
            ) from None
