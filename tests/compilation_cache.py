"""A cache of programs that are compiled without optimization, shared by runs of the train loop."""

import contextlib

import jax
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def persistent_compilation_cache(folder):
    """A context in which compiled programs are cached in `folder`."""
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
