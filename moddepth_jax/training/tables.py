"""Tables of results: made from rows, printed, or written as Markdown."""

from typing import NamedTuple

import rich.console
import rich.table
import rich.text


class Table(NamedTuple):
    """A table of text: the heads of the columns, and {name of a line: its other cells}."""

    title: str | None
    heads: list[str]
    lines: dict[str, list[str]]


def fixed(digits: int, scale: float = 1):
    """Return a function that formats a number, times `scale`, with `digits` decimals."""
    return lambda number: f'{scale * number:.{digits}f}'


def column_per_row(title: str, heads, lines: dict, rows: list[dict]) -> Table:
    """Make a table with one column for each row of results.

    `lines` is {name of the line: (key of the rows, function from its value to text)}. A line is
    left out if no row has a value for it. A row with `failed`, a reason, shows the reason's start.
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
    """Make a table with one cell for each row of results, and '-' in other cells.

    `line`, `column` and `text` are functions from a row to the name of its line, the name of its
    column, and the text of its cell. `corner` is the head of the line names.
    """
    columns = list(dict.fromkeys(column(row) for row in rows))
    lines = {}
    for row in rows:
        lines.setdefault(line(row), dict.fromkeys(columns, '-'))[column(row)] = text(row)
    heads = [corner, *columns]
    return Table(title, heads, {name: list(cells.values()) for name, cells in lines.items()})


def to_rich(table: Table) -> rich.table.Table:
    """Convert a table for a rich console; long texts are folded, but no name of up to 40."""
    short = max(map(len, table.lines), default=0) <= 40
    drawn = rich.table.Table(title=table.title or None, title_justify='left')
    for number, head in enumerate(table.heads):
        justify = 'right' if number else 'left'
        text = rich.text.Text(head)
        drawn.add_column(text, justify=justify, overflow='fold', no_wrap=short and not number)
    for name, cells in table.lines.items():
        # Rich would read [brackets] in a str as markup, but not in a Text.
        drawn.add_row(*map(rich.text.Text, (name, *cells)))
    return drawn


def print_table(table: Table, width: int | None = None):
    """Print a table, `width` characters wide, or as wide as the terminal."""
    rich.console.Console(width=width).print(to_rich(table))


def markdown_rows(heads, *rows) -> list[str]:
    """Return the lines of a table of texts in Markdown."""
    lines = [
        '| ' + ' | '.join(c.replace('|', '\\|') or ' ' for c in row) + ' |'
        for row in (heads, *rows)
    ]
    return [lines[0], '|' + '---|' * len(heads), *lines[1:]]


def to_markdown(table: Table) -> list[str]:
    """Return the lines of a table and its title in Markdown."""
    rows = [[name, *cells] for name, cells in table.lines.items()]
    return [f'**{table.title}**', '', *markdown_rows(table.heads, *rows), '']


def replace_between(page: str, begin: str, end: str, text: str) -> str:
    """Return the page with another text between its markers; raises ValueError without them."""
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f'page without its markers: must hold {begin} and then {end}, once each')
    return f'{page.split(begin)[0]}{begin}\n\n{text}\n\n{end}{page.split(end)[1]}'
