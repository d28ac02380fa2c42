"""Checkpoints of a train state: Orbax writes them, a manifest says which are good."""

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
import shutil
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp

from moddepth_jax.training import leaves as leaves_lib
from moddepth_jax.training import multihost
from moddepth_jax.training.manifest import MANIFEST_FILE, read_manifest, write_manifest

PATIENCE_SECONDS = 3600  # for a slow disk; a process that died ends the others far sooner
_STEP = re.compile('0|[1-9][0-9]*')
# After an error, TensorStore goes on for a moment with arrays that Orbax no longer waits for.
_REMOVALS, _REMOVAL_SECONDS = 5, 0.1
_DISK_FULL = [os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)]


def state_sha256(state) -> str:
    """Hex digest over the path, dtype, shape and bytes of every leaf, in sorted path order.

    Two states have equal digests exactly if they are bit-equal, however their arrays are split over
    devices and processes. If an array is split over processes, every process calls this, and each
    device holds one such array at a time in full.

    Args:
      state: pytree of jax or NumPy arrays of any dtype, typed PRNG keys, or Python scalars.
    """
    digest = hashlib.sha256()
    for path, leaf in sorted(leaves_lib.named_leaves(state).items()):
        digest.update(f'{path} {leaves_lib.spec(leaf)}\n'.encode())
        digest.update(np.ascontiguousarray(leaves_lib.to_host(leaf)).reshape(-1).view(np.uint8))
    return digest.hexdigest()


class SaveError(ValueError):
    """A checkpoint could not be written. The message is one line; earlier checkpoints are kept."""

    on_all_processes = True


class RemoteSaveError(SaveError, multihost.RemoteError):
    """The same on the other processes: process 0 raises the SaveError that the user sees."""


