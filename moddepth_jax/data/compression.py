"""Opens files of text, plain or compressed: every byte of the user's files is read through here."""

import contextlib
import io
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

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
    """The plain bytes of an open file; `tell` is the position in that file."""

    def __init__(self, file, codec):
        import pyarrow  # Slow to import, and most runs read no compressed file.

        self._stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, 'r'), codec)
        self._codec, self.tell = codec, file.tell

    def readable(self):
        return True

    def readinto(self, buffer):
        try:
            return self._stream.readinto(buffer)
        except OSError as error:
            if 'Truncated' in str(error):
                raise DamagedError(f'it is cut off within its {self._codec} data') from None
            raise DamagedError(f'its {self._codec} data are damaged: {error}') from None


def open_file(path: pathlib.Path) -> io.BufferedReader:
    """The bytes of the file as they are; raises OSError."""
    return open(path, 'rb', _BUFFER)


@contextlib.contextmanager
def open_plain(path: pathlib.Path) -> Iterator[io.BufferedReader]:
    """A stream of the plain bytes of `path`; `stream.raw.tell()` is how far the file has been read.

    Reading raises DamagedError for truncated or damaged compressed data, OSError otherwise.
    """
    with open_file(path) as file:
        if is_compressed(path):
            raw = _Decompressed(file, _CODECS[path.suffix.lower()])
            yield io.BufferedReader(raw, _PLAIN_BUFFER)
        else:
            yield file


@contextlib.contextmanager
def plain_file(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A path to the plain bytes of `path`, for formats that need to seek.

    It is `path` or a temporary file. Raises as `open_plain` does.
    """
    with open_plain(path) as stream:
        if not is_compressed(path):
            yield path
            return
        with tempfile.NamedTemporaryFile(suffix=pathlib.Path(plain_name(path)).suffix) as file:
            shutil.copyfileobj(stream, file, _BUFFER)
            file.flush()
            yield pathlib.Path(file.name)
