"""Opens files of text, plain or compressed: every byte of the user's files is read through here."""

import contextlib
import io
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator

_CODECS = {'.gz': 'gzip', '.zst': 'zstd'}
SUFFIXES = tuple(_CODECS)
_BUFFER = 1 << 20
_PLAIN_BUFFER = 1 << 16  # plain bytes that are lost in front of a damaged place


def is_compressed(path: pathlib.Path) -> bool:
    """Whether the suffix is that of a compression."""
    return path.suffix.lower() in _CODECS


def plain_name(path: pathlib.Path) -> str:
    """The file's name without the suffix of a compression."""
    return path.stem if is_compressed(path) else path.name


def open_file(path: pathlib.Path) -> io.BufferedReader:
    """The bytes of the file as they are; raises OSError."""
    return open(path, 'rb', _BUFFER)


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
