"""The child process of runner.py: runs the cases it receives, and answers each with a row."""

import gc
import importlib
import json
import os
import sys
import traceback

from moddepth_jax.benchmarks.results import SOURCES


class WrongError(Exception):
    """A result is wrong; the message says which one, and by how much."""


class SkippedError(Exception):
    """This device does not support the case; the message says why."""


def serve(connection, log, cases: dict, on_gpu: bool):
    """Answer each case name from the connection with a row, until the connection closes.

    All output goes to the file `log`. With `on_gpu`, nothing runs if JAX has no GPU.
    """
    redirect_output(log)
    connection.send({'status': 'ready'})
    while True:
        try:
            name = connection.recv()
        except EOFError:
            return
        print(f'--- {name}', flush=True)
        connection.send(run_case(cases[name], on_gpu))


def redirect_output(log):
    """Start a process group, which can be killed as one, and send its output to a file."""
    os.setsid()
    with open(log, 'ab') as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr  # unbuffered, so that a crash loses nothing


def run_case(case, on_gpu: bool) -> dict:
    """Run a case and return its row: `status`, and `reason` if the status is not ok."""
    if on_gpu and case.in_process:
        import jax

        if jax.default_backend() != 'gpu':
            return {'lost': f'JAX has no GPU any more, it sees {jax.devices()[0]}'}
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
