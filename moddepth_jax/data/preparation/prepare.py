"""Prepares text for training: files of any size to a store of tokens, by several processes.

A preparation that was killed anywhere goes on where it was: its work is cut into parts, each a file
in parts/ that is there as a whole or not at all.
"""

import contextlib
import errno
import hashlib
import os
import pathlib
import shutil

from moddepth_jax.data import files
from moddepth_jax.data.directory import LOCK_FILE, DirectoryLock
from moddepth_jax.data.preparation.options import Preparation, arguments_of
from moddepth_jax.data.preparation.run import KEPT, PARTS_DIRECTORY, is_trained, refuse_other, run
from moddepth_jax.data.rows import BadText
from moddepth_jax.data.token_store import (
    PARTS,
    PREPARED_FILE,
    TOKENIZER_DIRECTORY,
    Store,
    open_store,
)

_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def prepare(wanted: Preparation, phase) -> Store:
    """Prepares text, or goes on with what an earlier start left; the store may be there already.

    Documents lie in the order of the names of their files and of their rows, each on the side that
    `corpus.split` gives it. Documents without a byte are left out. The same files and arguments
    give the same bytes and the same fingerprint, by any number of processes and after any kills.
    Files that change between two starts are read anew, unless a tokenizer was trained on them.

    Args:
      wanted: what is asked for.
      phase: phase(what, total) is a context manager of a function that takes the bytes done since
        its last call.

    Raises:
      ValueError: one line with what to do, for sources as `files.find` tells, a bad row (what was
        done before is kept), a directory of something else, of another preparation or in use, a
        full disk, a process that was lost.
    """
    paths = _find(wanted.sources)
    try:
        wanted.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        right = 'must be a directory that can be written'
        raise ValueError(f'--output={wanted.directory}: {error.strerror}; {right}') from None
    _check_contents(wanted.directory)
    with DirectoryLock(wanted.directory, '--output'), _as_one_line(wanted):
        if (wanted.directory / PREPARED_FILE).exists():
            return _finished(wanted, paths)
        return run(wanted, paths, phase)


def _find(sources):
    """(name, path) of each file that one of the sources matches, sorted by name."""
    right = f'must be a glob of {files.KINDS}'
    if not sources:
        raise ValueError(f'--input=: names no file; {right}')
    found = [files.find(source, '--input', right) for source in sources]
    # By paths from one folder the files of several sources have names of their own.
    root = os.path.commonpath([os.path.abspath(root) for root, _ in found])
    paths = {os.path.abspath(path): path for _, matches in found for path in matches}
    names = {pathlib.Path(os.path.relpath(place, root)).as_posix(): p for place, p in paths.items()}
    return sorted(names.items())


@contextlib.contextmanager
def _as_one_line(wanted):
    try:
        yield
    except BadText as error:
        kept = KEPT
        if is_trained(wanted):
            because = f'{wanted.tokenizer} was trained on the text as it is'
            kept = f'to mend it, start again (rm -r {wanted.directory}): {because}'
        raise ValueError(f'{error}; or --skip_bad leaves it out; {kept}') from None
    except OSError as error:
        if error.errno not in _OF_THE_DISK:
            raise
        right = f'free some space, about twice the size of the tokens; {KEPT}'
        raise ValueError(f'--output={wanted.directory}: {error.strerror}; {right}') from None


def _check_contents(directory):
    known = {LOCK_FILE, PARTS_DIRECTORY, TOKENIZER_DIRECTORY, PREPARED_FILE}
    known |= {f'{part}.{kind}' for part in PARTS for kind in ('bin', 'index')}
    others = {path.name for path in directory.iterdir() if path.suffix != '.tmp'} - known
    if others:
        found = f'holds {min(others)!r}, so it is no directory of launch.prepare'
        raise ValueError(f'--output={directory}: {found}; use another --output')


def _finished(wanted, paths):
    """The store that is there, if it is the one that is asked for."""
    store = open_store(wanted.directory)
    refuse_other(wanted.directory, store.arguments, arguments_of(wanted))
    stored, now = {entry['name']: entry for entry in store.inputs}, dict(paths)
    for name in sorted(stored.keys() | now.keys()):
        same = name in stored and name in now and _is_as_stored(now[name], stored[name])
        if not same:
            problem = f'{name} is not what it was when this text was prepared'
            raise ValueError(f'--output={wanted.directory}: {problem}; use another --output')
    shutil.rmtree(wanted.directory / PARTS_DIRECTORY, ignore_errors=True)
    return store


def _is_as_stored(path, entry):
    """Whether a file is still an input of the store; it is read where its time is another one."""
    try:
        status = path.stat()
        if status.st_size != entry['bytes']:
            return False
        if status.st_mtime_ns == entry.get('modified'):  # earlier stores tell no time
            return True
        with open(path, 'rb') as file:
            return hashlib.file_digest(file, 'sha256').hexdigest() == entry['sha256']
    except OSError:
        return entry.get('modified') == 0  # --skip_bad left out a file that was not there