class Checkpoints:
    """The checkpoints of one run, in `directory`/STEP/. A context manager whose exit waits.

    A checkpoint counts once it has its `manifest.json`, written last: the size and sha256 of each
    file, the dtype and shape of each leaf, and the caller's metadata. So a process killed at any
    moment leaves its older checkpoints good and an unfinished one recognizable.

    Several processes share the directory and make the same calls in the same order (except
    `steps`). Each writes and reads its own parts of the arrays; process 0 alone decides what is
    good, removes checkpoints, and writes manifests.

    Args:
      directory: of all checkpoints.
      keep: how many good checkpoints stay, 1 or more.

    Attributes:
      skipped: a line for each checkpoint that the last `restore` skipped, newest first.
    """

    def __init__(self, directory: str | os.PathLike, keep: int):
        if keep < 1:
            raise ValueError(f'keep={keep!r}: must be 1 or more')
        self.skipped: list[str] = []
        self._directory = pathlib.Path(os.path.abspath(directory))
        self._keep = keep
        self._verified = set()
        self._pending = self._vote = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, 'checkpoint')
        silence_orbax()
        # Renaming would be atomic too, but not on network file systems; the manifest needs neither.
        mode = ocp.options.AtomicityMode.COMMIT_FILE
        self._orbax = ocp.AsyncCheckpointer(
            ocp.StandardCheckpointHandler(),
            atomicity_options=ocp.options.AtomicityOptions(mode=mode),
            async_options=ocp.options.AsyncOptions(
                timeout_secs=PATIENCE_SECONDS, barrier_sync_fn=self._await_all_parts
            ),
        )

    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, ascending; their files are not verified."""
        return [step for step in self._all_steps() if self._path(step, MANIFEST_FILE).exists()]

    def save(self, step: int, state, metadata: dict) -> None:
        """Writes a checkpoint in the background; the newest `keep` good ones stay.

        The state has been copied when this returns, so its arrays may be donated. If `step` already
        has a good checkpoint, nothing is written.

        Args:
          step: names the checkpoint.
          state: pytree whose leaves are jax arrays or typed PRNG keys.
          metadata: JSON values that `restore` returns.

        Raises:
          SaveError: this save could not begin; or the previous one failed, and this one has begun.
          ValueError: a leaf is not a jax array.
        """
        leaves = leaves_lib.named_leaves(state)
        for path, leaf in leaves.items():
            if not isinstance(leaf, jax.Array):
                raise ValueError(f'state leaf {path}={leaf!r}: must be a jax array')
        content = {
            'step': int(step),
            'leaves': {path: leaves_lib.spec(leaf) for path, leaf in leaves.items()},
            'metadata': json.loads(json.dumps(metadata)),
        }
        failure = self._finish_pending()
        if multihost.broadcast_from_leader(lambda: self._make_room(step)):
            self._vote = _SaveVote()
            self._begin(step, leaves)
            self._pending = self._thread.submit(self._commit, step, content)
        if failure is not None:
            raise failure

    def wait(self) -> None:
        """Returns when the last save has finished; raises SaveError if it failed."""
        failure = self._finish_pending()
        if failure is not None:
            raise failure

    def restore(self, abstract_state) -> tuple | None:
        """Returns the newest good checkpoint as (state, step, metadata), or None if there is none.

        Unfinished and damaged checkpoints are skipped; see `skipped`.

        Args:
          abstract_state: pytree of jax.ShapeDtypeStruct or arrays, like the saved state. Each leaf
            is placed by its `sharding`, or on the first device if that is None.

        Raises:
          StateMismatchError: the newest good checkpoint has another leaf, shape or dtype; one line
            that names the first of them with both values. Nothing has been read then.
          SaveError: the previous save failed.
        """
        self.wait()
        found = multihost.broadcast_from_leader(lambda: self._find_newest(abstract_state))
        self.skipped, step = found['skipped'], found['step']
        if found['differs']:
            raise leaves_lib.StateMismatchError(found['differs'])
        if step is None:
            return None
        # Without Orbax's checkpointer: if one process failed to read, the others would wait for it.
        state = multihost.run_on_all(lambda: self._read(step, abstract_state))
        return state, step, found['metadata']

    def close(self) -> None:
        """Waits for the last save and ends the background thread. Raises as `wait` does."""
        failure = self._finish_pending()
        self._thread.shutdown()
        self._orbax.close()
        if failure is not None:
            raise failure

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        try:
            self.close()
        except SaveError as failure:
            if error is None:
                raise
            error.add_note(str(failure))

    def _path(self, step, *names):
        return self._directory.joinpath(str(step), *names)

    def _all_steps(self):
        names = (path.name for path in self._directory.glob('[0-9]*'))
        return sorted(int(name) for name in names if _STEP.fullmatch(name))

    def _find_newest(self, abstract_state):
        """Returns the step (None: no good one) and metadata to restore, and the lines `skipped`."""
        skipped, leaves = [], leaves_lib.named_leaves(abstract_state)
        for step in reversed(self._all_steps()):
            try:
                content = self._verify(step)
            except (OSError, ValueError) as error:
                skipped.append(f'checkpoint {step} skipped: {_one_line(error)}')
                continue
            differs = leaves_lib.difference(content['leaves'], leaves)
            differs = differs and f'checkpoint {step} in {self._directory}: {differs}'
            found = {'step': step, 'metadata': content['metadata'], 'differs': differs}
            return found | {'skipped': skipped}
        return {'step': None, 'differs': '', 'skipped': skipped}

    def _verify(self, step):
        """Returns the manifest's content if every file is as written; raises otherwise."""
        self._verified.discard(step)
        content = read_manifest(self._path(step))
        if content['step'] != step:
            raise ValueError(f'its files are those of checkpoint {content["step"]}')
        self._verified.add(step)
        return content

    def _is_good(self, step):
        """Whether `step` is finished and intact; its files are read once per process."""
        if step not in self._verified:
            with contextlib.suppress(OSError, ValueError):
                self._verify(step)
        return step in self._verified

    def _make_room(self, step):
        """Whether to write `step`: False if it is good already, otherwise what was there goes."""
        if self._is_good(step):
            return False
        try:
            self._remove(step)
            self._path(step).mkdir(parents=True)
            self._path(step).rmdir()  # Orbax makes it again, while other processes wait for that
        except OSError as error:
            raise self._save_error(step, _one_line(error)) from error
        return True

    def _begin(self, step, leaves):
        """Lets Orbax copy this process's parts of the arrays and start writing them."""
        arrays = {path: leaves_lib.to_stored(leaf) for path, leaf in leaves.items() if leaf.size}
        # Orbax copies NumPy arrays before it returns; it would hold on to a jax buffer, and a held
        # buffer cannot be donated in place.
        arrays |= jax.device_get({path: x for path, x in arrays.items() if x.is_fully_addressable})
        save = functools.partial(self._orbax.save, args=ocp.args.StandardSave(arrays))
        try:
            multihost.run_on_all(lambda: save(self._path(step)))
        except Exception as error:
            multihost.exit_if_process_lost(error)
            reason = self._vote.report_part(_one_line(error))
            with contextlib.suppress(Exception):  # of arrays whose writing had begun
                self._orbax.wait_until_finished()
            raise self._save_error(step, reason) from error

    def _await_all_parts(self, *, key, timeout_ms):
        """The barrier of Orbax's threads: returns when all parts are written, or raises an error.

        Orbax has a second barrier, which waits until process 0 has joined the parts. It passes
        here, and `_commit` waits for more. An error elsewhere would open either of Orbax's own.
        """
        del key, timeout_ms
        error = self._vote.report_part()
        if error:
            raise ValueError(error)

    def _commit(self, step, content):
        """Runs in the background thread: waits for Orbax, then makes the checkpoint count."""
        reason, cause = '', None
        try:
            self._orbax.wait_until_finished()
            if multihost.is_leader():
                write_manifest(self._path(step), content)
        except Exception as error:
            multihost.exit_if_process_lost(error)
            reason = self._vote.report_part(_one_line(error)) or _one_line(error)
            cause = error
        if not multihost.is_leader():
            if reason := self._vote.decide():
                raise RemoteSaveError(reason) from cause
            return
        if reason:
            failure = SaveError(reason)
            try:
                failure = self._save_error(step, reason)
            finally:  # the other processes wait for this
                self._vote.decide(str(failure))
            raise failure from cause
        self._vote.decide()
        self._verified.add(step)
        older = [other for other in self._all_steps() if other < step]
        good = [other for other in reversed(older) if self._is_good(other)]
        for other in set(older) - set(good[: self._keep - 1]):
            self._remove(other)

    def _finish_pending(self):
        pending, self._pending = self._pending, None
        return None if pending is None else pending.exception()

    def _save_error(self, step, reason):
        """Removes the half-written files, which may fill the disk; returns the error to raise."""
        for _ in range(_REMOVALS):
            self._remove(step)
            time.sleep(_REMOVAL_SECONDS)
        self._remove(step)
        kept = self.steps()
        steps = ', '.join(map(str, kept)) or 'none'
        full = any(text in reason for text in _DISK_FULL)
        remedy = 'free disk space there' if full else 'fix that'
        again = f'the same command resumes after step {kept[-1]}' if kept else 'start again'
        where = f'checkpoint {step} in {self._directory}: not saved'
        kind = SaveError if multihost.is_leader() else RemoteSaveError
        return kind(f'{where}, {reason}; steps kept: {steps}; {remedy}, then {again}')

    def _remove(self, step):
        self._verified.discard(step)
        if not multihost.is_leader():
            return
        # The manifest goes first: a kill in between leaves the rest unfinished, not damaged.
        for path in (self._path(step, MANIFEST_FILE), self._path(step)):
            with contextlib.suppress(OSError):  # the second one should be a directory
                path.unlink()
        shutil.rmtree(self._path(step), ignore_errors=True)

    def _read(self, step, abstract_state):
        leaves = leaves_lib.named_leaves(abstract_state)
        targets = {path: leaves_lib.target(leaf) for path, leaf in leaves.items() if leaf.size}
        arrays = self._orbax.handler.restore(
            self._path(step), args=ocp.args.StandardRestore(targets)
        )
        restored = [leaves_lib.from_stored(leaf, arrays.get(path)) for path, leaf in leaves.items()]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), restored)


