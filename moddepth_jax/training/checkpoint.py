"""Checkpoints of a train state: Orbax writes them, a manifest says which are good."""

import concurrent.futures
import contextlib
import hashlib
import json
import logging
import os
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from moddepth_jax.training.manifest import MANIFEST_FILE, read_manifest, write_manifest


def _not_from_orbax(record):
    return f'{os.sep}orbax{os.sep}' not in record.pathname


# Orbax reports each save in dozens of lines, and its errors reach the caller as exceptions anyway.
logging.getLogger('absl').addFilter(_not_from_orbax)


class SaveError(ValueError):
    """A checkpoint could not be written. The message is one line; earlier checkpoints are kept."""


def state_sha256(state) -> str:
    """Hex digest over every leaf in sorted path order: its path, dtype, shape and bytes.

    Two states are equal bit for bit exactly when their digests are, however their arrays are spread
    over devices. Leaves are jax or NumPy arrays of any dtype, typed PRNG keys among them, or Python
    scalars; each array is held whole by this process, or replicated.
    """
    digest = hashlib.sha256()
    for path, leaf in sorted(_named_leaves(state).items()):
        if isinstance(leaf, jax.Array) and leaf.is_fully_replicated:
            leaf = leaf.addressable_data(0)
        array = np.asarray(jax.device_get(_stored(leaf)))
        digest.update(f'{path} {_spec(leaf)}\n'.encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return digest.hexdigest()


class Checkpoints:
    """The checkpoints of one run, as `directory`/STEP/. A context manager; leaving it waits.

    A checkpoint counts once its `manifest.json` is there, written last: the sha256 sum and size of
    each of its files, the dtype and shape of each leaf, and the caller's metadata. A process killed
    at any moment thus leaves its older checkpoints good and the one in the making recognisably
    unfinished.

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
        self._pending = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, 'checkpoint')
        # Renaming would be atomic too, but not on network file systems; the manifest needs neither.
        mode = ocp.options.AtomicityMode.COMMIT_FILE
        self._orbax = ocp.AsyncCheckpointer(
            ocp.StandardCheckpointHandler(),
            atomicity_options=ocp.options.AtomicityOptions(mode=mode),
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
        leaves = _named_leaves(state)
        for path, leaf in leaves.items():
            if not isinstance(leaf, jax.Array):
                raise ValueError(f'state leaf {path}={leaf!r}: must be a jax array')
        content = {
            'step': int(step),
            'leaves': {path: _spec(leaf) for path, leaf in leaves.items()},
            'metadata': json.loads(json.dumps(metadata)),
        }
        failure = self._finish_pending()
        if not self._is_good(step):
            try:
                self._remove(step)
                self._directory.mkdir(parents=True, exist_ok=True)
                arrays = {path: _stored(leaf) for path, leaf in leaves.items() if leaf.size}
                # Orbax copies NumPy arrays before it returns; a jax buffer it would hold on to, and
                # a held buffer cannot be donated in place.
                arrays |= jax.device_get(
                    {path: x for path, x in arrays.items() if x.is_fully_addressable}
                )
                self._orbax.save(self._path(step), args=ocp.args.StandardSave(arrays))
            except Exception as error:
                raise self._save_error(step, error) from error
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
          ValueError: the newest good checkpoint has another leaf, shape or dtype; one line that
            names the first of them with both values. Nothing has been read then.
          SaveError: the save before this failed.
        """
        self.wait()
        self.skipped = []
        for step in reversed(self._all_steps()):
            try:
                content = read_manifest(self._path(step))
            except (OSError, ValueError) as error:
                self._verified.discard(step)
                self.skipped.append(f'checkpoint {step} skipped: {_one_line(error)}')
                continue
            self._verified.add(step)
            self._compare(step, content['leaves'], _named_leaves(abstract_state))
            return self._read(step, abstract_state), step, content['metadata']
        return None

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
        paths = self._directory.glob('[0-9]*')
        return sorted(int(path.name) for path in paths if path.name.isdigit() and path.is_dir())

    def _finish_pending(self):
        pending, self._pending = self._pending, None
        return None if pending is None else pending.exception()

    def _save_error(self, step, error):
        """What `save` or `wait` raises; the half-written files go, for they may fill the disk."""
        self._remove(step)
        kept = ', '.join(map(str, self.steps())) or 'none'
        where = f'checkpoint {step} in {self._directory}'
        return SaveError(f'{where}: not saved, {_one_line(error)}; steps kept: {kept}')

    def _commit(self, step, content):
        """Runs in the background thread: waits for Orbax, then makes the checkpoint count."""
        try:
            self._orbax.wait_until_finished()
            if jax.process_index() != 0:
                return
            write_manifest(self._path(step), content)
        except Exception as error:
            raise self._save_error(step, error) from error
        self._verified.add(step)
        older = [other for other in self._all_steps() if other < step]
        good = [other for other in reversed(older) if self._is_good(other)]
        for other in set(older) - set(good[: self._keep - 1]):
            self._remove(other)

    def _remove(self, step):
        self._verified.discard(step)
        if jax.process_index() != 0:
            return
        # The manifest goes first: killed in between, this leaves it unfinished, not damaged.
        with contextlib.suppress(OSError):
            self._path(step, MANIFEST_FILE).unlink()
        shutil.rmtree(self._path(step), ignore_errors=True)

    def _is_good(self, step):
        """Whether `step` is finished and its files are as written, verified once a process."""
        if step not in self._verified:
            try:
                read_manifest(self._path(step))
            except (OSError, ValueError):
                return False
            self._verified.add(step)
        return True

    def _compare(self, step, saved, abstract_leaves):
        wanted = {path: _spec(leaf) for path, leaf in abstract_leaves.items()}
        for path in sorted(saved.keys() | wanted.keys()):
            old, new = saved.get(path, 'absent'), wanted.get(path, 'absent')
            if old != new:
                found = f'{path} is {old} in the checkpoint and {new} in this run'
                right = 'use the config it was saved with'
                raise ValueError(f'checkpoint {step} in {self._directory}: {found}; {right}')

    def _read(self, step, abstract_state):
        leaves = _named_leaves(abstract_state)
        targets = {path: _target(leaf) for path, leaf in leaves.items() if np.prod(leaf.shape)}
        arrays = self._orbax.restore(self._path(step), args=ocp.args.StandardRestore(targets))
        restored = [_restored(leaf, arrays.get(path)) for path, leaf in leaves.items()]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), restored)


