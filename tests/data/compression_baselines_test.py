"""The baselines are the sizes they say, and their cache may fail but not lie."""

import lzma
import zlib

import numpy as np
import pytest

from moddepth_jax.data import compression_baselines as module
from moddepth_jax.data.compression_baselines import measure_baselines
from moddepth_jax.data.corpus import Corpus


def _corpus(*train):
    return Corpus('hand-made', list(train), [b'held out'], 'f00d', 'by hand')


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    return tmp_path / 'moddepth_jax'


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


def test_the_cache_is_used_and_keyed_by_the_text(cache, monkeypatch):
    texts = _corpus(b'abcd' * 500), _corpus(b'ab' * 500)
    first, other = map(measure_baselines, texts)
    assert other != first and len(list(cache.iterdir())) == 2
    monkeypatch.setattr(module, '_measure', lambda text: {'unigram': 'measured again'})
    assert list(map(measure_baselines, texts)) == [first, other]
    assert measure_baselines(_corpus(b'new')) == {'unigram': 'measured again'}


@pytest.mark.parametrize('content', [b'{', b'[]', b'{"zlib": 1}', b'{"unigram": null}'])
def test_a_broken_cache_is_replaced(cache, content):
    expected = measure_baselines(_corpus(b'abcd' * 500))
    (path,) = cache.iterdir()
    good = path.read_bytes()
    path.write_bytes(content)
    assert measure_baselines(_corpus(b'abcd' * 500)) == expected
    assert path.read_bytes() == good
