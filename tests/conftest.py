"""Settings of all tests: the CPU, no compilation cache, no rank promotion; and tiny_config."""

import importlib.metadata
import os

# Read by JAX at its import, and inherited by the commands that tests start.
# Machine code is hardly optimized: tests compile far longer than they compute. This halves the CPU
# time of the suite. Tests that need a program as users run it: tests.model.cases.OPTIMIZED.
os.environ['XLA_FLAGS'] = ' '.join(
    [
        os.environ.get('XLA_FLAGS', ''),
        '--xla_backend_optimization_level=0',
        '--xla_llvm_disable_expensive_passes=true',
        '--xla_cpu_parallel_codegen_split_count=1',
        # Later versions have no such flag.
        '--xla_cpu_use_fusion_emitters=false'
        if importlib.metadata.version('jaxlib').startswith('0.10.')
        else '',
    ]
).strip()
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['JAX_ENABLE_COMPILATION_CACHE'] = 'false'
os.environ['JAX_NUMPY_RANK_PROMOTION'] = 'raise'
os.environ['JAX_TRACEBACK_IN_LOCATIONS_LIMIT'] = '0'  # no call stack for each operation of a trace

import gc
import pathlib

import jax
import pytest

from configs import base

_TOY_SIZES = {
    'model.num_layers': 2,
    'model.d_model': 32,
    'model.d_ff': 64,
    'model.num_heads': 4,
    'model.num_kv_heads': 2,
    'model.head_dim': 8,
    'model.routing.predictor_width': 8,
    'data.source': 'synthetic',
    'data.sequence_length': 32,
    'data.batch_size': 4,
    'training.num_steps': 4,
    'training.checkpoint_every': 2,
    'training.log_every': 1,
    'training.compilation_cache': False,
    'evaluation.every': 2,
    'evaluation.num_batches': 1,
    'evaluation.final_batches': 2,
    'report.sample_tokens': 8,
    'report.heatmap_tokens': 16,
}


def _tiny_config(**overrides):
    config = base.get_config()
    for name, value in {**_TOY_SIZES, **overrides}.items():
        *groups, knob = name.split('.')
        group = config
        for part in groups:
            group = group[part]
        if knob not in group:
            raise ValueError(f'{name}={value!r}: no such knob in configs/base.py')
        group[knob] = value
    return config


def pytest_collection_finish(session):
    """Collect less often: the modules never die, and traces make millions of objects that do."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.hookimpl(trylast=True)  # when the fixtures of a module have ended
def pytest_runtest_teardown(item, nextitem):
    """After a module or a slow test: drop the compiled programs, if they are too many.

    That is when they hold a third of the maps that Linux allows. A program takes some thirty maps,
    and a process that reaches the limit (65,530) crashes. One slow module can take most of it.
    """
    if item.get_closest_marker('slow') or nextitem is None or nextitem.path != item.path:
        limit = pathlib.Path('/proc/sys/vm/max_map_count')
        maps = pathlib.Path('/proc/self/maps')
        if limit.exists() and maps.read_bytes().count(b'\n') > int(limit.read_text()) // 3:
            jax.clear_caches()


@pytest.fixture(scope='session')
def tiny_config():
    """tiny_config(**{'model.num_layers': 3}): configs.base at toy size, changed in dotted knobs.

    Each call returns a new, unlocked ConfigDict of a run of 4 steps of 4 rows of 32 tokens.
    """
    return _tiny_config
