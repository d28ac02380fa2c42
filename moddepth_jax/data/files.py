"""The user's own text: documents from .txt, .jsonl and .parquet files."""

import glob
import json
import os
import pathlib


def _one_line(error):
    return ' '.join(str(error).split())


def _refuse(place, problem, remedy):
    raise ValueError(f'{place}: {problem}; {remedy}')


def _find(source):
    """(root, files): the folder before the first wildcard, and what `source` matches, sorted."""
    pattern = os.path.expanduser(source)
    # A file may have brackets in its own name: what exists as written is meant as written.
    if os.path.isfile(pattern):
        return pathlib.Path(pattern).parent, [pathlib.Path(pattern)]
    root = pathlib.Path(pattern)
    while glob.has_magic(str(root)):
        root = root.parent
    if root == pathlib.Path(pattern):
        root = root.parent
    matches = {pathlib.Path(match) for match in glob.glob(pattern, recursive=True)}
    # A link to nowhere stays among them: reading it fails aloud.
    files = [match for match in matches if not match.is_dir()]
    return root, sorted(files, key=lambda path: path.relative_to(root).as_posix())


def _read_text(path, name, text_field):
    # Bytes are taken as they are, whatever their encoding: the tokenizer reads bytes.
    return [(name, path.read_bytes())]


def _field_bytes(place, value, text_field):
    if not isinstance(value, str):
        kind = type(value).__name__
        _refuse(place, f'{text_field!r} is {kind}, not text', 'mend the row or leave it out')
    try:
        return value.encode()
    except UnicodeEncodeError:
        problem = f'{text_field!r} holds half a surrogate pair, which no UTF-8 text can'
        _refuse(place, problem, 'mend the row or leave it out')


def _read_jsonl(path, name, text_field):
    documents = []
    for row, line in enumerate(path.read_bytes().removeprefix(b'\xef\xbb\xbf').split(b'\n'), 1):
        if not line.strip():
            continue
        place = f'{path}, line {row}'
        try:
            record = json.loads(line.decode())
        except UnicodeDecodeError as error:
            problem = f'byte {error.start} of the line is not UTF-8'
            _refuse(place, problem, 'save the file as UTF-8')
        except json.JSONDecodeError as error:
            problem = f'not JSON ({error.msg}, column {error.colno})'
            _refuse(place, problem, 'write one JSON object a line')
        except (ValueError, RecursionError) as error:
            _refuse(place, f'not JSON ({_one_line(error)})', 'write one JSON object a line')
        if not isinstance(record, dict):
            kind = type(record).__name__
            _refuse(place, f'a JSON {kind}, not an object', 'write one JSON object a line')
        if text_field not in record:
            fields = ', '.join(map(repr, record)) or 'no field'
            remedy = f'set data.text_field to one of its own: {fields}'
            _refuse(place, f'no field {text_field!r}', remedy)
        documents.append((f'{name}#{row}', _field_bytes(place, record[text_field], text_field)))
    return documents


def _read_parquet(path, name, text_field):
    import pyarrow  # Slow to import, and most runs read no parquet.
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            table = file.read(columns=[text_field]) if text_field in columns else None
    except (pyarrow.ArrowException, OSError) as error:
        remedy = 'write the file again or leave it out'
        _refuse(path, f'not a readable parquet file ({_one_line(error)})', remedy)
    if table is None:
        remedy = f'set data.text_field to one of its own: {", ".join(map(repr, columns))}'
        _refuse(path, f'no column {text_field!r} (row 1 on)', remedy)
    column = table.column(0)
    kind = column.type.value_type if pyarrow.types.is_dictionary(column.type) else column.type
    text = (pyarrow.string(), pyarrow.large_string(), pyarrow.binary(), pyarrow.large_binary())
    if kind not in text:
        problem = f'column {text_field!r} holds {kind} from row 1 on, not text'
        _refuse(path, problem, 'set data.text_field to a column of strings')
    values = column.cast(kind).cast(pyarrow.large_binary()).to_pylist()
    if None in values:
        place = f'{path}, row {1 + values.index(None)}'
        _refuse(place, f'{text_field!r} is null', 'fill the row or leave it out')
    return [(f'{name}#{row}', value) for row, value in enumerate(values, 1)]


_READERS = {'.txt': _read_text, '.jsonl': _read_jsonl, '.parquet': _read_parquet}


def file_documents(source: str, text_field: str) -> list[tuple[str, bytes]]:
    """(name, bytes) of every document in the files that the glob `source` matches.

    A .txt file is one document, its bytes as they are, of any encoding. A .jsonl file, in UTF-8,
    holds one a line (blank lines are skipped) and a .parquet file one a row, in the field or column
    `text_field`. Names are paths relative to the folder before the first wildcard, so that moving
    the folder changes nothing, and `path#row` with rows from 1. Sorted by that path.

    Raises:
      ValueError: one line that names the file, the row and a remedy, for a glob without a match,
        another kind of file, a file that cannot be read, and rows that are not as described.
    """
    root, files = _find(source)
    right = (
        'must be stdlib, python_environment, synthetic, recall or a glob of .txt, .jsonl or '
        '.parquet files'
    )
    if not files:
        is_folder = os.path.isdir(os.path.expanduser(source))
        hint = f'; for a folder write {os.path.join(source, "**", "*.txt")}' if is_folder else ''
        raise ValueError(f'data.source={source!r}: matches no file; {right}{hint}')
    for path in files:
        if path.suffix.lower() not in _READERS:
            problem = f'{path.suffix!r} is no known kind of file' if path.suffix else 'no suffix'
            _refuse(path, problem, f'data.source={source!r} {right}')
    documents = []
    for path in files:
        name = path.relative_to(root).as_posix()
        try:
            documents += _READERS[path.suffix.lower()](path, name, text_field)
        except OSError as error:
            _refuse(path, f'cannot be read ({error.strerror})', 'check the file and its rights')
    return documents
