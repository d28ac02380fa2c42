"""How long a log-likelihood takes: in batches that share rows, and one request at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from moddepth_jax.benchmarks.timing import time_interleaved
from moddepth_jax.hparams import Hparams
from moddepth_jax.inference.scoring import row_lengths, score
from moddepth_jax.model.transformer import Transformer, causal_routing
from moddepth_jax.training.summary import versions

QUESTIONS, OPTIONS = 32, 4
CONTEXT_TOKENS = (20, 60)
OPTION_TOKENS = {'one token': (1, 1), '4 to 12 tokens': (4, 12)}
BATCH_SIZE = 32


def _requests(option_tokens, seed=0):
    """Questions of random bytes, each with its options."""
    draw = np.random.default_rng(seed)

    def text(least, most):
        return draw.integers(0, 256, draw.integers(least, most + 1)).tolist()

    contexts = [text(*CONTEXT_TOKENS) for _ in range(QUESTIONS)]
    return [(context, text(*option_tokens)) for context in contexts for _ in range(OPTIONS)]


@functools.partial(jax.jit, static_argnames='hparams')
def _log_p(variables, tokens_BT, segment_ids_BT, hparams):
    routing = causal_routing(hparams)
    logits_BTV, _ = Transformer(hparams).apply(variables, tokens_BT, segment_ids_BT, routing)
    return jax.nn.log_softmax(logits_BTV)


def _one_by_one(variables, hparams, requests):
    """Log-likelihoods, each from a row of its own, padded as in batches."""
    totals = []
    for context, labels in requests:
        tokens = [*context, *labels[:-1]]
        length = next(length for length in row_lengths(hparams) if length >= len(tokens))
        row_BT = np.zeros((1, length), np.int32)
        row_BT[0, : len(tokens)] = tokens
        real_BT = (np.arange(length) < len(tokens))[None].astype(np.int32)
        log_p_TV = np.asarray(_log_p(variables, row_BT, real_BT, hparams))[0]
        places = len(context) - 1 + np.arange(len(labels))
        totals.append(float(log_p_TV[places, labels].sum()))
    return totals


def _in_batches(variables, hparams, requests):
    scores = score(variables, hparams, requests, batch_size=BATCH_SIZE)
    return [one.log_likelihood for one in scores]


def bench_scoring(models: dict[str, Hparams], repeats: int) -> dict:
    """Times both ways in turn, on the options of multiple-choice questions.

    Args:
      models: by name; their weights are random.
      repeats: rounds that are timed.

    Returns:
      dict with `versions`, `batch_size` and `rows`: one for each model and length of options, with
      `requests`, median milliseconds a request `one_by_one` and `in_batches`, `ratio` (the median
      over rounds, and `ratio_range` the least and the greatest) and `difference`, the greatest of
      a log-likelihood between both, in nats.

    Raises:
      ValueError: no round.
    """
    if repeats < 1:
        raise ValueError(f'repeats={repeats}: must be 1 or more')
    rows = []
    for name, hparams in models.items():
        tokens_BT = jnp.zeros((1, 16), jnp.int32)
        variables = jax.jit(Transformer(hparams).init)(jax.random.key(hparams.seed), tokens_BT)
        for option, option_tokens in OPTION_TOKENS.items():
            given = (variables, hparams, _requests(option_tokens))
            calls = {
                'one_by_one': functools.partial(_one_by_one, *given),
                'in_batches': functools.partial(_in_batches, *given),
            }
            apart = np.subtract(*(call() for call in calls.values()))
            seconds = time_interleaved(calls, repeats, settle=1)
            ratios = seconds['one_by_one'] / seconds['in_batches']
            rows.append(
                {
                    'model': name,
                    'options': option,
                    'requests': len(given[2]),
                    'milliseconds': {
                        way: 1e3 * float(np.median(values)) / len(given[2])
                        for way, values in seconds.items()
                    },
                    'ratio': float(np.median(ratios)),
                    'ratio_range': [float(ratios.min()), float(ratios.max())],
                    'difference': float(np.abs(apart).max()),
                }
            )
    return {'versions': versions(), 'batch_size': BATCH_SIZE, 'repeats': repeats, 'rows': rows}


def scoring_table(result: dict, size: str) -> tuple:
    """Title, heads and lines of the result of `bench_scoring`."""
    rows = result['rows']
    heads = ['options of', *(f'{row["model"]}, {row["options"]}' for row in rows)]
    lines = {
        f'{way.replace("_", " ")}, ms a request': [
            f'{row["milliseconds"][way]:.2f}' for row in rows
        ]
        for way in ('one_by_one', 'in_batches')
    }
    lines['one by one / in batches'] = [f'{row["ratio"]:.1f}' for row in rows]
    lines['least and greatest'] = ['{:.1f} to {:.1f}'.format(*row['ratio_range']) for row in rows]
    lines['greatest difference, nats'] = [f'{row["difference"]:.1e}' for row in rows]
    title = f'log-likelihoods, {size}, {result["batch_size"]} rows a batch'
    return title, heads, lines
