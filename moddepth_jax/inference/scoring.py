"""Scores many continuations in batches, with the causal routing of evaluation."""

import collections
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moddepth_jax.hparams import Hparams
from moddepth_jax.hparams.rules import causal_routing, check_causal
from moddepth_jax.inference.generate import unrolled_variables
from moddepth_jax.model.cross_entropy import token_losses
from moddepth_jax.model.decoding import extend, prefill
from moddepth_jax.model.kv_cache import resize_cache
from moddepth_jax.model.layers import lm_head
from moddepth_jax.model.transformer import Transformer

_MIN_LENGTH = 16  # rows are padded to at least this length
_BLOCK = 16  # positions whose logits are computed at a time, to save memory
_OPTION_LENGTH = 4  # tokens of each row's options whose logits are computed at a time
_SPARE = 12  # a batch reuses an earlier shape that has up to a 12th more places than it needs
_IN_FLIGHT = 2  # batches on the device at a time, so that it does not wait for the host


class Score(NamedTuple):
    """The score of a continuation.

    Attributes:
      log_likelihood: in nats.
      greedy: whether each token is the most likely one; of equal ones, the lowest id counts.
      cut: number of tokens cut from the left of the context.
    """

    log_likelihood: float
    greedy: bool
    cut: int


class _Request(NamedTuple):
    """Input tokens, the labels of the last of them, and the number of tokens cut at the left."""

    tokens: tuple[int, ...]
    labels: tuple[int, ...]
    cut: int

    @property
    def start(self):
        return len(self.tokens) - len(self.labels)

    @property
    def context(self):
        return self.tokens[: self.start + 1]


@functools.partial(jax.jit, static_argnames=('hparams', 'routing'))
def _score_batch(
    variables, tokens_BT, segment_ids_BT, first_B, labels_BT, num_blocks, *, hparams, routing
):
    """Return log p of the labels, float32, and whether each is the most likely token, [B, T].

    labels_BT begins at position first_B of a row. Only the first num_blocks blocks are computed.
    """
    x_BTD, _ = Transformer(hparams).apply(
        variables, tokens_BT, segment_ids_BT, routing, method='hidden_states'
    )

    def of_block(i, results):
        places_BK = first_B[:, None] + (i * _BLOCK + jnp.arange(_BLOCK))[None]
        places_BK1 = jnp.minimum(places_BK, x_BTD.shape[1] - 1)[..., None]
        logits_BKV = lm_head(jnp.take_along_axis(x_BTD, places_BK1, axis=1), variables['params'])
        labels_BK = jax.lax.dynamic_slice_in_dim(labels_BT, i * _BLOCK, _BLOCK, axis=1)
        update = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
        pairs = zip(results, _of_labels(logits_BKV, labels_BK), strict=True)
        return tuple(update(result, block, i * _BLOCK) for result, block in pairs)

    zeros = jnp.zeros(labels_BT.shape, jnp.float32), jnp.zeros(labels_BT.shape, bool)
    return jax.lax.fori_loop(0, num_blocks, of_block, zeros)


def _of_labels(logits_BXV, labels_BX):
    """Return log p of the labels, and whether each is the most likely token."""
    nll_BX, _, _ = token_losses(logits_BXV, labels_BX)
    return -nll_BX, labels_BX == jnp.argmax(logits_BXV, axis=-1)


class _Options(NamedTuple):
    """Options of questions: B contexts, each with S tokens of its options, one after another."""

    context_BT: np.ndarray  # int32, like the others
    exists_BT: np.ndarray  # 1 for the tokens of a context
    first_BO: np.ndarray  # the first token of each option
    tokens_BS: np.ndarray  # all tokens but the last of each option; S is 0 if none has two tokens
    branches_BS: np.ndarray  # the number of the option, from 1; 0 for padding
    labels_BS: np.ndarray  # the token after each of tokens_BS


