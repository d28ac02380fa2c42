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
from jax._src import distributed  # its key-value store has no public name

from moddepth_jax.training import leaves as leaves_lib
from moddepth_jax.training import multihost
from moddepth_jax.training.manifest import MANIFEST_FILE, read_manifest, write_manifest

_STEP = re.compile('0|[1-9][0-9]*')
# After an error, TensorStore goes on for a moment with the arrays that Orbax no longer waits for.
_LATE_LOOKS, _LATE_SECONDS = 5, 0.1


def state_sha256(state) -> str:
    """Hex digest over every leaf in sorted path order: its path, dtype, shape and bytes.

    Two states are equal bit for bit exactly when their digests are, however their arrays are spread
    over devices and processes. Leaves are jax or NumPy arrays of any dtype, typed PRNG keys among
    them, or Python scalars. Where an array is spread over processes, every process has to call
    this, and each device holds all of one such array at a time.
    """
    digest = hashlib.sha256()
    for path, leaf in sorted(leaves_lib.named_leaves(state).items()):
        digest.update(f'{path} {leaves_lib.spec(leaf)}\n'.encode())
        digest.update(np.ascontiguousarray(leaves_lib.to_host(leaf)).reshape(-1).view(np.uint8))
    return digest.hexdigest()


class Checkpoints:
    """The checkpoints of one run, as `directory`/STEP/. A context manager; leaving it waits.

    A checkpoint counts once its `manifest.json` is there, written last: the sha256 sum and size of
    each of its files, the dtype and shape of each leaf, and the caller's metadata. A process killed
    at any moment thus leaves its older checkpoints good and the one in the making recognisably
    unfinished.

    Several processes share the directory, and each of them makes the same calls in the same order
    (but for `steps`). Each writes and reads its own parts of the arrays; process 0 alone decides
    what is good, removes, and writes manifests.

    Attributes:
      skipped: a line for each checkpoint that the last `restore` passed over, newest first.
    """

    def __init__(self, directory: str | os.PathLike, keep: int):
        if keep < 1:
            raise ValueError(f'keep={keep!r}: must be 1 or more')
        self.skipped: list[str] = []
        self._directory = pathlib.Path(os.path.abspath(directory))
        self._keep = keep
        self._verified = set()
        self._pending = self._outcome = None
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

        The state has been copied when this returns, so its arrays may be donated. A good checkpoint
        that is already there for `step` is left alone.

        Args:
          step: names the checkpoint.
          state: pytree whose leaves are jax arrays, typed PRNG keys among them.
          metadata: JSON values that `restore` gives back.

        Raises:
          SaveError: this save could not begin; or the one before it failed, and this one has begun.
          ValueError: a leaf is no jax array.
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
            self._outcome = SaveOutcome()
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
        """The newest good checkpoint as (state, step, metadata), or None where there is none.

        Unfinished and damaged checkpoints are passed over; see `skipped`.

        Args:
          abstract_state: pytree of jax.ShapeDtypeStruct or arrays, like the saved state. Each leaf
            is placed as its `sharding` says, or on the first device where that is None.

        Raises:
          LeavesDiffer: a ValueError, the newest good checkpoint has another leaf, shape or dtype;
            one line that names the first of them with both values. Nothing has been read then.
          SaveError: the save before this failed.
        """
        self.wait()
        found = multihost.broadcast_from_leader(lambda: self._newest(abstract_state))
        self.skipped, step = found['skipped'], found['step']
        if found['differs']:
            raise leaves_lib.StateMismatchError(found['differs'])
        if step is None:
            return None
        # Not by the checkpointer, whose processes would wait for one that could not read.
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

    def _newest(self, abstract_state):
        """What `restore` reads, step (None: no good one) and metadata, and what it skips."""
        skipped, leaves = [], leaves_lib.named_leaves(abstract_state)
        for step in reversed(self._all_steps()):
            try:
                content = self._verified_content(step)
            except (OSError, ValueError) as error:
                skipped.append(f'checkpoint {step} skipped: {one_line(error)}')
                continue
            differs = leaves_lib.difference(content['leaves'], leaves)
            differs = differs and f'checkpoint {step} in {self._directory}: {differs}'
            found = {'step': step, 'metadata': content['metadata'], 'differs': differs}
            return found | {'skipped': skipped}
        return {'step': None, 'differs': '', 'skipped': skipped}

    def _verified_content(self, step):
        self._verified.discard(step)
        content = read_manifest(self._path(step))
        if content['step'] != step:
            raise ValueError(f'its files are those of checkpoint {content["step"]}')
        self._verified.add(step)
        return content

    def _make_room(self, step):
        """Whether `step` is to be written: no good one is there, and what was is removed."""
        if self._is_good(step):
            return False
        try:
            self._remove(step)
            self._path(step).mkdir(parents=True)
            self._path(step).rmdir()  # Orbax makes it again, while other processes wait for that
        except OSError as error:
            raise self._save_error(step, one_line(error)) from error
        return True

    def _begin(self, step, leaves):
        """Has Orbax copy this process's parts of the arrays, which it then goes on to write."""
        arrays = {path: leaves_lib.stored(leaf) for path, leaf in leaves.items() if leaf.size}
        # Orbax copies NumPy arrays before it returns; a jax buffer it would hold on to, and a held
        # buffer cannot be donated in place.
        arrays |= jax.device_get({path: x for path, x in arrays.items() if x.is_fully_addressable})
        save = functools.partial(self._orbax.save, args=ocp.args.StandardSave(arrays))
        try:
            multihost.run_on_all(lambda: save(self._path(step)))
        except Exception as error:
            multihost.exit_if_process_lost(error)
            line = self._outcome.report(one_line(error))
            with contextlib.suppress(Exception):  # of those that had begun
                self._orbax.wait_until_finished()
            raise self._save_error(step, line) from error

    def _await_all_parts(self, *, key, timeout_ms):
        """The barrier of Orbax's threads: all parts are written, or the error of one of them.

        Orbax has a second one, for process 0 to have made the parts one checkpoint. It passes, and
        `_commit` waits for more. Neither is a barrier that an error elsewhere leaves closed.
        """
        del key, timeout_ms
        error = self._outcome.report()
        if error:
            raise ValueError(error)

    def _commit(self, step, content):
        """Runs in the background thread: waits for Orbax, then makes the checkpoint count."""
        line, cause = '', None
        try:
            self._orbax.wait_until_finished()
            if multihost.is_leader():
                write_manifest(self._path(step), content)
        except Exception as error:
            multihost.exit_if_process_lost(error)
            line, cause = self._outcome.report(one_line(error)) or one_line(error), error
        if not multihost.is_leader():
            if line := self._outcome.conclude():
                raise RemoteSaveError(line) from cause
            return
        if line:
            failure = SaveError(line)
            try:
                failure = self._save_error(step, line)
            finally:  # the other processes wait for this
                self._outcome.conclude(str(failure))
            raise failure from cause
        self._outcome.conclude()
        self._verified.add(step)
        older = [other for other in self._all_steps() if other < step]
        good = [other for other in reversed(older) if self._is_good(other)]
        for other in set(older) - set(good[: self._keep - 1]):
            self._remove(other)

    def _finish_pending(self):
        pending, self._pending = self._pending, None
        return None if pending is None else pending.exception()

    def _save_error(self, step, line):
        """What `save` or `wait` raises; the half-written files go, for they may fill the disk."""
        for _ in range(_LATE_LOOKS):
            self._remove(step)
            time.sleep(_LATE_SECONDS)
        self._remove(step)
        return not_saved(step, self._directory, line, self.steps())

    def _remove(self, step):
        self._verified.discard(step)
        if not multihost.is_leader():
            return
        # The manifest goes first: killed in between, this leaves it unfinished, not damaged.
        for path in (self._path(step, MANIFEST_FILE), self._path(step)):
            with contextlib.suppress(OSError):  # the second one is a directory, or ought to be
                path.unlink()
        shutil.rmtree(self._path(step), ignore_errors=True)

    def _is_good(self, step):
        """Whether `step` is finished and its files are as written, verified once a process."""
        if step not in self._verified:
            with contextlib.suppress(OSError, ValueError):
                self._verified_content(step)
        return step in self._verified

    def _read(self, step, abstract_state):
        leaves = leaves_lib.named_leaves(abstract_state)
        targets = {path: leaves_lib.target(leaf) for path, leaf in leaves.items() if leaf.size}
        arrays = self._orbax.handler.restore(
            self._path(step), args=ocp.args.StandardRestore(targets)
        )
        restored = [leaves_lib.restored(leaf, arrays.get(path)) for path, leaf in leaves.items()]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), restored)


