"""Times the first token after a prompt that is read in one pass or in chunks."""

import functools

import jax
import numpy as np

from moddepth_jax.benchmarks.decoding import cache_sizes
from moddepth_jax.benchmarks.models import make_model, random_variables
from moddepth_jax.benchmarks.timing import median_and_range, time_interleaved
from moddepth_jax.inference.generate import generate
from moddepth_jax.model.decoding import empty_cache, extend, prefill, unroll
from moddepth_jax.training.summary import versions
from moddepth_jax.training.tables import column_per_row, fixed

LINES = {
    'one pass, ms': ('one_pass_seconds', fixed(0, 1e3)),
    'in chunks, ms': ('chunks_seconds', fixed(0, 1e3)),
    'time, chunks / one pass': ('time_ratio', fixed(2)),
    'range of the ratio': ('time_ratio_range', lambda ends: '{:.2f} to {:.2f}'.format(*ends)),
    'one pass, temporary MiB': ('one_pass_temp_bytes', fixed(1, 2**-20)),
    'temporary memory, chunk / one pass': ('memory_ratio', fixed(2)),
}


def _temp_bytes(hparams, variables, length, chunk):
    """Temporary memory of the program for one pass, and of the program for a chunk."""
    sizes = cache_sizes(hparams)
    how = {name: sizes[name] for name in ('hparams', 'routing')}
    unrolled = jax.eval_shape(functools.partial(unroll, **how), variables)
    cache = jax.eval_shape(functools.partial(empty_cache, batch=1, **sizes), unrolled)
    prompt, part, flags = (
        jax.ShapeDtypeStruct((1, size), dtype)
        for size, dtype in ((length, 'int32'), (chunk, 'int32'), (chunk, 'bool'))
    )
    programs = {
        'one_pass': (functools.partial(prefill, **sizes), (unrolled, prompt, prompt)),
        'chunk': (functools.partial(extend, **how), (unrolled, cache, part, flags, flags)),
    }
    return {
        name: jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes
        for name, (function, arguments) in programs.items()
    }


def _compare(name, size, length, chunk, repeats):
    hparams = make_model(name, size, length + 1, 1, 'random')
    variables = random_variables(hparams)
    prompt = np.random.default_rng(0).integers(0, 256, length)

    def first_token(prefill_chunk):
        return generate(variables, hparams, [prompt], 1, prefill_chunk=prefill_chunk).tokens

    sizes = {'one_pass': 0, 'chunks': chunk}
    calls = {way: functools.partial(first_token, size) for way, size in sizes.items()}
    seconds, row = time_interleaved(calls, repeats, warmup=1), {'model': name}
    row |= {f'{way}_seconds': float(np.median(values)) for way, values in seconds.items()}
    row |= median_and_range('time_ratio', seconds['chunks'] / seconds['one_pass'])
    temp = _temp_bytes(hparams, variables, length, chunk)
    row |= {f'{program}_temp_bytes': number for program, number in temp.items()}
    return row | {'memory_ratio': temp['chunk'] / temp['one_pass']}


def prompts(*, size: str = '6x256', length: int = 4096, chunk: int = 512, repeats: int = 9):
    """The first token after a prompt that is read in one pass or in chunks.

    Compares the dense model and Mixture-of-Depths with random routing, both with random weights.
    Memory is the temporary memory of the largest program, without the cache.

    Args:
      size: LAYERSxWIDTH.
      length: tokens of the prompt.
      chunk: tokens of a chunk.
      repeats: timed rounds.
    """
    if not 1 <= chunk <= length:
        raise ValueError(f'--chunk={chunk}: must be from 1 to --length={length}')
    rows = [_compare(name, size, length, chunk, repeats) for name in ('dense', 'mod')]
    title = f'first token after {length}, {size}, in chunks of {chunk}'
    facts = {'versions': versions(), 'length': length, 'chunk': chunk, 'repeats': repeats}
    heads = ['model', *(row['model'] for row in rows)]
    yield {'size': size, **facts, 'rows': rows}, [column_per_row(title, heads, LINES, rows)]
