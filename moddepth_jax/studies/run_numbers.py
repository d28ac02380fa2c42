"""Numbers of single runs that claims refer to, and the judge that compares them with bounds."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from moddepth_jax.studies.judges import Finding, found_at
from moddepth_jax.studies.places import NotMeasured, Place
from moddepth_jax.studies.statistics import Sample


class Number(NamedTuple):
    """How to compute and format one number of a run."""

    # Takes a row of study.json with `capacity` and `measured` (the run's entry in measures.json).
    of: Callable[[dict], float | None]
    form: str  # format of the mean over seeds and its interval
    text: str = '{}'  # text around the formatted number
    measured: bool = True  # whether it needs measures.json


def _mean(values):
    """The mean of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def accuracy(run: dict) -> float:
    """Return the share of tokens on which the causal rule agrees with top-C, mean over layers."""
    wrong = [  # false positives plus false negatives, before a cap refuses some
        layer['rule_fraction'] * (1 - (layer['precision'] or 0.0))
        + run['capacity'] * (1 - (layer['recall'] or 0.0))
        for layer in run['routing'].values()
    ]
    return 1 - _mean(wrong)


def _of_routing(name):
    """The mean over routed layers; undefined values (precision without selections) count as 0."""
    return lambda run: _mean([layer[name] or 0.0 for layer in run['routing'].values()])


def _of_layers(name):
    return lambda run: _mean([layer[name] for layer in run['measured']['layers']])


def _difference(group, name, other):
    """The difference of two numbers in a group of measures."""
    return lambda run: run['measured'][group][name] - run['measured'][group][other]


def _class_over(name, other):
    """The selected share of one token class minus that of another."""

    def number(run):
        shares = [run['measured']['classes'].get(each) for each in (name, other)]
        return None if None in shares else shares[0]['entered'] - shares[1]['entered']

    return number


def _class_over_words(name):
    """The selected share of a token class minus that of other words.

    In Python text, the other words are those of comments and docstrings.
    """

    def number(run):
        classes = run['measured']['classes']
        others = [classes[each] for each in ('word', 'comment', 'docstring') if each in classes]
        tokens = sum(each['tokens'] for each in others)
        if name not in classes or not tokens:
            return None
        share = sum(each['tokens'] * each['entered'] for each in others) / tokens
        return classes[name]['entered'] - share

    return number


def first_token_of_sequence(run: dict) -> float:
    """Return the share of sequence attention that goes to the first token, mean over layers.

    Attention on depth slots is excluded, and layers that processed no token.
    """
    mass = run['measured']['depth_mass']
    pairs = zip(mass['first_token'], mass['depth'], strict=True)
    known = [pair for pair in pairs if None not in pair]
    return _mean([first / (1 - slots) for first, slots in known if slots < 1])


NUMBERS = {
    'routing gap': Number(
        lambda run: run['routing_gap'] / run['loss_top_c'], '+.2%', '{} of the loss', False
    ),
    'accuracy': Number(accuracy, '.1%', 'accuracy {}', False),
    'precision': Number(_of_routing('precision'), '.2f', 'precision {}', False),
    'recall': Number(_of_routing('recall'), '.2f', 'recall {}', False),
    'rule fraction': Number(_of_routing('rule_fraction'), '.1%', '{}', False),
    'in every block': Number(
        _difference('blocks_entered', 'every', 'every_by_chance'), '+.3%', 'every block {}'
    ),
    'in no block': Number(
        _difference('blocks_entered', 'none', 'none_by_chance'), '+.1%', 'no block {}'
    ),
    'entropy correlation': Number(
        lambda run: run['measured']['entropy']['correlation'], '+.3f', 'correlation {}'
    ),
    'numbers': Number(_class_over('number', 'whitespace'), '+.1%', 'numbers minus whitespace {}'),
    'keywords': Number(
        _class_over('keyword', 'whitespace'), '+.1%', 'keywords minus whitespace {}'
    ),
    'articles': Number(_class_over_words('article'), '+.1%', 'articles minus other words {}'),
    'prepositions': Number(
        _class_over_words('preposition'), '+.1%', 'prepositions minus other words {}'
    ),
    'first token': Number(
        _difference('first_token', 'entered', 'others_entered'), '+.1%', 'first minus others {}'
    ),
    'score correlation': Number(_of_layers('score_correlation'), '+.3f', 'correlation {}'),
    'linear probe': Number(_of_layers('probe_r2'), '+.3f'),
    'first token of the sequence': Number(first_token_of_sequence, '+.2%'),
}


