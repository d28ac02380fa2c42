"""Checkpoints of a train state: Orbax writes the arrays, a manifest shows which ones are good."""

import concurrent.futures
import contextlib
import errno
import functools
import hashlib
import itertools
import json
import logging
import os
import pathlib
import re
import secrets
import shutil
import sys
import tempfile
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from moddepth_jax.training import multihost
from moddepth_jax.training.manifest import MANIFEST_FILE, read_manifest, write_manifest

PATIENCE_SECONDS = 3600  # for a slow disk; a process that died ends the others much sooner
_STEP = re.compile('0|[1-9][0-9]*')
# After an error, TensorStore still writes arrays for a moment, and Orbax does not wait for it.
_REMOVALS, _REMOVAL_SECONDS = 6, 0.1
_DISK_FULL = [os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)]


def state_sha256(state) -> str:
    """Return a hex digest of the path, dtype, shape and bytes of every leaf, in sorted order.

    It does not depend on how the arrays are split over devices and processes. If an array is split
    over processes, every process calls this, and each device holds one full array at a time.
    """
    digest = hashlib.sha256()
    for path, leaf in sorted(_named_leaves(state).items()):
        digest.update(f'{path} {_spec(leaf)}\n'.encode())
        digest.update(np.ascontiguousarray(to_host(leaf)).reshape(-1).view(np.uint8))
    return digest.hexdigest()


def to_host(leaf) -> np.ndarray:
    """Return the full array; if it is split over processes, every process calls this."""
    split = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    if split and not leaf.is_fully_replicated:
        return multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)


