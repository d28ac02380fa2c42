"""study.html: a study as one page that explains itself, from study.json and its figures alone."""

import html
import json
import math
import pathlib
import re
import statistics

from moddepth_jax.studies import fit, study_text
from moddepth_jax.studies.plot_style import GRID, INK, PAPER, budget_name, scientific
from moddepth_jax.studies.study_warnings import INVALID_GAP, SHORT_RUN, warnings

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_COLOURS = {INK: 'var(--ink)', PAPER: 'var(--paper)', GRID: 'var(--grid)'}


def write_page(study: dict, directory):
    """Writes study.html beside the figures, which it holds as SVG; it needs no network.

    Args:
      study: the content of study.json.
      directory: where `isoflop_figures.draw` has put its figures.

    Raises:
      ValueError: a figure is not there.
    """
    directory = pathlib.Path(directory)
    title = 'isoFLOP study' if study['kind'] == 'flops' else 'Study at equal tokens'
    body = [
        f'<h1>{title}</h1>',
        f'<p class="faint">{_size_of(study)}</p>',
        _warned(study),
        '<h2>The best of each variant</h2>',
        _best_tables(study) if study['runs'] else '<p>No run has finished yet.</p>',
        '<h2>What is compared</h2>',
        _compared(study),
        *[_figure(directory, name) for name in study_text.FIGURES],
        '<h2>The plan</h2>',
        _plan(study),
        '<h2>All runs</h2>',
        _run_table(study) if study['runs'] else '<p>None yet.</p>',
        '<h2>What it was made with</h2>',
        _origin(study),
    ]
    head = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<title>{title}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<style>{study_text.STYLE}</style>\n</head>\n<body>\n'
    )
    tail = f'\n<script>{study_text.SORTING}</script>\n</body>\n</html>\n'
    (directory / 'study.html').write_text(head + '\n'.join(body) + tail, encoding='utf-8')


def _size_of(study):
    runs, missing = len(study['runs']), len(study['missing'])
    text = f'{_count(runs, "run")} finished, {missing or "none"} missing. '
    found = f'Config {study["config"]}, corpus {study["corpus"]}.'
    return html.escape(text + found)


def _count(number, noun):
    return f'{number:,} {noun}{"" if number == 1 else "s"}'


def _warned(study):
    found = warnings(study)
    if not found:
        return ''
    points = ''.join(f'<li>{html.escape(text)}</li>' for text in found)
    return f'<div class="warn"><b>Before you read on</b><ul>{points}</ul></div>'


def _compared(study):
    rows, names = study['runs'], study['variants']
    routed = any(row['rule'] for row in rows) or 'mod' in names
    parts = [
        study_text.MOD if routed else '',
        study_text.MODA if any('moda' in name for name in names) else '',
        study_text.EXPERTS if 'moe' in names or 'staged' in names else '',
        study_text.EQUAL_FLOPS if study['kind'] == 'flops' else study_text.EQUAL_STEPS,
        study_text.CAUSAL if routed else '',
        study_text.SHALLOW if 'shallow' in names else '',
    ]
    return ''.join(parts)


def _figure(directory, name):
    file = directory / f'{name}.svg'
    try:
        svg = file.read_text(encoding='utf-8')
    except OSError as error:
        reason = f'{error.strerror}; isoflop_figures.draw must have written it'
        raise ValueError(f'{file}: {reason}') from None
    heading, caption = study_text.FIGURES[name]
    svg = svg[svg.index('<svg') :]
    # Ids are the page's, colours follow its mode, and its style sheet gives the size.
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf'\g<1>{name}-', svg)
    svg = re.sub('|'.join(_COLOURS), lambda found: _COLOURS[found[0]], svg)
    points = re.search(r'viewBox="0 0 ([0-9.]+) ', svg)[1]
    svg = re.sub(r' (width|height)="[^"]*"', '', svg, count=2)
    wide = f'style="max-width: calc(1.08 * {points}pt)"'
    svg = svg.replace('<svg', f'<svg role="img" aria-label="{heading}" {wide}', 1)
    return f'<h2>{heading}</h2>\n<figure>{svg}<figcaption>{caption}</figcaption></figure>'


