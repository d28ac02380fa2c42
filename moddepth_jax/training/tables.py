"""Tables of benchmark results: drawn from rows, printed, or written as Markdown."""

from typing import NamedTuple

import rich.console
import rich.table
import rich.text


class Table(NamedTuple):
    """A table of text: heads of the columns, and cells by the name of the line, its first cell."""

    title: str | None
    heads: list[str]
    lines: dict[str, list[str]]


def fixed(digits: int, scale: float = 1, suffix: str = ''):
    """A function that formats a number times `scale` with so many decimals."""
    return lambda number: f'{scale * number:.{digits}f}{suffix}'


def column_per_row(title: str, heads, lines: dict, rows: list[dict]) -> Table:
    """A table with one column for each row of results.

    `lines` are (key of the rows, function from its value to text) by the name of the line; one that
    no row has a value for is left out. A row that has `failed`, a reason, shows its beginning.
    """

    def cell(row, key, text):
        if 'failed' in row:
            return row['failed'][:40]
        return '-' if row.get(key) is None else text(row[key])

    shown = {
        name: [cell(row, key, text) for row in rows]
        for name, (key, text) in lines.items()
        if any(row.get(key) is not None for row in rows)
    }
    return Table(title, list(heads), shown)


def pivot(title: str, rows: list[dict], line, column, text, corner: str = '') -> Table:
    """A table with one cell for each row of results, '-' where there is none.

    `line`, `column` and `text` are functions from a row to the name of its line, of its column, and
    to its cell; `corner` is the head of the line names.
    """
    columns = list(dict.fromkeys(column(row) for row in rows))
    lines = {}
    for row in rows:
        lines.setdefault(line(row), dict.fromkeys(columns, '-'))[column(row)] = text(row)
    heads = [corner, *columns]
    return Table(title, heads, {name: list(cells.values()) for name, cells in lines.items()})


def to_rich(table: Table) -> rich.table.Table:
    """The table for a rich console; long names are folded."""
    drawn = rich.table.Table(title=table.title or None, title_justify='left')
    for number, head in enumerate(table.heads):
        justify = 'right' if number else 'left'
        drawn.add_column(rich.text.Text(head), justify=justify, overflow='fold')
    for name, cells in table.lines.items():
        # Texts, since a str would have its [brackets] read as markup.
        drawn.add_row(*map(rich.text.Text, (name, *cells)))
    return drawn


def print_table(table: Table, width: int | None = None):
    """Prints a table, in the width of the terminal if `width` is None."""
    rich.console.Console(width=width).print(to_rich(table))


def markdown_rows(heads, *rows) -> list[str]:
    """The lines of a table of texts in Markdown."""
    lines = [
        '| ' + ' | '.join(c.replace('|', '\\|') or ' ' for c in row) + ' |'
        for row in (heads, *rows)
    ]
    return [lines[0], '|' + '---|' * len(heads), *lines[1:]]


def to_markdown(table: Table) -> list[str]:
    """The lines of a table and its title in Markdown."""
    rows = [[name, *cells] for name, cells in table.lines.items()]
    return [f'**{table.title}**', '', *markdown_rows(table.heads, *rows), '']


def replace_between(page: str, begin: str, end: str, text: str) -> str:
    """The page with another text between its markers. Raises ValueError unless both are there."""
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f'page without its markers: must hold {begin} and then {end}, once each')
    return f'{page.split(begin)[0]}{begin}\n\n{text}\n\n{end}{page.split(end)[1]}'
