"""One trained run for all tests of the commands that read a finished run."""

import fcntl
import json
import os

import jax
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.training import loop
from tests.launch.commands import write_words
from tests.training.conftest import skip_reports


@pytest.fixture(scope='session')
def trained(tiny_config, tmp_path_factory):
    """A folder with `run`, a routed model after its 4 steps, and the text it was trained on.

    Trained once for all processes of pytest-xdist. Nothing may be written to the run.

    0.txt to 5.txt: words to train on. other/short.txt: less than a window. other/windows.jsonl:
    rows with their text in the field `body`.
    """
    folder = tmp_path_factory.getbasetemp()
    if 'PYTEST_XDIST_WORKER' in os.environ:
        folder = folder.parent
    with open(folder / 'trained.lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = folder / 'trained'
        if not (folder / 'run' / 'summary.json').exists():
            _train(tiny_config, folder)
    return folder


def _train(tiny_config, folder):
    write_words(folder)
    (folder / 'other').mkdir()
    (folder / 'other' / 'short.txt').write_text('short')
    (folder / 'other' / 'windows.jsonl').write_text(
        ''.join(json.dumps({'body': 'to be or not ' * 5}) + '\n' for _ in range(4))
    )
    changes = {
        'model.num_layers': 1,
        'model.routing.router': 'learned',
        'model.routing.layers': '0',
        'model.routing.capacity': 0.25,
        'data.source': str(folder / '*.txt'),
        'data.held_out_fraction': 0.3,
        'evaluation.every': 0,
    }
    before = jax.config.values['jax_disable_most_optimizations']
    jax.config.update('jax_disable_most_optimizations', True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('XDG_CACHE_HOME', str(folder / 'cache'))
        skip_reports(patch)
        loop.train(from_config(tiny_config(**changes)), folder / 'run')
    jax.config.update('jax_disable_most_optimizations', before)


@pytest.fixture(scope='session')
def hasty(trained):
    """Environment of commands with fast compilation and a shared compilation cache."""
    return {
        'XLA_FLAGS': '',
        'XDG_CACHE_HOME': str(trained / 'cache'),
        'JAX_DISABLE_MOST_OPTIMIZATIONS': 'true',
        'JAX_ENABLE_COMPILATION_CACHE': 'true',
        'JAX_COMPILATION_CACHE_DIR': str(trained / 'cache' / 'xla'),
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    }
