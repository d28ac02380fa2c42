"""Measures the candidates for an attention once for each GPU model, and remembers the results.

Each candidate is checked and timed in a child process (autotune_trial.py) under a time limit: a
crash, a hang, a wrong result or too little memory costs that candidate alone. The results are a
file under the user's cache directory; to measure again, delete it.
"""

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import NamedTuple

from absl import logging

LIMIT_SECONDS = 60.0  # for one candidate: its start, compilation, check and times
TOTAL_SECONDS = 300.0  # for all measurements of a process
MIN_SECONDS = 10.0  # with less of the total remaining no candidate is started
COMMAND = (sys.executable, '-P', '-m', 'kernels_pallas.autotune_trial')
OUT_OF_MEMORY = 'out of device memory'  # another run may have more of it
PACKAGE = pathlib.Path(__file__).parent


class UnavailableError(RuntimeError):
    """No child process can use the device, which is no candidate's fault."""


class Fastest(NamedTuple):
    """The outcome of a measurement.

    Attributes:
      parts: the fastest `backends.Parts` that are right; empty if `not_measured`.
      times: of every candidate that is right, in words.
      failed: `candidate: reason` of the others.
      new: whether to warn of failures: measured now, not read from a file; or none was right.
      not_measured: why nothing could be measured; '': it was.
    """

    parts: tuple = ()
    times: str = ''
    failed: tuple[str, ...] = ()
    new: bool = False
    not_measured: str = ''


_lock = threading.Lock()
_known = {}  # what this process has measured or read, by digest of the key
_spent = 0.0  # seconds


def fastest(plan, shapes, device) -> Fastest:
    """Returns the fastest candidate that is right: as remembered, else measured now.

    Args:
      plan: `backends.Plan` of the shapes on the device.
      shapes: `backends.Shapes`; candidates are timed at this size.
      device: `backends.Device`, this process's.
    """
    key = key_of(shapes, device)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    with _lock:
        if digest not in _known:
            try:
                _known[digest] = _read_or_measure(digest, key, plan, shapes, device)
            except UnavailableError as error:
                _warn(f'depth_attention: nothing can be measured: {error}')
                _known[digest] = ({'not_measured': str(error)}, False)
        results, new = _known[digest]
        _known[digest] = results, False
    return _judge(results, new, plan, shapes)


def _judge(results, new, plan, shapes):
    """The fastest right candidate, or the first of `plan.proven` not known to be wrong."""
    if 'not_measured' in results:
        return Fastest(not_measured=results['not_measured'])
    by_label = {parts.label(shapes): parts for parts in plan.candidates + plan.otherwise}
    results = {name: result for name, result in results.items() if name in by_label}
    right = {n: r['milliseconds'] for n, r in results.items() if 'milliseconds' in r}
    failed = {name: r['failed'] for name, r in results.items() if 'failed' in r}
    reasons = tuple(f'{name}: {reason}' for name, reason in failed.items())
    ranked = sorted(right, key=right.get)
    if ranked:
        times = ', '.join(f'{name} {right[name]:.3g} ms' for name in ranked)
        return Fastest(by_label[ranked[0]], f'the fastest of {times}', reasons, new)
    unbroken = [p for p in plan.proven if failed.get(p.label(shapes)) in (None, OUT_OF_MEMORY)]
    return Fastest((*unbroken, plan.proven[-1])[0], 'as no candidate was right', reasons, True)


def key_of(shapes, device) -> dict:
    """The key of a stored measurement. Sizes are rounded to powers of two: fewer are measured."""

    def power(size):
        return 1 << (size - 1).bit_length() if size else 0

    q, k = ((power(x[0]), power(x[1]), *x[2:]) for x in (shapes.q, shapes.k))
    rounded = shapes._replace(q=q, k=k, slot_rows=power(shapes.slot_rows))
    return {
        'device': device.kind,
        'capability': list(device.capability or ()),
        'software': device.software,
        'xla_flags': os.environ.get('XLA_FLAGS', ''),
        'versions': _versions(),
        'shapes': json.loads(json.dumps(rounded._asdict())),
    }


@functools.cache
def _versions():
    """Of JAX, of cuDNN and of the kernels: their sources, which change more often than a number."""
    sources = b''.join(path.read_bytes() for path in sorted(PACKAGE.rglob('*.py')))
    found = {'kernels': hashlib.sha256(sources).hexdigest()[:16]}
    for name in ('jax', 'jaxlib', 'nvidia-cudnn-cu12', 'nvidia-cudnn-cu13'):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def cache_folder() -> pathlib.Path:
    """Returns this project's folder under XDG_CACHE_HOME, else ~/.cache."""
    cache = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
    return pathlib.Path(cache, 'moddepth_jax')


