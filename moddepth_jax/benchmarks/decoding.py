"""Times decoding steps of a dense model and another model, interleaved."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np

from moddepth_jax.benchmarks.models import LOOPED, LOOPS, TITLES, make_model, random_variables
from moddepth_jax.benchmarks.timing import time_interleaved
from moddepth_jax.hparams import Hparams
from moddepth_jax.hparams.checks import one_of
from moddepth_jax.hparams.rules import causal_routing
from moddepth_jax.model.decoding import decode_step, empty_cache, prefill, unroll
from moddepth_jax.model.kv_cache import Cache, cache_bytes, update_cache
from moddepth_jax.training.summary import versions
from moddepth_jax.training.tables import column_per_row, fixed

# Exit thresholds so small that no token leaves the loops, or so large that all leave at once.
EXIT_THRESHOLDS = {'no token leaves': 1e-9, 'all leave after a loop': 1e9}
AGAINST = {'mod': ('shape',), 'exits': tuple(EXIT_THRESHOLDS)}  # others: parameters, depth
WARMUP = 4  # steps before the timed ones


def cache_sizes(hparams: Hparams) -> dict:
    """Return arguments of `prefill` and `empty_cache`: causal rule, caches of the whole context."""
    rule, context = causal_routing(hparams), hparams.data.sequence_length
    routed = hparams.model.routing.cache_size(context, rule)
    how = {'hparams': hparams, 'routing': rule}
    return how | {'capacity': context, 'routed_capacity': routed}


def filled_cache(hparams: Hparams, unrolled, batch: int, length: int) -> Cache:
    """Return the cache after `length` tokens in each row; routed blocks hold the selected share.

    All keys and values are 0: their values do not change how long reading them takes.
    """
    cache = empty_cache(unrolled, batch, **cache_sizes(hparams))
    of_blocks, progress = hparams.model.router_of_block, hparams.model.loop_progress
    reads_first = hparams.model.reads_first_keys  # these blocks have no cache
    routers = [router for router, reads in zip(of_blocks, reads_first, strict=True) if not reads]
    layers = []
    for layer, router in zip(cache.layers, routers, strict=True):
        if router is not None:
            selected = hparams.model.routing.num_selected(length, progress[router])
        if layer.selected_B is not None:
            layer = layer._replace(selected_B=layer.selected_B + selected)
        if layer.lengths_B is not None:
            positions_S = jnp.linspace(0, length - 1, layer.positions_BS.shape[1])
            layer = layer._replace(
                positions_BS=jnp.tile(positions_S.astype(jnp.int32), (batch, 1)),
                lengths_B=layer.lengths_B + selected,
            )
        layers.append(layer)
    return cache._replace(layers=tuple(layers), lengths_B=cache.lengths_B + length)


def random_weights(hparams: Hparams) -> dict:
    """Return the unrolled variables of a newly initialised model."""
    return jax.jit(lambda: unroll(random_variables(hparams), hparams, causal_routing(hparams)))()


class _Decoder:
    """Decodes a random token for every row at each call."""

    def __init__(self, hparams, unrolled, batch, length):
        self.cache = filled_cache(hparams, unrolled, batch, length)
        self.cache_bytes, self.selected = cache_bytes(self.cache), []
        self.random, self.vocab_size = np.random.default_rng(0), hparams.model.vocab_size
        self.begins_B, self.active_B = jnp.zeros(batch, bool), jnp.ones(batch, bool)
        routing = causal_routing(hparams)

        @jax.jit
        def read(unrolled, cache, token_B):
            logits_BV, entries, dropped_BT = decode_step(
                *(unrolled, cache, token_B, self.begins_B, self.active_B),
                hparams=hparams,
                routing=routing,
            )
            return jnp.argmax(logits_BV, axis=-1), entries, dropped_BT

        self.read = functools.partial(read, unrolled)
        self.write = jax.jit(update_cache, donate_argnums=0)

    def __call__(self):
        token_B = self.random.integers(0, self.vocab_size, len(self.begins_B)).astype(np.int32)
        next_B, entries, dropped_BT = self.read(self.cache, token_B)
        each = self.begins_B[:, None], dropped_BT, self.active_B[:, None]
        self.cache = self.write(self.cache, entries, *each)
        self.selected += [e.selected_BT for e in entries if e.selected_BT is not None]
        return next_B, self.cache


def bench_decoding(dense: Hparams, other: Hparams, batches, prompt: int, repeats: int) -> dict:
    """Time a decoding step of two models at nearly full caches, and the first token of a prompt.

    Args:
      dense: the baseline.
      other: a model with the same context, `data.sequence_length`.
      batches: numbers of rows that decode together.
      prompt: tokens of the prompt, which is a batch of one row.
      repeats: timed rounds.

    Returns:
      `first_token_seconds` by model, and `rows`: for each batch the median seconds, `speedup` (the
      median of dense over other time), bytes of the caches, and, for blocks that cache only
      selected tokens, the `selected_fraction`.
    """
    models, rows = {'dense': dense, 'other': other}, []
    unrolled = {name: random_weights(hparams) for name, hparams in models.items()}
    for batch in batches:
        # Both models start early enough that no round reaches the end of the context.
        length = dense.data.sequence_length - repeats - WARMUP
        decoders = {
            name: _Decoder(hparams, unrolled[name], batch, length)
            for name, hparams in models.items()
        }
        seconds, row = time_interleaved(decoders, repeats, warmup=WARMUP), {'batch': batch}
        for name, decoder in decoders.items():
            median = float(np.median(seconds[name]))
            row |= {f'{name}_seconds': median, f'{name}_tokens_per_second': batch / median}
            row[f'{name}_cache_bytes'] = decoder.cache_bytes
        row['speedup'] = float(np.median(seconds['dense'] / seconds['other']))
        row['cache_ratio'] = row['other_cache_bytes'] / row['dense_cache_bytes']
        if selected := jax.device_get(decoders['other'].selected):
            row['selected_fraction'] = float(np.mean(selected))
        rows.append(row)
        del decoders
    return {
        'versions': versions(),
        'context': dense.data.sequence_length,
        'repeats': repeats,
        'prompt': prompt,
        'first_token_seconds': _first_token(models, unrolled, prompt, max(3, repeats // 4)),
        'rows': rows,
    }


def _first_token(models, unrolled, prompt, repeats):
    tokens_BT = np.random.default_rng(0).integers(0, 256, (1, prompt)).astype(np.int32)

    calls = {}
    for name, hparams in models.items():
        run = jax.jit(functools.partial(prefill, **cache_sizes(hparams)))
        calls[name] = functools.partial(run, unrolled[name], tokens_BT, np.ones_like(tokens_BT))
    seconds = time_interleaved(calls, repeats)
    return {name: float(np.median(values)) for name, values in seconds.items()}


def decoding_table(title: str, result: dict, other: str, dense: str = 'dense'):
    """Return a table of `bench_decoding` with a column for each batch and the given model names."""
    first = ', '.join(f'{1e3 * seconds:.1f}' for seconds in result['first_token_seconds'].values())
    lines = {
        f'{dense}, ms per step': ('dense_seconds', fixed(2, 1e3)),
        f'{other}, ms per step': ('other_seconds', fixed(2, 1e3)),
        f'{dense}, tokens/s': ('dense_tokens_per_second', fixed(0)),
        f'{other}, tokens/s': ('other_tokens_per_second', fixed(0)),
        f'{other} / {dense}, tokens/s': ('speedup', fixed(2)),
        f'{other} / {dense}, cache bytes': ('cache_ratio', fixed(3)),
        'fraction of tokens selected': ('selected_fraction', fixed(3)),
    }
    heads = ['batch', *(str(row['batch']) for row in result['rows'])]
    title += f', context {result["context"]}; first token after {result["prompt"]}'
    return column_per_row(f'{title}: {dense}, {other}: {first} ms', heads, lines, result['rows'])


def decode(
    *,
    models: list[str] = ('mod',),
    size: str = '12x512',
    batches: list[int] = (1, 8, 16, 64),
    kv_heads: list[int] = (8, 2),
    context: int = 2048,
    prompt: int = 1024,
    repeats: int = 31,
):
    """One decoding step, and the first token after a prompt, of the dense model and others.

    Caches are nearly full. In Mixture-of-Depths (mod), random routing sends an eighth of the tokens
    through every other block. Looped models and Mixture-of-Recursions (mor; mor_first with the keys
    of the first loop) run all blocks three times. They are compared with a dense model of equal
    parameters and with one of equal depth. A looped model with early exits (exits) is compared with
    the looped model in two cases: all tokens leave after the first loop, or none do.

    Args:
      models: mod, looped, exits, mor, mor_first.
      size: LAYERSxWIDTH; LAYERS is the number of blocks with parameters.
      batches: numbers of rows that decode together.
      kv_heads: key/value heads, each in a table.
      context: capacity of the caches, in tokens.
      prompt: tokens of the prompt.
      repeats: timed rounds.
    """
    if prompt > context:
        raise ValueError(f'--prompt={prompt}: must be --context={context} or less')
    if repeats + WARMUP > context // 2:
        right = f'must be at most {context // 2 - WARMUP} at --context={context}'
        raise ValueError(f'--repeats={repeats}: {right}, or the caches are far from full')
    for model in models:
        one_of('--models', model, ('mod', *LOOPED))
        if model not in AGAINST and not re.fullmatch(r'\d+x\d+', size):
            raise ValueError(f'--size={size}: must be LAYERSxWIDTH for looped models')
    compared = [
        (heads, model, against, _pair(model, against, size, context, heads))
        for heads in kv_heads
        for model in models
        for against in AGAINST.get(model, ('parameters', 'depth'))
    ]
    for heads, model, against, (dense, other) in compared:
        result = bench_decoding(dense, other, batches, prompt, repeats)
        equal = against if model == 'exits' else f'of equal {against}'
        title = f'decoding, {size}, {heads} key/value heads, {equal}'
        row = {'kv_heads': heads, 'model': model, 'equal': against} | result
        names = TITLES[model], 'looped' if model == 'exits' else 'dense'
        yield row, [decoding_table(title, result, *names)]


def _pair(model, against, size, context, heads):
    """The Hparams of the baseline and of the other model.

    The baseline is dense, of equal size or equal depth. For `exits` it is the looped model.
    """
    layers, _, width = size.partition('x')
    make = functools.partial(make_model, length=context, batch=1, num_kv_heads=heads)
    if model == 'exits':
        threshold = EXIT_THRESHOLDS[against]
        return make('looped', size), make(model, size, loop_exit_threshold=threshold)
    dense_size = f'{int(layers) * LOOPS}x{width}' if against == 'depth' else size
    router = 'random' if model == 'mod' else None
    return make('dense', dense_size), make(model, size, router=router)
