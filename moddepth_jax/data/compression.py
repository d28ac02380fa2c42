"""Opens regular files, plain or compressed; all files of the user are read through here."""

import contextlib
import errno
import io
import os
import pathlib
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator

_CODECS = {'.gz': 'gzip', '.zst': 'zstd'}
SUFFIXES = tuple(_CODECS)
_KINDS = {'d': 'a directory', 'p': 'a pipe', 's': 'a socket'}
_BUFFER = 1 << 20
_PLAIN_BUFFER = 1 << 16  # plain bytes that are lost in front of a damaged place


def is_compressed(path: pathlib.Path) -> bool:
    """Return whether the suffix is that of a compressed file."""
    return path.suffix.lower() in _CODECS


def plain_name(path: pathlib.Path) -> str:
    """Return the file's name without the suffix of the compression."""
    return path.stem if is_compressed(path) else path.name


def open_file(path: str | os.PathLike) -> io.BufferedReader:
    """Open a regular file to read its bytes as they are.

    Raises OSError for anything else without opening it: a pipe would block, and a device may have
    no end.
    """
    if not stat.S_ISREG(mode := os.stat(path).st_mode):
        kind = _KINDS.get(stat.filemode(mode)[0], 'a device')
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(number, f'{kind}, not a regular file', str(path))
    return open(path, 'rb', _BUFFER)


def read_small(path: str | os.PathLike, limit: int = 1 << 26) -> bytes:
    """Read a regular file of at most `limit` bytes; raises OSError if it is larger."""
    with open_file(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > limit:
            problem = f'{size:,} bytes, more than the {limit:,} that are allowed'
            raise OSError(errno.EINVAL, problem, str(path))
        return file.read(size)


@contextlib.contextmanager
def open_plain(path: pathlib.Path) -> Iterator[tuple[io.BufferedReader, Callable[[], int]]]:
    """Open `path` as (stream of plain bytes, function: bytes of the file that have been read).

    This or reading raises OSError; its errno is None if compressed data are truncated or damaged.
    """
    with open_file(path) as file:
        stream = file
        if is_compressed(path):
            import pyarrow  # slow to import, and most runs read no compressed file

            if not os.fstat(file.fileno()).st_size:  # which pyarrow reads as an empty text
                raise OSError('0 bytes')
            raw = pyarrow.PythonFile(file, 'r')
            raw = pyarrow.CompressedInputStream(raw, _CODECS[path.suffix.lower()])
            stream = io.BufferedReader(raw, _PLAIN_BUFFER)
        yield stream, file.tell


@contextlib.contextmanager
def plain_file(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield `path`, or a temporary file with its plain bytes, to seek in; see `open_plain`."""
    with open_plain(path) as (stream, _):
        if not is_compressed(path):
            yield path
            return
        with tempfile.NamedTemporaryFile(suffix=pathlib.Path(plain_name(path)).suffix) as file:
            shutil.copyfileobj(stream, file, _BUFFER)
            file.flush()
            yield pathlib.Path(file.name)