def _one_line(error):
    """The message of an error in one line of at most 300 characters."""
    os_error = re.search(r"os_error_code='(\d+)'", str(error))  # in half a page of TensorStore's
    if os_error:
        return os.strerror(int(os_error[1]))
    return ' '.join(str(error).split())[:300] or type(error).__name__


_save_numbers = itertools.count()  # equal on every process: all begin the same saves in order


class _SaveVote:
    """One save on several processes: each reports on its part, then process 0 on the whole.

    Background threads cannot use the collectives of devices, whose order must be equal on all
    processes. So the messages go through the key-value store of `jax.distributed`.
    """

    def __init__(self):
        number = next(_save_numbers)
        self._folder, self._reported = f'moddepth_jax/saves/{number}', False
        self._several = jax.process_count() > 1
        if self._several and jax.process_index() == 0:
            # All processes have begun the save after that one, so none reads its keys any more.
            self._store.key_value_delete(f'moddepth_jax/saves/{number - 2}')

    def report_part(self, error: str = '') -> str:
        """Reports how this process's part ended, and waits for the reports of all processes.

        Args:
          error: one line; empty if the part is written. Only the first report counts.

        Returns:
          The first error of any process, or ''. No process writes any more.
        """
        if not self._several:
            return error
        if not self._reported:
            self._reported = True
            self._put(f'part_{jax.process_index()}', error)
        reports = [self._get(f'part_{process}') for process in range(jax.process_count())]
        return next((f'process {i}: {text}' for i, text in enumerate(reports) if text), '')

    def decide(self, error: str = '') -> str:
        """Returns the error of the whole save, or '': that of process 0, which the others await."""
        if not self._several:
            return error
        if jax.process_index() == 0:
            self._put('whole', error)
        return self._get('whole')

    @property
    def _store(self):
        return ocp.multihost.get_jax_distributed_client()

    def _put(self, key, text):
        # After a colon, since the store takes no empty value.
        self._store.key_value_set(f'{self._folder}/{key}', f':{text}')

    def _get(self, key):
        milliseconds = 1000 * PATIENCE_SECONDS
        return self._store.blocking_key_value_get(f'{self._folder}/{key}', milliseconds)[1:]


