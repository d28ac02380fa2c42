"""Benchmarks go on where one of the things they measure cannot run."""

import time

import jax
import jax.numpy as jnp
import numpy as np


class DeviceLostError(RuntimeError):
    """After an error the device computes nothing more: only a new process can go on."""


def reason(error: Exception) -> str:
    """One line that says why something did not run."""
    text = str(error)
    if 'RESOURCE_EXHAUSTED' in text or 'OUT_OF_MEMORY' in text:
        return 'out of device memory'
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return ': '.join([type(error).__name__, *lines[:1]])[:240]


def try_run(function, *arguments):
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


def time_interleaved(calls: dict, repeats: int, settle: int = 2) -> dict[str, np.ndarray]:
    """Seconds of each call, by name, [repeats].

    Args:
      calls: functions without arguments, whose result is waited for.
      repeats: rounds that are timed.
      settle: rounds before them: the first compiles.
    """
    seconds = {name: [] for name in calls}
    for turn in range(settle + repeats):
        for name, call in calls.items():
            begin = time.perf_counter()
            jax.block_until_ready(call())
            if turn >= settle:
                seconds[name].append(time.perf_counter() - begin)
    return {name: np.array(values) for name, values in seconds.items()}
