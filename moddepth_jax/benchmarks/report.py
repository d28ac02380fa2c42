"""What the results of launch.gpu say: one page with every number, plots, and claims."""

import json
import pathlib

from moddepth_jax.benchmarks import attention_report, experts, model_tables, plots
from moddepth_jax.benchmarks.attention_cases import Case
from moddepth_jax.benchmarks.claims import judged
from moddepth_jax.benchmarks.results import BAD, FILE, Results

CLAIM_COLUMNS = ('claim', 'paper', 'ours', 'verdict', 'reason')


def markdown(title: str, heads: list[str], lines: dict[str, list]) -> list[str]:
    """Lines of a table.

    Args:
      title: above it.
      heads: of its columns, the first that of the names.
      lines: cells by name.
    """
    cells = [[head or ' ' for head in heads]] + [[name, *row] for name, row in lines.items()]
    rows = ['| ' + ' | '.join(str(cell).replace('|', '/') for cell in row) + ' |' for row in cells]
    return [f'**{title}**', '', rows[0], '|' + '---|' * len(heads), *rows[1:], '']


def starting(rows: dict[str, dict], *starts: str) -> dict[str, dict]:
    """Rows that are ok of the cases whose names begin so, by the rest of the name."""
    return {
        name.removeprefix(start): row
        for start in starts
        for name, row in rows.items()
        if name.startswith(start) and row['status'] == 'ok'
    }


def timed(rows: dict[str, dict]) -> list[dict]:
    """Results of bench_case, those of one shape joined: the baseline's rows are the first's."""
    joined = {}
    for row in starting(rows, 'time/').values():
        shape = tuple(row[field] for field in Case._fields)
        if shape not in joined:
            joined[shape] = row | {'rows': list(row['rows'])}
            continue
        held = joined[shape]
        held['baseline'] = held['baseline'] or row['baseline']
        names = {other['implementation'] for other in held['rows']}
        held['rows'] += [new for new in row['rows'] if new['implementation'] not in names]
    return list(joined.values())


def _machines(rows):
    """A line for each device with its versions and commits."""
    found = {}
    for row in rows.values():
        versions = ', '.join(f'{name} {version}' for name, version in row['versions'].items())
        toy = ', toy sizes' if row.get('toy') else ''
        line = f'{row["device"]}{toy}; {versions}; {row.get("driver", "").replace(chr(10), " ")}'
        found.setdefault(line, {}).setdefault(row['commit'][:12], []).append(row['date'][:10])
    return [
        f'- {line}; commits '
        + ', '.join(f'{commit} ({min(dates)} to {max(dates)})' for commit, dates in commits.items())
        for line, commits in found.items()
    ] + ['']


def _outcomes(rows):
    """How many cases ended how, and a line for each that is not right."""
    counts = {}
    for row in rows.values():
        counts[row['status']] = counts.get(row['status'], 0) + 1
    total = sum(row['seconds'] for row in rows.values()) / 60
    said = ', '.join(f'{number} {status}' for status, number in counts.items())
    page = [f'{len(rows)} cases in {total:.0f} minutes: {said}.', '']
    for status in (*BAD, 'cut', 'missing', 'skipped'):
        for name, row in rows.items():
            if row['status'] == status:
                page.append(f'- **{status}** {name}: {row["reason"]}')
    return [*page, '']


