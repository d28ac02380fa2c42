"""study.html: a study as one page that explains itself, from study.json and its figures alone."""

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
from moddepth_jax.studies.statistics import INVALID_GAP, MIN_SEEDS, MIN_STEPS

_TEMPLATE = pathlib.Path(__file__).parent / 'page.html'
_OFF_BUDGET = 0.01


def write_page(study: dict, directory):
    """Writes study.html, which holds the figures as SVG and needs no network.

    Args:
      study: the content of study.json.
      directory: where `plots.draw` has put its figures.

    Raises:
      ValueError: a figure is missing.
    """
    directory = pathlib.Path(directory)
    rest = {name: value for name, value in study.items() if name not in ('runs', 'fits')}
    template = string.Template(_TEMPLATE.read_text(encoding='utf-8'))
    page = template.substitute(
        title='isoFLOP study' if study['kind'] == 'flops' else 'Study at equal tokens',
        summary=_summary(study),
        warnings=_warnings(study),
        reference=html.escape(study['variants'][fit.reference(study)]['label']),
        min_steps=MIN_STEPS,
        invalid_gap=f'{INVALID_GAP:g}',
        best=_best_tables(study),
        runs=_run_table(study),
        rest=html.escape(json.dumps(rest, indent=1, ensure_ascii=False)),
        **{name: _figure(directory / f'{name}.svg') for name in FIGURES},
    )
    (directory / 'study.html').write_text(page, encoding='utf-8')


def warnings(study: dict) -> list[str]:
    """What a reader must know before the numbers, the gravest first; [] for a sound study.

    Args:
      study: the content of study.json.
    """
    return [*_unfinished(study), *_unsound(study), *_budgets(study), *_rates(study)]


def _names(rows):
    return ', '.join(row['run'] for row in rows)


def _unfinished(study):
    # Studies of earlier versions say `whole` for `complete`.
    if study['missing'] or not study.get('complete', study.get('whole', True)):
        number = len(study['missing'])
        yield (
            f'The study is not finished: {number} {"run is" if number == 1 else "runs are"} '
            'missing, and the best sizes may change.'
        )
    lost = [row for row in study['runs'] if row['loss'] is None or not math.isfinite(row['loss'])]
    lost = [*study.get('diverged', ()), *(row['run'] for row in lost)]
    if lost:
        yield f'These runs diverged and are in no figure: {", ".join(lost)}.'


def _unsound(study):
    runs = study['runs']
    short = [row for row in runs if row['steps'] < MIN_STEPS]
    if short:
        yield (
            f'{len(short)} of {len(runs)} runs have fewer than {MIN_STEPS} steps: they show that '
            'the study works, and no verdict is drawn from them.'
        )
    invalid = [row for row in runs if (row['routing_gap'] or 0) >= INVALID_GAP]
    if invalid:
        yield (
            f'A routing gap of {INVALID_GAP:g} nats or more makes a run invalid, for its causal '
            f'rule does not do what its training did: {_names(invalid)}.'
        )
    if study['kind'] == 'flops':
        off = [r for r in runs if abs(r['total_flops'] / r['budget'] - 1) > _OFF_BUDGET]
        if off:
            yield f'More than {_OFF_BUDGET:.0%} off their budget of FLOPs: {_names(off)}.'


def _budgets(study):
    base, budgets = fit.reference(study), fit.budgets(study)
    labels = {name: details['label'] for name, details in study['variants'].items()}
    for budget in budgets:
        for name, rows in fit.found(study, budget):
            parabola = fit.fit(rows)
            if parabola is not None and not parabola.inside:
                yield (
                    f'"{labels[name]}" at {budget_name(study, budget)} has no optimum within the '
                    f'sizes that were run: {fit.best(rows).size} is best. Run more sizes.'
                )
    worse = [budget_name(study, b) for b in budgets if _is_beaten_by_shallow(study, base, b)]
    if worse:
        yield (
            f'At {", ".join(worse)} the shallower dense control is better than "{labels[base]}": '
            f'what a routed model gains over "{labels[base]}" there may come from fewer layers '
            'alone.'
        )
    for name, rows in fit.found(study, budgets[-1]) if budgets else ():
        number = len(fit.best(rows).losses)
        if number < MIN_SEEDS:
            yield (
                f'"{labels[name]}" has {number} of the {MIN_SEEDS} seeds at the largest budget '
                'that a comparison needs.'
            )


