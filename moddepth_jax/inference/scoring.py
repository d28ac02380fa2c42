"""Log-likelihoods of many continuations at once, with the causal routing of evaluation."""

import collections
import functools
import itertools
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
    """Log-likelihood of a continuation in nats, and tokens cut from the left of its context.

    `greedy`: whether each of its tokens is the likeliest there, among equals the lowest id.
    """

    log_likelihood: float
    greedy: bool
    cut: int


class _Request(NamedTuple):
    """The tokens that the model reads; the labels of the last of them; tokens cut at the left."""

    tokens: tuple[int, ...]
    labels: tuple[int, ...]
    cut: int

    @property
    def start(self):
        return len(self.tokens) - len(self.labels)

    def places(self, first):
        """Where the labels stand in a row whose labels begin at `first`."""
        return slice(self.start - first, len(self.tokens) - first)


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
    context = hparams.data.sequence_length
    powers = (_MIN_LENGTH << i for i in itertools.count())
    return [*itertools.takewhile(lambda length: length < context, powers), context]


def _checked(hparams, requests):
    """Yields a _Request for each pair of context and continuation; raises ValueError."""
    context, size = hparams.data.sequence_length, hparams.model.vocab_size
    for i, (before, labels) in enumerate(requests):
        before, labels = tuple(map(int, before)), tuple(map(int, labels))
        if not before or not labels:
            part = 'context: begin it with the separator' if labels else 'continuation'
            raise ValueError(f'request {i} has no token in its {part}')
        if len(labels) > context:
            raise ValueError(
                f'request {i}: a continuation of {len(labels)} tokens is longer than the context '
                f'data.sequence_length={context}; cut it, or score it in windows'
            )
        for token in before + labels:
            if not 0 <= token < size:
                raise ValueError(f'token id {token} of request {i}: must lie in [0, {size})')
        cut = max(0, len(before) + len(labels) - context - 1)
        yield _Request(before[cut:] + labels[:-1], labels, cut)


def _shared_rows(requests):
    """Lists of requests by number, longest rows first.

    A request that is a prefix of another (an option of one token, a text's beginning) shares its
    row, since a prediction depends only on the tokens up to it.
    """
    rows = []
    # In this order a row is followed by its prefixes.
    for i in sorted(range(len(requests)), key=lambda i: requests[i].tokens, reverse=True):
        tokens = requests[i].tokens
        fits = rows and len(rows[-1]) < _MAX_PARTS
        if fits and requests[rows[-1][0]].tokens[: len(tokens)] == tokens:
            rows[-1].append(i)
        else:
            rows.append([i])
    return sorted(rows, key=lambda row: len(requests[row[0]].tokens), reverse=True)


def _arrays(rows, batch_size, length):
    """The arrays of `_score_batch` for lists of requests; missing rows are padding."""
    tokens_BT = np.zeros((batch_size, length), np.int32)
    segment_ids_BT, first_B = np.zeros_like(tokens_BT), np.zeros(batch_size, np.int32)
    padded = -(-length // _BLOCK) * _BLOCK
    labels_BTM, longest = np.zeros((batch_size, padded, _MAX_PARTS), np.int32), 0
    for b, row in enumerate(rows):
        tokens = row[0].tokens
        tokens_BT[b, : len(tokens)] = tokens
        segment_ids_BT[b, : len(tokens)] = 1
        first_B[b] = min(request.start for request in row)
        longest = max(longest, len(tokens) - first_B[b])
        for m, request in enumerate(row):
            labels_BTM[b, request.places(first_B[b]), m] = request.labels
    return tokens_BT, segment_ids_BT, first_B, labels_BTM, np.int32(-(-longest // _BLOCK))


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

    Rows are sorted by length and padded to one of `row_lengths`, for each of which a program is
    compiled. A row is one document. Its batch changes nothing but rounding.

    `requests` are pairs of token id sequences, context and continuation, of one token at least; the
    left of a context that does not fit `data.sequence_length` is removed. `routing` is a causal
    rule, by default the one the model was trained for. `on_scored` is called with the number of
    requests that were scored, as it happens.

    Raises:
      ValueError: an empty request, unknown id, or continuation longer than the context; a batch
        size below 1; a routing that looks ahead or that the model lacks.
    """
    routing = causal_routing(hparams) if routing is None else routing
    check_causal(hparams, routing)
    if batch_size < 1:
        raise ValueError(f'batch_size={batch_size}: must be 1 or more')
    requests = list(_checked(hparams, requests))
    rows, scores = _shared_rows(requests), [None] * len(requests)
    lengths, running = row_lengths(hparams), collections.deque()

    def finish():
        batch, first_B, results = running.popleft()
        log_p_BTM, best_BTM = map(np.asarray, results)
        for b, row in enumerate(batch):
            for m, i in enumerate(row):
                at = b, requests[i].places(first_B[b]), m
                total = float(log_p_BTM[at].sum(dtype=np.float64))
                scores[i] = Score(total, bool(best_BTM[at].all()), requests[i].cut)
        if on_scored is not None:
            on_scored(sum(map(len, batch)))

    for begin in range(0, len(rows), batch_size):
        batch = rows[begin : begin + batch_size]
        of_rows = [[requests[i] for i in row] for row in batch]
        length = next(length for length in lengths if length >= len(of_rows[0][0].tokens))
        arrays = _arrays(of_rows, batch_size, length)
        results = _score_batch(variables, *arrays, hparams=hparams, routing=routing)
        running.append((batch, arrays[2], results))
        if len(running) == _IN_FLIGHT:
            finish()
    while running:
        finish()
    return scores
