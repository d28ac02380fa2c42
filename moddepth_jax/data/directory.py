"""Directories that one process at a time writes to, JSON in files, and the user's cache folder."""

import contextlib
import fcntl
import io
import json
import os
import pathlib
import socket

from moddepth_jax.data.compression import read_small

LOCK_FILE = 'lock'


def cache_directory() -> pathlib.Path | None:
    """This project's folder in the user's cache, or None for a user without a home."""
    folder = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
    return pathlib.Path(folder, 'moddepth_jax') if os.path.isabs(folder) else None


def write_atomically(path: str | os.PathLike, text: str) -> None:
    """Writes `text` so that, killed anywhere, `path` holds all of the old text or of the new."""
    # Several processes, on several hosts, may write the same file at once.
    temporary = f'{os.fspath(path)}.{socket.gethostname()}-{os.getpid()}.tmp'
    try:
        with open(temporary, 'w', encoding='utf-8') as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # a partial file must not fill the disk
            os.unlink(temporary)
        raise


def read_json(file: pathlib.Path, remedy: str) -> dict | None:
    """The JSON object in `file`, None if there is no such file; raises ValueError, one line."""
    try:
        content = json.loads(read_small(file).decode())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        problem = getattr(error, 'strerror', None) or error
        raise ValueError(f'{file}: cannot be read ({problem}); {remedy}') from None
    if not isinstance(content, dict):
        raise ValueError(f'{file}: holds no JSON object; {remedy}')
    return content


def lock_directory(path: str | os.PathLike, flag: str = '--workdir') -> io.TextIOBase:
    """Locks a directory until the returned file is closed, or the process dies.

    `flag` is the option that names it, for messages. Raises ValueError, one line, if another
    process holds the directory or the lock file cannot be written.
    """
    try:
        file = open(pathlib.Path(path) / LOCK_FILE, 'a+', encoding='utf-8')
    except OSError as error:
        right = 'must be a directory that can be written'
        raise ValueError(f'{flag}={path}: {error.strerror}; {right}') from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with file:
            file.seek(0)
            holder = file.read().strip() or 'another process'
        right = f'wait until it ends, or use another {flag}'
        raise ValueError(f'{flag}={path}: in use by {holder}; {right}') from None
    file.truncate(0)
    file.write(f'process {os.getpid()} on {socket.gethostname()}\n')
    file.flush()
    return file
