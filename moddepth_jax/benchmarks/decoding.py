"""How long a token takes: decoding by the dense and by the Mixture-of-Depths model, in turn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from moddepth_jax.benchmarks.timing import time_interleaved
from moddepth_jax.hparams import Hparams
from moddepth_jax.model.decoding import decode_step, prefill, unroll
from moddepth_jax.model.kv_cache import Cache, cache_bytes, update_cache
from moddepth_jax.model.transformer import Transformer, causal_routing
from moddepth_jax.training.summary import versions

SETTLE = 4  # steps before the timed ones


def _prefill(hparams, unrolled, tokens_BT):
    rule, context = causal_routing(hparams), hparams.data.sequence_length
    return prefill(
        unrolled,
        tokens_BT,
        jnp.ones_like(tokens_BT),
        hparams=hparams,
        routing=rule,
        capacity=context,
        routed_capacity=hparams.model.routing.cache_size(context, rule),
    )


def filled_cache(hparams: Hparams, unrolled, batch: int, length: int) -> Cache:
    """A cache as after `length` tokens in each row, the rule's share of them in routed blocks.

    What keys and values are does not change how long reading them takes: all are 0.1.
    """
    tokens_BT = jax.ShapeDtypeStruct((batch, length), 'int32')
    _, shapes = jax.eval_shape(functools.partial(_prefill, hparams), unrolled, tokens_BT)
    entered = hparams.model.routing.num_selected(length)

    def fill(shape):
        value = 0.1 if jnp.issubdtype(shape.dtype, jnp.floating) else 0
        return jnp.full(shape.shape, value, shape.dtype)

    layers = []
    for layer in jax.tree.map(fill, shapes.layers):
        if layer.lengths_B is not None:
            spread_S = jnp.linspace(0, length - 1, layer.capacity).astype(jnp.int32)
            layer = layer._replace(
                positions_BS=jnp.tile(spread_S[None], (batch, 1)),
                lengths_B=layer.lengths_B + entered,
            )
        layers.append(layer)
    rest = jax.tree.map(fill, shapes._replace(layers=()))
    return rest._replace(layers=tuple(layers), lengths_B=rest.lengths_B + length)


class _Decoding:
    """One model that decodes random tokens, one a call; all rows stay at work."""

    def __init__(self, hparams, unrolled, batch, length, seed=0):
        self.unrolled, self.cache = unrolled, filled_cache(hparams, unrolled, batch, length)
        self.bytes = cache_bytes(self.cache)
        self.tokens = np.random.default_rng(seed)
        self.flags = (np.zeros(batch, bool), np.ones(batch, bool))
        how = {'hparams': hparams, 'routing': causal_routing(hparams)}
        self.read = jax.jit(functools.partial(_next_token, **how))
        self.write = jax.jit(update_cache, donate_argnums=0)
        self.vocabulary, self.entered = hparams.model.vocab_size, []

    def __call__(self):
        begins_B, active_B = self.flags
        token_B = self.tokens.integers(0, self.vocabulary, len(begins_B)).astype(np.int32)
        next_B, entries, dropped_B = self.read(
            self.unrolled, self.cache, token_B, begins_B, active_B
        )
        self.cache = self.write(self.cache, entries, begins_B, dropped_B, active_B)
        self.entered += [e.selected_B for e in entries if e.selected_B is not None]
        return next_B, self.cache


def _next_token(unrolled, cache, token_B, begins_B, active_B, *, hparams, routing):
    logits_BV, entries, dropped_B = decode_step(
        unrolled, cache, token_B, begins_B, active_B, hparams=hparams, routing=routing
    )
    return jnp.argmax(logits_BV, axis=-1), entries, dropped_B


def bench_decode(dense: Hparams, routed: Hparams, batches, prompt: int, repeats: int) -> dict:
    """Times a decoding step of both models at nearly full caches, and a prompt's first token.

    Args:
      dense, routed: two models of the same shape, whose context is `data.sequence_length`. The
        router of `routed`, if it has one, need not be trained where its rule has a known rate:
        `random` has.
      batches: rows that decode together.
      prompt: tokens of the prompt whose first token is timed, at batch 1.
      repeats: rounds that are timed.

    Returns:
      dict with `versions`, `time_to_first_token` (seconds of each model, and `speedup`) and `rows`:
      one for each batch with median seconds a step of each model, `tokens_per_second`, `speedup`
      (the median over rounds of dense / routed time), `cache_bytes`, and `entered_fraction`.
    """
    models = {'dense': dense, 'routed': routed}
    unrolled = {name: _random_weights(hparams) for name, hparams in models.items()}
    rows = []
    for batch in batches:
        # Both start so far from the end of the context that no round reaches it.
        length = dense.data.sequence_length - repeats - SETTLE
        calls = {
            name: _Decoding(hparams, unrolled[name], batch, length)
            for name, hparams in models.items()
        }
        seconds = time_interleaved(calls, repeats, settle=SETTLE)
        median = {name: float(np.median(values)) for name, values in seconds.items()}
        rows.append(
            {
                'batch': batch,
                'seconds': median,
                'tokens_per_second': {name: batch / s for name, s in median.items()},
                'speedup': float(np.median(seconds['dense'] / seconds['routed'])),
                'cache_bytes': {name: call.bytes for name, call in calls.items()},
                'entered_fraction': _mean(jax.device_get(calls['routed'].entered)),
            }
        )
        del calls
    return {
        'versions': versions(),
        'context': dense.data.sequence_length,
        'repeats': repeats,
        'time_to_first_token': _first_token(models, unrolled, prompt, max(3, repeats // 4)),
        'rows': rows,
    }


def _mean(entered):
    """Mean over steps, layers and rows; 1.0 of a model without routed layers."""
    return float(np.mean(entered)) if entered else 1.0


def _random_weights(hparams):
    def make():
        tokens_BT = jnp.zeros((1, 16), jnp.int32)
        variables = Transformer(hparams).init(jax.random.key(hparams.seed), tokens_BT)
        return unroll(variables, hparams, causal_routing(hparams))

    return jax.jit(make)()


def _first_token(models, unrolled, prompt, repeats):
    tokens = np.random.default_rng(0).integers(0, 256, (1, prompt)).astype(np.int32)

    def first(name, hparams):
        run = jax.jit(functools.partial(_prefill, hparams))
        return lambda: run(unrolled[name], tokens)

    seconds = time_interleaved({name: first(name, h) for name, h in models.items()}, repeats)
    return {
        'prompt': prompt,
        'seconds': {name: float(np.median(values)) for name, values in seconds.items()},
        'speedup': float(np.median(seconds['dense'] / seconds['routed'])),
    }