def _table(heads, rows, sortable=False):
    """HTML of a table; a cell is a text, or (text, number to sort by, class)."""
    parts, numbers = [], set()
    for row in rows:
        parts.append('<tr>')
        for place, cell in enumerate(row):
            text, value, kind = cell if isinstance(cell, tuple) else (cell, None, '')
            if value is not None:
                numbers.add(place)
            value = '' if value is None else f' data-v="{value!r}"'
            kind = f'{kind} n' if place in numbers else kind
            kind = f' class="{kind.strip()}"' if kind else ''
            parts.append(f'<td{value}{kind}>{html.escape(str(text))}</td>')
        parts.append('</tr>\n')
    kinds = [' class="n"' if place in numbers else '' for place in range(len(heads))]
    head = ''.join(
        f'<th{kind}>{html.escape(name)}</th>' for kind, name in zip(kinds, heads, strict=True)
    )
    kind = ' class="sortable"' if sortable else ''
    table = f'<table{kind}><thead><tr>{head}</tr></thead><tbody>\n{"".join(parts)}</tbody></table>'
    return f'<div class="wide">{table}</div>'


def _number(value, text, kind=''):
    """A cell; empty for None and for what is not finite."""
    if value is None or not math.isfinite(value):
        return ('', '', kind)
    return (text.format(value), value, kind)


def _best_tables(study):
    label = study['variants'][fit.reference(study)]['label']
    told = (
        'Sizes are layers x width. The loss is the mean over the seeds ± their standard deviation. '
        f'"Relative" is over "{label}" at its optimum in the same budget. The last column is where '
        'a parabola through the sizes has its minimum: parameters, and nats there. '
        f'Highlighted: fewer than {SHORT_RUN} steps, or an optimum that may lie beyond the sizes.'
    )
    parts = [f'<p class="faint">{html.escape(told)}</p>']
    heads = ('variant', 'best size', 'parameters', 'steps', 'FLOPs of a forward pass, relative')
    heads += ('causal loss, nats', 'bits/byte', 'loss, relative', 'optimum')
    for budget in fit.budgets(study):
        parts.append(f'<h3>{budget_name(study, budget)}</h3>')
        parts.append(_table(heads, _best_rows(study, budget)))
    return '\n'.join(parts)


def _best_rows(study, budget):
    base = fit.select(study, fit.reference(study), budget)
    optimum, bits = fit.optimum(base), fit.bits_per_nat(study)
    for name, rows in fit.found(study, budget):
        best, parabola = fit.best(rows), fit.fit(rows)
        steps = next(row['steps'] for row in rows if row['size'] == best.size)
        cost = best.flops_per_forward / optimum.flops_per_forward if optimum else None
        yield (
            study['variants'][name]['label'],
            best.size,
            _number(best.parameters, '{:,}'),
            _number(steps, '{:,}', 'bad' if steps < SHORT_RUN else ''),
            _number(cost, '{:.2f}'),
            (_spread(best.losses), best.loss, ''),
            _number(best.loss * bits, '{:.4f}'),
            _number(best.loss / optimum.loss if optimum else None, '{:.4f}'),
            _vertex(parabola),
        )


def _spread(losses):
    spread = f' ± {statistics.stdev(losses):.4f}' if len(losses) > 1 else ''
    return f'{statistics.fmean(losses):.4f}{spread} ({_count(len(losses), "seed")})'


def _vertex(parabola):
    if parabola is None:
        return '–'
    if not parabola.inside:
        return ('at an edge', None, 'bad')
    return f'{parabola.optimum_parameters:,.0f}, {parabola.optimum_loss:.4f}'


