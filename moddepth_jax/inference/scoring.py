"""Log-likelihoods of many continuations at once, with the causal routing of evaluation."""

import collections
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moddepth_jax.hparams import Hparams
from moddepth_jax.model.cross_entropy import token_losses
from moddepth_jax.model.layers import lm_head
from moddepth_jax.model.transformer import Transformer, causal_routing, check_causal

_MIN_LENGTH = 16  # rows are padded to powers of two: few shapes, few compilations
_MAX_PARTS = 4  # continuations that one row can score
_BLOCK = 16  # positions whose logits exist at a time: those of a long row may not fit
_IN_FLIGHT = 2  # batches on the device, so that it does not wait for the host


class Score(NamedTuple):
    """Of one continuation.

    Attributes:
      log_likelihood: of its tokens given the context, in nats, 0 or less.
      greedy: whether each of its tokens is the most likely one at its position (among equals the
        lowest id).
      cut: tokens removed from the left of its context to fit the model's.
    """

    log_likelihood: float
    greedy: bool
    cut: int


class _Part(NamedTuple):
    """The tokens of a row, from `start` on, that are labels of request `index`."""

    index: int
    start: int
    labels: tuple[int, ...]


class _Row(NamedTuple):
    tokens: tuple[int, ...]
    parts: list[_Part]

    @property
    def first(self):
        return min(part.start for part in self.parts)

    @property
    def end(self):
        return max(part.start + len(part.labels) for part in self.parts)


@functools.partial(jax.jit, static_argnames=('hparams', 'routing'))
def _score_batch(
    variables, tokens_BT, segment_ids_BT, first_B, labels_BTM, num_blocks, *, hparams, routing
):
    """log p of the labels, float32, and whether each is the likeliest token: [B, T, M].

    labels_BTM begin at position first_B of a row. Only their first num_blocks blocks are computed.
    """
    x_BTD, _ = Transformer(hparams).apply(
        variables, tokens_BT, segment_ids_BT, routing, method='hidden_states'
    )

    def of_block(i, results):
        places_BK = first_B[:, None] + (i * _BLOCK + jnp.arange(_BLOCK))[None]
        places_BK1 = jnp.minimum(places_BK, x_BTD.shape[1] - 1)[..., None]
        logits_BKV = lm_head(jnp.take_along_axis(x_BTD, places_BK1, axis=1), variables['params'])
        labels_BKM = jax.lax.dynamic_slice_in_dim(labels_BTM, i * _BLOCK, _BLOCK, axis=1)
        nll_BKM, _, _ = jax.vmap(token_losses, (None, 2), 2)(logits_BKV, labels_BKM)
        best_BK1 = jnp.argmax(logits_BKV, axis=-1, keepdims=True)
        update = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
        pairs = zip(results, (-nll_BKM, labels_BKM == best_BK1), strict=True)
        return tuple(update(whole, block, i * _BLOCK) for whole, block in pairs)

    zeros = jnp.zeros(labels_BTM.shape, jnp.float32), jnp.zeros(labels_BTM.shape, bool)
    return jax.lax.fori_loop(0, num_blocks, of_block, zeros)


def row_lengths(hparams: Hparams) -> list[int]:
    """Ascending lengths that rows are padded to: powers of two, and the model's context."""
    context, length = hparams.data.sequence_length, _MIN_LENGTH
    lengths = []
    while length < context:
        lengths.append(length)
        length *= 2
    return [*lengths, context]


def _checked(hparams, requests):
    """(inputs, labels, tokens cut at the left) of each request."""
    context, size = hparams.data.sequence_length, hparams.model.vocab_size
    for i, (before, labels) in enumerate(requests):
        before, labels = [*map(int, before)], tuple(map(int, labels))
        if not before or not labels:
            part = 'context: begin it with the separator' if labels else 'continuation'
            raise ValueError(f'request {i} has no token in its {part}')
        if len(labels) > context:
            raise ValueError(
                f'request {i}: a continuation of {len(labels)} tokens is longer than the context '
                f'data.sequence_length={context}; cut it, or score it in windows'
            )
        outside = [token for token in (*before, *labels) if not 0 <= token < size]
        if outside:
            raise ValueError(f'token id {outside[0]} of request {i}: must lie in [0, {size})')
        cut = max(0, len(before) + len(labels) - context - 1)
        yield (*before[cut:], *labels[:-1]), labels, cut


