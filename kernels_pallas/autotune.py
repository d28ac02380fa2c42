"""Measures the candidate backends of an attention, once for each GPU model and shape.

Each candidate is checked and timed in a child process (autotune_trial.py) with a time limit. The
results are a file under the user's cache directory; delete it to measure again.
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
import threading
import time
from typing import NamedTuple

from absl import logging

LIMIT_SECONDS = 60.0  # for one candidate: its start, compilation, check and times
TOTAL_SECONDS = 300.0  # for all measurements of a process
MIN_SECONDS = 10.0  # with less than this remaining, no candidate is started
COMMAND = (sys.executable, '-P', '-m', 'kernels_pallas.autotune_trial')
OUT_OF_MEMORY = 'out of device memory'  # another run may have more memory
NOT_DONE = 'not done in'
TRIES = 2  # of a candidate that is not done: it may have compiled what the next finds in a cache
PACKAGE = pathlib.Path(__file__).parent


class UnavailableError(RuntimeError):
    """No child process can use the device; the candidates are not at fault."""


_known = {}  # Measured by file name
_spent = 0.0  # seconds


class Measured(NamedTuple):
    """What is known of the candidates of one key."""

    results: dict  # by label, as of `run_trial`; {} if nothing can be measured
    problem: str = ''  # why nothing can be measured
    new: bool = True  # measured by this process, not read from the file
    asked: frozenset[str] = frozenset()  # labels of the candidates to which this applies


class Choice(NamedTuple):
    """The candidate to use."""

    parts: tuple  # backends.Parts
    how: str  # text for the log
    failed: dict[str, str]  # reasons, by label of the candidate
    warn: bool  # log it as a warning


def fastest(candidates, shapes, device) -> Choice:
    """Choose the fastest of the candidates (`backends.Parts`), from the file or measured now."""
    default, measured = candidates[0], _measured(candidates, shapes, device)
    if measured.problem:
        return Choice(default, f'not measured: {measured.problem}', {}, True)
    by_label = {parts.label(shapes): parts for parts in candidates + _without_first(candidates)}
    results = {name: r for name, r in measured.results.items() if name in by_label}
    failed = {name: r['failed'] for name, r in results.items() if 'failed' in r}
    right = {name: r['milliseconds'] for name, r in results.items() if name not in failed}
    if right:
        ranked = sorted(right, key=right.get)
        times = ', '.join(f'{name} {right[name]:.3g} ms' for name in ranked)
        return Choice(by_label[ranked[0]], f'the fastest of {times}', failed, measured.new)
    # The default candidate, with XLA for the sequence if it is known to be wrong.
    if failed.get(default.label(shapes)) not in (None, OUT_OF_MEMORY):
        default = default._replace(sequence='xla')
    return Choice(default, 'as no candidate was right', failed, True)


def _measured(candidates, shapes, device) -> Measured:
    """Return what this process knows, or the results in the file, or those measured now."""
    key = key_of(shapes, device)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    name = f'{file_prefix(device.kind)}{digest}.json'
    labels = frozenset(parts.label(shapes) for parts in candidates)
    asked = _known[name].asked if name in _known else frozenset()
    if labels <= asked:
        return _known[name]
    path = (cache_folder() or pathlib.Path(os.devnull)) / 'attention' / name
    asked |= labels
    with _exclusive(path):
        results = _read(path, key)
        if not _waiting(candidates, results, shapes):
            _known[name] = Measured(results, new=False, asked=asked)
        elif threading.current_thread() is not threading.main_thread():
            # The main thread may compile, for which XLA times programs, or train.
            return Measured(results, '' if results else 'only the main thread measures', False)
        else:
            try:
                _measure(results, candidates, shapes, device)
                _write(path, {'key': key, 'results': results})
                _known[name] = Measured(results, asked=asked)
            except UnavailableError as error:
                logging.warning('depth_attention: nothing can be measured: %s', error)
                _known[name] = Measured({}, str(error), asked=asked)
    return _known[name]


def _waiting(candidates, results, shapes):
    """Return the candidates to try: those without a result, or with one that may change."""
    wanted, first = list(candidates), candidates[0].sequence
    of_first = [p.label(shapes) for p in candidates if p.sequence == first]
    if all('failed' in results.get(name, ()) for name in of_first):
        wanted += _without_first(candidates)
    none_right = all('failed' in result for result in results.values())

    def may_change(result):
        reason = result.get('failed', '')
        if reason.startswith(NOT_DONE):
            return result.get('tries', 0) < TRIES
        return not result or none_right and reason == OUT_OF_MEMORY

    return [parts for parts in wanted if may_change(results.get(parts.label(shapes), {}))]


def _without_first(candidates):
    """Return depth kernels with XLA's sequence, tried if all with the first sequence part fail."""
    found = [p._replace(sequence='xla') for p in candidates if 'xla' not in (p.sequence, p.depth)]
    return list(dict.fromkeys(found))