def _named_leaves(tree):
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    leaves = {jax.tree_util.keystr(path, simple=True, separator='.'): leaf for path, leaf in pairs}
    if len(leaves) != len(pairs):
        raise ValueError(f'{len(pairs)} leaves have {len(leaves)} paths: no key may contain a dot')
    return leaves


def _is_key(leaf):
    return jnp.issubdtype(getattr(leaf, 'dtype', None), jax.dtypes.prng_key)


def _spec(leaf):
    leaf = leaf if hasattr(leaf, 'dtype') else np.asarray(leaf)
    return f'{leaf.dtype}[{",".join(map(str, leaf.shape))}]'


def _stored(leaf):
    """What is written for a leaf: itself, or the uint32 data of a typed PRNG key."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _sharding(leaf):
    return leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _target(leaf):
    stored = jax.eval_shape(_stored, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=_sharding(leaf))


def _restored(leaf, array):
    if array is None:  # Orbax refuses arrays without elements, so they are not written.
        return jax.device_put(jnp.empty(leaf.shape, leaf.dtype), _sharding(leaf))
    if _is_key(leaf):
        impl = jax.random.key_impl(jnp.empty((), leaf.dtype))
        return jax.device_put(jax.random.wrap_key_data(array, impl=impl), _sharding(leaf))
    return array


def _one_line(error):
    os_error = re.search(r"os_error_code='(\d+)'", str(error))  # in half a page of TensorStore's
    if os_error:
        return os.strerror(int(os_error[1]))
    return ' '.join(str(error).split())[:300] or type(error).__name__
