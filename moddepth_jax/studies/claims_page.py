"""The table of claims as Markdown and as a table for the console."""

import itertools

import rich.box
import rich.table
import rich.text

from moddepth_jax.studies.claims import FAILS, HOLDS, NOTHING, UNTOLD, Evidence

BEGIN = '<!-- claims: written by python -m launch.claims -->'
END = '<!-- end of claims -->'
_COLOURS = {HOLDS: 'green', FAILS: 'red', UNTOLD: 'yellow'}
_SOURCES = (
    'MoD is [Raposo et al. 2024](https://arxiv.org/abs/2404.02258), MoDA is '
    '[Zhu et al. 2026](https://arxiv.org/abs/2603.15619).'
)
_DETAILS = ('setting', 'spread', 'rule', 'reason')


def counts(rows: list[dict]) -> str:
    """How many claims hold, do not, and cannot be told."""
    hold, fail, open_ = ([row['verdict'] for row in rows].count(v) for v in (HOLDS, FAILS, UNTOLD))
    return f'{hold} hold, {fail} do not, {open_} cannot be told here'


def _cell(text):
    return text.replace('|', '\\|')


def _studies(evidence: Evidence):
    if not evidence.studies:
        return ['No study was found: every claim that needs runs says so.']
    heads = ('study', 'config', 'corpus', 'runs', 'missing', 'Python', 'JAX', 'device')
    lines = [f'| {" | ".join(heads)} |', '|' + '---|' * len(heads)]
    for name, study in sorted(evidence.studies.items()):
        versions = study.get('versions', {})
        told = [versions.get(key, '') for key in ('python', 'jax', 'device')]
        seen = len({row['run'] for row in study['runs']})
        cells = [f'`{name}`', f'`{study["config"]}`', study['corpus']]
        cells += [str(seen), str(len(study.get('missing', []))), *told]
        lines.append(f'| {" | ".join(map(_cell, cells))} |')
    labels = {}
    for _, study in sorted(evidence.studies.items()):
        labels |= {name: variant['label'] for name, variant in study['variants'].items()}
    names = '; '.join(f'`{name}` {label}' for name, label in labels.items())
    return [*lines, '', f'Names of variants: {names}.']


def markdown(rows: list[dict], evidence: Evidence) -> str:
    """What stands between BEGIN and END: the table by topic, details of each claim, the studies.

    Args:
      rows: of `verdicts.fill`.
      evidence: that they were filled from.
    """
    lines = [f'Of {len(rows)} claims: {counts(rows)}.', '', _SOURCES, '']
    for topic, group in itertools.groupby(rows, key=lambda row: row['topic']):
        lines += [
            f'## {topic}',
            '',
            "| claim | the paper's number | ours | verdict |",
            '|' + '---|' * 4,
        ]
        for row in group:
            link = f'[{row["claim"]}](#{row["id"]})'
            cells = map(_cell, (link, row['paper'], row['ours'], f'**{row["verdict"]}**'))
            lines.append(f'| {" | ".join(cells)} |')
        lines.append('')
    lines += ['## How each was judged', '']
    for row in rows:
        lines += [
            f'<a id="{row["id"]}"></a>**{row["claim"]}** ({row["source"]}): {row["verdict"]}',
            '',
        ]
        lines += [f'- {name}: {_quoted(row[name])}' for name in _DETAILS if row[name] != NOTHING]
        lines.append('')
    return '\n'.join([*lines, '## Studies', '', *_studies(evidence)])


def _quoted(text):
    """With the command that it ends in set as code."""
    before, command, after = text.partition('python -m ')
    return f'{before}`{command}{after}`' if command else text


def replaced(page: str, table: str) -> str:
    """The page with another table between its markers.

    Raises:
      ValueError: a page without both markers, in this order, once.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f'page without its markers: must hold {BEGIN} and then {END}, once each')
    head, tail = page.split(BEGIN)[0], page.split(END)[1]
    return f'{head}{BEGIN}\n\n{table}\n\n{END}{tail}'


def console_tables(rows: list[dict]):
    """A rich table for each topic: claim, the paper's number and ours, verdict and its reason."""
    for topic, group in itertools.groupby(rows, key=lambda row: row['topic']):
        table = rich.table.Table(
            title=topic,
            title_justify='left',
            box=rich.box.SIMPLE_HEAD,
            expand=True,
            show_lines=True,
        )
        for name, ratio in (('claim', 4), ('paper', 3), ('ours', 4), ('verdict and reason', 4)):
            table.add_column(name, ratio=ratio, overflow='fold')
        for row in group:
            verdict = rich.text.Text(row['verdict'], style=_COLOURS[row['verdict']])
            # Texts, since a str would have its [brackets] read as markup.
            cells = [rich.text.Text(row[name]) for name in ('claim', 'paper', 'ours')]
            # A command is long, and claims.md has it.
            reason = row['reason'].split(': python -m ')[0]
            table.add_row(*cells, verdict.append(f': {reason}', style='default'))
        yield table
