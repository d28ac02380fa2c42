"""Several processes as one run: how they agree, and how an error of one becomes that of all."""

import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from moddepth_jax.training.processes import is_first

_CHUNK = 1024  # bytes; each length that is broadcast compiles a program of its own
_GLANCES = 10  # at a file, a second apart: network file systems are slow to show a new one


class ToldByAnother(ValueError):
    """An error that another process of this run has met and tells: this one ends in silence."""

    everywhere = told_by_another = True


def from_first(function: Callable[[], Any]) -> Any:
    """Calls `function` on process 0 alone; every process gets what it returns, or its error.

    Every process has to call this, and in the same order as other exchanges of theirs.

    Args:
      function: without arguments; returns JSON values.

    Raises:
      ToldByAnother: a ValueError of the same one line, on the other processes, where `function`
        raised anything on process 0; there the error goes on as it is.
    """
    if jax.process_count() == 1:
        return function()
    answer, error = {}, None
    if is_first():
        answer, error = _attempt(function)
    answer = _exchange(answer, 0)
    if error is not None:
        error.everywhere = True
        raise error
    if 'error' in answer:
        raise ToldByAnother(answer['error'])
    return answer['result']


def on_first(make: Callable[[], Any]) -> Any:
    """Calls `make` on process 0 alone, as `from_first` does; what it made there, None elsewhere."""
    made = []
    from_first(lambda: made.append(make()))
    return made[0] if made else None


def check_alike(values: dict) -> None:
    """Refuses a run whose processes were started with different things.

    Args:
      values: of this process, JSON values by name, in nested dicts.

    Raises:
      ValueError: one line, where those of another process than the first are not those of process
        0; it names the first that differs.
    """
    if jax.process_count() == 1:
        return
    mine = _flat(json.loads(json.dumps(values)))
    first = from_first(lambda: mine)

    def compare():
        for name in dict.fromkeys((*mine, *first)):
            here, there = (side.get(name, 'absent') for side in (mine, first))
            if here != there:
                where = f'{here!r} on process {jax.process_index()} and {there!r} on 0'
                raise ValueError(f'{name}: {where}; must be the same on all processes')

    together(compare)


def check_shared(path: pathlib.Path) -> None:
    """Refuses a run whose processes do not see one directory: its checkpoints would be torn apart.

    Args:
      path: a file that process 0 has written there and leaves alone now.

    Raises:
      ValueError: one line, where another process finds no such file, or another text in it.
    """
    if jax.process_count() == 1:
        return
    text = from_first(path.read_text)

    def compare():
        for _ in range(_GLANCES):
            if path.exists() and path.read_text() == text:
                return
            time.sleep(1)
        right = 'must be one directory that all processes share'
        what = f'process {jax.process_index()} does not find the {path.name} of process 0'
        raise ValueError(f'--workdir={path.parent}: {what}; {right}')

    together(compare)


def together(function: Callable[[], Any]) -> Any:
    """Calls `function` on every process; where it fails on any of them, none goes on.

    Inside, no process should wait for another: one that has failed before does not come.

    Returns:
      What `function` returned here.

    Raises:
      ToldByAnother: a ValueError of one line, where the first process on which `function` failed is
        another one; on that one, its error goes on as it is.
    """
    if jax.process_count() == 1:
        return function()
    result, error = None, None
    try:
        result = function()
    except Exception as caught:
        error = caught
    failed_P = multihost_utils.process_allgather(np.int32(error is not None))
    if not failed_P.any():
        return result
    first = int(np.argmax(failed_P))
    told = _exchange({'error': _one_line(error)}, first)
    if jax.process_index() == first:
        error.everywhere = True
        raise error
    raise ToldByAnother(told['error'])


def _flat(values, prefix=''):
    flat = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f'{prefix}{name}.')
        else:
            flat[prefix + name] = value
    return flat


def _attempt(function):
    try:
        return {'result': function()}, None
    except Exception as error:
        return {'error': _one_line(error)}, error


def _one_line(error):
    return ' '.join(str(error).split()) or type(error).__name__


def _exchange(value, source):
    """The JSON `value` of process `source`, on every process."""
    text = json.dumps(value).encode()
    here = jax.process_index() == source
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text)), here))
    padded = np.zeros(-(-length // _CHUNK) * _CHUNK, np.uint8)
    if here:
        padded[:length] = np.frombuffer(text, np.uint8)
    padded = multihost_utils.broadcast_one_to_all(padded, here)
    return json.loads(padded[:length].tobytes())
