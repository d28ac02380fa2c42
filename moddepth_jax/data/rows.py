"""One row of a file of text: a document, or what is wrong with it."""

import json
import typing


class BadText(ValueError):
    """Text that cannot be used; its message is one line: file and row, problem; remedy.

    Attributes:
      reason: of what sort the problem is, the same words for all of a sort: 'not JSON'.
    """

    def __init__(self, where: object, reason: str, problem: str, remedy: str):
        super().__init__(str(where), reason, problem, remedy)
        self.reason = reason

    def __str__(self):
        where, _, problem, remedy = self.args
        return f'{where}: {problem}; {remedy}'


class Row(typing.NamedTuple):
    """What one row gives.

    Attributes:
      name: of the document: the file's name, and '#' and the row's number where a file has many.
      text: its bytes, or the BadText that stands in their place.
      end: bytes of the file (as it lies there, perhaps compressed) from the span's beginning to
        here, about.
    """

    name: str
    text: bytes | BadText
    end: int


class Span(typing.NamedTuple):
    """A stretch of a file that can be read alone.

    Attributes:
      start: byte of a .jsonl, row group of a .parquet, record of an .arrayrecord.
      stop: the first beyond it; None is the end of the file.
      first_row: number of its first row, from 1.
    """

    start: int
    stop: int | None
    first_row: int


WHOLE = Span(0, None, 1)


def field_names(names: typing.Iterable[str]) -> str:
    """The remedy for a field that is not there: which there are."""
    return f'set data.text_field to one of its own: {", ".join(map(repr, names)) or "no field"}'


def object_text(where: str, line: bytes, text_field: str, unit: str) -> bytes | BadText:
    """The field `text_field` of the JSON object `line`, as UTF-8.

    Args:
      where: file and row, for the message.
      line: one JSON object in UTF-8.
      text_field: name of the field.
      unit: what one object is in this kind of file: 'line' or 'record'.
    """
    remedy = f'write one JSON object a {unit}'
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        problem = f'byte {error.start} of the {unit} is not UTF-8'
        return BadText(where, 'not UTF-8', problem, 'save the file as UTF-8')
    except json.JSONDecodeError as error:
        problem = f'not JSON ({error.msg}, column {error.colno})'
        return BadText(where, 'not JSON', problem, remedy)
    except (ValueError, RecursionError) as error:
        problem = f'not JSON ({" ".join(str(error).split())})'
        return BadText(where, 'not JSON', problem, remedy)
    if not isinstance(record, dict):
        problem = f'a JSON {type(record).__name__}, not an object'
        return BadText(where, 'not JSON', problem, remedy)
    if text_field not in record:
        return BadText(where, 'no field', f'no field {text_field!r}', field_names(record))
    value = record[text_field]
    remedy = 'mend the row or leave it out'
    if not isinstance(value, str):
        problem = f'{text_field!r} is {type(value).__name__}, not text'
        return BadText(where, 'not text', problem, remedy)
    try:
        return value.encode()
    except UnicodeEncodeError:
        problem = f'{text_field!r} holds half a surrogate pair, which no UTF-8 text can'
        return BadText(where, 'not UTF-8', problem, remedy)
