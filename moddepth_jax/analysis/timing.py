"""Seconds of several things measured in turn, so that the machine's drift falls on all alike."""

import time

import jax
import numpy as np


def in_turn(calls: dict, repeats: int, settle: int = 2) -> dict[str, np.ndarray]:
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
