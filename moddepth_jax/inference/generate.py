"""Text from a model, token by token, with the causal routing that its evaluation used."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np

from moddepth_jax.data.tokenizers.tokenizer import Tokenizer
from moddepth_jax.hparams import Hparams
from moddepth_jax.inference.sampling import check_sampling, sample
from moddepth_jax.model.decoding import decode_step, prefill, unroll
from moddepth_jax.model.kv_cache import longest_routed_row, resize_cache, update_cache
from moddepth_jax.model.transformer import causal_routing, check_causal

SHORTEST = 16  # prompts are padded to a power of two from here on: few shapes, few compilations
SLOTS = 128  # slots of dense caches come in multiples of this


@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` returns, a row for each sample of each prompt, samples adjacent.

    Attributes:
      tokens: int32 arrays, the prompt and what follows it, without the id that ended it.
      stopped: whether a row ended with its document and not with num_tokens.
      refused: times that a routed block had no slot for a token that its rule let in, over rows
        and blocks; under `overflow` skip such a token passes the block by. Those of a prompt count
        once, whatever its samples.
      grown_to: slots of the routed blocks' caches where they had to grow, else 0.
    """

    tokens: list[np.ndarray]
    stopped: list[bool]
    refused: int
    grown_to: int

    @property
    def notes(self) -> list[str]:
        """What a user should know of the caches of routed blocks."""
        notes = []
        if self.refused:
            notes.append(f'{self.refused} times a routed block had no cache slot for a token')
        if self.grown_to:
            notes.append(f'caches of the routed blocks grew to {self.grown_to} slots')
        return notes


def check_prompt(hparams: Hparams, prompt, num_tokens: int):
    """Raises ValueError where a prompt and what is to follow do not fit the context.

    Args:
      hparams: of the model; the context is `data.sequence_length`.
      prompt: token ids, any sequence.
      num_tokens: tokens to add.
    """
    context = hparams.data.sequence_length
    _integers('prompt', prompt)
    _integers('num_tokens', [num_tokens])
    if len(prompt) == 0:
        raise ValueError('the prompt has no token: start it with the separator at least')
    outside = [token for token in prompt if not 0 <= token < hparams.model.vocab_size]
    if outside:
        size = hparams.model.vocab_size
        raise ValueError(f'token id {outside[0]} of the prompt: must lie in [0, {size})')
    if num_tokens < 1:
        raise ValueError(f'num_tokens={num_tokens}: must be 1 or more')
    if len(prompt) + num_tokens > context:
        raise ValueError(
            f'a prompt of {len(prompt)} tokens and {num_tokens} to generate do not fit the context '
            f'data.sequence_length={context}: shorten either by '
            f'{len(prompt) + num_tokens - context}'
        )


def _integers(name, values):
    try:
        for value in values:
            operator.index(value)
    except TypeError:
        raise ValueError(f'{name}={str(values)[:60]}: must hold integers only') from None


def _everywhere(tree):
    """Arrays that the host reads, whole on every device of the mesh of the context."""
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    return jax.lax.with_sharding_constraint(tree, jax.sharding.PartitionSpec())


@functools.partial(jax.jit, static_argnums=1)
def _keys(seed_P, num_samples):
    """A PRNG key for each row: of its prompt's seed and the number of its sample."""
    sample_B = jnp.tile(jnp.arange(num_samples), len(seed_P))
    keys_B = jax.vmap(jax.random.key)(jnp.repeat(seed_P, num_samples))
    return _everywhere(jax.vmap(jax.random.fold_in)(keys_B, sample_B))


def _draw(logits_BV, keys_B, lengths_B, temperature, top_p, tokenizer):
    if tokenizer is not None:  # the model may have more ids than the tokenizer, which has gaps
        known_V = np.zeros(logits_BV.shape[1], bool)
        known_V[np.flatnonzero(tokenizer.token_bytes_V)] = True
        known_V[list(tokenizer.stops)] = True
        logits_BV = jnp.where(known_V[None], logits_BV, -jnp.inf)
    keys_B = jax.vmap(jax.random.fold_in)(keys_B, lengths_B)
    return _everywhere(sample(keys_B, logits_BV, temperature, top_p))


