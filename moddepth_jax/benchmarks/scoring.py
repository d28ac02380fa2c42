"""Times log-likelihoods in batches that share contexts, and one request at a time."""

import functools

import jax
import numpy as np

from moddepth_jax.benchmarks.models import make_model, random_variables
from moddepth_jax.benchmarks.timing import median_and_range, time_interleaved
from moddepth_jax.hparams.rules import causal_routing
from moddepth_jax.inference.scoring import row_length, score
from moddepth_jax.model.transformer import Transformer
from moddepth_jax.training.summary import versions
from moddepth_jax.training.tables import column_per_row, fixed

QUESTIONS, OPTIONS = 32, 4
CONTEXT_TOKENS = (20, 60)
OPTION_TOKENS = {'one token': (1, 1), '4 to 12 tokens': (4, 12)}
BATCH_SIZE = 32


def _requests(option_tokens):
    """Requests for questions of random bytes, each with several options."""
    draw = np.random.default_rng(0)

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
    """Log-likelihoods, each computed in a separate row that is padded as in batches."""
    totals = []
    for context, labels in requests:
        tokens = [*context, *labels[:-1]]
        length = row_length(hparams, len(tokens))
        row_BT = np.zeros((1, length), np.int32)
        row_BT[0, : len(tokens)] = tokens
        segment_ids_BT = (np.arange(length) < len(tokens))[None].astype(np.int32)
        log_p_TV = np.asarray(_log_p(variables, row_BT, segment_ids_BT, hparams))[0]
        positions = len(context) - 1 + np.arange(len(labels))
        totals.append(float(log_p_TV[positions, labels].sum()))
    return totals


def _in_batches(variables, hparams, requests):
    scores = score(variables, hparams, requests, batch_size=BATCH_SIZE)
    return [one.log_likelihood for one in scores]


def _compare(name, hparams, repeats):
    """Yield a row for each length of options: times of both ways, and how far results differ."""
    variables = random_variables(hparams)
    for option, option_tokens in OPTION_TOKENS.items():
        requests = _requests(option_tokens)
        calls = {
            'one_by_one': functools.partial(_one_by_one, variables, hparams, requests),
            'in_batches': functools.partial(_in_batches, variables, hparams, requests),
        }
        difference = np.subtract(*(call() for call in calls.values()))
        seconds = time_interleaved(calls, repeats, warmup=1)
        row = {'model': name, 'options': option, 'requests': len(requests)}
        for way, values in seconds.items():
            row[f'{way}_milliseconds'] = 1e3 * float(np.median(values)) / len(requests)
        row |= median_and_range('ratio', seconds['one_by_one'] / seconds['in_batches'])
        yield row | {'difference': float(np.abs(difference).max())}


LINES = {
    'one by one, ms a request': ('one_by_one_milliseconds', fixed(2)),
    'in batches, ms a request': ('in_batches_milliseconds', fixed(2)),
    'one by one / in batches': ('ratio', fixed(1)),
    'range of the ratio': ('ratio_range', lambda ends: '{:.1f} to {:.1f}'.format(*ends)),
    'greatest difference, nats': ('difference', '{:.1e}'.format),
}


def scoring(*, size: str = '6x256', repeats: int = 5):
    """Log-likelihoods of the options of multiple-choice questions, in batches or one by one.

    Compares the dense model and Mixture-of-Depths with random weights. Batches read each context
    only once.

    Args:
      size: LAYERSxWIDTH.
      repeats: timed rounds.
    """
    compared = {name: make_model(name, size, 256, 1) for name in ('dense', 'mod')}
    rows = [row for name, h in compared.items() for row in _compare(name, h, repeats)]
    heads = ['options of', *(f'{row["model"]}, {row["options"]}' for row in rows)]
    title = f'log-likelihoods, {size}, {BATCH_SIZE} rows a batch'
    facts = {'versions': versions(), 'batch_size': BATCH_SIZE, 'repeats': repeats}
    yield {'size': size, **facts, 'rows': rows}, [column_per_row(title, heads, LINES, rows)]
