"""Programs compiled in haste and kept on disk: runs of the train loop have most in common."""

import contextlib

import jax
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def persistent_compilation_cache(folder):
    """Inside, this process keeps what it compiles in `folder`, and takes it from there."""
    changes = {
        'jax_disable_most_optimizations': True,
        'jax_enable_compilation_cache': True,
        'jax_compilation_cache_dir': str(folder),
        'jax_persistent_cache_min_compile_time_secs': 0.0,
    }
    before = {name: jax.config.values[name] for name in changes}
    try:
        _use(changes)
        yield
    finally:
        _use(before)


def _use(values):
    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
