"""Runs one command in a separate process; tests.forked_commands runs many."""

import pathlib
import random
import time

from tests.forked_commands import ROOT, Finished, run_commands

# What most commands import.
_PRELOAD = ('launch.config_file', 'moddepth_jax.training.saved_run')


def call(name, *arguments, cwd=ROOT, **variables) -> Finished:
    """Run `python -m launch.NAME ARGUMENTS` in `cwd` with environment variables.

    It compiles as fast as can be; its caches lie next to a folder that is not ROOT.
    """
    environment = {'XLA_FLAGS': '', 'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'}
    if cwd != ROOT:
        environment['XDG_CACHE_HOME'] = f'{cwd}.cache'
    line = [name, *map(str, arguments)]
    (done,) = run_commands([line], cwd, _PRELOAD, **environment | variables)
    return done


def wait_for(condition, seconds=60):
    """Return once `condition()` holds; fails if it takes longer."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, 'it never happened'
        time.sleep(0.01)


def is_running(pid) -> bool:
    """Whether a process is there and no zombie."""
    try:
        state = pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]
    except OSError:
        return False
    return state != 'Z'


def write_words(folder, count=6, length=400) -> list[bytes]:
    """Write 0.txt, 1.txt, ... of random words; returns the texts."""
    words, draw = ['to ', 'be, ', 'or ', 'not\n'], random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    texts = [''.join(draw.choice(words) for _ in range(length)).encode() for _ in range(count)]
    for i, text in enumerate(texts):
        (folder / f'{i}.txt').write_bytes(text)
    return texts
