"""Fixtures of tests that run the train loop: programs compiled in haste, a corpus, signals."""

import os
import random
import signal

import pytest

from moddepth_jax.data.pipeline import Dataset
from tests import compilation_cache


@pytest.fixture(scope='module')
def compiled_once(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('XDG_CACHE_HOME', str(tmp_path_factory.mktemp('cache')))
        with compilation_cache.persistent_compilation_cache(tmp_path_factory.mktemp('compiled')):
            yield


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    """Six files of words; returns their glob."""
    words, draw = ['to ', 'be, ', 'or ', 'not\n'], random.Random(0)
    folder = tmp_path_factory.mktemp('text')
    for i in range(6):
        text = ''.join(draw.choice(words) for _ in range(400))
        (folder / f'{i}.txt').write_text(text)
    return str(folder / '*.txt')


@pytest.fixture
def signals(monkeypatch):
    """signals[step] = name: this process gets the signal while that step's batch is made."""
    plan, train_batch = {}, Dataset.train_batch

    def train_batch_and_signal(dataset, step, *rows):
        if step in plan:
            os.kill(os.getpid(), getattr(signal, plan.pop(step)))
        return train_batch(dataset, step, *rows)

    monkeypatch.setattr(Dataset, 'train_batch', train_batch_and_signal)
    return plan
