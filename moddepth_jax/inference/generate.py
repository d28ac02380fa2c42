"""Generates text from a model, token by token, with the causal routing of its evaluation."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np

from moddepth_jax.data.tokenizers.tokenizer import Tokenizer
from moddepth_jax.hparams import Hparams
from moddepth_jax.hparams.flag_values import check_sampling
from moddepth_jax.hparams.rules import causal_routing, check_causal
from moddepth_jax.inference.prompt_cache import PromptCache
from moddepth_jax.inference.sampling import sample
from moddepth_jax.model import ahead
from moddepth_jax.model.decoding import empty_cache, extend, prefill, unroll
from moddepth_jax.model.kv_cache import Cache, longest_routed_row, resize_cache, update_cache
from moddepth_jax.model.layers import lm_head

_MIN_LENGTH = 16  # prompts are padded to powers of two from here on, so that few programs compile
_CAPACITY_STEP = 128  # the capacity of dense caches is a multiple of this
_SIZES = ('capacity', 'routed_capacity')
_STATIC = ('hparams', 'routing', 'temperature', 'top_p', 'top_k', 'tokenizer')


@dataclasses.dataclass(frozen=True)
class Generation:
    """The result of `generate`; samples of a prompt are adjacent rows.

    Attributes:
      tokens: int32 arrays of prompt and continuation, without the id that ended it.
      stopped: whether a row ended with its document.
      dropped_B: int array, tokens of each row for which a routed block had no room in its cache;
        those of a prompt count in its first sample.
      guessed_B: int array, tokens of each row that were guessed.
      held_B: int array, guesses of each row that the model confirmed.
      grown_to: capacity of the routed blocks' caches if they had to grow, otherwise 0.
      reused: number of prompt tokens that were in the PromptCache.
    """

    tokens: list[np.ndarray]
    stopped: list[bool]
    dropped_B: np.ndarray
    guessed_B: np.ndarray
    held_B: np.ndarray
    grown_to: int
    reused: int

    def first_rows(self, number: int) -> 'Generation':
        """Return a Generation of the first rows."""
        by_row = ('tokens', 'stopped', 'dropped_B', 'guessed_B', 'held_B')
        return dataclasses.replace(self, **{name: getattr(self, name)[:number] for name in by_row})

    @property
    def notes(self) -> list[str]:
        """Lines for the user about the caches and about guesses."""
        return describe([self])


def describe(parts: list[Generation]) -> list[str]:
    """Return lines for the user about the caches and the guesses of several Generations."""
    names = 'dropped_B', 'guessed_B', 'held_B'
    dropped, guessed, held = (sum(getattr(part, name).sum() for part in parts) for name in names)
    grown_to, reused = max(part.grown_to for part in parts), sum(part.reused for part in parts)
    notes = {
        f'{dropped} times a routed block had no room in its cache for a token': dropped,
        f'caches of the routed blocks grew to {grown_to} tokens': grown_to,
        f'{held} of {guessed} guessed tokens held': guessed,
        f'{reused} tokens of the prompt were in the cache': reused,
    }
    return [note for note, happened in notes.items() if happened]


def _check_prompt(hparams, prompt, num_tokens, name):
    """Raise ValueError if a prompt (token ids) and `num_tokens` more do not fit the context."""
    context, size = hparams.data.sequence_length, hparams.model.vocab_size
    _check_integers('prompt', prompt)
    if len(prompt) == 0:
        raise ValueError('the prompt has no token: start it with the separator')
    for token in prompt:
        if not 0 <= token < size:
            raise ValueError(f'token id {token} of the prompt: must lie in [0, {size})')
    if num_tokens < 1:
        raise ValueError(f'num_tokens={num_tokens}: must be 1 or more')
    excess = len(prompt) + num_tokens - context
    if excess > 0:
        found = f'{name} of {len(prompt)} tokens and {num_tokens} to generate do not fit'
        right = [f'shorten the prompt by {excess}'] * (num_tokens < context)
        right += [f'generate at most {context - len(prompt)}'] * (len(prompt) < context)
        right = ' or '.join(right) or 'shorten both'
        raise ValueError(f'{found} data.sequence_length={context}: {right}')


def check_request(
    hparams: Hparams, prompts, num_tokens, seed, num_samples, prefill_chunk, draft_tokens, **draw
):
    """Raise ValueError like `generate` for the same arguments; `draw` as in `check_sampling`."""
    if not len(prompts):
        raise ValueError('prompts=[]: must hold at least one')
    lengths = _of_each('num_tokens', num_tokens, prompts)
    for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True), 1):
        name = f'prompt {number}' if len(prompts) > 1 else 'a prompt'
        _check_prompt(hparams, prompt, length, name)
    _check_integers('num_samples', [num_samples])
    _check_integers('top_k', [draw['top_k']])
    if num_samples < 1:
        raise ValueError(f'num_samples={num_samples}: must be 1 or more')
    for one in _of_each('seed', seed, prompts):
        if not 0 <= one < 2**32:
            raise ValueError(f'seed={one}: must lie in [0, 2**32)')
    check_sampling(**draw)
    _check_integers('prefill_chunk', [prefill_chunk])
    if prefill_chunk < 0:
        raise ValueError(f'prefill_chunk={prefill_chunk}: must be 0 (one pass) or more')
    _check_integers('draft_tokens', [draft_tokens])
    if draft_tokens < 0:
        raise ValueError(f'draft_tokens={draft_tokens}: must be 0 (no guesses) or more')
    if draft_tokens and not hparams.model.routed_layers:
        right = 'must be 0: guesses skip routed blocks, and no block of this model is routed'
        raise ValueError(f'draft_tokens={draft_tokens}: {right}')


def _check_integers(name, values):
    try:
        list(map(operator.index, values))
    except TypeError:
        raise ValueError(f'{name}={str(values)[:60]}: must hold integers only') from None


def _of_each(name, value, prompts):
    """Return the integer of each prompt; raises ValueError unless `value` is one, or one each."""
    values = [value] if np.ndim(value) == 0 else list(value)
    _check_integers(name, values)
    if len(values) not in (1, len(prompts)):
        right = f'must be one, or one for each of the {len(prompts)} prompts'
        raise ValueError(f'{name}={str(value)[:60]}: holds {len(values)}; {right}')
    return values * len(prompts) if len(values) == 1 else values


def _replicate(tree):
    """Replicates arrays that the host will read over the mesh of the context."""
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    return jax.lax.with_sharding_constraint(tree, jax.sharding.PartitionSpec())


@functools.partial(jax.jit, static_argnums=1)
def _row_keys(seed_P, num_samples):
    """Make a PRNG key for each row from the seed of its prompt and the number of its sample."""
    sample_B = jnp.tile(jnp.arange(num_samples), len(seed_P))
    keys_B = jax.vmap(jax.random.key)(jnp.repeat(seed_P, num_samples))
    return _replicate(jax.vmap(jax.random.fold_in)(keys_B, sample_B))


def _separator(tokenizer, hparams):
    """Return the id before which a token sees nothing, as in training; -1: there is none."""
    return -1 if tokenizer is None or hparams.model.across_documents else tokenizer.separator


def _draw(logits_BV, keys_B, lengths_B, tokenizer, **how):
    if tokenizer is not None:  # the model may have more ids, and the tokenizer may have gaps
        known_V = np.zeros(logits_BV.shape[1], bool)
        known_V[np.flatnonzero(tokenizer.token_bytes_V)] = True
        known_V[list(tokenizer.stops)] = True
        logits_BV = jnp.where(known_V[None], logits_BV, -jnp.inf)
    keys_B = jax.vmap(jax.random.fold_in)(keys_B, lengths_B)
    return _replicate(sample(keys_B, logits_BV, **how))


_replicated = jax.jit(_replicate)
unrolled_variables = jax.jit(unroll, static_argnums=(1, 2))
_write = jax.jit(update_cache, donate_argnums=0)


@functools.partial(jax.jit, static_argnames=(*_STATIC, 'num_samples', *_SIZES))
def _start(unrolled, batch, keys_B, *, num_samples, tokenizer, temperature, top_p, top_k, **how):
    """Draw the first new token of each row, [B, 1]; also returns the cache of the prompts.

    `batch` is a result of `_read`.
    """
    if isinstance(batch[1], Cache):
        prompts = lm_head(batch[0], unrolled)[:, 0], batch[1]
    else:
        prompts = prefill(unrolled, *batch, **how)
    repeat = functools.partial(jnp.repeat, repeats=num_samples, axis=0)
    logits_BV, cache = jax.tree.map(repeat, prompts)
    first_B = jnp.arange(len(keys_B)) % num_samples == 0
    cache = cache._replace(dropped_B=jnp.where(first_B, cache.dropped_B, 0))
    draw = {'temperature': temperature, 'top_p': top_p, 'top_k': top_k}
    return _draw(logits_BV, keys_B, cache.lengths_B, tokenizer, **draw)[:, None], cache


_empty = jax.jit(empty_cache, static_argnums=1, static_argnames=('hparams', 'routing', *_SIZES))


@functools.partial(jax.jit, static_argnames=('ends', 'hparams', 'routing'))
def _chunk(unrolled, cache, x_B1D, tokens_BT, begins_BT, active_BT, *, ends, hparams, routing):
    """Compute one chunk of the prompts.

    Returns x_B1D, the input of `lm_head` at the last token of each row so far, and the arguments of
    `_write`. `ends` says whether a row ends in this chunk. If not, the output of the last block is
    not used, and XLA removes it.
    """
    inputs = unrolled, cache, tokens_BT, begins_BT, active_BT
    x_BTD, updates, dropped_BT = extend(*inputs, hparams=hparams, routing=routing)
    if ends:
        last_B1 = jnp.maximum(jnp.sum(active_BT, axis=1, keepdims=True) - 1, 0)
        last_B1D = jnp.take_along_axis(x_BTD, last_B1[..., None], axis=1)
        x_B1D = jnp.where(active_BT[:, :1, None], last_B1D, x_B1D)
    return x_B1D, (updates, begins_BT, dropped_BT, active_BT)


def _in_chunks(unrolled, cache, batch, size, *, hparams, routing):
    """Compute prompts in chunks of `size` tokens; `batch` is a result of `_pad`.

    Returns the input of `lm_head` at the last token of each row, and the cache of all tokens.
    """
    tokens_BT, segment_ids_BT = batch
    rows, lengths_B = len(tokens_BT), (segment_ids_BT > 0).sum(axis=1)
    size = min(size, tokens_BT.shape[1])
    tokens_BT, segment_ids_BT = (np.pad(side, ((0, 0), (0, size))) for side in batch)
    begins_BT = np.diff(segment_ids_BT, axis=1, prepend=1) > 0
    how = {'hparams': hparams, 'routing': routing}
    x_B1D = np.zeros((rows, 1, hparams.model.d_model), hparams.model.dtype)
    for first in range(0, lengths_B.max(), size):
        part = np.s_[:, first : first + size]
        inputs = tokens_BT[part], begins_BT[part], segment_ids_BT[part] > 0
        ends = bool(np.any(-(-lengths_B // size) == first // size + 1))
        x_B1D, update = ahead.call(_chunk, unrolled, cache, x_B1D, *inputs, ends=ends, **how)
        cache = ahead.call(_write, cache, *update)
    return x_B1D, cache


def _read(unrolled, prompts, chunk, kept, *, tokenizer, hparams, routing, **sizes):
    """Return the batch for `prefill`, or the result of `_in_chunks`; and the reused tokens."""
    how = {'hparams': hparams, 'routing': routing}
    separator = _separator(tokenizer, hparams)
    cache, reused_B = kept.take(routing, prompts, separator)
    if cache is None:
        batch = _pad(prompts, separator, sizes['capacity'])
        if not chunk:
            return batch, 0
        cache = ahead.call(_empty, unrolled, len(prompts), **how, **sizes)
        return _in_chunks(unrolled, cache, batch, chunk, **how), 0
    if sizes['routed_capacity'] is None:
        cache = resize_cache(cache, sizes['capacity'])
    rests = [prompt[num:] for prompt, num in zip(prompts, reused_B, strict=True)]
    batch = _pad(rests, separator, sizes['capacity'])
    read = _in_chunks(unrolled, cache, batch, chunk or batch[0].shape[1], **how)
    return read, int(sum(reused_B))


@functools.partial(jax.jit, static_argnames=_STATIC)
def _step(unrolled, cache, tokens_BT, active_BT, keys_B, *, hparams, routing, tokenizer, **draw):
    """Draw the token after each of `tokens_BT`.

    A row of `tokens_BT` is the last token of a text, then guesses of the next ones. The guesses up
    to the first that differs from the drawn token are held. Returns the drawn tokens, which of
    `tokens_BT` are held, and the arguments of `_write`.
    """
    begins_BT = tokens_BT == _separator(tokenizer, hparams)
    inputs = unrolled, cache, tokens_BT, begins_BT, active_BT
    x_BTD, updates, dropped_BT = extend(*inputs, hparams=hparams, routing=routing)
    after_BT = cache.lengths_B[:, None] + 1 + jnp.arange(tokens_BT.shape[1])[None]
    held_B, drawn, held = active_BT[:, 0], [], []
    for t in range(tokens_BT.shape[1]):
        if t:
            held_B = held_B & active_BT[:, t] & (drawn[-1] == tokens_BT[:, t])
        logits_BV = lm_head(x_BTD[:, t : t + 1], unrolled)[:, 0]
        drawn.append(_draw(logits_BV, keys_B, after_BT[:, t], tokenizer, **draw))
        held.append(held_B)
    next_BT, held_BT = _replicate((jnp.stack(drawn, axis=1), jnp.stack(held, axis=1)))
    return next_BT, held_BT, (updates, begins_BT, dropped_BT, held_BT)


class _Draft:
    """Guesses tokens with the model without its routed blocks, or with one of its routed loops.

    It draws with the same noise as the full model will, so that many guesses are right.
    """

    def __init__(self, unrolled, cache, keys_B, static):
        self.cache = cache
        self._step = functools.partial(_step, unrolled, keys_B=keys_B, **static)

    def _next(self, token_B, active_B):
        next_B1, _, update = self._step(self.cache, token_B[:, None], active_B[:, None])
        self.cache = _write(self.cache, *update)
        return next_B1[:, 0]

    def guess(self, tokens_B, active_B, num_tokens):
        """Return the tokens and the guesses that follow them, [B, 1 + num_tokens]."""
        guesses = [tokens_B]
        for _ in range(num_tokens):
            guesses.append(self._next(guesses[-1], active_B))
        return jnp.stack(guesses, axis=1)

    def follow(self, cache: Cache, guesses_BT, all_held_B):
        """Drop guesses that are not in `cache`; if all of a row are, reads the last one, too."""
        own = self.cache
        lengths_B = jnp.minimum(own.lengths_B, cache.lengths_B)
        documents_B = jnp.copy(cache.documents_B)  # the other cache's will be donated
        self.cache = own._replace(lengths_B=lengths_B, documents_B=documents_B)
        if all_held_B.any():
            self._next(guesses_BT[:, -1], all_held_B)


class _Texts:
    """The rows of a generation while they grow; samples of a prompt are adjacent.

    Attributes:
      rows: token ids of each row, without the stop that ended it.
      left_B: number of tokens that each row may still get.
      stopped_B: whether a row ended with a stop.
    """

    def __init__(self, prompts, num_samples, num_tokens, stops, on_tokens):
        self.rows = [list(prompt) for prompt in prompts for _ in range(num_samples)]
        self.left_B = np.repeat(num_tokens, num_samples)
        self.stopped_B = np.zeros(len(self.rows), bool)
        self._stops, self._on_tokens = stops, on_tokens

    @property
    def active_B(self):
        """Whether each row may get more tokens."""
        return ~self.stopped_B & (self.left_B > 0)

    def add(self, drawn_BT, new_BT):
        """Add drawn tokens where `new_BT` is True, which are the first of a row, up to a stop."""
        for drawn_B, new_B in zip(drawn_BT.T, new_BT.T, strict=True):
            self.stopped_B = self.stopped_B | (new_B & np.isin(drawn_B, self._stops))
            new_B = new_B & ~self.stopped_B
            for row in np.flatnonzero(new_B):
                self.rows[row].append(drawn_B[row])
            self.left_B = self.left_B - new_B
            if self._on_tokens is not None and new_B.any():
                self._on_tokens(drawn_B, new_B)


def _pad(prompts, separator, most):
    """Return tokens_BT and segment_ids_BT of prompts, padded to a power of two or `most`.

    A segment begins at each `separator`.
    """
    longest = max(map(len, prompts))
    length = min(most, max(_MIN_LENGTH, 1 << (longest - 1).bit_length()))
    tokens_BT = np.zeros((len(prompts), length), np.int32)
    segment_ids_BT = np.zeros_like(tokens_BT)
    for row, prompt in enumerate(prompts):
        tokens_BT[row, : len(prompt)] = prompt
        segment_ids_BT[row, : len(prompt)] = 1 + np.cumsum(np.asarray(prompt) == separator)
    return tokens_BT, segment_ids_BT


def generate(
    variables,
    hparams: Hparams,
    prompts,
    num_tokens,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed=0,
    num_samples: int = 1,
    routing: str | None = None,
    tokenizer: Tokenizer | None = None,
    stop: bool = True,
    prefill_chunk: int = 0,
    draft_tokens: int = 0,
    prompt_cache: PromptCache | None = None,
    on_tokens=None,
) -> Generation | None:
    """Continues prompts by up to `num_tokens` tokens.

    First the prompts are computed, in a single causally routed pass or in chunks. Then each token
    costs one step, in which a routed block computes and caches only the rows that it selects. All
    processes of a mesh in the context (`jax.set_mesh`) share the work and get every text. Chunks,
    drafts, the prompt cache and other rows of the batch change a row's result by rounding only.

    Args:
      variables: Linen variables of the model. With abstract ones, this only compiles.
      hparams: hyper-parameters of the model and its stage.
      prompts: sequences of one or more token ids.
      num_tokens: most new tokens of a row: an integer, or one for each prompt. They must fit the
        context with the prompt.
      temperature, top_p, top_k: as in `sample`.
      seed: an integer, or one for each prompt. A row's draws depend on it, on the number of its
        sample, and on the position.
      num_samples: number of continuations of each prompt.
      routing: causal rule, by default that of training.
      tokenizer: if given, its separator begins a document, its stops end one, and only stops and
        ids of text are drawn.
      stop: whether a stop ends the row.
      prefill_chunk: number of tokens of a prompt to compute at a time, which saves memory; 0: all.
      draft_tokens: number of tokens that the model without its routed blocks guesses at a time;
        one pass checks them (speculative decoding, Leviathan et al. 2023, arXiv 2211.17192). Drafts
        use the noise of the tokens instead of rejection sampling.
      prompt_cache: PromptCache; tokens that the prompts share with the texts of its last call are
        not computed again.
      on_tokens: function that is called with NumPy arrays as tokens are drawn: token_B, and which
        rows got theirs.

    Returns:
      A Generation, or None for abstract variables.

    Raises:
      ValueError: for an argument that does not fit the model, or a routing that looks ahead.
    """
    routing = routing or causal_routing(hparams)
    check_causal(hparams, routing)
    draw = {'temperature': temperature, 'top_p': top_p, 'top_k': top_k}
    check_request(
        hparams, prompts, num_tokens, seed, num_samples, prefill_chunk, draft_tokens, **draw
    )

    # Sizes of the caches: those of routed blocks begin small and grow if they may.
    context, model = hparams.data.sequence_length, hparams.model
    num_tokens = _of_each('num_tokens', num_tokens, prompts)
    length = max(map(operator.add, map(len, prompts), num_tokens))
    capacity = min(context, -(-length // _CAPACITY_STEP) * _CAPACITY_STEP)
    kept = PromptCache() if prompt_cache is None else prompt_cache
    unroll_once = functools.partial(ahead.call, unrolled_variables)
    unrolled = kept.unroll(unroll_once, variables, hparams, routing, tokenizer)
    if prompt_cache is not None:
        if num_samples > 1:
            right = 'must be 1 with a prompt_cache, which keeps one text per prompt'
            raise ValueError(f'num_samples={num_samples}: {right}')
        capacity = kept.capacity(length, _CAPACITY_STEP, context)
    first_capacity = routed_capacity = min(capacity, model.routing.cache_size(context, routing))
    grows = bool(model.routed_layers) and model.routing.overflow == 'grow'
    static = {'hparams': hparams, 'routing': routing, 'tokenizer': tokenizer, **draw}
    seed_P = np.broadcast_to(np.asarray(seed, np.uint32), len(prompts))
    keys_B = _row_keys(seed_P, num_samples)
    sizes = {'capacity': capacity, 'routed_capacity': None if grows else routed_capacity}

    def start(sizes, static):
        how = {name: static[name] for name in ('hparams', 'routing', 'tokenizer')}
        read, reused = _read(unrolled, prompts, prefill_chunk, kept, **how, **sizes)
        first = {'num_samples': num_samples, **sizes, **static}
        return *ahead.call(_start, unrolled, read, keys_B, **first), reused

    # Compute the prompts and draw the first token of each row.
    next_BT, cache, reused = start(sizes, static)
    ends = stop and tokenizer is not None
    texts = _Texts(prompts, num_samples, num_tokens, tokenizer.stops if ends else (), on_tokens)
    new_BT = texts.active_B[:, None]
    if ahead.is_abstract(cache):
        inputs = next_BT, new_BT, keys_B
        _, _, update = ahead.call(_step, unrolled, cache, *inputs, **static)
        ahead.call(_write, cache, *update)
        return None

    # Draw the next tokens, 1 + draft_tokens per round, until all rows have ended.
    draft, per_round = None, 1 + draft_tokens
    guessed_B = held_B = np.zeros(len(keys_B), int)
    if draft_tokens:
        of_draft = static | {'routing': 'bypass'}
        _, draft_cache, _ = start(sizes | {'routed_capacity': 1}, of_draft)
        draft = _Draft(unrolled, draft_cache, keys_B, of_draft)
    room = 0  # number of tokens until a routed block's cache may be full and must grow
    while True:
        drawn_BT = np.asarray(next_BT)
        texts.add(drawn_BT, new_BT)
        active_B = texts.active_B
        if not active_B.any():
            break
        if grows and room < per_round:
            used = longest_routed_row(cache)
            while routed_capacity < min(capacity, used + per_round):
                routed_capacity = min(capacity, 2 * routed_capacity)
            cache, room = resize_cache(cache, routed_capacity), routed_capacity - used
        tokens_BT, active_BT = next_BT, active_B[:, None]
        if draft is not None:
            last_B = drawn_BT[np.arange(len(drawn_BT)), np.maximum(new_BT.sum(axis=1) - 1, 0)]
            tokens_BT = draft.guess(last_B, active_B, draft_tokens)
            active_BT = active_BT & (np.arange(per_round) < texts.left_B[:, None])
        next_BT, held_BT, update = _step(unrolled, cache, tokens_BT, active_BT, keys_B, **static)
        cache, room, new_BT = _write(cache, *update), room - per_round, active_BT
        if draft is not None:
            new_BT = np.asarray(held_BT)
            draft.follow(cache, tokens_BT, new_BT.all(axis=1))
            guessed_B = guessed_B + active_BT[:, 1:].sum(axis=1)
            held_B = held_B + new_BT[:, 1:].sum(axis=1)

    caches = {routing: cache} if draft is None else {routing: cache, 'bypass': draft.cache}
    kept.keep(texts.rows, caches)
    return Generation(
        [np.array(row, np.int32) for row in texts.rows],
        texts.stopped_B.tolist(),
        np.asarray(_replicated(cache.dropped_B)),
        guessed_B,
        held_B,
        routed_capacity if routed_capacity > first_capacity else 0,
        reused,
    )