def numbers_within(
    place: Place,
    variants: list[str],
    numbers: list[str],
    low: float = -math.inf,
    high: float = math.inf,
    also=(),
    routed_layers: int = 0,
    least_second: float = -math.inf,
) -> Finding:
    """Judge: numbers of one variant, or paired differences between two, lie between two bounds.

    Args:
      place: where the runs are.
      variants: one variant, or two whose numbers are subtracted.
      numbers: keys of NUMBERS, all of which must lie within the bounds.
      low: the lower bound.
      high: the upper bound.
      also: keys of NUMBERS that are shown but not judged.
      routed_layers: models with fewer routed layers get no verdict.
      least_second: there is no verdict if the mean of the second variant is below this.
    """
    groups = place.groups(*variants, one_size=True)
    if any(NUMBERS[name].measured for name in numbers):
        groups = [_measured(place, group) for group in groups]
    seeds = place.seeds(groups)
    values = {name: [_values(place, g, name, seeds) for g in groups] for name in numbers}
    if not seeds or any(None in each for both in values.values() for each in both):
        raise NotMeasured
    layers = min(len(row['routing']) for group in groups for row in group.rows.values())
    problem = (
        f'{layers} routed blocks, {routed_layers} are needed' if layers < routed_layers else ''
    )

    texts, spread, samples = [], [], []
    for name, each in values.items():
        number, of_which = NUMBERS[name], f'{name}, ' if len(numbers) > 1 else ''
        samples.append(
            Sample(np.subtract(*each) if len(groups) > 1 else np.array(each[0]), low, high)
        )
        text = number.text.format(f'{samples[-1].interval:{number.form}}')
        if len(groups) > 1:
            means = [f'{np.mean(side):{number.form.lstrip("+")}}' for side in each]
            pairs = zip(variants, means, strict=True)
            text = f'{", ".join(f"{variant} {mean}" for variant, mean in pairs)}: {text}'
            if np.mean(each[1]) < least_second:
                problem = f'{variants[1]} has {means[1]}; at least {least_second:.0%} is needed'
        texts.append(text)
        for group, side in zip(groups, each, strict=True):
            listed = ', '.join(f'{value:.4f}' for value in side)
            spread.append(f'{of_which}{group.variant} {group.size}: {listed}')
    for name in also:
        mean = np.mean(_values(place, groups[0], name, seeds))
        texts.append(NUMBERS[name].text.format(f'{mean:{NUMBERS[name].form}}'))
    ours = (', ' if also else '; ').join(texts)
    return found_at(place, groups, ours, samples, problem, spread='; '.join(spread))


def _measured(place, group):
    """The group with only the runs in measures.json. Raises NotMeasured if there are none."""
    known = place.evidence.measures.get(place.name, {})
    rows = {seed: row for seed, row in group.rows.items() if row['run'] in known}
    if not rows:
        raise NotMeasured
    return group._replace(rows=rows)


def _values(place, group, name, seeds):
    """A number for each seed; None where a run does not have it."""
    measures = place.evidence.measures.get(place.name, {})
    changes = place.study['variants'][group.variant]['changes']
    more = {'capacity': changes.get('model.routing.capacity')}
    rows = [group.rows[seed] | more for seed in seeds]
    return [NUMBERS[name].of(row | {'measured': measures.get(row['run'])}) for row in rows]
