"""What a reader of a study must know before its numbers: plain sentences, found by stated rules."""

import math

from moddepth_jax.studies import fit
from moddepth_jax.studies.plot_style import budget_name

SHORT_RUN = 500  # steps; no verdict from shorter runs
INVALID_GAP = 0.05  # nats between causal and top-C routing, see docs/mixture_of_depths.md
_FEW_SEEDS = 3
_OFF_BUDGET = 0.01


def warnings(study: dict) -> list[str]:
    """Sentences, the gravest first; none for a study that is whole and sound.

    Args:
      study: the content of study.json.
    """
    return [*_unfinished(study), *_unsound(study), *_budgets(study), *_rates(study)]


def _names(rows):
    return ', '.join(row['run'] for row in rows)


def _unfinished(study):
    if study['missing'] or not study.get('whole', True):
        number = len(study['missing'])
        yield (
            f'The study is not finished: {number} {"run is" if number == 1 else "runs are"} '
            'missing, and the best sizes may change.'
        )
    runs = [row for row in study['runs'] if row['loss'] is None or not math.isfinite(row['loss'])]
    lost = [*study.get('diverged', ()), *(row['run'] for row in runs)]
    if lost:
        yield f'These runs diverged and are in no figure: {", ".join(lost)}.'


def _unsound(study):
    runs = study['runs']
    short = [row for row in runs if row['steps'] < SHORT_RUN]
    if short:
        yield (
            f'{len(short)} of {len(runs)} runs have fewer than {SHORT_RUN} steps: they show that '
            'the study works, and no verdict is drawn from them.'
        )
    void = [row for row in runs if (row['routing_gap'] or 0) >= INVALID_GAP]
    if void:
        yield (
            f'A routing gap of {INVALID_GAP:g} nats or more makes a run invalid, for its causal '
            f'rule does not do what its training did: {_names(void)}.'
        )
    if study['kind'] == 'flops':
        off = [r for r in runs if abs(r['total_flops'] / r['budget'] - 1) > _OFF_BUDGET]
        if off:
            yield f'More than 1% off their budget of FLOPs: {_names(off)}.'


def _budgets(study):
    base = fit.reference(study)
    labels = {name: details['label'] for name, details in study['variants'].items()}
    budgets = fit.budgets(study)
    for budget in budgets:
        for name, rows in fit.found(study, budget):
            parabola = fit.fit(rows)
            if parabola is not None and not parabola.inside:
                yield (
                    f'"{labels[name]}" at {budget_name(study, budget)} has no optimum within the '
                    f'sizes that were run: {fit.best(rows).size} is best. More sizes '
                    'would tell.'
                )
    worse = [budget for budget in budgets if _is_beaten(study, base, budget)]
    if worse:
        yield (
            f'At {", ".join(budget_name(study, budget) for budget in worse)} the shallower dense '
            f'control is better than "{labels[base]}": what a routed model gains over '
            f'"{labels[base]}" there may come from fewer layers alone.'
        )
    for name, rows in fit.found(study, budgets[-1]) if budgets else ():
        number = len(fit.best(rows).losses)
        if number < _FEW_SEEDS:
            yield (
                f'"{labels[name]}" has {number} of the {_FEW_SEEDS} seeds at the largest budget '
                'that a comparison needs.'
            )


def _is_beaten(study, base, budget):
    both = [fit.select(study, name, budget) for name in (base, 'shallow')]
    optimum, shallow = map(fit.optimum, both)
    return bool(optimum and shallow and shallow.loss < optimum.loss)


def _rates(study):
    for width, rate in study['learning_rates'].items():
        tried = [r['learning_rate'] for r in study['tuning'] if str(r['width']) == str(width)]
        if len(tried) > 1 and rate in (min(tried), max(tried)):
            end = 'smallest' if rate == min(tried) else 'largest'
            yield f'At width {width} the learning rate {rate:g} is the {end} of those tried.'
