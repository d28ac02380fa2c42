"""The user's own text: documents from .txt, .jsonl, .parquet and .arrayrecord, or compressed."""

import glob
import os
import pathlib
from collections.abc import Iterator

from moddepth_jax.data import array_records, json_lines, parquet_rows
from moddepth_jax.data.compression import DamagedError, open_plain, plain_name
from moddepth_jax.data.rows import WHOLE, BadText, Row, Span

KINDS = '.txt, .jsonl, .parquet or .arrayrecord files, each perhaps with .gz or .zst behind'

_WRITE_AGAIN = 'write the file again or leave it out'


def find(source: str, option: str, right: str) -> tuple[pathlib.Path, list[pathlib.Path]]:
    """(root, files): the folder before the first wildcard, and what the glob matches, sorted.

    The name of a file is its path relative to the root, so that moving the folder changes nothing.

    Args:
      source: the glob; a path that exists is meant as written, even with brackets in it.
      option: what holds `source`, for messages: 'data.source'.
      right: what would be right, for messages.

    Raises:
      ValueError: one line, for a glob without a match, and for another kind of file.
    """
    pattern = os.path.expanduser(source)
    root, files = _match(pattern)
    if not files:
        is_folder = os.path.isdir(pattern)
        hint = f'; for a folder write {os.path.join(source, "**", "*.txt")}' if is_folder else ''
        raise ValueError(f'{option}={source!r}: matches no file; {right}{hint}')
    for path in files:
        suffix = _kind(path)
        if suffix not in _READERS:
            problem = f'{suffix!r} is no known kind of file' if suffix else 'no suffix'
            raise ValueError(f'{path}: {problem}; {option}={source!r} {right}')
    return root, files


def _match(pattern):
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


def _kind(path):
    return pathlib.Path(plain_name(path.name)).suffix.lower()


def _text_rows(path, name, text_field, span):
    # Bytes are taken as they are, whatever their encoding: the tokenizer reads bytes.
    with open_plain(path) as (stream, tell):
        text = stream.read()
        yield Row(name, text, tell())


_READERS = {
    '.txt': _text_rows,
    '.jsonl': json_lines.rows,
    '.parquet': parquet_rows.rows,
    '.arrayrecord': array_records.rows,
}


def rows(path: pathlib.Path, name: str, text_field: str, span: Span = WHOLE) -> Iterator[Row]:
    """The documents of one file, in order, and what is wrong with those that are none.

    No more of the file is in memory than a few megabytes and the row at hand. A .txt is one
    document, its bytes as they are, of any encoding. A .jsonl, in UTF-8, holds one a line (blank
    lines are no rows), a .parquet one a row, in the field or column `text_field`, an .arrayrecord
    one a record: the field of a JSON object, or, where the first record is none, the record itself.
    Behind each of these suffixes may stand .gz or .zst.

    Args:
      path: of the file.
      name: of the file, for the names of its documents.
      text_field: the field or column.
      span: one of `spans`.

    Yields:
      Row; one whose text is a BadText for each row that is none, and a last one where the rest of
      the file cannot be read.
    """
    size, last = 0, None
    try:
        size = path.stat().st_size
        for row in _READERS[_kind(path)](path, name, text_field, span):
            last = row
            yield row
        return
    except DamagedError as error:
        where = f'{path}, after row {last.name.rpartition("#")[2]}' if last else path
        problem = BadText(where, 'unreadable file', f'{error}', _WRITE_AGAIN)
    except (BadText, OSError) as error:
        problem = as_bad_text(path, error)
    yield Row(name, problem, size)


def as_bad_text(path: pathlib.Path, error: BadText | OSError) -> BadText:
    """`error`, if it is one already, or that `path` cannot be read."""
    if isinstance(error, BadText):
        return error
    problem = f'cannot be read ({error.strerror or error})'
    return BadText(path, 'unreadable file', problem, 'check the file and its rights')


def spans(path: pathlib.Path, text_field: str, size: int) -> list[Span]:
    """Stretches of about `size` bytes that together are the file; one, where it cannot be cut.

    A .jsonl is cut by `json_lines.LineSpans`, not here.

    Raises:
      BadText: the file cannot be read, or has no such column.
    """
    readers = {'.parquet': parquet_rows, '.arrayrecord': array_records}
    kind = _kind(path)
    return readers[kind].spans(path, text_field, size) if kind in readers else [WHOLE]


def iterate(path: pathlib.Path, name: str, text_field: str) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of each document of one file, as `rows` tells.

    Raises:
      BadText: a ValueError of one line that names file, row and a remedy, at the first bad row.
    """
    for row in rows(path, name, text_field):
        if isinstance(row.text, BadText):
            raise row.text
        yield row.name, row.text


def file_documents(source: str, text_field: str) -> list[tuple[str, bytes]]:
    """(name, bytes) of every document in the files that the glob `source` matches, in memory.

    Documents and their names are those of `rows`, sorted by the files' names.

    Raises:
      ValueError: one line that names the file, the row and a remedy, as `find` and `rows` tell.
    """
    right = (
        'must be stdlib, python_environment, synthetic, recall, mixture, a folder of '
        f'launch.prepare or a glob of {KINDS}'
    )
    root, found = find(source, 'data.source', right)
    names = [path.relative_to(root).as_posix() for path in found]
    pairs = zip(found, names, strict=True)
    return [document for pair in pairs for document in iterate(*pair, text_field)]
