"""Documents of .parquet: one a row, in a column of strings or bytes."""

import pathlib
from collections.abc import Iterator

from moddepth_jax.data.compression import SUFFIXES, plain_file
from moddepth_jax.data.rows import WHOLE, BadText, Row, Span, field_names

_BATCH_BYTES = 4 << 20  # of text that is in memory at a time, about
_BATCH_ROWS = 256
_READ_AHEAD = 1 << 20


def rows(path: pathlib.Path, name: str, text_field: str, span: Span) -> Iterator[Row]:
    """The rows of the row groups in `span`; see `files.rows`."""
    import pyarrow  # Slow to import, and most runs read no parquet.

    size = path.stat().st_size
    try:
        with plain_file(path) as plain, _open(plain) as file:
            _check_column(path, file.schema_arrow, text_field)
            all_groups = file.metadata.num_row_groups
            groups = list(range(all_groups)[span.start : span.stop])
            if not groups:
                return
            number, all_rows = span.first_row, max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(
                _rows_at_once(file.metadata, groups, text_field),
                row_groups=groups,
                columns=[text_field],
                use_threads=False,
            ):
                for text in _bytes(batch.column(0)):
                    if text is None:
                        problem, remedy = f'{text_field!r} is null', 'fill the row or leave it out'
                        text = BadText(f'{path}, row {number}', 'null', problem, remedy)
                    yield Row(
                        f'{name}#{number}', text, size * (number - span.first_row + 1) // all_rows
                    )
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None


def spans(path: pathlib.Path, text_field: str, size: int) -> list[Span]:
    """Stretches of row groups with `size` bytes or more each; see `files.spans`."""
    import pyarrow

    if path.suffix.lower() in SUFFIXES:
        return [WHOLE]
    try:
        with _open(path) as file:
            _check_column(path, file.schema_arrow, text_field)
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            sizes = [(group.total_byte_size, group.num_rows) for group in groups]
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None
    found, start, row, filled, next_row = [], 0, 1, 0, 1
    for i, (num_bytes, num_rows) in enumerate(sizes, 1):
        filled += num_bytes
        next_row += num_rows
        if filled >= size or i == len(sizes):
            found.append(Span(start, i, row))
            start, row, filled = i, next_row, 0
    return found or [WHOLE]


def _open(path):
    from pyarrow import parquet

    # With a buffer pages are read as they are needed, not the whole column of a row group.
    return parquet.ParquetFile(path, buffer_size=_READ_AHEAD, pre_buffer=False)


def _rows_at_once(metadata, groups, text_field):
    """As many as hold `_BATCH_BYTES` of text where rows are as long as on average."""
    num_bytes = num_rows = 1
    for i in groups:
        group = metadata.row_group(i)
        columns = map(group.column, range(group.num_columns))
        num_rows += group.num_rows
        num_bytes += sum(
            column.total_uncompressed_size
            for column in columns
            if column.path_in_schema.split('.')[0] == text_field
        )
    return min(max(_BATCH_BYTES * num_rows // num_bytes, 1), _BATCH_ROWS)


def _bytes(column):
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(pyarrow.large_binary()).to_pylist()


def _unreadable(path, error):
    problem = f'not a readable parquet file ({" ".join(str(error).split())})'
    return BadText(path, 'unreadable file', problem, 'write the file again or leave it out')


def _check_column(path, schema, text_field):
    import pyarrow

    if text_field not in schema.names:
        problem = f'no column {text_field!r} (row 1 on)'
        raise BadText(path, 'no field', problem, field_names(schema.names))
    kind = schema.field(text_field).type
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    text = (pyarrow.string(), pyarrow.large_string(), pyarrow.binary(), pyarrow.large_binary())
    if kind not in text:
        problem = f'column {text_field!r} holds {kind} from row 1 on, not text'
        raise BadText(path, 'not text', problem, 'set data.text_field to a column of strings')
