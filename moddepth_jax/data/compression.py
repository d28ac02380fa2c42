"""Files that may be compressed: plain bytes out of .gz, .zst and anything else."""

import contextlib
import io
import pathlib
import shutil
import tempfile
import typing

_CODECS = {'.gz': 'gzip', '.zst': 'zstd'}
SUFFIXES = tuple(_CODECS)
_BUFFER = 1 << 20
_PLAIN_BUFFER = 1 << 16  # plain bytes that are lost in front of a damaged place


class DamagedError(Exception):
    """A compressed file that is truncated or damaged; the message says which."""


def is_compressed(path: pathlib.Path) -> bool:
    """Whether the suffix is that of a compression."""
    return path.suffix.lower() in _CODECS


def plain_name(path: pathlib.Path) -> str:
    """The file's name without the suffix of a compression."""
    return path.stem if is_compressed(path) else path.name


class _Decompressed(io.RawIOBase):
    """The plain bytes of an open file; raises DamagedError."""

    def __init__(self, file, codec):
        import pyarrow  # Slow to import, and most runs read no compressed file.

        self._stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, 'r'), codec)
        self._codec = codec

    def readable(self):
        return True

    def readinto(self, buffer):
        try:
            return self._stream.readinto(buffer)
        except OSError as error:
            if 'Truncated' in str(error):
                raise DamagedError(f'it is cut off within its {self._codec} data') from None
            raise DamagedError(f'its {self._codec} data are damaged: {error}') from None


@contextlib.contextmanager
def open_plain(path: pathlib.Path) -> typing.Iterator[tuple[typing.BinaryIO, typing.Callable]]:
    """(stream, tell): the plain bytes of `path`, and how many bytes of the file have been read.

    Reading raises DamagedError for truncated or damaged compressed data, OSError otherwise.
    """
    with open(path, 'rb', _BUFFER) as file:
        stream = file
        if is_compressed(path):
            raw = _Decompressed(file, _CODECS[path.suffix.lower()])
            stream = io.BufferedReader(raw, _PLAIN_BUFFER)
        yield stream, file.tell


@contextlib.contextmanager
def plain_file(path: pathlib.Path) -> typing.Iterator[pathlib.Path]:
    """A path to the plain bytes of `path`: itself, or a temporary file.

    For formats that are not read from beginning to end.
    """
    if not is_compressed(path):
        yield path
        return
    with tempfile.NamedTemporaryFile(suffix=pathlib.Path(plain_name(path)).suffix) as file:
        with open_plain(path) as (stream, _):
            shutil.copyfileobj(stream, file, _BUFFER)
        file.flush()
        yield pathlib.Path(file.name)
