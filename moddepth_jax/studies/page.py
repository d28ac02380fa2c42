"""Writes study.html, a self-contained page about a study, from study.json and the figures."""

import base64
import html
import json
import math
import pathlib
import statistics
import string

from moddepth_jax.studies import fit
from moddepth_jax.studies.plot_style import budget_name, scientific
from moddepth_jax.studies.plots import FIGURES
from moddepth_jax.studies.statistics import MIN_SEEDS, MIN_STEPS, interval
from moddepth_jax.training import routing_gap

_OFF_BUDGET = 0.01


def write_page(study: dict, directory):
    """Write study.html with the figures of `plots.draw` as embedded SVG; it needs no network."""
    directory = pathlib.Path(directory)
    rest = {name: value for name, value in study.items() if name != 'runs'}
    template = pathlib.Path(__file__).with_suffix('.html').read_text(encoding='utf-8')
    svgs = {name: (directory / f'{name}.svg').read_bytes() for name in FIGURES}
    summary = f'{_count(len(study["runs"]), "run")} finished, {len(study["missing"]) or "none"} '
    summary += f'missing. Config {study["config"]}, corpus {study["corpus"]}.'
    page = string.Template(template).substitute(
        title='isoFLOP study' if study['kind'] == 'flops' else 'Study at equal tokens',
        summary=html.escape(summary),
        warnings=_warnings(study),
        reference=html.escape(study['variants'][fit.reference(study)]['label']),
        min_steps=MIN_STEPS,
        large_gap=f'{routing_gap.LARGE:g}',
        best=_best_tables(study),
        runs=_run_table(study),
        rest=html.escape(json.dumps(rest, indent=1, ensure_ascii=False)),
        **{name: base64.b64encode(svg).decode() for name, svg in svgs.items()},
    )
    (directory / 'study.html').write_text(page, encoding='utf-8')


def warnings(study: dict) -> list[str]:
    """Return warnings for the reader, the most serious first; [] for a sound study."""
    return [*_runs(study), *_budgets(study), *_rates(study)]


def _runs(study):
    runs, missing = study['runs'], len(study['missing'])
    if missing or not study['complete']:
        yield (
            f'The study is not finished: {missing} {"run is" if missing == 1 else "runs are"} '
            'missing, and the best sizes may change.'
        )
    lost = [row['run'] for row in runs if row['loss'] is None or not math.isfinite(row['loss'])]
    lost = [*study['diverged'], *lost]
    if lost:
        yield f'These runs diverged and are in no figure: {", ".join(lost)}.'
    short = [row for row in runs if row['steps'] < MIN_STEPS]
    if short:
        found = f'{len(short)} of {len(runs)} runs have fewer than {MIN_STEPS} steps'
        yield f'{found}: they get no verdict.'
    far = [row['run'] for row in runs if routing_gap.is_large(row['routing_gap'])]
    if far:
        found = f'These runs have a routing gap of {routing_gap.LARGE:g} nats or more, up or down'
        yield f'{found}; compare them by both losses: {", ".join(far)}.'
    if study['kind'] == 'flops':
        off = [r['run'] for r in runs if abs(r['total_flops'] / r['budget'] - 1) > _OFF_BUDGET]
        if off:
            yield f'More than {_OFF_BUDGET:.0%} off their FLOP budget: {", ".join(off)}.'


def _budgets(study):
    base, budgets = fit.reference(study), fit.budgets(study)
    labels = {name: details['label'] for name, details in study['variants'].items()}
    for budget in budgets:
        where = f'At {budget_name(study, budget)}'
        for name, rows in fit.found(study, budget):
            parabola, best = fit.fit(rows), fit.best(rows)
            if parabola is not None and not parabola.inside:
                found = f'"{labels[name]}" has no optimum within the sizes that ran'
                yield f'{where} {found}: {best.size} is best. Run more sizes.'
            if budget == budgets[-1] and len(best.losses) < MIN_SEEDS:
                lacking = f'{len(best.losses)} of the {MIN_SEEDS} seeds that a comparison needs'
                yield f'{where} "{labels[name]}" has {lacking}.'
        found = {name: fit.best(rows).loss for name, rows in fit.found(study, budget)}
        if found.get('shallow', math.inf) < found.get(base, -math.inf):
            better = f'the shallower dense control is better than "{labels[base]}"'
            yield f'{where} {better}: the gain of a routed model may come from fewer layers.'


def _rates(study):
    for width, rate in study['learning_rates'].items():
        tried = [r['learning_rate'] for r in study['tuning'] if str(r['width']) == str(width)]
        if len(tried) > 1 and rate in (min(tried), max(tried)):
            end = 'smallest' if rate == min(tried) else 'largest'
            yield f'At width {width} the learning rate {rate:g} is the {end} of those tried.'


