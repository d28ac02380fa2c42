"""Benchmarks go on where one of the things they measure cannot run."""

import contextlib
import os
import sys
import threading

import jax
import jax.numpy as jnp

HUNG = 75  # exit status of a process whose device does not answer any more


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


@contextlib.contextmanager
def watched(name: str, seconds: float):
    """Ends the process with status HUNG where the body takes longer: a kernel that never ends."""

    def end():
        print(f'{name}: no answer in {seconds:g} s', file=sys.stderr, flush=True)
        os._exit(HUNG)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
