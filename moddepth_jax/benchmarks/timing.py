"""Timing functions in turn, and handling those that cannot run."""

import time

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.autotune_trial import describe_error


class DeviceLostError(RuntimeError):
    """The device computes nothing any more after an error; only a new process can go on."""


def device_responds() -> bool:
    """Whether the device still computes something."""
    try:
        jax.block_until_ready(jnp.zeros(8) + 1)
    except Exception:
        return False
    return True


def try_run(function, *args):
    """(result, None) of a call, or (None, the reason in one line) if it failed.

    Raises DeviceLostError if the device does not respond any more.
    """
    try:
        return jax.block_until_ready(function(*args)), None
    except Exception as error:  # a compiler may raise anything, and the other forms are still timed
        reason = describe_error(error)
    if not device_responds():
        raise DeviceLostError(reason)
    return None, reason


def time_interleaved(
    calls: dict, repeats: int, warmup: int = 2, counts: dict | None = None
) -> dict:
    """Seconds [repeats] of each call, in turn, so that drift of the machine affects all alike.

    `calls` are functions without arguments, by name; `warmup` rounds before them compile. Short
    ones may be called several times in a round, `counts` by name.
    """
    seconds, counts = {name: [] for name in calls}, counts or dict.fromkeys(calls, 1)
    for turn in range(warmup + repeats):
        for name, call in calls.items():
            begin = time.perf_counter()
            jax.block_until_ready([call() for _ in range(counts[name])])
            if turn >= warmup:
                seconds[name].append((time.perf_counter() - begin) / counts[name])
    return {name: np.array(values) for name, values in seconds.items()}