def _named_leaves(tree):
    """Return {path: leaf} in the order of `jax.tree.leaves`; 'params.stack.run_0.norm.scale'."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator='.'): leaf for path, leaf in leaves}


def _spec(leaf):
    """Return dtype and shape, such as float32[8,4]."""
    leaf = leaf if hasattr(leaf, 'dtype') else np.asarray(leaf)
    return f'{leaf.dtype}[{",".join(map(str, leaf.shape))}]'


def _specs(tree):
    return {path: _spec(leaf) for path, leaf in _named_leaves(tree).items()}


class SaveError(ValueError):
    """A checkpoint could not be written; the message is one line. Earlier checkpoints are kept."""

    on_all_processes = True

    def __init__(self, line: str):
        super().__init__(line)
        self.reported_elsewhere = not multihost.is_leader()


class Checkpoints(contextlib.AbstractContextManager):
    """Keeps the newest `keep` checkpoints of a run in `directory`/STEP/.

    A context manager, which waits for the last save on exit. A checkpoint counts once it has its
    `manifest.json`, which is written last and holds the size and sha256 of each file, the dtype and
    shape of each leaf, and the metadata. A kill at any moment therefore damages no checkpoint.

    All processes make the same calls in the same order (except `steps`). Each writes and reads its
    own parts of the arrays. Only process 0 verifies, removes and writes manifests.

    Attributes:
      directory: absolute path.
      skipped: a line for each checkpoint that the last `restore` skipped, newest first.
    """

    def __init__(self, directory: str | os.PathLike, keep: int):
        self.skipped: list[str] = []
        self.directory = pathlib.Path(os.path.abspath(directory))
        self._alias = _plain_alias(self.directory)
        self._keep = keep
        self._verified = set()
        self._pending = self._vote = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, 'checkpoint')
        silence_orbax()
        # The manifest makes a save atomic, so Orbax need not rename, which network disks cannot do
        # atomically.
        mode, barrier = ocp.options.AtomicityMode.COMMIT_FILE, self._await_all_parts
        options = ocp.options.AsyncOptions(timeout_secs=PATIENCE_SECONDS, barrier_sync_fn=barrier)
        self._orbax = ocp.AsyncCheckpointer(
            ocp.StandardCheckpointHandler(),
            atomicity_options=ocp.options.AtomicityOptions(mode=mode),
            async_options=options,
        )

    def steps(self) -> list[int]:
        """Return the steps of the finished checkpoints, ascending, without verifying files."""
        return [step for step in self._all_steps() if self._path(step, MANIFEST_FILE).exists()]

    def save(self, step: int, state, metadata: dict) -> None:
        """Write a checkpoint in the background, unless `step` already has a good one.

        `state` is a pytree of JAX arrays; it is copied before this returns, so it may be donated.
        `metadata` holds JSON values. Raises SaveError if this save could not begin. Also raises it
        if the previous save failed; this save then runs nevertheless.
        """
        metadata = json.loads(json.dumps(metadata))
        content = {'step': int(step), 'leaves': _specs(state), 'metadata': metadata}
        failure = self._finish_pending()
        if multihost.broadcast_from_leader(lambda: self._make_room(step)):
            self._vote = _SaveVote()
            self._begin(step, _named_leaves(state))
            self._pending = self._thread.submit(self._commit, step, content)
        if failure:
            raise failure

    def wait(self) -> None:
        """Wait until the last save has finished; raises SaveError if it failed."""
        if failure := self._finish_pending():
            raise failure

    def restore(self, *abstract_states, at: int | None = None) -> tuple | None:
        """Return the newest good checkpoint as (state, step, metadata), or None if there is none.

        Args:
          *abstract_states: pytrees of jax.ShapeDtypeStruct or arrays. The first one with the same
            leaves as the checkpoint is restored. Each leaf is placed by its `sharding` (None: on
            the first device).
          at: step of the checkpoint to restore instead of the newest.

        Raises:
          SaveError: like `wait`.
          ValueError: one line with the first difference from the first state, before any array is
            read, if no state has the leaves, shapes and dtypes of the checkpoint.
        """
        self.wait()
        found = multihost.broadcast_from_leader(lambda: self._find_newest(abstract_states, at))
        self.skipped, step = found['skipped'], found['step']
        if step is None:
            return None
        # Not by Orbax's checkpointer, in which all processes would wait for one that cannot read.
        state = multihost.run_on_all(lambda: self._read(step, abstract_states[found['index']]))
        return state, step, found['metadata']

    def __exit__(self, kind, error, trace):
        try:
            self.wait()
        except SaveError as failure:
            if error is None:
                raise
            error.add_note(str(failure))
        finally:
            self._thread.shutdown()
            self._orbax.close()
            if self._alias != self.directory:
                self._alias.unlink(missing_ok=True)

    def _path(self, step, *names):
        return self.directory.joinpath(str(step), *names)

    def _all_steps(self):
        names = (path.name for path in self.directory.glob('[0-9]*'))
        return sorted(int(name) for name in names if _STEP.fullmatch(name))

    def _find_newest(self, abstract_states, at):
        """Return the step to restore (None: no good one), its metadata, and the state's index."""
        skipped = []
        for step in reversed(self._all_steps()) if at is None else [at]:
            try:
                content = self._verify(step)
            except (OSError, ValueError) as error:
                skipped.append(f'checkpoint {step} skipped: {_one_line(error)}')
                continue
            wanted, saved = [_specs(state) for state in abstract_states], content['leaves']
            if saved not in wanted:
                path = min(name for name, _ in saved.items() ^ wanted[0].items())
                old, new = (side.get(path, 'absent') for side in (saved, wanted[0]))
                found = f'{path} is {old} in the checkpoint and {new} in this run'
                right = 'use the config it was saved with'
                raise ValueError(f'checkpoint {step} in {self.directory}: {found}; {right}')
            index, metadata = wanted.index(saved), content['metadata']
            return {'step': step, 'metadata': metadata, 'index': index, 'skipped': skipped}
        return {'step': None, 'skipped': skipped}

    def _verify(self, step):
        """Return the content of the manifest if all files are as they were written, or raise."""
        self._verified.discard(step)
        content = read_manifest(self._path(step))
        if content['step'] != step:
            raise ValueError(f'holds the files of checkpoint {content["step"]}')
        self._verified.add(step)
        return content

    def _is_good(self, step):
        """Return whether `step` is finished and intact; reads its files once per process."""
        if step not in self._verified:
            with contextlib.suppress(OSError, ValueError):
                self._verify(step)
        return step in self._verified

    def _make_room(self, step):
        """Remove a bad checkpoint of `step`; returns False if a good one is there to keep."""
        if self._is_good(step):
            return False
        try:
            self._remove(step)
            self._path(step).mkdir(parents=True)
            self._path(step).rmdir()  # Orbax makes it again, and other processes wait for that
        except OSError as error:
            raise self._clean_up(step, _one_line(error)) from error
        return True

    def _begin(self, step, arrays):
        """Make Orbax copy this process's parts of the arrays and start to write them."""
        # Orbax copies NumPy arrays before it returns. It would keep a JAX buffer, which then could
        # not be donated in place.
        arrays |= jax.device_get({path: x for path, x in arrays.items() if x.is_fully_addressable})
        save = functools.partial(self._orbax.save, args=ocp.args.StandardSave(arrays))
        try:
            multihost.run_on_all(lambda: save(self._alias / str(step)))
        except Exception as error:
            multihost.exit_if_process_lost(error)
            reason = self._vote.report_part(_one_line(error))
            with contextlib.suppress(Exception):  # errors of arrays whose writing had begun
                self._orbax.wait_until_finished()
            raise self._clean_up(step, reason) from error

    def _await_all_parts(self, *, key, timeout_ms):
        """Wait until all processes have written their parts; raises the first error of any.

        Replaces both barriers of Orbax's threads, which would open if another process failed.
        """
        del key, timeout_ms
        error = self._vote.report_part()
        if error:
            raise ValueError(error)

    def _commit(self, step, content):
        """Wait for Orbax, then write the manifest and remove old steps; this runs in a thread."""
        reason, cause = '', None
        try:
            self._orbax.wait_until_finished()
            if multihost.is_leader():
                write_manifest(self._path(step), content)
        except Exception as error:
            multihost.exit_if_process_lost(error)
            reason = self._vote.report_part(_one_line(error)) or _one_line(error)
            cause = error
        if reason and multihost.is_leader():
            reason = str(self._clean_up(step, reason))
        if reason := self._vote.decide(reason):
            raise SaveError(reason) from cause
        if multihost.is_leader():
            self._verified.add(step)
            older = [other for other in self._all_steps() if other < step]
            good = [other for other in reversed(older) if self._is_good(other)]
            for other in set(older) - set(good[: self._keep - 1]):
                self._remove(other)

    def _finish_pending(self):
        pending, self._pending = self._pending, None
        return None if pending is None else pending.exception()

    def _clean_up(self, step, reason):
        """Remove the half-written files, which may fill the disk; returns the error to raise."""
        for _ in range(_REMOVALS):
            self._remove(step)
            time.sleep(_REMOVAL_SECONDS)
        kept = self.steps()
        steps = ', '.join(map(str, kept)) or 'none'
        full = any(text in reason for text in _DISK_FULL)
        remedy = 'free disk space there' if full else 'fix that'
        again = f'the same command resumes after step {kept[-1]}' if kept else 'start again'
        where = f'checkpoint {step} in {self.directory}: not saved'
        return SaveError(f'{where}, {reason}; steps kept: {steps}; {remedy}, then {again}')

    def _remove(self, step):
        self._verified.discard(step)
        if not multihost.is_leader():
            return
        # The manifest goes first: after a kill in between, the rest is unfinished, not damaged.
        for path in (self._path(step, MANIFEST_FILE), self._path(step)):
            with contextlib.suppress(OSError):  # the second is usually a directory
                path.unlink()
        shutil.rmtree(self._path(step), ignore_errors=True)

    def _read(self, step, abstract_state):
        first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        targets = {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or first)
            for path, leaf in _named_leaves(abstract_state).items()
        }
        how = ocp.args.StandardRestore(targets)
        arrays = self._orbax.handler.restore(self._alias / str(step), args=how)
        leaves = [arrays[path] for path in targets]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)


