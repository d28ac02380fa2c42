"""study.md: warnings, the best of each variant and the figures of a study, from study.json."""

import math
import pathlib
import statistics

from moddepth_jax.studies import fit
from moddepth_jax.studies.plot_style import budget_name
from moddepth_jax.studies.plots import FIGURES
from moddepth_jax.studies.statistics import INVALID_GAP, MIN_SEEDS, MIN_STEPS
from moddepth_jax.training.tables import Table, to_markdown

_OFF_BUDGET = 0.01


def write_page(study: dict, directory):
    """Writes study.md, which shows the figures of `plots.draw`; docs/isoflop.md explains it."""
    missing = len(study['missing']) or 'none'
    lines = [
        '# isoFLOP study' if study['kind'] == 'flops' else '# Study at equal tokens',
        '',
        f'{_count(len(study["runs"]), "run")} finished, {missing} missing. '
        f'Config {study["config"]}, corpus {study["corpus"]}.',
        '',
        *(f'- **Warning.** {text}' for text in warnings(study)),
        '',
    ]
    for budget in fit.budgets(study):
        lines += to_markdown(_best(study, budget))
    lines += [f'![{name}]({name}.png)' for name in FIGURES]
    (pathlib.Path(directory) / 'study.md').write_text('\n'.join(lines) + '\n', encoding='utf-8')


def warnings(study: dict) -> list[str]:
    """What a reader must know before the numbers, the gravest first; [] for a sound study."""
    return [*_runs(study), *_budgets(study), *_rates(study)]


def _runs(study):
    runs, missing = study['runs'], len(study['missing'])
    # Studies of earlier versions say `whole` for `complete`.
    if missing or not study.get('complete', study.get('whole', True)):
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


def _count(number, noun):
    return f'{number:,} {noun}{"" if number == 1 else "s"}'


def _best(study, budget):
    """The best size of each variant; relative to the reference at its optimum in this budget."""
    optimum = fit.optimum(fit.select(study, fit.reference(study), budget))
    bits, lines = fit.bits_per_nat(study), {}
    for name, runs in fit.found(study, budget):
        best, parabola = fit.best(runs), fit.fit(runs)
        steps = next(run['steps'] for run in runs if run['size'] == best.size)
        spread = f' ± {statistics.stdev(best.losses):.4f}' if len(best.losses) > 1 else ''
        relative = ['-', '-']
        if optimum:
            relative = [
                f'{best.flops_per_forward / optimum.flops_per_forward:.2f}',
                f'{best.loss / optimum.loss:.4f}',
            ]
        vertex = 'at an edge' if parabola else '-'
        if parabola and parabola.inside:
            vertex = f'{parabola.optimum_parameters:,.0f}, {parabola.optimum_loss:.4f}'
        lines[study['variants'][name]['label']] = [
            best.size,
            f'{best.parameters:,}',
            f'{steps:,}',
            f'{best.loss:.4f}{spread} ({_count(len(best.losses), "seed")})',
            f'{best.loss * bits:.4f}',
            *relative,
            vertex,
        ]
    heads = ['', 'best size', 'parameters', 'steps', 'causal loss, nats', 'bits/byte']
    heads += ['forward FLOPs, relative', 'loss, relative', 'optimum: parameters, nats']
    return Table(budget_name(study, budget), heads, lines)