_FULL = [os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)]


class SaveError(ValueError):
    """A checkpoint could not be written. The message is one line; earlier checkpoints are kept."""

    everywhere = True  # every process of a run meets it


class RemoteSaveError(SaveError, multihost.RemoteError):
    """The same on the other processes: process 0 raises the SaveError that the user sees."""


def not_saved(step: int, directory, reason: str, kept: list[int]) -> SaveError:
    """The error of a checkpoint: what failed, which steps are kept, and what to do.

    Args:
      step: of the checkpoint.
      directory: of all checkpoints.
      reason: of `one_line`.
      kept: steps of those that are there.
    """
    steps = ', '.join(map(str, kept)) or 'none'
    mend = 'make room there' if any(full in reason for full in _FULL) else 'mend that'
    again = f'the same command goes on after step {kept[-1]}' if kept else 'start again'
    where = f'checkpoint {step} in {directory}: not saved'
    kind = SaveError if multihost.is_leader() else RemoteSaveError
    return kind(f'{where}, {reason}; steps kept: {steps}; {mend}, then {again}')


def one_line(error: BaseException) -> str:
    """What an error says, in a line of 300 characters at most."""
    os_error = re.search(r"os_error_code='(\d+)'", str(error))  # in half a page of TensorStore's
    if os_error:
        return os.strerror(int(os_error[1]))
    return ' '.join(str(error).split())[:300] or type(error).__name__


