"""Documents of .arrayrecord: one a record, a JSON object with the field or the text itself."""

import pathlib
from collections.abc import Iterator

from moddepth_jax.data.compression import SUFFIXES, plain_file
from moddepth_jax.data.rows import WHOLE, BadText, Row, Span, object_text

_BATCH_BYTES = 4 << 20  # of the file that are read at a time, about
_BATCH_RECORDS = 1024


def rows(path: pathlib.Path, name: str, text_field: str, span: Span) -> Iterator[Row]:
    """The records of `span`; see `files.rows`.

    Where the first record of the file is a JSON object, all are; else each is a text as it stands.
    """
    size = path.stat().st_size
    with plain_file(path) as plain:
        reader, count = _open(path, plain)
        at_once = min(max(_BATCH_BYTES * count // (size or 1), 1), _BATCH_RECORDS)
        of_objects = count > 0 and _read(path, reader, 0, 1)[0].lstrip().startswith(b'{')
        stop = count if span.stop is None else span.stop
        for start in range(span.start, stop, at_once):
            records = _read(path, reader, start, min(start + at_once, stop))
            for number, text in enumerate(records, start + 1):
                if of_objects:
                    text = object_text(f'{path}, record {number}', text, text_field, 'record')
                yield Row(f'{name}#{number}', text, size * (number - span.start) // count)


def spans(path: pathlib.Path, text_field: str, size: int) -> list[Span]:
    """Stretches of records with about `size` bytes of the file each; see `files.spans`."""
    if path.suffix.lower() in SUFFIXES:
        return [WHOLE]
    _, count = _open(path, path)
    step = max(size * count // max(path.stat().st_size, 1), 1)
    starts = range(0, count, step)
    return [Span(start, min(start + step, count), start + 1) for start in starts] or [WHOLE]


def _open(path, plain):
    """The reader of `plain`, and how many records it has; `path` is its name for messages."""
    from array_record.python import array_record_module  # Few runs read records.

    plain.open('rb').close()  # the reader takes a file that cannot be opened for an empty one
    # Neither threads nor pages ahead: several processes read.
    how = 'readahead_buffer_size:0,max_parallelism:0'
    reader = array_record_module.ArrayRecordReader(str(plain), how)
    count = reader.num_records()
    if not reader.ok():
        raise _unreadable(path, 'its end is missing')
    return reader, count


def _read(path, reader, start, stop):
    try:
        return reader.read(start, stop)
    except (RuntimeError, IndexError, ValueError) as error:
        raise _unreadable(path, f'records {start + 1} to {stop}: {error}') from None


def _unreadable(path, error):
    problem = f'not a readable arrayrecord file ({" ".join(str(error).split())})'
    return BadText(path, 'unreadable file', problem, 'write the file again or leave it out')
