"""Drawing the next token from its logits."""

import jax
import jax.numpy as jnp


def sample(key, logits_BV, temperature: float):
    """Token ids int32 [B] drawn from softmax(logits / temperature); the argmax at temperature 0.

    Args:
      key: one PRNG key; rows draw independently.
      logits_BV: float32 [B, V].
      temperature: 0 or more.
    """
    if temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    return jax.random.categorical(key, logits_BV / temperature).astype(jnp.int32)