def _plain_alias(directory):
    """Return `directory`, or a temporary link to it if its name has unusual characters.

    All processes get the same link. Orbax reads `[1]` as a pattern and would find no data to
    commit, and TensorStore changes other names.
    """
    if re.fullmatch(r'[\w./-]*', str(directory), re.ASCII):
        return directory
    name = multihost.broadcast_from_leader(lambda: f'moddepth_jax-{secrets.token_hex(8)}')
    alias = pathlib.Path(tempfile.gettempdir(), name)
    with contextlib.suppress(FileExistsError):  # made by another process of this host
        alias.symlink_to(directory)
    return alias


def _one_line(error):
    os_error = re.search(r"os_error_code='(\d+)'", str(error))  # TensorStore writes half a page
    return os.strerror(int(os_error[1])) if os_error else multihost.one_line(error)[:300]


_save_numbers = itertools.count()  # equal on every process: all begin the same saves in order


class _SaveVote:
    """Agreement of several processes on one save: on each part first, then on the whole.

    It uses the key-value store of `jax.distributed`, because background threads cannot use
    collectives.
    """

    def __init__(self):
        number = next(_save_numbers)
        self._folder, self._reported = f'moddepth_jax/saves/{number}', False
        self._several = jax.process_count() > 1
        self._store = ocp.multihost.get_jax_distributed_client() if self._several else None
        if self._several and multihost.is_leader():
            # All processes have begun the save after that one, so none still reads its keys.
            self._store.key_value_delete(f'moddepth_jax/saves/{number - 2}')

    def report_part(self, error: str = '') -> str:
        """Report this process's error, or ''; wait for all, and return the first error."""
        if not self._several:
            return error
        if not self._reported:
            self._reported = True
            self._put(f'part_{jax.process_index()}', error)
        reports = [self._get(f'part_{process}') for process in range(jax.process_count())]
        return next((f'process {i}: {text}' for i, text in enumerate(reports) if text), '')

    def decide(self, error: str) -> str:
        """Return the error of the whole save, or '', as process 0 decides; the others wait."""
        if self._several and multihost.is_leader():
            self._put('whole', error)
        return self._get('whole') if self._several else error

    def _put(self, key, text):
        # The store takes no empty value, hence the colon.
        self._store.key_value_set(f'{self._folder}/{key}', f':{text}')

    def _get(self, key):
        milliseconds = 1000 * PATIENCE_SECONDS
        return self._store.blocking_key_value_get(f'{self._folder}/{key}', milliseconds)[1:]


@functools.cache
def silence_orbax() -> None:
    """Drop useless output of Orbax and TensorStore in this process; further calls do nothing.

    Orbax logs dozens of lines per save. If an array cannot be written, Orbax drops the others and
    closes its event loop, for which TensorStore would print pages of tracebacks.
    """
    orbax, hook = f'{os.sep}orbax{os.sep}', sys.unraisablehook

    def pass_other_records(record):
        text = record.getMessage()
        of_save = orbax in text or 'OCDBT' in text  # TensorStore's format
        return not (of_save and text.startswith(('Future exception', 'Task ')))

    def pass_other_errors(unraisable):
        # An error in a C++ callback has no Python object.
        of_cpp = unraisable.object is None and unraisable.exc_type is RuntimeError
        if not (of_cpp and str(unraisable.exc_value) == 'Event loop is closed'):
            hook(unraisable)

    logging.getLogger('absl').addFilter(lambda record: orbax not in record.pathname)
    logging.getLogger('asyncio').addFilter(pass_other_records)
    sys.unraisablehook = pass_other_errors
