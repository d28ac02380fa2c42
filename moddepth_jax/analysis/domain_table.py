"""The losses of several texts, one a row, for the console."""

import math

import rich.table
import rich.text

# key: (heading, format of a number). A key that no text has is no column.
_COLUMNS = {
    'text': ('text', None),
    'share': ('share', '.1%'),
    'epochs': ('epochs', '.2f'),
    'targets': ('targets', ',d'),
    'loss': ('nats a\ntoken', '.4f'),
    'perplexity': ('perplexity', '.2f'),
    'bits_per_byte': ('bits a\nbyte', '.4f'),
    'routing_gap': ('routing\ngap', '+.4f'),
}


def domain_table(domains: dict[str, dict], title: str | None = None) -> rich.table.Table:
    """One row for each text; perplexity is a token's.

    Args:
      domains: numbers by name of the text: some of `loss` (nats a token), `perplexity`,
        `bits_per_byte`, `targets`, `routing_gap` (nats), and `share`, `epochs` of a mixture; `text`
        is a word.
      title: above the table.
    """
    keys = [key for key in _COLUMNS if any(key in values for values in domains.values())]
    table = rich.table.Table(title=title, title_justify='left')
    table.add_column('domain', overflow='fold')
    for key in keys:
        heading, digits = _COLUMNS[key]
        table.add_column(heading, justify='left' if digits is None else 'right', no_wrap=True)
    for name, values in domains.items():
        # Texts, since a str would have its [brackets] read as markup.
        cells = (rich.text.Text(_cell(values, key)) for key in keys)
        table.add_row(rich.text.Text(name), *cells)
    return table


def _cell(values, key):
    digits = _COLUMNS[key][1]
    if digits is None or key not in values:
        return values[key] if key in values else ''
    return format(values[key], digits) if math.isfinite(values[key]) else 'n/a'
