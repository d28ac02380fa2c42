"""Draws the next token from its logits."""

import jax
import jax.numpy as jnp
import numpy as np


def nucleus(logits_V, top_p: float):
    """Set logits, float32 [V], to -inf outside the smallest set of tokens that reaches `top_p`.

    Nucleus sampling (Holtzman et al. 2020, arXiv 1904.09751, section 3.1). The most likely token is
    always kept; of equal logits, the lower index comes first.
    """
    order_V = jnp.argsort(-logits_V, stable=True)
    chance_V = jax.nn.softmax(logits_V[order_V])
    before_V = jnp.cumsum(chance_V) - chance_V
    kept_V = jnp.zeros(logits_V.shape, bool).at[order_V].set(before_V < top_p, unique_indices=True)
    return jnp.where(kept_V, logits_V, -jnp.inf)


def sample(keys_B, logits_BV, temperature: float, top_p: float = 1.0, top_k: int = 0):
    """Draw token ids int32 [B] from softmax(logits / temperature); argmax at temperature 0.

    A row's draw depends only on its own key and logits. A logit of -inf is never drawn. The three
    settings are Python numbers and apply in this order: the temperature; the `top_k` most likely
    tokens (0: all; of equal logits, the lower indices); the `nucleus` of these if top_p is below 1.
    """
    if temperature < np.finfo(np.float32).tiny:  # float32 cannot divide by less
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)

    def draw(key, logits_V):
        # The maximum is subtracted first, so that a low temperature overflows to -inf only.
        logits_V = (logits_V - jnp.max(logits_V)) / temperature
        if 0 < top_k < len(logits_V):
            values_K, ids_K = jax.lax.top_k(logits_V, top_k)
            logits_V = jnp.full_like(logits_V, -jnp.inf).at[ids_K].set(values_K)
        if top_p < 1:  # rounded sums of probabilities may reach 1 before the last token
            logits_V = nucleus(logits_V, top_p)
        return jax.random.categorical(key, logits_V).astype(jnp.int32)

    return jax.vmap(draw)(keys_B, logits_BV)
