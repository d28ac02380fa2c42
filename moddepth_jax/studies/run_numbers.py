"""Numbers of single runs that claims are about, and the judge that compares them with bounds."""

import math
from collections.abc import Callable
from typing import NamedTuple

from moddepth_jax.studies.judges import UNDECIDED, Evidence, Outcome, outcome_of, verdict_within
from moddepth_jax.studies.statistics import NotMeasured, choose, interval


class Number(NamedTuple):
    """One number of a run: a row of study.json with `capacity` and `measured` (measures.json)."""

    of: Callable[[dict], float | None]
    form: str  # of its mean over the seeds, with the interval
    text: str = '{}'  # around that
    measured: bool = True  # whether it needs measures.json


def _mean(values):
    """The mean of the values that are not None, or None."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def accuracy(run: dict) -> float:
    """Share of the tokens on which a causal rule agrees with top-C, the mean over routed layers."""
    wrong = [  # selected wrongly, and missed
        layer['selected_fraction'] * (1 - (layer['precision'] or 0.0))
        + run['capacity'] * (1 - (layer['recall'] or 0.0))
        for layer in run['routing'].values()
    ]
    return 1 - _mean(wrong)


def _of_routing(name):
    """The mean over routed layers; what is undefined, as the precision of no token, counts as 0."""
    return lambda run: _mean([layer[name] or 0.0 for layer in run['routing'].values()])


def _of_layers(name):
    return lambda run: _mean([layer[name] for layer in run['measured']['layers']])


def _difference(group, name, other):
    """One number of a group of measures less another."""
    return lambda run: run['measured'][group][name] - run['measured'][group][other]


def _over_whitespace(name):
    def number(run):
        shares = [run['measured']['classes'].get(each) for each in (name, 'whitespace')]
        return None if None in shares else shares[0]['entered'] - shares[1]['entered']

    return number


NUMBERS = {
    'routing gap': Number(
        lambda run: run['routing_gap'] / run['loss_top_c'], '+.2%', '{} of the loss', False
    ),
    'accuracy': Number(accuracy, '.1%', 'accuracy {}', False),
    'precision': Number(_of_routing('precision'), '.2f', 'precision {}', False),
    'recall': Number(_of_routing('recall'), '.2f', 'recall {}', False),
    'selected fraction': Number(_of_routing('selected_fraction'), '.1%', '{}', False),
    'in every block': Number(
        _difference('blocks_entered', 'every', 'every_by_chance'), '+.1%', 'every block {}'
    ),
    'in no block': Number(
        _difference('blocks_entered', 'none', 'none_by_chance'), '+.1%', 'no block {}'
    ),
    'entropy correlation': Number(
        lambda run: run['measured']['entropy']['correlation'], '+.3f', 'correlation {}'
    ),
    'numbers': Number(_over_whitespace('number'), '+.1%', 'numbers less whitespace {}'),
    'keywords': Number(_over_whitespace('keyword'), '+.1%', 'keywords less whitespace {}'),
    'first token': Number(
        _difference('first_token', 'entered', 'others_entered'), '+.1%', 'first less others {}'
    ),
    'score correlation': Number(_of_layers('score_correlation'), '+.3f', 'correlation {}'),
    'linear probe': Number(_of_layers('probe_r2'), '+.3f'),
    'attention off the first token': Number(
        lambda run: 1 - _mean(run['measured']['depth_mass']['first_token']), '+.3f'
    ),
}


def numbers_within(
    evidence: Evidence,
    variants: list[str],
    numbers: list[str],
    low: float = -math.inf,
    high: float = math.inf,
    also=(),
    kinds=('flops',),
) -> Outcome:
    """Each of some NUMBERS, or the differences of two variants', lies between two bounds.

    Those of `also` are only shown.
    """

    def pick(place):
        groups = place.shared(*variants) if len(variants) > 1 else [place.best(variants[0])]
        if any(NUMBERS[name].measured for name in numbers):
            groups = [_measured(evidence, place, group) for group in groups]
        return groups

    place, groups = choose(evidence.studies, pick, kinds)
    samples = {name: [_values(evidence, place, g, name) for g in groups] for name in numbers}
    if not all(values for each in samples.values() for values in each):
        raise NotMeasured
    weights = (1.0, -1.0)[: len(groups)]
    intervals = {name: interval(values, weights) for name, values in samples.items()}
    percent = NUMBERS[numbers[0]].form.endswith('%')
    verdict, reason = verdict_within(list(intervals.values()), low, high, percent)
    lengths = [len(group.rows) for group in groups]
    if any(list(map(len, each)) != lengths for each in samples.values()):
        verdict, reason = UNDECIDED, 'a run does not have this measure'

    texts, spread = [], []
    for name, values in samples.items():
        number, of_which = NUMBERS[name], f'{name}, ' if len(numbers) > 1 else ''
        text = number.text.format(f'{intervals[name]:{number.form}}')
        if len(groups) > 1:
            means = [f'{_mean(each):{number.form.lstrip("+")}}' for each in values]
            pairs = zip(variants, means, strict=True)
            text = f'{", ".join(f"{variant} {mean}" for variant, mean in pairs)}: {text}'
        texts.append(text)
        for group, each in zip(groups, values, strict=True):
            listed = ', '.join(f'{value:.4f}' for value in each)
            spread.append(f'{of_which}{group.variant} {group.size}: {listed}')
    for name in also:
        mean = _mean(_values(evidence, place, groups[0], name))
        texts.append(NUMBERS[name].text.format(f'{mean:{NUMBERS[name].form}}'))
    ours = (', ' if also else '; ').join(texts)
    return outcome_of(place, groups, ours, verdict, reason, '; '.join(spread))


def _measured(evidence, place, group):
    """The runs of a group that are in measures.json; None if there are none."""
    known = evidence.measures.get(place.name, {})
    rows = tuple(row for row in group.rows if row['run'] in known) if group else ()
    return group._replace(rows=rows) if rows else None


def _values(evidence, place, group, name):
    """A number of each run of a group that did not diverge; runs that lack it are left out."""
    measures = evidence.measures.get(place.name, {})
    changes = place.study['variants'][group.variant]['changes']
    capacity = changes.get('model.routing.capacity')
    values = [
        NUMBERS[name].of(row | {'capacity': capacity, 'measured': measures.get(row['run'])})
        for row in group.rows
        if row['loss'] is not None
    ]
    return [value for value in values if value is not None]
