"""study.md: warnings, figures and tables of a study, from study.json and its figures alone."""

import math
import pathlib
import statistics

from moddepth_jax.studies import fit
from moddepth_jax.studies.plot_style import budget_name, scientific
from moddepth_jax.studies.plots import FIGURES
from moddepth_jax.studies.statistics import INVALID_GAP, MIN_SEEDS, MIN_STEPS, interval
from moddepth_jax.training.tables import markdown_rows

_OFF_BUDGET = 0.01


def write_page(study: dict, directory):
    """Writes study.md, which shows the figures of `plots.draw`."""
    lines = [
        f'# {"isoFLOP study" if study["kind"] == "flops" else "Study at equal tokens"}',
        '',
        f'{len(study["runs"])} runs finished, {len(study["missing"])} missing. Config '
        f'{study["config"]}, corpus {study["corpus"]}. How each figure is read: docs/isoflop.md.',
        '',
    ]
    if found := warnings(study):
        lines += ['**Read this first**', '', *(f'- {text}' for text in found), '']
    for name in FIGURES:
        lines += [f'![{name}]({name}.png)', '']
    for budget in fit.budgets(study):
        rows = list(_best_rows(study, budget))
        table = markdown_rows(rows[0], *(row.values() for row in rows))
        lines += [f'**The best of each variant, {budget_name(study, budget)}**', '', *table, '']
    if rows := list(map(_cells, study['runs'])):
        table = markdown_rows(rows[0], *(row.values() for row in rows))
        lines += ['**All runs**; losses are causal, on held-out text', '', *table, '']
    (pathlib.Path(directory) / 'study.md').write_text('\n'.join(lines), encoding='utf-8')


def warnings(study: dict) -> list[str]:
    """What a reader must know before the numbers, the gravest first; [] for a sound study."""
    return [*_runs(study), *_budgets(study), *_rates(study)]


def _runs(study):
    runs, missing = study['runs'], len(study['missing'])
    if missing or not study.get('complete', True):  # studies of earlier versions lack it
        yield (
            f'The study is not finished: {missing} {"run is" if missing == 1 else "runs are"} '
            'missing, and the best sizes may change.'
        )
    lost = [row['run'] for row in runs if row['loss'] is None or not math.isfinite(row['loss'])]
    lost = [*study.get('diverged', ()), *lost]
    if lost:
        yield f'These runs diverged and are in no figure: {", ".join(lost)}.'
    short = [row for row in runs if row['steps'] < MIN_STEPS]
    if short:
        found = f'{len(short)} of {len(runs)} runs have fewer than {MIN_STEPS} steps'
        yield f'{found}: no verdict is drawn from them.'
    invalid = [row['run'] for row in runs if (row['routing_gap'] or 0) >= INVALID_GAP]
    if invalid:
        yield f'A routing gap of {INVALID_GAP:g} nats makes runs invalid: {", ".join(invalid)}.'
    if study['kind'] == 'flops':
        off = [r['run'] for r in runs if abs(r['total_flops'] / r['budget'] - 1) > _OFF_BUDGET]
        if off:
            yield f'More than {_OFF_BUDGET:.0%} off their budget of FLOPs: {", ".join(off)}.'


def _budgets(study):
    base, budgets = fit.reference(study), fit.budgets(study)
    labels = {name: details['label'] for name, details in study['variants'].items()}
    for budget in budgets:
        where = f'At {budget_name(study, budget)}'
        for name, rows in fit.found(study, budget):
            parabola, best = fit.fit(rows), fit.best(rows)
            if parabola is not None and not parabola.inside:
                found = f'"{labels[name]}" has no optimum within the sizes that were run'
                yield f'{where} {found}: {best.size} is best. Run more sizes.'
            if budget == budgets[-1] and len(best.losses) < MIN_SEEDS:
                lacking = f'{len(best.losses)} of the {MIN_SEEDS} seeds that a comparison needs'
                yield f'{where} "{labels[name]}" has {lacking}.'
        dense, shallow = (fit.optimum(fit.select(study, v, budget)) for v in (base, 'shallow'))
        if dense and shallow and shallow.loss < dense.loss:
            better = f'the shallower dense control is better than "{labels[base]}"'
            yield f'{where} {better}: a routed model may gain from fewer layers alone.'


def _rates(study):
    for width, rate in study['learning_rates'].items():
        tried = [r['learning_rate'] for r in study['tuning'] if str(r['width']) == str(width)]
        if len(tried) > 1 and rate in (min(tried), max(tried)):
            end = 'smallest' if rate == min(tried) else 'largest'
            yield f'At width {width} the learning rate {rate:g} is the {end} of those tried.'


def _number(value, form):
    """Text; empty for None and for what is not finite."""
    return '' if value is None or not math.isfinite(value) else format(value, form)


def _best_rows(study, budget):
    """The cells of each variant, by heading."""
    optimum = fit.optimum(fit.select(study, fit.reference(study), budget))
    bits, paired = fit.bits_per_nat(study), fit.paired_differences(study, budget)
    for name, runs in fit.found(study, budget):
        best, parabola = fit.best(runs), fit.fit(runs)
        steps = next(run['steps'] for run in runs if run['size'] == best.size)
        cost = best.flops_per_forward / optimum.flops_per_forward if optimum else None
        spread = f' ± {statistics.stdev(best.losses):.4f}' if len(best.losses) > 1 else ''
        vertex = '–'
        if parabola:
            vertex = f'{parabola.optimum_parameters:,.0f}, {parabola.optimum_loss:.4f}'
            vertex = vertex if parabola.inside else 'at an edge'
        yield {
            'variant': study['variants'][name]['label'],
            'best size': best.size,
            'parameters': f'{best.parameters:,}',
            'steps': f'{steps:,}',
            'FLOPs of a forward pass, relative': _number(cost, '.2f'),
            'loss, nats': f'{best.loss:.4f}{spread}',
            'seeds': str(len(best.losses)),
            'bits/byte': f'{best.loss * bits:.4f}',
            # None of the reference itself, and without common seeds.
            'less the reference, in pairs': f'{interval([paired[name]]):+.4f}'
            if any(paired[name])
            else '',
            'loss, relative': _number(best.loss / optimum.loss if optimum else None, '.4f'),
            'parameters and loss of the optimum': vertex,
        }


def _cells(row):
    """The cells of a run, by heading."""
    return {
        'run': row['run'],
        'variant': row['variant'],
        'parameters': f'{row["parameters"]:,}',
        'active': _number(row['active_parameters'], ','),
        'steps': f'{row["steps"]:,}',
        'FLOPs': scientific(row['total_flops']),
        'epochs': _number(row['epochs'], '.2f'),
        'loss, nats': _number(row['loss'], '.4f'),
        'bits/byte': _number(row['bits_per_byte'], '.4f'),
        'top-C loss, nats': _number(row['loss_top_c'], '.4f'),
        'gap, nats': _number(row['routing_gap'], '+.4f'),
        'rule': row['rule'] or '',
    }
