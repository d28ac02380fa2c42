"""How likely continuations are, many at a time, with the causal routing of honest evaluation."""

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

SHORTEST = 16  # rows are padded to a power of two from here on: few shapes, few compilations
LANES = 4  # continuations that one row can serve
BLOCK = 16  # positions whose logits exist at a time: all of a long row's may not fit
IN_FLIGHT = 2  # batches that the device has, so that it does not wait for the host


class Score(NamedTuple):
    """Of one continuation.

    Attributes:
      log_likelihood: of its tokens given the context, in nats, 0 or less.
      greedy: whether each of its tokens is the most likely one at its place (of equally likely
        ones the lowest id).
      cut: tokens that its context lost at the left, because the model's context is shorter.
    """

    log_likelihood: float
    greedy: bool
    cut: int


class _Part(NamedTuple):
    """Of a row, the tokens from `start` on that are labels of request `index`."""

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
        places_BK = first_B[:, None] + (i * BLOCK + jnp.arange(BLOCK))[None]
        places_BK1 = jnp.minimum(places_BK, x_BTD.shape[1] - 1)[..., None]
        logits_BKV = lm_head(jnp.take_along_axis(x_BTD, places_BK1, axis=1), variables['params'])
        labels_BKM = jax.lax.dynamic_slice_in_dim(labels_BTM, i * BLOCK, BLOCK, axis=1)
        nll_BKM, _, _ = jax.vmap(token_losses, (None, 2), 2)(logits_BKV, labels_BKM)
        best_BK1 = jnp.argmax(logits_BKV, axis=-1, keepdims=True)
        news = -nll_BKM, labels_BKM == best_BK1
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
        return tuple(put(whole, new, i * BLOCK) for whole, new in zip(results, news, strict=True))

    nothing = jnp.zeros(labels_BTM.shape, jnp.float32), jnp.zeros(labels_BTM.shape, bool)
    return jax.lax.fori_loop(0, num_blocks, of_block, nothing)


def row_lengths(hparams: Hparams) -> list[int]:
    """Ascending lengths that rows are padded to: powers of two, and the model's context."""
    context, length = hparams.data.sequence_length, SHORTEST
    lengths = []
    while length < context:
        lengths.append(length)
        length *= 2
    return [*lengths, context]


def _checked(hparams, requests):
    """(inputs, labels, tokens cut at the left) of each request."""
    context, size = hparams.data.sequence_length, hparams.model.vocab_size
    for i, (given, labels) in enumerate(requests):
        given, labels = [*map(int, given)], tuple(map(int, labels))
        if not given or not labels:
            part = 'context: begin it with the separator' if labels else 'continuation'
            raise ValueError(f'request {i} has no token in its {part}')
        if len(labels) > context:
            raise ValueError(
                f'request {i}: a continuation of {len(labels)} tokens is longer than the context '
                f'data.sequence_length={context}; cut it, or score it in windows'
            )
        outside = [token for token in (*given, *labels) if not 0 <= token < size]
        if outside:
            raise ValueError(f'token id {outside[0]} of request {i}: must lie in [0, {size})')
        cut = max(0, len(given) + len(labels) - context - 1)
        yield (*given[cut:], *labels[:-1]), labels, cut


def _shared_rows(inputs, labels):
    """Rows for all requests, longest first: what begins another's row needs none of its own.

    What the model says of a token depends on the tokens up to it alone, so that options of one
    token, or a text and its own beginning, are answered by one row.
    """
    rows = []
    # In this order a row's beginnings come right after it.
    for i in sorted(range(len(inputs)), key=inputs.__getitem__, reverse=True):
        part = _Part(i, len(inputs[i]) - len(labels[i]), labels[i])
        fits = rows and len(rows[-1].parts) < LANES
        if fits and rows[-1].tokens[: len(inputs[i])] == inputs[i]:
            rows[-1].parts.append(part)
        else:
            rows.append(_Row(inputs[i], [part]))
    return sorted(rows, key=lambda row: len(row.tokens), reverse=True)


def _batch(rows, batch_size, length):
    """What `_score_batch` takes of the data; rows that are missing are padding."""
    tokens_BT = np.zeros((batch_size, length), np.int32)
    segment_ids_BT, first_B = np.zeros_like(tokens_BT), np.zeros(batch_size, np.int32)
    whole_blocks = -(-length // BLOCK) * BLOCK
    labels_BTM = np.zeros((batch_size, whole_blocks, LANES), np.int32)
    for b, row in enumerate(rows):
        tokens_BT[b, : len(row.tokens)] = row.tokens
        segment_ids_BT[b, : len(row.tokens)] = 1
        first_B[b] = row.first
        for lane, part in enumerate(row.parts):
            start = part.start - row.first
            labels_BTM[b, start : start + len(part.labels), lane] = part.labels
    longest = max(row.end - row.first for row in rows)
    return tokens_BT, segment_ids_BT, first_B, labels_BTM, np.int32(-(-longest // BLOCK))


def _read(rows, results):
    """(index, log-likelihood, greedy) of each request of the rows."""
    log_p_BTM, best_BTM = map(np.asarray, results)
    for b, row in enumerate(rows):
        for lane, part in enumerate(row.parts):
            start = part.start - row.first
            places = b, slice(start, start + len(part.labels)), lane
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
    is compiled for each length that occurs. A row is one document, whatever its tokens are. What
    else is in a batch, and its size, change nothing but rounding. Requests are answered by one row
    where one's tokens begin another's.

    Args:
      variables: of the Transformer; TrainState.variables.
      hparams: of the same; the context is `data.sequence_length` tokens, the last label apart.
      requests: pairs of token id sequences, context and continuation, of one token at least. What
        does not fit the context is cut from the context's left.
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
        given = _batch(batch, batch_size, length)
        running.append((batch, _score_batch(variables, *given, hparams=hparams, routing=routing)))
        if len(running) == IN_FLIGHT:
            finish()
    while running:
        finish()
    return scores