def key_of(shapes, device) -> dict:
    """Return the key of a stored measurement; sizes are rounded up to powers of two."""

    def power(size):
        return 1 << (size - 1).bit_length() if size else 0

    q, k = ((power(x[0]), power(x[1]), *x[2:]) for x in (shapes.q, shapes.k))
    rounded = shapes._replace(q=q, k=k, slot_rows=power(shapes.slot_rows))
    if shapes.places:
        # One measurement with a fixed number of slots serves all layers (autotune_decoding.py).
        rounded = rounded._replace(places=power(shapes.places), num_slots=bool(shapes.num_slots))
    key = {name: getattr(device, name) for name in ('kind', 'capability', 'software')}
    names = 'XLA_FLAGS', 'XLA_PYTHON_CLIENT_MEM_FRACTION'  # the memory that is left for a trial
    key |= {name.lower(): os.environ.get(name, '') for name in names} | {'versions': _versions()}
    # Lists instead of tuples, as a file has them.
    return json.loads(json.dumps(key | {'shapes': rounded._asdict()}))


@functools.cache
def _versions():
    """Return the versions of JAX, cuDNN and CUDA's compiler, and a hash of the kernels' sources."""
    sources = b''.join(path.read_bytes() for path in sorted(PACKAGE.rglob('*.py')))
    found = {'kernels': hashlib.sha256(sources).hexdigest()[:16]}
    of_cuda = [f'nvidia-{name}-cu1{n}' for name in ('cudnn', 'cuda-nvcc') for n in (2, 3)]
    for name in ('jax', 'jaxlib', *of_cuda, 'nvidia-cuda-nvcc'):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def cache_folder() -> pathlib.Path | None:
    """Return this project's folder under XDG_CACHE_HOME or ~/.cache; None for a relative path."""
    cache = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
    return pathlib.Path(cache, 'moddepth_jax') if os.path.isabs(cache) else None


def file_prefix(kind: str) -> str:
    """Return the first part of the names of the files with measurements on a kind of device."""
    return re.sub(r'[^0-9A-Za-z_]+', '_', kind) + '-'


def _read(path, key):
    """Return the results in a file; {} if it is missing, damaged or has another key."""
    try:
        kept = json.loads(path.read_text(encoding='utf-8'))
        results = kept['results'] if kept['key'] == key else {}
        right = all(float(r['milliseconds']) > 0 for r in results.values() if 'failed' not in r)
        return results if right else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _write(path, contents):
    try:
        # Written under another name first, so that readers see the old file or the new one.
        new = path.with_suffix(f'.{os.getpid()}')
        new.write_text(json.dumps(contents, indent=1), encoding='utf-8')
        os.replace(new, path)
    except OSError as error:
        why = f'{error.strerror}: each start will measure again'
        logging.warning('depth_attention: %s: %s', path, why)


