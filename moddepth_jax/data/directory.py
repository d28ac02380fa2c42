"""Locks, atomic writes, JSON files, and the user's cache folder."""

import collections
import contextlib
import fcntl
import io
import json
import os
import pathlib
import reprlib
import socket
import sys

from moddepth_jax.data.compression import read_small

LOCK_FILE = 'lock'
_MAX_DEPTH = 64  # of nested objects and lists; Python's limit depends on the depth of the caller
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 100
short_repr = _REPR.repr  # of a value from a file, for messages
_KINDS = {
    dict: 'an object',
    list: 'a list',
    str: 'text',
    int: 'an integer',
    float: 'a finite number',
}


def cache_directory() -> pathlib.Path | None:
    """Return this project's folder in the user's cache, or None for a user without a home."""
    folder = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
    return pathlib.Path(folder, 'moddepth_jax') if os.path.isabs(folder) else None


def write_atomically(path: str | os.PathLike, content: str | bytes) -> None:
    """Write text or bytes so that a kill at any moment leaves the old or the new content."""
    content = content.encode() if isinstance(content, str) else content
    # Several processes, on several hosts, may write the same file at once.
    temporary = f'{os.fspath(path)}.{socket.gethostname()}-{os.getpid()}.tmp'
    try:
        with open(temporary, 'wb') as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # a partial file must not fill the disk
            os.unlink(temporary)
        raise


def _unique_keys(pairs):
    """Make a dict; refuses equal keys, of which other readers may use another one."""
    content = dict(pairs)
    if len(content) < len(pairs):
        ((key, _),) = collections.Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f'holds {short_repr(key)} twice')
    return content


def parse_object(text: str | bytes) -> dict:
    """Parse a JSON object in UTF-8; raises ValueError, one line, for anything else.

    Also if an object has two equal keys.
    """
    too_deep = ValueError(f'nested more than {_MAX_DEPTH} deep')
    try:
        text = text if isinstance(text, str) else text.decode()
        content = json.loads(text, object_pairs_hook=_unique_keys)
    except RecursionError:
        raise too_deep from None
    if not isinstance(content, dict):
        raise ValueError('not a JSON object')
    level = [content]
    for _ in range(_MAX_DEPTH):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
    if level:
        raise too_deep
    return content


def check_fields(content: dict, fields: dict, where: object, remedy: str) -> None:
    """Raise ValueError, one line, unless the JSON object `content` has these fields.

    Args:
      content: the object.
      fields: {name: type}. For a nested object {name: {...}} with its fields, for a list of objects
        {name: [{...}]} with the fields of each.
      where: the file, and perhaps the place in it, for the message.
      remedy: end of the message.
    """
    for name, kind in fields.items():
        value, right = content.get(name), kind if isinstance(kind, type) else type(kind)
        fits = type(value) is right or (right is float and type(value) is int)
        if fits and right in (int, float):
            fits = abs(value) <= sys.float_info.max
        if not fits:
            found = f'{name}={short_repr(value)}' if name in content else f'holds no {name!r}'
            raise ValueError(f'{where}: {found}; must be {_KINDS[right]}; {remedy}')
        if isinstance(kind, list):
            value, kind = dict(enumerate(value)), dict.fromkeys(range(len(value)), kind[0])
        if isinstance(kind, dict):
            check_fields(value, kind, f'{where}: {name}', remedy)


def read_json(
    file: pathlib.Path, remedy: str, fields: dict | None = None, limit: int = 1 << 26
) -> dict | None:
    """Read the JSON object in a regular file of at most `limit` bytes; None if there is no file.

    Raises ValueError, one line that ends with `remedy`, if it cannot be read, or like
    `check_fields`.
    """
    try:
        content = parse_object(read_small(file, limit))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        problem = getattr(error, 'strerror', None) or error
        raise ValueError(f'{file}: cannot be read ({problem}); {remedy}') from None
    check_fields(content, fields or {}, file, remedy)
    return content


def lock_directory(path: str | os.PathLike, flag: str = '--workdir') -> io.TextIOBase:
    """Lock a directory until the returned file is closed or the process dies.

    `flag` is the option that names the directory, for messages. Raises ValueError, one line, if
    another process holds the lock, or if the lock file cannot be written.
    """
    try:
        file = open(pathlib.Path(path) / LOCK_FILE, 'a+', encoding='utf-8')
    except OSError as error:
        right = 'must be a directory that can be written'
        if isinstance(error, IsADirectoryError):
            right = f'its {LOCK_FILE} must be a file'
        raise ValueError(f'{flag}={path}: {error.strerror}; {right}') from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with file:
            file.seek(0)
            holder = file.read().strip() or 'another process'
        right = f'wait until that ends, or use another {flag}'
        raise ValueError(f'{flag}={path}: in use by {holder}; {right}') from None
    file.truncate(0)
    file.write(f'process {os.getpid()} on {socket.gethostname()}\n')
    file.flush()
    return file
