"""The parent's side of a trial: starts the child process trial.py, ends it in time, reads it."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

from kernels_pallas.candidates import Device, Shapes
from kernels_pallas.joint_softmax import Parts

COMMAND = (sys.executable, '-P', '-m', 'kernels_pallas.trial')
OUT_OF_MEMORY = 'out of device memory'  # which another run may have more of
PACKAGE = pathlib.Path(__file__).parent


class UnavailableError(RuntimeError):
    """No child process can use the device: that says nothing about a candidate."""


def cache_folder() -> pathlib.Path:
    """This project's folder under XDG_CACHE_HOME, else ~/.cache."""
    cache = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
    return pathlib.Path(cache, 'moddepth_jax')


def run_trial(parts: Parts, shapes: Shapes, device: Device, limit: float) -> dict:
    """Has a child process check and time one candidate.

    Args:
      parts: the candidate.
      shapes: what it computes.
      device: this process's, which the child must find too.
      limit: seconds after which the child and what it started are killed.

    Returns:
      {'milliseconds': forward and backward}, or {'failed': reason in one line}.

    Raises:
      UnavailableError: the child did not come as far as the candidate.
    """
    request = {
        'parts': parts._asdict(),
        'shapes': shapes._asdict(),
        'kind': device.kind,
        'limit': limit,
    }
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            env=_environment(device),
            start_new_session=True,
        )
        status = None
        try:
            with contextlib.suppress(OSError):  # it has ended already, and says below why
                # Open until the child ends: its end of file says that this process is gone.
                child.stdin.write(json.dumps(request).encode() + b'\n')
                child.stdin.flush()
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = child.wait(timeout=limit)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            with contextlib.suppress(OSError):
                child.stdin.close()
        return _result(_text(out), _text(err), status, limit)


def _environment(device):
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get('PYTHONPATH')])]
    # The reference and XLA's form are compiled by one child and read by the others.
    cache = {'JAX_COMPILATION_CACHE_DIR': str(cache_folder() / 'xla')}
    return (
        cache
        | os.environ
        | {
            'PYTHONPATH': os.pathsep.join(paths),
            'JAX_PLATFORMS': 'cuda,cpu' if device.platform == 'gpu' else 'cpu',
            # This process holds most of the memory.
            'XLA_PYTHON_CLIENT_PREALLOCATE': 'false',
        }
    )


def _text(file):
    file.seek(0)
    return file.read().decode(errors='replace')


def _result(out, err, status, limit):
    """What a child printed; status None: it was killed at the limit."""
    said = {}
    for line in out.splitlines():
        with contextlib.suppress(ValueError, TypeError):
            said |= json.loads(line)
    why = ([line for line in err.splitlines() if line.strip()] or ['it says nothing'])[-1].strip()
    if 'milliseconds' in said or 'failed' in said:
        return {name: said[name] for name in ('milliseconds', 'failed') if name in said}
    if status is None or status == -signal.SIGALRM:
        why = f'not done in {limit:g} s'
    elif 'RESOURCE_EXHAUSTED' in err:
        why = OUT_OF_MEMORY
    elif status < 0:
        why = f'it ended by signal {-status}: {why}'
    else:
        why = f'it ended with status {status}: {why}'
    if 'ready' not in said:
        raise UnavailableError(said.get('unavailable') or f'{" ".join(COMMAND[1:])}: {why}'[:240])
    return {'failed': why[:240]}
