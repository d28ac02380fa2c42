"""Times functions in interleaved rounds, and handles functions that fail."""

import time

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.autotune_trial import describe_error


class DeviceLostError(RuntimeError):
    """The device stopped working after an error; only a new process can use it."""


def device_responds() -> bool:
    """Return whether the device still computes."""
    try:
        jax.block_until_ready(jnp.zeros(8) + 1)
    except Exception:
        return False
    return True


def try_run(function, *args):
    """Call a function. Returns (result, None), or (None, reason in one line) if it fails.

    Raises DeviceLostError if the device no longer responds.
    """
    try:
        return jax.block_until_ready(function(*args)), None
    except Exception as error:  # a compiler may raise anything; other functions can still run
        reason = describe_error(error)
    if not device_responds():
        raise DeviceLostError(reason)
    return None, reason


def median_and_range(name: str, values) -> dict:
    """Return {name: median, name_range: [least, greatest]} of an array, for a row of results."""
    ends = [float(values.min()), float(values.max())]
    return {name: float(np.median(values)), f'{name}_range': ends}


def time_interleaved(
    calls: dict, repeats: int, warmup: int = 2, counts: dict | None = None
) -> dict:
    """Time calls in interleaved rounds, so that drift of the machine affects all equally.

    Args:
      calls: functions without arguments, by name.
      repeats: timed rounds.
      warmup: rounds before the timed ones, for compilation.
      counts: calls of each function in a round, by name. Default: 1.

    Returns:
      Seconds per call as an array [repeats], by name.
    """
    seconds, counts = {name: [] for name in calls}, counts or dict.fromkeys(calls, 1)
    for turn in range(warmup + repeats):
        for name, call in calls.items():
            begin = time.perf_counter()
            jax.block_until_ready([call() for _ in range(counts[name])])
            if turn >= warmup:
                seconds[name].append((time.perf_counter() - begin) / counts[name])
    return {name: np.array(values) for name, values in seconds.items()}