_unrolled = jax.jit(unroll, static_argnums=(1, 2))


_DRAW = ('temperature', 'top_p', 'tokenizer')


@functools.partial(
    jax.jit,
    static_argnames=('hparams', 'routing', 'slots', 'routed_capacity', 'num_samples', *_DRAW),
)
def _start(unrolled, tokens_BT, segment_ids_BT, keys_B, *, num_samples, hparams, routing, slots,
           routed_capacity, **draw):  # fmt: skip
    """The first new token of each row, and the cache of its prompt."""
    logits_BV, cache = prefill(
        unrolled,
        tokens_BT,
        segment_ids_BT,
        hparams=hparams,
        routing=routing,
        capacity=slots,
        routed_capacity=routed_capacity,
    )
    repeat = functools.partial(jnp.repeat, repeats=num_samples, axis=0)
    logits_BV, cache = jax.tree.map(repeat, (logits_BV, cache))
    first_B = jnp.arange(len(keys_B)) % num_samples == 0
    cache = cache._replace(dropped_B=jnp.where(first_B, cache.dropped_B, 0))
    return _draw(logits_BV, keys_B, cache.lengths_B, **draw), cache


@functools.partial(jax.jit, static_argnames=('hparams', 'routing', *_DRAW))
def _step(unrolled, cache, token_B, active_B, keys_B, *, hparams, routing, tokenizer, **draw):
    """The token after `token_B` of each row, and what `_write` needs."""
    parted = tokenizer is not None and not hparams.model.across_documents
    begins_B = token_B == (tokenizer.separator if parted else -1)
    logits_BV, entries, dropped_B = decode_step(
        unrolled, cache, token_B, begins_B, active_B, hparams=hparams, routing=routing
    )
    next_B = _draw(logits_BV, keys_B, cache.lengths_B + 1, tokenizer=tokenizer, **draw)
    return next_B, (entries, begins_B, dropped_B, active_B)


_write = jax.jit(update_cache, donate_argnums=0)


def _padded(prompts, tokenizer, most):
    """tokens_BT and segment_ids_BT of prompts: a power of two of tokens, `most` at the most."""
    longest = max(map(len, prompts))
    length = min(most, max(SHORTEST, 1 << (longest - 1).bit_length()))
    tokens_BT = np.zeros((len(prompts), length), np.int32)
    segment_ids_BT = np.zeros_like(tokens_BT)
    for row, prompt in enumerate(prompts):
        tokens_BT[row, : len(prompt)] = prompt
        begins = np.zeros(len(prompt), int)
        if tokenizer is not None:  # as in training, a document does not see the one before it
            begins = np.asarray(prompt) == tokenizer.separator
        segment_ids_BT[row, : len(prompt)] = 1 + np.cumsum(begins)
    return tokens_BT, segment_ids_BT