@functools.partial(jax.jit, static_argnames=('hparams', 'routing'))
def _score_options(unrolled, options: _Options, *, hparams, routing):
    """Return log p of first_BO and labels_BS, and whether each is the most likely token."""
    how, routes = {'hparams': hparams, 'routing': routing}, hparams.model.routing
    length = options.context_BT.shape[1]
    capacity = length + options.tokens_BS.shape[1]
    most = min(capacity, routes.cache_size(hparams.data.sequence_length, routing))
    grows = routes.overflow == 'grow'
    # Options are not written into a cache, but routed blocks and loops count them.
    dense = capacity if routes.routes_loops else length
    sizes = {'capacity': dense, 'routed_capacity': None if grows else most}
    first_BV, cache = prefill(unrolled, options.context_BT, options.exists_BT, **sizes, **how)
    first_BOV = jnp.broadcast_to(first_BV[:, None], (*options.first_BO.shape, first_BV.shape[-1]))
    first = _of_labels(first_BOV, options.first_BO)
    if not options.tokens_BS.size:
        return first, jax.tree.map(lambda side_BO: side_BO[:, :0], first)
    if grows:
        cache = resize_cache(cache, capacity)
    begins_BS = jnp.zeros(options.tokens_BS.shape, bool)
    x_BSD, _, _ = extend(unrolled, cache, options.tokens_BS, begins_BS, options.branches_BS, **how)

    def of_places(places):  # in parts, since the logits of all places may not fit into memory
        x_BPD, labels_BP = places
        return _of_labels(lm_head(x_BPD, unrolled), labels_BP)

    def parts(side_BSX):
        return jnp.stack(jnp.split(side_BSX, side_BSX.shape[1] // _OPTION_LENGTH, axis=1))

    rest = jax.lax.map(of_places, jax.tree.map(parts, (x_BSD, options.labels_BS)))
    return first, jax.tree.map(lambda side_XBP: jnp.concatenate(list(side_XBP), axis=1), rest)


def row_length(hparams: Hparams, num_tokens: int, parts: int = 2) -> int:
    """Return the padded length of `num_tokens`: one of `_sizes` from 16, or the model's context."""
    length = next(size for size in _sizes(_MIN_LENGTH, parts) if size >= num_tokens)
    return min(length, hparams.data.sequence_length)


def _sizes(least, parts):
    """Yield ascending sizes, `parts` per factor of two, so that few programs compile."""
    for i in itertools.count():
        yield from ((least << i) * (parts + part) // parts for part in range(parts))


def _checked(hparams, requests):
    """Yield a _Request for each (context, continuation); raises ValueError for a bad one."""
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


def _arrays(requests, batch_size, length):
    """Return the arrays of `_score_batch` for some requests; missing rows are padding."""
    tokens_BT = np.zeros((batch_size, length), np.int32)
    segment_ids_BT, first_B = np.zeros_like(tokens_BT), np.zeros(batch_size, np.int32)
    padded = -(-length // _BLOCK) * _BLOCK
    labels_BT, longest = np.zeros((batch_size, padded), np.int32), 0
    for b, one in enumerate(requests):
        tokens_BT[b, : len(one.tokens)] = one.tokens
        segment_ids_BT[b, : len(one.tokens)] = 1
        first_B[b], longest = one.start, max(longest, len(one.labels))
        labels_BT[b, : len(one.labels)] = one.labels
    return tokens_BT, segment_ids_BT, first_B, labels_BT, np.int32(-(-longest // _BLOCK))


def score(
    variables,
    hparams: Hparams,
    requests,
    *,
    batch_size: int = 32,
    routing: str | None = None,
    on_scored=None,
) -> list[Score]:
    """Score each continuation given its context, in the order of the requests.

    A context with several continuations is computed once, and they continue from its cache. Other
    requests are computed in one pass. Rows are sorted by length and padded to few lengths (see
    `row_length`), for each of which a program compiles. A row is one document. The batch changes
    the results by rounding only.

    Args:
      variables: Linen variables of the model.
      hparams: hyper-parameters of the model and its stage.
      requests: pairs (context, continuation) of sequences of one or more token ids. If a context
        does not fit `data.sequence_length`, its left end is removed.
      batch_size: rows in a batch.
      routing: causal rule, by default that of training.
      on_scored: function that is called with the number of requests as they are scored.

    Raises:
      ValueError: for an empty request, an unknown id, a continuation longer than the context, a
        batch size below 1, or a routing that looks ahead or that the model lacks.
    """
    routing = causal_routing(hparams) if routing is None else routing
    check_causal(hparams, routing)
    if batch_size < 1:
        raise ValueError(f'batch_size={batch_size}: must be 1 or more')
    requests = list(_checked(hparams, requests))
    how = {'batch_size': batch_size, 'hparams': hparams, 'routing': routing}
    questions = _questions(requests, hparams, batch_size)
    others = {*range(len(requests))}.difference(*questions)
    scores, running = [None] * len(requests), collections.deque()

    def finish():
        found = running.popleft()()
        for i, log_p, best in found:
            total = float(log_p.sum(dtype=np.float64))
            scores[i] = Score(total, bool(best.all()), requests[i].cut)
        if on_scored is not None:
            on_scored(len(found))

    for batch in itertools.chain(
        _from_contexts(variables, requests, questions, **how),
        _in_one_pass(variables, requests, others, **how),
    ):
        running.append(batch)
        if len(running) == _IN_FLIGHT:
            finish()
    while running:
        finish()
    return scores


def _in_one_pass(variables, requests, numbers, *, batch_size, hparams, routing):
    """Start batches of rows; yields functions that wait and return [(number, log p, best)]."""
    rows = sorted(numbers, key=lambda i: len(requests[i].tokens), reverse=True)
    for begin in range(0, len(rows), batch_size):
        batch = rows[begin : begin + batch_size]
        length = row_length(hparams, len(requests[batch[0]].tokens))
        arrays = _arrays([requests[i] for i in batch], batch_size, length)
        results = _score_batch(variables, *arrays, hparams=hparams, routing=routing)

        def wait(batch=batch, results=results):
            log_p_BT, best_BT = map(np.asarray, results)
            sizes = [len(requests[i].labels) for i in batch]
            return [
                (i, log_p_BT[b, :size], best_BT[b, :size])
                for b, (i, size) in enumerate(zip(batch, sizes, strict=True))
            ]

        yield wait


def _from_contexts(variables, requests, questions, *, batch_size, hparams, routing):
    """Like `_in_one_pass`, for `_questions`, whose contexts are computed once."""
    if not questions:
        return
    unrolled, shapes = unrolled_variables(variables, hparams, routing), []
    for batch in _batches(questions, requests, batch_size, hparams):
        of_questions = [[requests[i] for i in options] for options in batch]
        arrays = _option_arrays(of_questions, *_shape(of_questions, hparams, shapes))
        results = _score_options(unrolled, arrays, hparams=hparams, routing=routing)

        def wait(batch=batch, branches_BS=arrays.branches_BS, results=results):
            (first_p_BO, first_best_BO), (log_p_BS, best_BS) = jax.device_get(results)
            found = []
            for b, options in enumerate(batch):
                for o, i in enumerate(options):
                    mine_S = branches_BS[b] == o + 1
                    log_p = np.append(first_p_BO[b, o], log_p_BS[b, mine_S])
                    found.append((i, log_p, np.append(first_best_BO[b, o], best_BS[b, mine_S])))
            return found

        yield wait


def _context_length(longest, hparams):
    return row_length(hparams, longest, parts=4)


def _shape(questions, hparams, shapes):
    """Return the padded lengths of contexts and options: a shape of `shapes`, or a new one."""
    length = _context_length(max(len(options[0].context) for options in questions), hparams)
    longest = max(sum(len(one.labels) - 1 for one in options) for options in questions)
    parts = -(-longest // _OPTION_LENGTH)
    sizes = itertools.chain([0], _sizes(_MIN_LENGTH, parts=8))
    size = next(size for size in sizes if size >= parts * _OPTION_LENGTH)
    most = (length + size) * (_SPARE + 1) // _SPARE
    fit = [one for one in shapes if sum(one) <= most and one[0] >= length and one[1] >= size]
    if not fit:
        shapes.append((length, size))
    return min(fit, key=sum, default=(length, size))


def _option_arrays(questions, length, size):
    """Return the _Options of questions, padded to the lengths of `_shape`."""
    rows = 1 << (len(questions) - 1).bit_length()
    most = max(map(len, questions))
    context = np.zeros((2, rows, length), np.int32)
    first_BO = np.zeros((rows, 1 << (most - 1).bit_length()), np.int32)
    arrays = _Options(*context, first_BO, *np.zeros((3, rows, size), np.int32))
    for b, options in enumerate(questions):
        context = options[0].context
        arrays.context_BT[b, : len(context)], arrays.exists_BT[b, : len(context)] = context, 1
        begin = 0
        for o, one in enumerate(options):
            arrays.first_BO[b, o], end = one.labels[0], begin + len(one.labels) - 1
            arrays.tokens_BS[b, begin:end] = one.labels[:-1]
            arrays.labels_BS[b, begin:end] = one.labels[1:]
            arrays.branches_BS[b, begin:end] = o + 1
            begin = end
    return arrays


def _questions(requests, hparams, batch_size):
    """Group the numbers of requests that share a context; requests without others are left out.

    Empty if experts count the tokens of a row, since the options in a row are separate texts.
    """
    if hparams.model.experts.row_capacity:
        return []
    by_context = collections.defaultdict(list)
    for i, request in enumerate(requests):
        by_context[request.context].append(i)
    most = hparams.data.sequence_length  # tokens of options in one row
    shared = [options for options in by_context.values() if len(options) > 1]
    return [row for options in shared for row in _cut(options, requests, most, batch_size)]


def _cut(options, requests, most, batch_size):
    """Split options into lists of at most `most` labels and batch_size options."""
    rows, room = [], 0
    for i in options:
        size = len(requests[i].labels)
        if size > room or len(rows[-1]) == batch_size:
            rows.append([])
            room = most
        rows[-1].append(i)
        room -= size
    return rows


def _batches(questions, requests, batch_size, hparams):
    """Return batches of questions, with at most batch_size options of more than one token in all.

    The longest contexts come first; of contexts with equal padding, those with the longest options.
    """

    def lengths(options):
        context = len(requests[options[0]].context)
        return _context_length(context, hparams), sum(len(requests[i].labels) for i in options)

    batches, room = [], 0
    for options in sorted(questions, key=lengths, reverse=True):
        size = max(1, sum(len(requests[i].labels) > 1 for i in options))
        if size > room:
            batches.append([])
            room = batch_size
        batches[-1].append(options)
        room -= size
    return batches