def _read_or_measure(digest, key, plan, shapes, device):
    """(results by label, whether they are new)."""
    name = re.sub(r'\W+', '_', device.kind)
    path = cache_folder() / 'attention' / f'{name}-{digest}.json'
    if (results := _read(path, key)) is not None:
        return results, False
    with _exclusive(path):
        # Another process may have measured while this one waited.
        if (results := _read(path, key)) is not None:
            return results, False
        results, complete = _measure(plan, shapes, device)
        if complete:
            _write(path, {'key': key, 'results': results})
    return results, True


def _read(path, key):
    """The results in a file; None if it is missing, damaged, or of another key."""
    try:
        kept = json.loads(path.read_text(encoding='utf-8'))
        if kept['key'] != key:
            return None
        results = kept['results']
        right = all(float(r['milliseconds']) > 0 for r in results.values() if 'failed' not in r)
        return results if results and right else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write(path, contents):
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written under a name of this process: a reader finds the old file or the new one.
        new = path.with_suffix(f'.{os.getpid()}')
        new.write_text(json.dumps(contents, indent=1), encoding='utf-8')
        os.replace(new, path)
    except OSError as error:
        _warn(f'depth_attention: {path}: {error.strerror}: each start will measure again')


@contextlib.contextmanager
def _exclusive(path):
    """Waits for other processes that measure the same: together they would time each other."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(path.with_suffix('.lock'), 'w'))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _measure(plan, shapes, device):
    """(results by label, whether every candidate was tried)."""
    global _spent
    _warn(
        f'depth_attention on {device.kind}: measuring {len(plan.candidates)} candidates for '
        f'{shapes.q[0]} x {shapes.q[1]} queries, once: at most {LIMIT_SECONDS:g} s each; '
        'MODDEPTH_MEASURE=0 skips this'
    )
    results, waiting, complete = {}, list(plan.candidates), True
    first = [p.label(shapes) for p in plan.candidates if p.sequence == plan.candidates[0].sequence]
    while waiting:
        parts = waiting.pop(0)
        limit = min(LIMIT_SECONDS, TOTAL_SECONDS - _spent)
        if limit < MIN_SECONDS:
            complete = False
            break
        begin = time.monotonic()
        try:
            result = run_trial(parts, shapes, device, limit)
        finally:
            _spent += time.monotonic() - begin
        name = parts.label(shapes)
        results[name] = result
        if 'failed' in result:
            _warn(f'depth_attention: {name} is not used: {result["failed"]}')
        if parts == plan.candidates[-1] and all('failed' in results[name] for name in first):
            waiting += plan.otherwise
    if not results:
        raise UnavailableError(f'the {TOTAL_SECONDS:g} s of this process are spent')
    return results, complete


def run_trial(parts, shapes, device, limit: float) -> dict:
    """Has a child process check and time one candidate.

    Args:
      parts: `backends.Parts`, the candidate.
      shapes: `backends.Shapes` of the call.
      device: `backends.Device`, this process's, which the child must find too.
      limit: seconds after which the child and the processes that it started are killed.

    Returns:
      {'milliseconds': forward and backward}, or {'failed': reason in one line}.

    Raises:
      UnavailableError: the child did not get as far as the candidate.
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
            with contextlib.suppress(OSError):  # it has ended already; its output says why
                # Open until the child ends: the end of its input means that this process is gone.
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
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors='replace'))
        return _result(*texts, status, limit)


def _environment(device):
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get('PYTHONPATH')])]
    # The reference and XLA's form are compiled by one child and read by the others.
    default = {'JAX_COMPILATION_CACHE_DIR': str(cache_folder() / 'xla')}
    child = {
        'PYTHONPATH': os.pathsep.join(paths),
        'JAX_PLATFORMS': 'cuda,cpu' if device.platform == 'gpu' else 'cpu',
        # This process holds most of the memory.
        'XLA_PYTHON_CLIENT_PREALLOCATE': 'false',
    }
    return default | os.environ | child


def _result(out, err, status, limit):
    """A child's answer from its output; status None: it was killed at the limit."""
    said = {}
    for line in out.splitlines():
        with contextlib.suppress(ValueError, TypeError):
            said |= json.loads(line)
    if 'milliseconds' in said or 'failed' in said:
        return {name: said[name] for name in ('milliseconds', 'failed') if name in said}
    last = ([line for line in err.splitlines() if line.strip()] or ['no message'])[-1].strip()
    if status is None or status == -signal.SIGALRM:
        why = f'not done in {limit:g} s'
    elif 'RESOURCE_EXHAUSTED' in err:
        why = OUT_OF_MEMORY
    elif status < 0:
        why = f'it ended by signal {-status}: {last}'
    else:
        why = f'it ended with status {status}: {last}'
    if 'ready' not in said:
        raise UnavailableError(said.get('unavailable') or f'{" ".join(COMMAND[1:])}: {why}'[:240])
    return {'failed': why[:240]}


def _warn(line):
    logging.warning('%s', line)
