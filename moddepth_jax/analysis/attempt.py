"""Benchmarks go on where one of the things they measure cannot run."""

import jax
import jax.numpy as jnp


class DeviceLostError(RuntimeError):
    """After an error the device computes nothing more: only a new process can go on."""


def reason(error: Exception) -> str:
    """One line that says why something did not run."""
    text = str(error)
    if 'RESOURCE_EXHAUSTED' in text or 'OUT_OF_MEMORY' in text:
        return 'out of device memory'
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return ': '.join([type(error).__name__, *lines[:1]])[:240]


def attempt(function, *arguments):
    """(result, None), or (None, why not). The result is waited for.

    Raises:
      DeviceLostError: nothing else runs after it either.
    """
    try:
        return jax.block_until_ready(function(*arguments)), None
    except Exception as error:  # a compiler may raise anything, and the others are to be measured
        why = reason(error)
    try:
        jax.block_until_ready(jnp.zeros(8) + 1)
    except Exception as error:
        raise DeviceLostError(why) from error
    return None, why