def silence_orbax() -> None:
    """Drops two kinds of useless output in the whole process; further calls do nothing.

    One are Orbax's log records: dozens of lines per save, though its errors are raised anyway. The
    other are errors that Python cannot raise: if one array of a save cannot be written, Orbax drops
    the others and closes its event loop. TensorStore then finds the loop closed, or nobody reads
    its error; either would print pages of tracebacks on stderr.
    """
    logging.getLogger('absl').addFilter(_not_from_orbax)
    logging.getLogger('asyncio').addFilter(_not_from_dropped_save)
    if not isinstance(sys.unraisablehook, _WithoutLateWrites):
        sys.unraisablehook = _WithoutLateWrites(sys.unraisablehook)


class _WithoutLateWrites:
    """A sys.unraisablehook that passes all but TensorStore's late errors to the previous hook."""

    def __init__(self, hook):
        self._hook = hook

    def __call__(self, unraisable):
        # A callback of C++ has no Python object that the error could be attributed to.
        of_cpp = unraisable.object is None and unraisable.exc_type is RuntimeError
        if not (of_cpp and str(unraisable.exc_value) == 'Event loop is closed'):
            self._hook(unraisable)


def _not_from_orbax(record):
    return f'{os.sep}orbax{os.sep}' not in record.pathname


def _not_from_dropped_save(record):
    text = record.getMessage()
    of_save = f'{os.sep}orbax{os.sep}' in text or 'OCDBT' in text  # TensorStore's format
    return not (of_save and text.startswith(('Future exception', 'Task ')))
