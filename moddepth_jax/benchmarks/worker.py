"""The child process of runner.py: runs the cases it receives, and answers each with a row."""

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import traceback

from moddepth_jax.benchmarks.results import SOURCES


class WrongError(Exception):
    """A result is wrong; the message says which one, and by how much."""


class SkippedError(Exception):
    """This device does not support the case; the message says why."""


def serve(connection, log, cases: dict, on_gpu: bool):
    """Answer each case name from the connection with a row, until the connection closes.

    All output goes to the file `log`. With `on_gpu` it is ready when JAX has found the GPU, unless
    a case starts a command that uses the GPU itself; without a GPU it answers `lost`, and ends.
    """
    redirect_output(log)
    if on_gpu and all(case.in_process for case in cases.values()) and (found := _find_lost()):
        connection.send({'status': 'lost', 'reason': found})
        return
    connection.send({'status': 'ready'})
    while True:
        try:
            name = connection.recv()
        except EOFError:
            return
        print(f'--- {name}', flush=True)
        connection.send(run_case(cases[name]))


def redirect_output(log):
    """Start a process group, which can be killed as one, and send its output to a file.

    The process ends with its parent.
    """
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    with open(log, 'ab') as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr  # unbuffered, so that a crash loses nothing


def _find_lost():
    """Import JAX, and say what it sees instead of a GPU, or nothing."""
    import jax

    if jax.default_backend() != 'gpu':
        return f'JAX has no GPU any more, it sees {jax.devices()[0]}'
    return ''


def run_case(case) -> dict:
    """Run a case and return its row: `status`, and `reason` if the status is not ok."""
    module, _, name = case.run.partition(':')
    try:
        function = getattr(importlib.import_module(module), name)
        row = {'status': 'ok', **function(**case.arguments)}
        json.dumps(row)  # a row that is not JSON is an error of this case
        return row
    except WrongError as error:
        return {'status': 'wrong', 'reason': str(error)}
    except SkippedError as error:
        return {'status': 'skipped', 'reason': str(error)}
    except Exception as error:
        return _failed(error, case)
    finally:
        gc.collect()


def _failed(error, case):
    """The row of an error; with `ends`, the device no longer responds."""
    if isinstance(error, ModuleNotFoundError) and str(error.name).split('.')[0] not in SOURCES:
        why = f'no Python module {error.name}; docs/gpu.md says how to carry it'
        return {'status': 'missing', 'reason': why}
    traceback.print_exception(error)
    reason = f'{type(error).__name__}: {error}'[:240]
    if not case.in_process:
        return {'status': 'failed', 'reason': reason}
    if isinstance(error, ValueError) and 'not supported here' in reason:
        return {'status': 'skipped', 'reason': ' '.join(str(error).split())[:240]}
    from kernels_pallas.autotune_trial import describe_error
    from moddepth_jax.benchmarks.timing import device_responds

    return {'status': 'failed', 'reason': describe_error(error), 'ends': not device_responds()}
