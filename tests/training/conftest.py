"""Fixtures of tests that run the train loop: compiled programs and one finished run are shared."""

import contextlib
import os
import shutil
import signal

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from moddepth_jax.data.pipeline import Dataset
from moddepth_jax.hparams import from_config
from moddepth_jax.model.flops import train_step_flops
from moddepth_jax.training import loop, summary, trainer
from moddepth_jax.training.teacher import step_flops
from tests.launch.commands import write_words

NUM_STEPS = 7  # of the finished run


@pytest.fixture(scope='session', autouse=True)
def cheap_reports():
    with pytest.MonkeyPatch.context() as patch:
        skip_reports(patch)
        yield


def skip_reports(patch):
    """Skip slow parts that are tested elsewhere: baselines, and XLA's count of FLOPs."""

    def counted_flops(hparams, num_steps):
        return {'flops_per_step': step_flops(hparams), 'flops_per_step_xla': None}

    patch.setattr(trainer, 'measure_baselines', lambda corpus: {'unigram': 3.0})
    for module in (summary, trainer):
        patch.setattr(module, 'step_flops_report', counted_flops)


@contextlib.contextmanager
def persistent_compilation_cache(folder):
    """A context in which programs are compiled without optimization, and cached in `folder`."""
    changes = {
        'jax_disable_most_optimizations': True,
        'jax_enable_compilation_cache': True,
        'jax_compilation_cache_dir': str(folder),
        'jax_persistent_cache_min_compile_time_secs': 0.0,
    }
    before = {name: jax.config.values[name] for name in changes}
    try:
        _configure(changes)
        yield
    finally:
        _configure(before)


def _configure(values):
    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope='session')
def programs(tmp_path_factory):
    return tmp_path_factory.mktemp('programs')


@pytest.fixture(scope='module')
def compiled_once(programs):
    """Compile programs without optimization, and each of them once per session."""
    with persistent_compilation_cache(programs):
        yield


@pytest.fixture(scope='session')
def corpus(tmp_path_factory):
    """Six files of words; returns their glob."""
    folder = tmp_path_factory.mktemp('text')
    write_words(folder)
    return str(folder / '*.txt')


@pytest.fixture(scope='session')
def run_hparams(tiny_config, corpus):
    """Hyper-parameters of the finished run: routed, with a budget that pays for 7.5 steps."""
    changes = {
        'model.num_layers': 1,
        'model.routing.router': 'learned',
        'model.routing.layers': '0',
        'model.routing.capacity': 0.25,
        'data.source': corpus,
        'data.held_out_fraction': 0.3,
        'training.num_steps': 0,
        'training.checkpoint_every': 3,
        'training.log_every': 2,
        'evaluation.every': 4,
    }
    cost = train_step_flops(from_config(tiny_config(**changes, flop_budget=1.0)))
    return from_config(tiny_config(**changes, flop_budget=(NUM_STEPS + 0.5) * cost))


@pytest.fixture(scope='session')
def finished(run_hparams, programs, tmp_path_factory):
    """A run that was not interrupted; tests only read it."""
    with persistent_compilation_cache(programs):
        return loop.train(run_hparams, tmp_path_factory.mktemp('finished') / 'run')


@pytest.fixture
def copied(finished, tmp_path):
    return shutil.copytree(finished.workdir, tmp_path / 'copied')


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