@contextlib.contextmanager
def _exclusive(path):
    """Wait for other processes that measure the same, which would disturb the times."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(open(path.with_suffix('.lock'), 'w')), fcntl.LOCK_EX)
        yield


def _measure(results, candidates, shapes, device):
    """Add what is measured to `results`, by label, while this process has time."""
    global _spent
    waiting, tried = _waiting(candidates, results, shapes), []
    logging.warning(
        'depth_attention on %s: measuring %d candidates for %d x %d queries, once: at most %g s '
        'each; MODDEPTH_MEASURE=0 skips this',
        *(device.kind, len(waiting), *shapes.q[:2], LIMIT_SECONDS),
    )
    while waiting and (limit := min(LIMIT_SECONDS, TOTAL_SECONDS - _spent)) >= MIN_SECONDS:
        parts, begin = waiting[0], time.monotonic()
        name = parts.label(shapes)
        tries = results.get(name, {}).get('tries', 0)
        try:
            results[name] = run_trial(parts, shapes, device, limit)
        finally:
            _spent += time.monotonic() - begin
        if reason := results[name].get('failed'):
            logging.warning('depth_attention: %s is not used: %s', name, reason)
            if reason.startswith(NOT_DONE):
                results[name]['tries'] = tries + (limit == LIMIT_SECONDS)
        tried.append(parts)
        waiting = [p for p in _waiting(candidates, results, shapes) if p not in tried]
    if not results:
        raise UnavailableError(f'the {TOTAL_SECONDS:g} s of this process are spent')


def run_trial(parts, shapes, device, limit: float) -> dict:
    """Check and time one candidate in a child process, which is killed after `limit` seconds.

    Returns {'milliseconds': time} or {'failed': reason}.

    Raises:
      UnavailableError: the child process found no device.
    """
    request = {'parts': parts._asdict(), 'shapes': shapes._asdict()}
    request |= {'kind': device.kind, 'limit': limit}
    pipes = dict.fromkeys(('stdin', 'stdout', 'stderr'), subprocess.PIPE)
    child = subprocess.Popen(COMMAND, **pipes, env=_environment(device), start_new_session=True)
    try:
        out, err = child.communicate(json.dumps(request).encode(), timeout=limit)
        status = child.returncode
    except subprocess.TimeoutExpired as late:
        out, err, status = late.stdout or b'', late.stderr or b'', None
    finally:
        if child.returncode is None:
            os.killpg(child.pid, signal.SIGKILL)
            # A driver may hold a process that spins on the device.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.communicate(timeout=10)
    return _result(out.decode(errors='replace'), err.decode(errors='replace'), status, limit)


def _environment(device):
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get('PYTHONPATH')])]
    # One child compiles the reference and XLA's form, and the others read them.
    folder = cache_folder()
    default = {'JAX_COMPILATION_CACHE_DIR': str(folder / 'xla')} if folder else {}
    child = {
        'PYTHONPATH': os.pathsep.join(paths),
        'JAX_PLATFORMS': 'cuda,cpu' if device.platform == 'gpu' else 'cpu',
        # The parent process holds most of the memory.
        'XLA_PYTHON_CLIENT_PREALLOCATE': 'false',
    }
    return default | os.environ | child


def _result(out, err, status, limit):
    """Return a child's result from its output; status None: it was killed at the limit."""
    said = {}
    for line in out.splitlines():
        with contextlib.suppress(ValueError, TypeError):
            said |= json.loads(line)
    if 'milliseconds' in said or 'failed' in said:
        return {name: said[name] for name in ('milliseconds', 'failed') if name in said}
    last = ([line for line in err.splitlines() if line.strip()] or ['no message'])[-1].strip()
    if status is None or status == -signal.SIGALRM:
        why = f'{NOT_DONE} {limit:g} s'
    elif 'RESOURCE_EXHAUSTED' in err:
        why = OUT_OF_MEMORY
    elif status < 0:
        why = f'it ended by signal {-status}: {last}'
    else:
        why = f'it ended with status {status}: {last}'
    if 'ready' not in said:
        raise UnavailableError(said.get('unavailable') or f'{" ".join(COMMAND[1:])}: {why}'[:240])
    return {'failed': why[:240]}
