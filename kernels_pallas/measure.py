"""Measures the candidates for an attention once for each GPU model, and remembers what was found.

Each candidate is checked and timed in a child process of its own (trial.py) under a time limit: a
crash, a hang, a wrong result or too little memory costs that candidate alone. What was found is a
file under the user's cache directory; to measure again, delete it.
"""

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import threading
import time
from typing import NamedTuple

from absl import logging

from kernels_pallas.autotune import (
    OUT_OF_MEMORY,
    PACKAGE,
    UnavailableError,
    cache_folder,
    run_trial,
)
from kernels_pallas.candidates import Device, Plan, Shapes, label
from kernels_pallas.joint_softmax import Parts

LIMIT_SECONDS = 60.0  # of one candidate: its start, its compilation, its check and its times
TOTAL_SECONDS = 300.0  # of all measurements of a process
LEAST_SECONDS = 10.0  # with less of the total left no candidate is started


class Fastest(NamedTuple):
    """What a measurement says.

    Attributes:
      parts: the fastest that are right.
      times: of every candidate that is right, in words.
      failed: `candidate: reason` of those that are not.
      new: measured now, not read from a file; or nothing was right.
      not_measured: why nothing could be measured; '': it was.
    """

    parts: Parts = Parts()
    times: str = ''
    failed: tuple[str, ...] = ()
    new: bool = False
    not_measured: str = ''


_lock = threading.Lock()
_known = {}  # what this process has measured or read, by digest of the key
_spent = 0.0  # seconds


def fastest(plan: Plan, shapes: Shapes, device: Device) -> Fastest:
    """The fastest candidate that is right: as remembered, else measured now.

    Args:
      plan: of the shapes on the device.
      shapes: what is computed, and at which size it is timed.
      device: this process's.
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
    """Fastest of results by label; where none is right, what was not shown to be broken."""
    if 'not_measured' in results:
        return Fastest(not_measured=results['not_measured'])
    by_label = {label(parts, shapes): parts for parts in plan.candidates + plan.otherwise}
    results = {name: result for name, result in results.items() if name in by_label}
    right = {n: r['milliseconds'] for n, r in results.items() if 'milliseconds' in r}
    failed = tuple(f'{name}: {r["failed"]}' for name, r in results.items() if 'failed' in r)
    ranked = sorted(right, key=right.get)
    times = ', '.join(f'{name} {right[name]:.3g} ms' for name in ranked)
    if ranked:
        return Fastest(by_label[ranked[0]], f'the fastest of {times}', failed, new)
    untried = [
        parts
        for parts in plan.proven
        if results.get(label(parts, shapes), {}).get('failed') in (None, OUT_OF_MEMORY)
    ]
    return Fastest((*untried, Parts())[0], 'as no candidate was right', failed, True)


def key_of(shapes: Shapes, device: Device) -> dict:
    """What a measurement holds for; its size in powers of two, so that few are needed."""
    q, k = ((_power(x[0]), _power(x[1]), *x[2:]) for x in (shapes.q, shapes.k))
    rounded = shapes._replace(q=q, k=k, slot_rows=_power(shapes.slot_rows))
    return {
        'device': device.kind,
        'capability': list(device.capability or ()),
        'software': device.software,
        'xla_flags': os.environ.get('XLA_FLAGS', ''),
        'versions': _versions(),
        'shapes': json.loads(json.dumps(rounded._asdict())),
    }


def _power(size):
    return 1 << (size - 1).bit_length() if size else 0


@functools.cache
def _versions():
    """Of JAX, of cuDNN and of the kernels: their sources, which change more often than a number."""
    sources = b''.join(path.read_bytes() for path in sorted(PACKAGE.glob('*.py')))
    found = {'kernels': hashlib.sha256(sources).hexdigest()[:16]}
    for name in ('jax', 'jaxlib', 'nvidia-cudnn-cu12', 'nvidia-cudnn-cu13'):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _read_or_measure(digest, key, plan, shapes, device):
    """(results by label, whether they are new)."""
    name = re.sub(r'\W+', '_', device.kind)
    path = cache_folder() / 'attention' / f'{name}-{digest}.json'
    if (results := _read(path, key)) is not None:
        return results, False
    with _alone(path):
        # Another process may have measured while this one waited.
        if (results := _read(path, key)) is not None:
            return results, False
        results, complete = _measure(plan, shapes, device)
        if complete:
            _write(path, {'key': key, 'results': results})
    return results, True


def _read(path, key):
    """The results of a file; None of one that is missing, damaged, or of another key."""
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
        # A name of this process's own; a reader finds the old file or the new one.
        new = path.with_suffix(f'.{os.getpid()}')
        new.write_text(json.dumps(contents, indent=1), encoding='utf-8')
        os.replace(new, path)
    except OSError as error:
        _warn(f'depth_attention: {path}: {error.strerror}: each start will measure again')


@contextlib.contextmanager
def _alone(path):
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
        'MODDEPTH_MEASURE=0 does without'
    )
    results, waiting, complete = {}, list(plan.candidates), True
    while waiting:
        parts = waiting.pop(0)
        limit = min(LIMIT_SECONDS, TOTAL_SECONDS - _spent)
        if limit < LEAST_SECONDS:
            complete = False
            break
        begin = time.monotonic()
        try:
            result = run_trial(parts, shapes, device, limit)
        finally:
            _spent += time.monotonic() - begin
        name = label(parts, shapes)
        results[name] = result
        if 'failed' in result:
            _warn(f'depth_attention: {name} is not used: {result["failed"]}')
        by_cudnn = [p for p in plan.candidates if p.sequence == 'cudnn']
        failed = ['failed' in results.get(label(p, shapes), {}) for p in by_cudnn]
        if parts == plan.candidates[-1] and all(failed):
            waiting += plan.otherwise
    if not results:
        raise UnavailableError(f'the {TOTAL_SECONDS:g} s of this process are spent')
    return results, complete


def _warn(line):
    logging.warning('%s', line)