PATIENCE_SECONDS = 3600  # for a slow disk; a process that died ends the others far sooner
_numbers = itertools.count()  # alike on every process: all begin the same saves in the same order


class SaveOutcome:
    """Of one save: each process reports on its part, then process 0 on the whole.

    Threads beside the training cannot use the collectives of devices, whose order has to be the
    same everywhere. So the processes leave notes at the coordinator of `jax.distributed`.
    """

    def __init__(self):
        number = next(_numbers)
        self._folder, self._reported = f'moddepth_jax/saves/{number}', False
        self._several = jax.process_count() > 1
        if self._several and jax.process_index() == 0:
            # All have begun the save after that one, so none will read of it any more.
            distributed.global_state.client.key_value_delete(f'moddepth_jax/saves/{number - 2}')

    def report(self, error: str = '') -> str:
        """Tells how this process's part ended, and waits until every process has told that.

        Args:
          error: one line; empty where the part is written. Only the first report counts.

        Returns:
          The first error of any process, or ''. None of them writes any more.
        """
        if not self._several:
            return error
        if not self._reported:
            self._reported = True
            self._leave(f'part_{jax.process_index()}', error)
        told = {process: self._find(f'part_{process}') for process in range(jax.process_count())}
        return next((f'process {process}: {text}' for process, text in told.items() if text), '')

    def conclude(self, error: str = '') -> str:
        """What process 0 gives as the error of the whole save, or ''; the others wait for that."""
        if not self._several:
            return error
        if jax.process_index() == 0:
            self._leave('whole', error)
        return self._find('whole')

    def _leave(self, note, text):
        # Behind a colon, for a note without text is none.
        distributed.global_state.client.key_value_set(f'{self._folder}/{note}', f':{text}')

    def _find(self, note):
        client = distributed.global_state.client
        return client.blocking_key_value_get(f'{self._folder}/{note}', 1000 * PATIENCE_SECONDS)[1:]


_LATE = 'Event loop is closed'


def silence_orbax() -> None:
    """Drops, in the whole process, two things that tell nobody anything; further calls do nothing.

    The first are Orbax's log records: dozens of lines a save, and its errors reach the caller as
    exceptions anyway. The second are errors that Python cannot raise. Where one array of a save
    cannot be written, Orbax gives up the others and closes its event loop. TensorStore then finds
    the loop closed, or nobody asks for its error; either would be pages of tracebacks on stderr.
    """
    logging.getLogger('absl').addFilter(_not_from_orbax)
    logging.getLogger('asyncio').addFilter(_not_given_up)
    if not isinstance(sys.unraisablehook, _WithoutLateWrites):
        sys.unraisablehook = _WithoutLateWrites(sys.unraisablehook)


class _WithoutLateWrites:
    """A sys.unraisablehook that gives all but TensorStore's late errors to the one before it."""

    def __init__(self, hook):
        self._hook = hook

    def __call__(self, unraisable):
        # A callback of C++ has no Python object that the error could be blamed on.
        of_cpp = unraisable.object is None and unraisable.exc_type is RuntimeError
        if not (of_cpp and str(unraisable.exc_value) == _LATE):
            self._hook(unraisable)


def _not_from_orbax(record):
    return f'{os.sep}orbax{os.sep}' not in record.pathname


def _not_given_up(record):
    text = record.getMessage()
    of_save = f'{os.sep}orbax{os.sep}' in text or 'OCDBT' in text  # TensorStore's format
    return not (of_save and text.startswith(('Future exception', 'Task ')))
