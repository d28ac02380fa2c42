"""Files that may be compressed: plain bytes out of .gz, .zst and anything else."""

import contextlib
import gzip
import io
import pathlib
import shutil
import tempfile
import typing
import zlib

_BUFFER = 1 << 20
# A block of four bytes may stand for 128 KiB, so little is decompressed at a time.
_ZSTD_READ = 1 << 10
SUFFIXES = ('.gz', '.zst')


class DamagedError(Exception):
    """A compressed file that is cut off or damaged; the message says which."""


def plain_name(name: str) -> str:
    """`name` without the suffix of a compression."""
    for suffix in SUFFIXES:
        if name.lower().endswith(suffix):
            return name[: -len(suffix)]
    return name


class _Zstd(io.RawIOBase):
    """The plain bytes of a zstd file of one frame or more.

    The library's own stream takes a file that is cut off within a frame for a shorter one.
    """

    def __init__(self, file):
        import zstandard

        self._file, self._make = file, zstandard.ZstdDecompressor().decompressobj
        self._error, self._frame = zstandard.ZstdError, None
        self._input = self._output = b''

    def readable(self):
        return True

    def readinto(self, buffer):
        while not self._output:
            self._input = self._input or self._file.read(_ZSTD_READ)
            if not self._input:
                if self._frame is not None:
                    raise DamagedError('it is cut off within a zstd frame')
                return 0
            self._frame = self._frame or self._make()
            try:
                self._output = self._frame.decompress(self._input)
            except self._error as error:
                raise DamagedError(f'its zstd data are damaged: {error}') from None
            self._input = b''
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count


class _Gzip(io.RawIOBase):
    """The plain bytes of a gzip file; its errors are DamagedError."""

    def __init__(self, file):
        self._file = gzip.GzipFile(fileobj=file)

    def readable(self):
        return True

    def readinto(self, buffer):
        try:
            return self._file.readinto1(buffer)  # all that comes before a damaged place
        except EOFError:
            raise DamagedError('it is cut off within its gzip data') from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise DamagedError(f'its gzip data are damaged: {error}') from None


@contextlib.contextmanager
def open_plain(path: pathlib.Path) -> typing.Iterator[tuple[typing.BinaryIO, typing.Callable]]:
    """(stream, tell): the plain bytes of `path`, and how many bytes of the file have been read.

    Reading raises DamagedError for compressed data that are cut off or damaged, OSError else.
    """
    with open(path, 'rb', _BUFFER) as file:
        kind = path.suffix.lower()
        if kind not in SUFFIXES:
            yield file, file.tell
            return
        raw = _Gzip(file) if kind == '.gz' else _Zstd(file)
        yield io.BufferedReader(raw, _BUFFER), file.tell


@contextlib.contextmanager
def plain_file(path: pathlib.Path) -> typing.Iterator[pathlib.Path]:
    """A path to the plain bytes of `path`: itself, or a temporary file for as long as needed.

    For kinds of files that are not read from beginning to end.
    """
    if path.suffix.lower() not in SUFFIXES:
        yield path
        return
    with tempfile.NamedTemporaryFile(suffix=pathlib.Path(plain_name(path.name)).suffix) as file:
        with open_plain(path) as (stream, _):
            shutil.copyfileobj(stream, file, _BUFFER)
        file.flush()
        yield pathlib.Path(file.name)
