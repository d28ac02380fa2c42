"""The baselines are the sizes of the compressed text."""

import lzma
import zlib

import numpy as np
import pytest

from moddepth_jax.data import compression_baselines as module
from moddepth_jax.data.compression_baselines import describe_measured_text, measure_baselines
from moddepth_jax.data.corpus import Corpus


def _corpus(*train):
    return Corpus('hand-made', list(train), [b'held out'], 'f00d', 'by hand')


def test_values_are_bits_per_byte_of_the_training_text():
    texts = [b'abcd' * 500, b'dcba' * 500]
    whole = b''.join(texts)
    assert measure_baselines(_corpus(*texts)) == {
        'unigram': pytest.approx(2),
        'zlib': 8 * len(zlib.compress(whole, 9)) / len(whole),
        'xz': 8 * len(lzma.compress(whole, preset=6)) / len(whole),
    }
    noise = np.random.default_rng(0).integers(0, 256, 50000, np.uint8).tobytes()
    assert all(7.9 < bits < 8.1 for bits in measure_baselines(_corpus(noise)).values())


def test_only_the_first_bytes_are_measured(monkeypatch):
    monkeypatch.setattr(module, 'MAX_BYTES', 100)
    expected = measure_baselines(_corpus(b'ab' * 50))
    assert measure_baselines(_corpus(b'ab' * 30, b'ab' * 40 + b'xyz', None)) == expected
    assert measure_baselines(_corpus(b'ab' * 30, b'xyz' * 40)) != expected


def test_the_measured_text_is_described(monkeypatch):
    monkeypatch.setattr(module, 'MAX_BYTES', 2**20)
    assert describe_measured_text(_corpus(b'a' * 2**19, b'b' * 2**19)) == 'training text'
    assert describe_measured_text(_corpus(b'a' * 2**20, b'b')) == 'first 1 MiB of training text'