def _shared_rows(inputs, labels):
    """Rows for all requests, longest first; a request that is a prefix of another shares its row.

    A prediction depends only on the tokens up to it, so options of one token, or a text and its own
    beginning, are scored by one row.
    """
    rows = []
    # In this order a row is followed by its prefixes.
    for i in sorted(range(len(inputs)), key=inputs.__getitem__, reverse=True):
        part = _Part(i, len(inputs[i]) - len(labels[i]), labels[i])
        fits = rows and len(rows[-1].parts) < _MAX_PARTS
        if fits and rows[-1].tokens[: len(inputs[i])] == inputs[i]:
            rows[-1].parts.append(part)
        else:
            rows.append(_Row(inputs[i], [part]))
    return sorted(rows, key=lambda row: len(row.tokens), reverse=True)


def _batch(rows, batch_size, length):
    """The arrays of `_score_batch`; missing rows are padding."""
    tokens_BT = np.zeros((batch_size, length), np.int32)
    segment_ids_BT, first_B = np.zeros_like(tokens_BT), np.zeros(batch_size, np.int32)
    padded = -(-length // _BLOCK) * _BLOCK
    labels_BTM = np.zeros((batch_size, padded, _MAX_PARTS), np.int32)
    for b, row in enumerate(rows):
        tokens_BT[b, : len(row.tokens)] = row.tokens
        segment_ids_BT[b, : len(row.tokens)] = 1
        first_B[b] = row.first
        for m, part in enumerate(row.parts):
            start = part.start - row.first
            labels_BTM[b, start : start + len(part.labels), m] = part.labels
    longest = max(row.end - row.first for row in rows)
    return tokens_BT, segment_ids_BT, first_B, labels_BTM, np.int32(-(-longest // _BLOCK))


def _read(rows, results):
    """(index, log-likelihood, greedy) of each request of the rows."""
    log_p_BTM, best_BTM = map(np.asarray, results)
    for b, row in enumerate(rows):
        for m, part in enumerate(row.parts):
            start = part.start - row.first
            places = b, slice(start, start + len(part.labels)), m
            log_likelihood = log_p_BTM[places].sum(dtype=np.float64)
            yield part.index, float(log_likelihood), bool(best_BTM[places].all())


def score(
    variables,
    hparams: Hparams,
    requests,
    *,
    batch_size: int = 32,
    routing: str | None = None,
    on_scored=None,
) -> list[Score]:
    """Scores each continuation given its context, in the order of the requests.

    Rows are sorted by length and padded to one of `row_lengths`, `batch_size` at a time: a program
    is compiled for each length that occurs. A row is one document, whatever its tokens are. The
    size and the other rows of a batch change nothing but rounding. Requests share a row if the
    tokens of one are a prefix of the other's.

    Args:
      variables: of the Transformer; TrainState.variables.
      hparams: of the same; the context is `data.sequence_length` tokens, the last label apart.
      requests: pairs of token id sequences, context and continuation, of one token at least. The
        left of a context that is too long is removed.
      batch_size: rows that run together.
      routing: a causal rule; None for the one the model was trained for.
      on_scored: called with the number of requests that were scored, as it happens.

    Raises:
      ValueError: an empty context or continuation, a continuation longer than the model's context,
        an unknown id, a batch size below 1, a routing that looks ahead or that the model lacks.
    """
    routing = causal_routing(hparams) if routing is None else routing
    check_causal(hparams, routing)
    if batch_size < 1:
        raise ValueError(f'batch_size={batch_size}: must be 1 or more')
    checked = list(_checked(hparams, requests))
    if not checked:
        return []
    inputs, labels, cuts = zip(*checked, strict=True)
    rows, scores = _shared_rows(inputs, labels), [None] * len(inputs)
    lengths, running = row_lengths(hparams), collections.deque()

    def finish():
        batch, results = running.popleft()
        for i, log_likelihood, greedy in _read(batch, results):
            scores[i] = Score(log_likelihood, greedy, cuts[i])
        if on_scored is not None:
            on_scored(sum(len(row.parts) for row in batch))

    for begin in range(0, len(rows), batch_size):
        batch = rows[begin : begin + batch_size]
        length = next(length for length in lengths if length >= len(batch[0].tokens))
        arrays = _batch(batch, batch_size, length)
        results = _score_batch(variables, *arrays, hparams=hparams, routing=routing)
        running.append((batch, results))
        if len(running) == _IN_FLIGHT:
            finish()
    while running:
        finish()
    return scores
