"""Training BPE gives the size that was asked for, and the same tokenizer wherever it runs."""

import pytest

from moddepth_jax.data.tokenizers.bpe_training import train_bpe
from tests.data import tokenizer_files


def documents(number=4):
    return [tokenizer_files.plain_text(seed, 400) for seed in range(number)]


@pytest.mark.parametrize('vocab_size', [257, 300, 320])
def test_the_size_counts_bytes_merges_and_the_separator(vocab_size):
    """All 256 bytes have ids of their own, also those that no document holds."""
    tokenizer = train_bpe(iter(documents()), vocab_size)
    assert (tokenizer.vocab_size, tokenizer.name) == (vocab_size, f'bpe:{vocab_size}')
    assert tokenizer.stops == (tokenizer.separator,)
    lengths = tokenizer.token_bytes_V.tolist()
    assert lengths.count(0) == 1 and lengths.count(1) == 256
    text = 'ßπ😀\0'.encode()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_make_text_shorter():
    """What comes often is one id."""
    few, more = (train_bpe(iter(documents()), size) for size in (257, 320))
    text = documents()[0]
    assert len(more.encode(text)) < 0.6 * len(few.encode(text)) == 0.6 * len(text)


def test_neither_threads_nor_the_order_of_documents_matter(monkeypatch):
    """Bit for bit; other text gives another tokenizer."""
    one = train_bpe(iter(documents()), 310).sha256
    monkeypatch.setenv('TOKENIZERS_PARALLELISM', 'true')
    assert train_bpe(iter(documents()), 310).sha256 == one
    assert train_bpe(iter(documents()[::-1]), 310).sha256 == one
    other = [text.replace(b'return', b'retreat') for text in documents()]
    assert train_bpe(iter(other), 310).sha256 != one


@pytest.mark.parametrize(
    ('texts', 'vocab_size', 'words'),
    [
        ([b'abc'], 256, 'bpe:256: must be 257 ids or more'),
        ([b'a b'], 300, 'bpe:300: the text has pieces for 257 ids only; take bpe:257'),
        ([], 258, 'bpe:258: the text has pieces for 257 ids only'),
        ([b'ab', b'a\xff'], 258, 'document 2 for training BPE: byte 1 is not UTF-8'),
    ],
)
def test_what_cannot_be_trained_is_refused(texts, vocab_size, words):
    """One line with what would do."""
    with pytest.raises(ValueError) as caught:
        train_bpe(iter(texts), vocab_size)
    assert str(caught.value).startswith(words) and '\n' not in str(caught.value)