def _warnings(study):
    items = ''.join(f'<li>{html.escape(text)}</li>' for text in warnings(study))
    return f'<div class="warn"><b>Read this first</b><ul>{items}</ul></div>' if items else ''


def _count(number, noun):
    return f'{number:,} {noun}{"" if number == 1 else "s"}'


def _table(rows, kind=''):
    """HTML table of `rows`, dicts by heading. A cell is a text or (text, sort key, CSS class)."""
    if not rows:
        return '<p>None yet.</p>'
    body = ''.join(f'<tr>{"".join(map(_cell, row.values()))}</tr>\n' for row in rows)
    head = ''.join(f'<th>{html.escape(name)}</th>' for name in rows[0])
    body = f'<thead><tr>{head}</tr></thead><tbody>\n{body}</tbody>'
    return f'<div class="wide"><table class="{kind}">{body}</table></div>'


def _cell(cell):
    text, value, style = cell if isinstance(cell, tuple) else (cell, None, '')
    number = '' if value is None else f' data-v="{value!r}"'
    style = f'{style} n' if number else style
    return f'<td{number} class="{style}">{html.escape(str(text))}</td>'


def _number(value, form, bad=False):
    """A cell for a number; empty if it is None or not finite."""
    if value is None or not math.isfinite(value):
        return ''
    return format(value, form), value, 'bad' if bad else ''


def _best_tables(study):
    parts = [
        f'<h3>{budget_name(study, budget)}</h3>{_table([*_best_rows(study, budget)])}'
        for budget in fit.budgets(study)
    ]
    return '\n'.join(parts) or '<p>No run has finished yet.</p>'


def _best_rows(study, budget):
    rows = fit.select(study, fit.reference(study), budget)
    base = fit.best(rows) if rows else None
    bits, paired = fit.bits_per_nat(study), fit.paired_differences(study, budget)
    for name, runs in fit.found(study, budget):
        best, parabola = fit.best(runs), fit.fit(runs)
        steps = next(run['steps'] for run in runs if run['size'] == best.size)
        cost = best.flops_per_forward / base.flops_per_forward if base else None
        spread = f' ± {statistics.stdev(best.losses):.4f}' if len(best.losses) > 1 else ''
        loss = f'{best.loss:.4f}{spread} ({_count(len(best.losses), "seed")})'
        vertex = '–'
        if parabola and parabola.inside:
            vertex = f'{parabola.optimum_parameters:,.0f}, {parabola.optimum_loss:.4f}'
        elif parabola:
            vertex = ('at an edge', None, 'bad')
        yield {
            'variant': study['variants'][name]['label'],
            'best size': best.size,
            'parameters': _number(best.parameters, ','),
            'steps': _number(steps, ',', bad=steps < MIN_STEPS),
            'FLOPs of a forward pass, relative': _number(cost, '.2f'),
            'causal loss, nats': (loss, best.loss, ''),
            'bits/byte': _number(best.loss * bits, '.4f'),
            'bits/byte minus the reference, in pairs': _paired(paired[name]),
            'loss, relative': _number(best.loss / base.loss if base else None, '.4f'),
            'optimum': vertex,
        }


def _paired(differences):
    """The mean with its 95% interval; empty for the reference and without common seeds."""
    if not any(differences):
        return ''
    mean = interval([differences])
    return f'{mean:+.4f}', mean.mean, ''


def _run_table(study):
    rows = [
        {
            'variant': study['variants'][row['variant']]['label'],
            'size': (row['size'], row['parameters'], ''),
            'seed': _number(row['seed'], ''),
            'budget': (budget_name(study, row['budget']).split()[0], row['budget'], ''),
            'parameters': _number(row['parameters'], ','),
            'active parameters': _number(row['active_parameters'], ','),
            'steps': _number(row['steps'], ',', bad=row['steps'] < MIN_STEPS),
            'FLOPs': (scientific(row['total_flops']), row['total_flops'], ''),
            'epochs': _number(row['epochs'], '.2f'),
            'learning rate': _number(row['learning_rate'], 'g'),
            'causal loss, nats': _number(row['loss'], '.4f'),
            'bits/byte': _number(row['bits_per_byte'], '.4f'),
            'top-C loss, nats': _number(row['loss_top_c'], '.4f'),
            'gap, nats': _number(
                row['routing_gap'], '+.4f', routing_gap.is_large(row['routing_gap'])
            ),
            'rule': row['rule'] or '',
        }
        for row in {(row['variant'], row['run']): row for row in study['runs']}.values()
    ]
    return _table(rows, 'sortable')