def generate(
    variables,
    hparams: Hparams,
    prompts,
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed=0,
    num_samples: int = 1,
    routing: str | None = None,
    tokenizer: Tokenizer | None = None,
    stop: bool = True,
    on_tokens=None,
) -> Generation:
    """Continues prompts by up to `num_tokens` tokens each.

    The prompts run in one causal-routed pass; then each token costs one step, which in a routed
    block computes the entering rows only and keeps their keys and values alone. A row is drawn by
    `seed`, the number of its sample and its positions: its batch mates change nothing but
    rounding.

    Where a mesh is that of the context (`jax.set_mesh`) its devices share the work; each of several
    processes calls this then, and gets every text. Rows that do not divide are computed by all.

    Args:
      variables: of the Transformer; TrainState.variables.
      hparams: of the same; the context is `data.sequence_length`.
      prompts: a list of token id sequences, each of one token at least, of any lengths.
      num_tokens: to add; the longest prompt and they fit the context.
      temperature, top_p: of `sample`.
      seed: of the draws, an integer; or one for each prompt, so that different prompts do not
        share them.
      num_samples: continuations of each prompt.
      routing: a causal rule; None for the one the model was trained for.
      tokenizer: its separator begins a document, its stops end one, and nothing is drawn but they
        and ids that stand for text; None: the text is one document, any id of the model may come.
      stop: end a row with its document; else the next document follows.
      on_tokens: called with (token_B, active_B), NumPy arrays over rows, as tokens are drawn.

    Raises:
      ValueError: no prompt, an empty one, one that does not fit, an unknown id, a temperature or
        top_p out of range, a routing that looks ahead or that the model cannot run.
    """
    how = {'temperature': temperature, 'top_p': top_p}
    routing = check_request(
        hparams, prompts, num_tokens, seed=seed, num_samples=num_samples, routing=routing, **how
    )
    context, model = hparams.data.sequence_length, hparams.model
    longest = max(map(len, prompts))
    slots = min(context, -(-(longest + num_tokens) // SLOTS) * SLOTS)
    first_slots = routed_capacity = min(slots, model.routing.cache_size(context, routing))
    grows = bool(model.routed_layers) and model.routing.overflow == 'grow'
    unrolled = _unrolled(variables, hparams, routing)
    how |= {'hparams': hparams, 'routing': routing, 'tokenizer': tokenizer}
    tokens_BT, segment_ids_BT = _padded(prompts, tokenizer, slots)
    seed_P = np.broadcast_to(np.asarray(seed, np.uint32), len(prompts))
    keys_B = _keys(seed_P, num_samples)
    token_B, cache = _start(
        unrolled,
        tokens_BT,
        segment_ids_BT,
        keys_B,
        num_samples=num_samples,
        slots=slots,
        routed_capacity=None if grows else routed_capacity,
        **how,
    )
    rows = [list(prompt) for prompt in prompts for _ in range(num_samples)]
    active_B = np.ones(len(rows), bool)
    room = 0  # steps until a routed block's cache may be full, where it grows
    for left in reversed(range(num_tokens)):
        drawn_B = np.asarray(token_B)
        if stop and tokenizer is not None:
            active_B = active_B & ~np.isin(drawn_B, tokenizer.stops)
        for row in np.flatnonzero(active_B):
            rows[row].append(drawn_B[row])
        if on_tokens is not None:
            on_tokens(drawn_B, active_B)
        if not left or not active_B.any():
            break
        if grows and not room:
            used = longest_routed_row(cache)
            while routed_capacity <= used:
                routed_capacity = min(slots, 2 * routed_capacity)
            cache, room = resize_cache(cache, routed_capacity), routed_capacity - used
        token_B, news = _step(unrolled, cache, token_B, active_B, keys_B, **how)
        cache, room = _write(cache, *news), room - 1
    return Generation(
        [np.array(row, np.int32) for row in rows],
        [not running for running in active_B.tolist()],
        int(jnp.sum(cache.dropped_B)),
        routed_capacity if routed_capacity > first_slots else 0,
    )


def check_request(
    hparams: Hparams,
    prompts,
    num_tokens: int,
    *,
    temperature: float,
    top_p: float,
    seed,
    num_samples: int,
    routing: str | None,
) -> str:
    """Raises ValueError as `generate` does, which takes the same; returns the routing."""
    routing = causal_routing(hparams) if routing is None else routing
    check_causal(hparams, routing)
    if not len(prompts):
        raise ValueError('prompts=[]: must hold one at least')
    for prompt in prompts:
        check_prompt(hparams, prompt, num_tokens)
    _integers('num_samples', [num_samples])
    if num_samples < 1:
        raise ValueError(f'num_samples={num_samples}: must be 1 or more')
    seeds = [seed] if np.ndim(seed) == 0 else list(seed)
    _integers('seed', seeds)
    for one in seeds:
        if not 0 <= one < 2**32:
            raise ValueError(f'seed={one}: must lie in [0, 2**32)')
    if len(seeds) not in (1, len(prompts)):
        right = f'must be one, or one for each of the {len(prompts)} prompts'
        raise ValueError(f'seed={str(seed)[:60]}: holds {len(seeds)}; {right}')
    check_sampling(temperature, top_p)
    return routing