def _plan(study):
    budgets = ', '.join(budget_name(study, budget) for budget in study['budgets'])
    names = study['variants']
    facts = [
        ('Budgets', budgets),
        ('Sizes', ', '.join(study['sizes']) + ' (layers x width)'),
        ('Seeds', ', '.join(map(str, study['seeds']))),
        ('A step', f'{study["batch_tokens"]:,} tokens in rows of {study["sequence_length"]:,}'),
    ]
    rates = [f'{rate:g} at width {width}' for width, rate in study['learning_rates'].items()]
    facts.append(('Learning rates', ', '.join(rates) or 'not chosen yet'))
    items = ''.join(f'<li><b>{k}:</b> {html.escape(v)}</li>' for k, v in facts)
    sized = [name for name in ('dense', 'shallow', 'mod') if name in names]
    told = [f'<ul>{items}</ul>']
    if sized:
        labels = html.escape('; '.join(names[name]['label'] for name in sized))
        told.append(
            f'<p>At every size and budget run: {labels}. The others run at the size where the '
            'routed model (or, without one, the dense model) was best at that budget. All seeds '
            'run at the largest budget, at the best sizes; elsewhere the first alone.</p>'
        )
    if study['tuning']:
        told.append(
            '<p>The learning rate was tuned for each width, with one run for each rate tried, at '
            'the smallest budget and without routing, and then held for all variants and budgets. '
            'This favours the baseline: the other variants might do better with rates of their '
            'own.</p>'
        )
        tried = [
            (
                _number(row['width'], '{}'),
                _number(row['learning_rate'], '{:g}'),
                _number(row['loss'], '{:.4f}') if row['loss'] else 'none',
                row['run'],
            )
            for row in study['tuning']
        ]
        told.append(_table(('width', 'learning rate', 'causal loss, nats', 'run'), tried))
    changed = [
        (name, names[name]['label'], (_knobs(names[name]['changes']), None, 'long'))
        for name in names
    ]
    table = _table(('name', 'variant', 'knobs'), changed)
    told.append(
        f'<details><summary>The variants, and the knobs they set</summary>{table}</details>'
    )
    return '\n'.join(told)


def _knobs(changes):
    return ', '.join(f'{name}={json.dumps(value)}' for name, value in changes.items()) or 'none'


def _run_table(study):
    flops = study['kind'] == 'flops'
    experts = any(row['active_parameters'] != row['parameters'] for row in study['runs'])
    heads = ['variant', 'size', 'seed', 'budget', 'parameters']
    heads += ['active parameters'] * experts + ['steps']
    heads += [
        'FLOPs over budget' if flops else 'FLOPs',
        'epochs',
        'learning rate',
        'causal loss, nats',
    ]
    heads += ['bits/byte', 'top-C loss, nats', 'gap, nats', 'rule']
    rows = []
    for row in study['runs']:
        gap = row['routing_gap']
        cells = [
            study['variants'][row['variant']]['label'],
            (row['size'], row['parameters'], ''),
            _number(row['seed'], '{}'),
            (budget_name(study, row['budget']).split()[0], row['budget'], ''),
            _number(row['parameters'], '{:,}'),
            *[_number(row['active_parameters'], '{:,}')] * experts,
            _number(row['steps'], '{:,}', 'bad' if row['steps'] < SHORT_RUN else ''),
            _number(row['total_flops'] / row['budget'], '{:.4f}')
            if flops
            else (scientific(row['total_flops']), row['total_flops'], ''),
            _number(row['epochs'], '{:.2f}'),
            _number(row['learning_rate'], '{:g}'),
            _number(row['loss'], '{:.4f}'),
            _number(row['bits_per_byte'], '{:.4f}'),
            _number(row['loss_top_c'], '{:.4f}'),
            _number(gap, '{:+.4f}', 'bad' if gap is not None and gap >= INVALID_GAP else ''),
            row['rule'] or '',
        ]
        rows.append(cells)
    told = (
        'Losses are on held-out text. Epochs: how often the training text was read. A click on a '
        f'heading sorts. Highlighted: fewer than {SHORT_RUN} steps, or a routing gap of '
        f'{INVALID_GAP:g} nats or more.'
    )
    return f'<p class="faint">{html.escape(told)}</p>{_table(heads, rows, sortable=True)}'


def _origin(study):
    facts = [
        ('Corpus', study['corpus']),
        ('sha256 of the corpus', study['corpus_sha256']),
        ('Versions', ', '.join(f'{name} {v}' for name, v in study['versions'].items())),
        ('Config', study['config']),
        ('Knobs changed for all runs', _knobs(study['overrides'])),
        ('Missing runs', ', '.join(study['missing']) or 'none'),
    ]
    items = ''.join(f'<li><b>{k}:</b> <code>{html.escape(str(v))}</code></li>' for k, v in facts)
    return f'<ul>{items}</ul>'
