"""Text from a model, with the causal routing that its evaluation used."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from moddepth_jax.data.tokenizer import Tokenizer
from moddepth_jax.hparams import Hparams
from moddepth_jax.inference.sampling import sample
from moddepth_jax.model.transformer import Transformer, causal_routing, check_routing


def check_prompt(hparams: Hparams, prompt, num_tokens: int):
    """Raises ValueError where a prompt and what is to follow do not fit the context.

    Args:
      hparams: of the model; the context is `data.sequence_length`.
      prompt: token ids, any sequence.
      num_tokens: tokens to add.
    """
    context = hparams.data.sequence_length
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


@functools.partial(jax.jit, static_argnames=('hparams', 'routing', 'temperature', 'tokenizer'))
def _extend(params, tokens_BT, start, stop, key, *, hparams, routing, temperature, tokenizer):
    def add(position, tokens_BT):
        segment_ids_BT = None
        if tokenizer is not None:  # as in training, a document does not see the one before it
            segment_ids_BT = 1 + jnp.cumsum(tokens_BT == tokenizer.separator, axis=1)
        logits_BTV, _ = Transformer(hparams).apply(
            {'params': params}, tokens_BT, segment_ids_BT, routing
        )
        logits_BV = jax.lax.dynamic_index_in_dim(logits_BTV, position - 1, axis=1, keepdims=False)
        if tokenizer is not None:  # the model may have more ids than the tokenizer
            known_V = jnp.arange(logits_BV.shape[1]) < tokenizer.vocab_size
            logits_BV = jnp.where(known_V[None], logits_BV, -jnp.inf)
        token_B = sample(jax.random.fold_in(key, position), logits_BV, temperature)
        return tokens_BT.at[:, position].set(token_B)

    return jax.lax.fori_loop(start, stop, add, tokens_BT)


def generate(
    params,
    hparams: Hparams,
    prompt,
    num_tokens: int,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    num_samples: int = 1,
    routing: str | None = None,
    tokenizer: Tokenizer | None = None,
) -> np.ndarray:
    """Continues a prompt by `num_tokens`, each from one causal-routed forward pass of the whole.

    Args:
      params: of the Transformer.
      hparams: of the same.
      prompt: token ids, at least one.
      num_tokens: to add; prompt and addition fit `data.sequence_length`.
      temperature: of `sample`.
      seed: of the draws.
      num_samples: independent continuations.
      routing: a causal rule; None for the one the model was trained for.
      tokenizer: its separator starts a new document, and only its ids are drawn; None: the text
        is one document, and any id of the model may come.

    Returns:
      int32 [num_samples, len(prompt) + num_tokens], the prompt first.

    Raises:
      ValueError: an empty prompt, one that does not fit, an unknown id, a negative temperature, a
        routing that looks ahead or that the model cannot run.
    """
    routing = causal_routing(hparams) if routing is None else routing
    check_routing(hparams, routing)
    if routing == 'top_c' and hparams.model.routed_layers:
        raise ValueError("routing='top_c' looks at later tokens, which do not exist yet")
    check_prompt(hparams, prompt, num_tokens)
    if temperature < 0:
        raise ValueError(f'temperature={temperature}: must be 0 or more')
    # Places not written yet hold token 0; nothing before them sees it.
    tokens_BT = np.zeros((num_samples, hparams.data.sequence_length), np.int32)
    tokens_BT[:, : len(prompt)] = prompt
    stop = len(prompt) + num_tokens
    tokens_BT = _extend(
        params,
        jnp.asarray(tokens_BT),
        len(prompt),
        stop,
        jax.random.key(seed),
        hparams=hparams,
        routing=routing,
        temperature=temperature,
        tokenizer=tokenizer,
    )
    return np.asarray(tokens_BT)[:, :stop]