def _correctness(rows):
    """By kernel: how many cases were right, and the largest error over what is allowed."""
    lines = {}
    for name, row in rows.items():
        kind, kernel, *_ = name.split('/')
        if kind not in ('right', 'packed'):
            continue
        title = f'{kernel}, packed documents' if kind == 'packed' else kernel
        line = lines.setdefault(title, {'ok': 0, 'bad': 0, 'skipped': 0, 'worst': [], 'rerun': []})
        status = row['status']
        line['ok' if status == 'ok' else 'bad' if status in BAD else 'skipped'] += 1
        errors = row.get('errors', {}) if status == 'ok' else {}
        line['worst'] += [errors[what] / row['allowed'][what] for what in errors]
        if 'sequence_gradients_rerun_equal' in row:
            line['rerun'].append(row['sequence_gradients_rerun_equal'])
    heads = ['', 'right', 'wrong, failed or hung', 'skipped', 'largest error / allowed']
    heads.append('dq, dk, dv equal in a rerun')
    cells = {
        title: [
            *(line[what] for what in ('ok', 'bad', 'skipped')),
            f'{max(line["worst"]):.2f}' if line['worst'] else '-',
            {True: 'yes', False: 'no'}[all(line['rerun'])] if line['rerun'] else '-',
        ]
        for title, line in lines.items()
    }
    return markdown('against the softmax in float64', heads, cells) if cells else []


def _ceilings(rows):
    if not (found := starting(rows, 'machine/ceilings')):
        return []
    row = found['']
    copy, product = (row['ceilings'][k] for k in ('copy_bytes_per_second',
                                                  'matmul_flops_per_second'))  # fmt: skip
    page = [f'Copy {copy / 1e9:.4g} GB/s, bf16 product {product / 1e12:.4g} TFLOP/s.']
    for flag, said in row.get('cudnn_backward_by_deterministic_flag', {}).items():
        page.append(f'cuDNN backward, xla_gpu_deterministic_ops={flag}: {said}.')
    return [*page, '']


def _attention(rows):
    results, page = timed(rows), []
    ceilings = starting(rows, 'machine/ceilings')
    if ceilings and results:
        title, heads, lines = attention_report.targets([ceilings[''], *results])
        page += markdown(title, heads, lines) if lines else []
    for result in results:
        page += markdown(*attention_report.case_table(result))
        page += [*(f'- {line}' for line in attention_report.failures(result)), '']
    return page


def _models(rows):
    page = []
    for table in model_tables.tables(rows):
        page += markdown(*table)
    for row in starting(rows, 'experts/').values():
        page += markdown(*experts.products_table(row))
    for name, row in starting(rows, 'step/').items():
        page += [f'- {name}: {line}' for line in row['chosen']]
    return page


def _claims(rows):
    lines = {row['id']: [row[name] for name in CLAIM_COLUMNS] for row in judged(rows)}
    return markdown('by rule', ['', *CLAIM_COLUMNS], lines) if lines else []


def page(rows: dict[str, dict], title: str, pictures=()) -> str:
    """The page, as Markdown.

    Args:
      rows: the newest of each case, by name.
      title: of the page.
      pictures: names of files next to it.
    """
    lines = [f'# {title}', '', *_machines(rows), *_outcomes(rows)]
    sections = {'Ceilings': _ceilings, 'Correctness': _correctness, 'Attention': _attention}
    sections |= {'Models': _models, 'Claims': _claims}
    for name, section in sections.items():
        if found := section(rows):
            lines += [f'## {name}', '', *found]
        if name == 'Attention':
            lines += [line for picture in pictures for line in (f'![{picture}]({picture})', '')]
    return '\n'.join(lines).rstrip() + '\n'


def write(out: pathlib.Path) -> list[pathlib.Path]:
    """Writes table.md, claims.json and plots into the directory of results.jsonl.

    Args:
      out: the directory.

    Returns:
      Paths of what was written.

    Raises:
      ValueError: no results in it.
    """
    rows = Results(out / FILE).latest
    if not rows:
        raise ValueError(f'--out={out}: holds no {FILE} with results; launch.gpu writes it')
    pictures = [
        name
        for name, draw in (('times.png', plots.draw_times), ('depth.png', plots.draw_depth))
        if draw(timed(rows), rows, out / name)
    ]
    texts = {'table.md': page(rows, out.absolute().name, pictures)}
    texts['claims.json'] = json.dumps(judged(rows), indent=1) + '\n'
    for name, text in texts.items():
        (out / name).write_text(text, encoding='utf-8')
    return [out / name for name in (*texts, *pictures)]