def _is_beaten_by_shallow(study, base, budget):
    both = [fit.optimum(fit.select(study, name, budget)) for name in (base, 'shallow')]
    return None not in both and both[1].loss < both[0].loss


def _rates(study):
    for width, rate in study['learning_rates'].items():
        tried = [r['learning_rate'] for r in study['tuning'] if str(r['width']) == str(width)]
        if len(tried) > 1 and rate in (min(tried), max(tried)):
            end = 'smallest' if rate == min(tried) else 'largest'
            yield f'At width {width} the learning rate {rate:g} is the {end} of those tried.'


def _warnings(study):
    items = ''.join(f'<li>{html.escape(text)}</li>' for text in warnings(study))
    return f'<div class="warn"><b>Read this first</b><ul>{items}</ul></div>' if items else ''


def _summary(study):
    finished, missing = len(study['runs']), len(study['missing'])
    text = f'{_count(finished, "run")} finished, {missing or "none"} missing. '
    return html.escape(f'{text}Config {study["config"]}, corpus {study["corpus"]}.')


def _count(number, noun):
    return f'{number:,} {noun}{"" if number == 1 else "s"}'


def _figure(file):
    """A data URL of the SVG file."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(f'{file}: {error.strerror}; plots.draw must have written it') from None
    return f'data:image/svg+xml;base64,{base64.b64encode(content).decode()}'


def _table(rows, kind=''):
    """HTML of a table: dicts by heading, each cell a text or (text, number to sort by, class)."""
    if not rows:
        return '<p>None yet.</p>'
    parts = []
    for row in rows:
        parts.append('<tr>')
        for cell in row.values():
            text, value, style = cell if isinstance(cell, tuple) else (cell, None, '')
            number = '' if value is None else f' data-v="{value!r}"'
            style = f'{style} n' if number else style
            parts.append(f'<td{number} class="{style}">{html.escape(str(text))}</td>')
        parts.append('</tr>\n')
    head = ''.join(f'<th>{html.escape(name)}</th>' for name in rows[0])
    body = f'<thead><tr>{head}</tr></thead><tbody>\n{"".join(parts)}</tbody>'
    return f'<div class="wide"><table class="{kind}">{body}</table></div>'


def _number(value, form, bad=False):
    """A cell; empty for None and for what is not finite."""
    if value is None or not math.isfinite(value):
        return ''
    return format(value, form), value, 'bad' if bad else ''


def _best_tables(study):
    parts = [
        f'<h3>{budget_name(study, budget)}</h3>{_table(_best_rows(study, budget))}'
        for budget in fit.budgets(study)
    ]
    return '\n'.join(parts) or '<p>No run has finished yet.</p>'


def _best_rows(study, budget):
    optimum = fit.optimum(fit.select(study, fit.reference(study), budget))
    bits, rows = fit.bits_per_nat(study), []
    for name, runs in fit.found(study, budget):
        best = fit.best(runs)
        steps = next(run['steps'] for run in runs if run['size'] == best.size)
        cost = best.flops_per_forward / optimum.flops_per_forward if optimum else None
        row = {
            'variant': study['variants'][name]['label'],
            'best size': best.size,
            'parameters': _number(best.parameters, ','),
            'steps': _number(steps, ',', bad=steps < MIN_STEPS),
            'FLOPs of a forward pass, relative': _number(cost, '.2f'),
            'causal loss, nats': (_spread(best.losses), best.loss, ''),
            'bits/byte': _number(best.loss * bits, '.4f'),
            'loss, relative': _number(best.loss / optimum.loss if optimum else None, '.4f'),
            'optimum': _vertex(fit.fit(runs)),
        }
        rows.append(row)
    return rows


def _spread(losses):
    spread = f' ± {statistics.stdev(losses):.4f}' if len(losses) > 1 else ''
    return f'{statistics.fmean(losses):.4f}{spread} ({_count(len(losses), "seed")})'


def _vertex(parabola):
    if parabola is None:
        return '–'
    if not parabola.inside:
        return ('at an edge', None, 'bad')
    return f'{parabola.optimum_parameters:,.0f}, {parabola.optimum_loss:.4f}'


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
                row['routing_gap'], '+.4f', (row['routing_gap'] or 0) >= INVALID_GAP
            ),
            'rule': row['rule'] or '',
        }
        for row in study['runs']
    ]
    return _table(rows, 'sortable')
