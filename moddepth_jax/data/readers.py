"""Readers of text files: one for each format, in a table by the suffix of the file."""

import codecs
import contextlib
import itertools
import json
import os
import pathlib
import typing
from collections.abc import Callable, Iterable, Iterator

from moddepth_jax.data.compression import (
    SUFFIXES,
    is_compressed,
    open_plain,
    plain_file,
    plain_name,
)
from moddepth_jax.data.directory import parse_object

_UNREAD = ('.xz', '.bz2', '.zip', '.7z', '.lz4', '.br')  # compressions
_TEXTS = ('.txt', '.json', '.md', '.csv', '.tsv')  # inside of these
_BATCH = 16  # rows or records in memory at a time
_MOST_NAMES = 8  # in a message
_WRITE_AGAIN = 'write the file again or leave it out'
_HEAD = 8000  # like git, a file with a NUL among these first characters counts as binary
_MAX_TEXT = 1 << 32  # plain bytes of a file that is a single text, which memory holds
_PIECE = 1 << 20  # bytes that are read at a time
_MARKS = {  # UTF-32 first: its byte-order mark begins with that of UTF-16
    'utf-32': (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    'utf-16': (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}


class BadText(ValueError):
    """Text that cannot be used. The message is one line: file and row, problem, remedy.

    `reason` is one of a few fixed phrases, by which such texts are counted.
    """

    def __init__(self, where: object, reason: str, problem: str, remedy: str):
        super().__init__(str(where), reason, problem, remedy)  # so that it can be pickled
        self.reason = reason

    def __str__(self):
        where, _, problem, remedy = self.args
        return f'{where}: {problem}; {remedy}'


class Row(typing.NamedTuple):
    """One row of a file.

    Attributes:
      name: name of the file, with '#' and the row's number if the format has rows.
      text: bytes of the document, or BadText if it cannot be used.
      end: approximate number of bytes from the start of the span to the end of the row.
    """

    name: str
    text: bytes | BadText
    end: int


class Span(typing.NamedTuple):
    """A part of a file that can be read separately, from `start` to before `stop` (None: the end).

    The unit is bytes, row groups of a .parquet, or records. `first_row` is the number of the first
    row, counted from 1.
    """

    start: int
    stop: int | None
    first_row: int


WHOLE_FILE = Span(0, None, 1)


class Format(typing.NamedTuple):
    """Functions for one suffix: `rows` is like `read_rows` but may raise, `spans` `find_spans`."""

    rows: Callable[[pathlib.Path, str, str, Span], Iterator[Row]]
    spans: Callable[[pathlib.Path, str, int, Iterable[bytes]], list[Span]]


def _line_rows(path, name, text_field, span):
    with open_plain(path) as (stream, tell):
        position = span.start
        if position:
            stream.seek(position)
        for number, line in enumerate(stream, span.first_row):
            position += len(line)
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                text = _object_text(f'{path}, line {number}', line, text_field, 'line')
                end = tell() if is_compressed(path) else position - span.start
                yield Row(f'{name}#{number}', text, end)
            if span.stop is not None and position >= span.stop:
                return


def _line_spans(path, text_field, size, chunks):
    """Find spans of complete lines; lines that are appended after the last chunk are ignored."""
    cuts, position, lines = [(0, 1)], 0, 0  # (first byte, first row) of each span
    for chunk in chunks:
        begin = 0
        while (end := chunk.find(b'\n', max(begin, cuts[-1][0] + size - position - 1))) >= 0:
            lines += chunk.count(b'\n', begin, end + 1)
            cuts.append((position + end + 1, lines + 1))
            begin = end + 1
        lines += chunk.count(b'\n', begin)
        position += len(chunk)
    starts = [cut for cut in cuts if cut[0] < position] or cuts[:1]
    stops = [start for start, _ in starts[1:]] + [position]
    return [Span(start, stop, row) for (start, row), stop in zip(starts, stops, strict=True)]


def _checked(where, text):
    """Return a text if it is UTF-8, as its format requires, otherwise a BadText."""
    try:
        text.decode()
        return text
    except UnicodeDecodeError as error:
        problem = f'byte {error.start} is {text[error.start]:#04x}, which is not UTF-8 there'
        return BadText(where, 'not UTF-8', problem, 'save it as UTF-8')


def _object_text(where, line, text_field, unit):
    """Return the field `text_field` of the JSON object `line`, or a BadText.

    `unit` is what the file calls it: a line or a record.
    """
    if isinstance(line := _checked(where, line), BadText):
        return line
    remedy = f'write one JSON object per {unit}'
    try:
        record = json.loads(line.decode())
    except json.JSONDecodeError as error:
        problem = f'not JSON ({error.msg}, column {error.colno})'
        return BadText(where, 'not JSON', problem, remedy)
    except (ValueError, RecursionError) as error:
        return BadText(where, 'not JSON', f'not JSON ({_one_line(error)})', remedy)
    if not isinstance(record, dict):
        problem = f'a JSON {type(record).__name__}, not an object'
        return BadText(where, 'not JSON', problem, remedy)
    if text_field not in record:
        return _no_field(where, f'no field {text_field!r}', record)
    value, remedy = record[text_field], 'correct the row or leave it out'
    if not isinstance(value, str):
        problem = f'{text_field!r} is {type(value).__name__}, not text'
        return BadText(where, 'not text', problem, remedy)
    try:
        return value.encode()
    except UnicodeEncodeError:
        problem = f'{text_field!r} has half a surrogate pair, which is not valid in UTF-8'
        return BadText(where, 'not UTF-8', problem, remedy)


def _one_line(error):
    return ' '.join(str(error).split())


def _no_field(where, problem, names):
    shown = [repr(name) for name, _ in zip(names, range(_MOST_NAMES), strict=False)]
    shown += [f'{len(names) - len(shown)} more'] * (len(names) > len(shown))
    remedy = f'set data.text_field to one that it has: {", ".join(shown) or "no field"}'
    return BadText(where, 'no field', problem, remedy)


def _unreadable(path, kind, error):
    problem = f'not a readable {kind} file ({_one_line(error)})'
    return BadText(path, 'unreadable file', problem, _WRITE_AGAIN)


@contextlib.contextmanager
def _open_parquet(path, text_field):
    import pyarrow  # slow to import, and most runs read no parquet
    from pyarrow import parquet

    try:
        with plain_file(path) as plain:
            # With a buffer, pages are read as needed, not the full column of a row group.
            with parquet.ParquetFile(plain, buffer_size=1 << 20, pre_buffer=False) as file:
                _check_column(path, file.schema_arrow, text_field)
                yield file
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(path, 'parquet', error) from None


def _check_column(path, schema, text_field):
    import pyarrow

    if text_field not in schema.names:
        raise _no_field(path, f'no column {text_field!r} (row 1 on)', schema.names)
    if (number := schema.names.count(text_field)) > 1:
        right = 'must be one; give the others another name, or set data.text_field to another'
        raise BadText(path, 'no field', f'{number} columns are named {text_field!r}', right)
    kind = schema.field(text_field).type
    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    texts = pyarrow.string(), pyarrow.large_string(), pyarrow.binary(), pyarrow.large_binary()
    if kind not in texts:
        problem = f'column {text_field!r} holds {kind} from row 1 on, not text'
        raise BadText(path, 'not text', problem, 'set data.text_field to a column of strings')


def _parquet_rows(path, name, text_field, span):
    import pyarrow

    size, number = path.stat().st_size, span.first_row
    with _open_parquet(path, text_field) as file:
        groups = list(range(file.metadata.num_row_groups)[span.start : span.stop])
        batches = file.iter_batches(_BATCH, groups, columns=[text_field], use_threads=False)
        for batch in batches if groups else ():
            column = batch.column(text_field)
            if pyarrow.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            for text in column.cast(pyarrow.large_binary()).to_pylist():
                where = f'{path}, row {number}'
                if text is None:
                    problem, remedy = f'{text_field!r} is null', 'fill the row or leave it out'
                    text = BadText(where, 'null', problem, remedy)
                else:
                    text = _checked(where, text)
                end = size * (number - span.first_row + 1) // file.metadata.num_rows
                yield Row(f'{name}#{number}', text, end)
                number += 1


def _parquet_spans(path, text_field, size, chunks):
    with _open_parquet(path, text_field) as file:
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    found, start, first_row, filled, next_row = [], 0, 1, 0, 1
    for i, group in enumerate(groups, 1):
        filled += group.total_byte_size
        next_row += group.num_rows
        if filled >= size or i == len(groups):
            found.append(Span(start, i, first_row))
            start, first_row, filled = i, next_row, 0
    return found or [WHOLE_FILE]


def _record_rows(path, name, text_field, span):
    """Read records: JSON objects if the first one that is not blank is an object, else texts.

    Blank records between objects are skipped. An object with the text among texts is refused.
    """
    size = path.stat().st_size
    with _open_records(path) as (read, count):
        records = (read(number, number + 1)[0] for number in range(count))
        of_objects = _object(next(filter(bytes.strip, records), b'')) is not None
        stop = count if span.stop is None else span.stop
        for start in range(span.start, stop, _BATCH):
            for number, text in enumerate(read(start, min(start + _BATCH, stop)), start + 1):
                where = f'{path}, record {number}'
                if of_objects and not text.strip():
                    continue
                if of_objects:
                    text = _object_text(where, text, text_field, 'record')
                elif text_field in (_object(text) or ()):
                    problem = f'a JSON object with {text_field!r} after a record that is none'
                    text = BadText(
                        where, 'mixed records', problem, 'write objects only, or texts only'
                    )
                else:
                    text = _checked(where, text)
                yield Row(f'{name}#{number}', text, size * (number - span.start) // count)


def _object(text):
    """Return the JSON object that a text is, or None."""
    try:
        return parse_object(text) if text.lstrip().startswith(b'{') else None
    except ValueError:
        return None


def _record_spans(path, text_field, size, chunks):
    with _open_records(path) as (_, count):
        step = max(size * count // max(path.stat().st_size, 1), 1)
    starts = range(0, count, step)
    return [Span(start, min(start + step, count), start + 1) for start in starts] or [WHOLE_FILE]


@contextlib.contextmanager
def _open_records(path):
    """Open a file of records as (read, count); read(start, stop) returns some of them."""
    from array_record.python import array_record_module  # few runs read records

    def read(start, stop):
        try:
            return reader.read(start, stop)
        except (RuntimeError, IndexError, ValueError) as error:
            problem = f'records {start + 1} to {stop}: {error}'
            raise _unreadable(path, 'arrayrecord', problem) from None

    # Without threads and read-ahead, since several processes read.
    options = 'readahead_buffer_size:0,max_parallelism:0'
    with plain_file(path) as plain:
        reader = array_record_module.ArrayRecordReader(str(plain), options)
        count = reader.num_records()
        if not reader.ok():
            raise _unreadable(path, 'arrayrecord', 'its end is missing')
        yield read, count


FORMATS = {
    '.jsonl': Format(_line_rows, _line_spans),
    '.parquet': Format(_parquet_rows, _parquet_spans),
    '.arrayrecord': Format(_record_rows, _record_spans),
}


def describe_formats() -> str:
    """Describe the files that can be read, for messages."""
    *others, last = FORMATS
    return f'text, {", ".join(others)} or {last}, plain or compressed ({", ".join(SUFFIXES)})'


def _suffix(path):
    suffix = pathlib.Path(plain_name(path)).suffix.lower()
    return '.jsonl' if suffix == '.ndjson' else suffix


def has_format(path: pathlib.Path) -> bool:
    """Return whether the name of a file says that it has one of FORMATS."""
    return _suffix(path) in FORMATS


def to_utf8(where: object, content: bytes, encoding: str) -> bytes:
    """Convert the text of a file to UTF-8; raises BadText with the first byte that is invalid.

    Text in UTF-8 keeps its bytes, even a byte-order mark, which utf-8-sig removes.
    """
    name = codecs.lookup(encoding).name
    for other, marks in _MARKS.items() if name == 'utf-8' else ():
        if content.startswith(marks):
            problem = f'begins with the byte-order mark of {other.upper()}'
            raise BadText(where, 'not UTF-8', problem, f'set data.encoding={other}')
    try:
        if (place := content[:_HEAD].decode(name, 'replace').find('\0')) >= 0:
            found = f'byte {content.find(0)}' if name == 'utf-8' else f'character {place}'
            remedy = 'leave it out, or name its encoding, as in data.encoding=utf-16-le'
            raise BadText(where, 'binary', f'{found} is NUL, as in a binary file', remedy)
        return content.decode(name).encode()
    except UnicodeError as error:
        place = getattr(error, 'start', 0)
        problem = f'byte {place} is {content[place]:#04x}, which is not {name.upper()} there'
        remedy = 'name its encoding, as in data.encoding=latin-1, or save it as UTF-8'
        raise BadText(where, f'not {name.upper()}', problem, remedy) from None


def read_text(path: pathlib.Path, encoding: str) -> bytes:
    """Read a file, plain or compressed, as one text in UTF-8; raises OSError or BadText."""
    pieces, room = [], _MAX_TEXT
    with open_plain(path) as (stream, _):
        is_larger = (size := os.stat(path).st_size) > _MAX_TEXT  # even if it is compressed
        while not is_larger and room >= 0 and (piece := stream.read(min(_PIECE, room + 1))):
            pieces.append(piece)
            room -= len(piece)
    if is_larger or room < 0:
        problem = f'more than the {_MAX_TEXT:,} bytes that one text may have'
        problem = f'{size:,} bytes, {problem}' if is_larger else problem
        raise BadText(path, 'too long', problem, 'split it into files or rows of a .jsonl')
    text = to_utf8(path, b''.join(pieces), encoding)
    if _suffix(path) == '.json' and _has_object_lines(text):
        problem = 'has a JSON object in each line'
        raise BadText(path, 'lines of JSON', problem, 'rename it to .jsonl')
    return text


def _has_object_lines(text):
    lines = filter(bytes.strip, text[:_PIECE].removeprefix(codecs.BOM_UTF8).splitlines())
    first = [_object(line) for line in itertools.islice(lines, 2)]
    return len(first) == 2 and None not in first


def may_be_text(path: pathlib.Path, encoding: str) -> bool:
    """Return whether to read a file that was found in a folder or by a glob.

    It must be a regular file and not binary. Files with .txt or a suffix of FORMATS count as text,
    and so do texts with a compression that `read_rows` refuses.
    """
    if path.suffix.lower() in _UNREAD:
        return _suffix(path.with_suffix('')) in (*_TEXTS, *FORMATS)
    if (promised := _suffix(path) in ('.txt', *FORMATS)) or not path.is_file():
        return promised
    try:
        with open_plain(path) as (stream, _):
            to_utf8(path, stream.read(_HEAD), encoding)
    except (OSError, BadText) as error:  # `read_rows` reports it
        return getattr(error, 'reason', '') != 'binary'
    return True


def read_rows(
    path: pathlib.Path,
    name: str,
    text_field: str,
    span: Span = WHOLE_FILE,
    encoding: str = 'utf-8',
) -> Iterator[Row]:
    """Yield the Rows of a file in order, with a BadText in place of text that cannot be used.

    A .jsonl, in UTF-8, has a document in each line (blank lines are skipped), and a .parquet in
    each row, in the field or column `text_field`. An .arrayrecord has one in each record: the field
    of a JSON object, or the record itself if the first record that is not blank is not an object.
    Any other file is one document in `encoding`. `name` is the name of the file in the names of its
    documents.
    """
    size, last = 0, None
    try:
        size = path.stat().st_size
        if (suffix := path.suffix.lower()) in _UNREAD:
            remedy = f'compress it as {" or ".join(SUFFIXES)}'
            raise BadText(path, 'unreadable file', f'{suffix} is not read', remedy)
        if (kind := FORMATS.get(_suffix(path))) is None:
            yield Row(name, read_text(path, encoding), size)
            return
        for last in kind.rows(path, name, text_field, span):
            yield last
    except (BadText, OSError) as error:
        where = f'{path}, after row {last.name.rpartition("#")[2]}' if last else path
        yield Row(name, as_bad_text(where, error), size)


def as_bad_text(where: object, error: BadText | OSError) -> BadText:
    """Turn an OSError into a BadText that says why the file cannot be read; keeps a BadText."""
    if isinstance(error, BadText):
        return error
    if error.errno is None and 'too much memory' in str(error):
        remedy = 'compress it again without --long'
        return BadText(where, 'unreadable file', 'its zstd window is too large', remedy)
    if error.errno is None:  # from a library
        problem = f'its data are damaged or cut off ({_one_line(error)})'
        return BadText(where, 'unreadable file', problem, _WRITE_AGAIN)
    problem, remedy = f'cannot be read ({error.strerror})', 'check the file and its permissions'
    return BadText(where, 'unreadable file', problem, remedy)


def find_spans(
    path: pathlib.Path, text_field: str, size: int, chunks: Iterable[bytes]
) -> list[Span]:
    """Split a file, whose bytes `chunks` yields, into spans of about `size` bytes.

    Raises BadText or OSError if the file cannot be read or has no such column.
    """
    kind = FORMATS.get(_suffix(path))
    if kind is None or is_compressed(path):
        return [WHOLE_FILE]
    return kind.spans(path, text_field, size, chunks)
