"""Opens regular files, plain or compressed: every byte of the user's files is read through here."""

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
    """Whether the suffix is that of a compression."""
    return path.suffix.lower() in _CODECS


def plain_name(path: pathlib.Path) -> str:
    """The file's name without the suffix of a compression."""
    return path.stem if is_compressed(path) else path.name


def open_file(path: str | os.PathLike) -> io.BufferedReader:
    """The bytes of a regular file as they are; raises OSError, with what would be right.

    Anything else is refused without opening it: a pipe would block, and a device may have no end.
    """
    if not stat.S_ISREG(mode := os.stat(path).st_mode):
        kind = _KINDS.get(stat.filemode(mode)[0], 'a device')
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(number, f'{kind}, not a regular file', str(path))
    return open(path, 'rb', _BUFFER)


def read_small(path: str | os.PathLike, limit: int = 1 << 26) -> bytes:
    """The bytes of a regular file of at most `limit`; raises OSError, as `open_file`, for more."""
    with open_file(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > limit:
            problem = f'{size:,} bytes, more than the {limit:,} of such a file'
            raise OSError(errno.EINVAL, problem, str(path))
        return file.read(size)


@contextlib.contextmanager
def open_plain(path: pathlib.Path) -> Iterator[tuple[io.BufferedReader, Callable[[], int]]]:
    """(stream, tell): the plain bytes of `path`, and how many bytes of the file have been read.

    Reading raises OSError, without an errno if compressed data are truncated or damaged.
    """
    with open_file(path) as file:
        stream = file
        if is_compressed(path):
            import pyarrow  # Slow to import, and most runs read no compressed file.

            raw = pyarrow.PythonFile(file, 'r')
            raw = pyarrow.CompressedInputStream(raw, _CODECS[path.suffix.lower()])
            stream = io.BufferedReader(raw, _PLAIN_BUFFER)
        yield stream, file.tell


@contextlib.contextmanager
def plain_file(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """`path` or a temporary file with its plain bytes, to seek in; raises as `open_plain`."""
    with open_plain(path) as (stream, _):
        if not is_compressed(path):
            yield path
            return
        with tempfile.NamedTemporaryFile(suffix=pathlib.Path(plain_name(path)).suffix) as file:
            shutil.copyfileobj(stream, file, _BUFFER)
            file.flush()
            yield pathlib.Path(file.name)
