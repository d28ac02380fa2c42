"""Claims judged by measures.json: who enters how often, what blocks add, where attention looks.

The numbers are those of `measures.measure`, one for each run that was measured.
"""

import math

from moddepth_jax.studies.claims import FAILS, HOLDS, UNTOLD, Claim, Outcome, problem_of
from moddepth_jax.studies.statistics import choose, interval

TOPIC = 'Measured on trained models'
_NEEDS = 'measures.json beside study.json, with {} of 3 seeds or more: python -m launch.isoflop'
_T = 'Holds: the t interval of the mean over seeds lies above 0. Does not hold: below.'
_WELCH = 'Welch interval of the difference of the means over seeds'
_SINK = 'Share of the attention that is not on the first token, mean over layers'
_CLASSES = ('number', 'keyword')


def _measured(evidence, pick, kinds):
    """(place, groups) of the runs that were measured, or None."""

    def only_measured(place):
        measures = evidence.measures.get(place.name, {})
        found = []
        for group in pick(place):
            rows = tuple(row for row in group.rows if row['run'] in measures) if group else ()
            if not rows:
                return []
            found.append(group._replace(rows=rows))
        return found

    return choose(evidence.studies, only_measured, kinds)


def _numbers(evidence, place, group, number):
    """One number of each run of a group; those that have none (None) are left out."""
    measures = evidence.measures[place.name]
    found = [number(measures[row['run']]) for row in group.rows]
    return [value for value in found if value is not None]


def _told(group, values):
    return f'{group.variant} {group.size}: {", ".join(f"{value:.4f}" for value in values)}'


def _problem(groups, samples):
    lost = any(len(values) < len(g.rows) for g, values in zip(groups, samples, strict=True))
    return problem_of(groups) or ('a run does not have this measure' if lost else '')


def _all_above(intervals):
    """(verdict, reason) of the claim that each of some numbers lies above 0."""
    if all(found.low > 0 for found in intervals):
        return HOLDS, f'{"each" if len(intervals) > 1 else "the"} whole interval lies above 0'
    if any(found.high < 0 for found in intervals):
        return FAILS, 'a whole interval lies below 0'
    return UNTOLD, 'an interval contains 0'


def _above(numbers, form='+.3f'):
    """A judge: each of some numbers of MoD lies above 0.

    Args:
      numbers: name -> what finds it in the measures of a run.
      form: of each as text.
    """

    def judge(evidence):
        found = _measured(evidence, lambda place: [place.best('mod')], ('flops',))
        if not found:
            return None
        place, (group,) = found
        samples = {
            name: _numbers(evidence, place, group, number) for name, number in numbers.items()
        }
        samples = {name: values for name, values in samples.items() if values}
        if len(samples) < len(numbers):
            return None
        intervals = {name: interval([values]) for name, values in samples.items()}
        verdict, reason = _all_above(list(intervals.values()))
        problem = _problem([group] * len(samples), samples.values())
        if problem:
            verdict, reason = UNTOLD, problem
        ours = '; '.join(f'{name} {found.told(form)}' for name, found in intervals.items())
        spread = '; '.join(f'{name}, {_told(group, values)}' for name, values in samples.items())
        return Outcome(ours, spread, verdict, reason, place.told([group]))

    return judge


def _more_than(first, second, number, form='.3f'):
    """A judge: a number of the MoDA variant `first` lies above that of `second`, at one size."""

    def judge(evidence):
        found = _measured(evidence, lambda place: place.shared(first, second), ('steps',))
        if not found:
            return None
        place, groups = found
        samples = [_numbers(evidence, place, group, number) for group in groups]
        if not all(samples):
            return None
        difference = interval(samples, (1.0, -1.0))
        verdict, reason = _all_above([difference])
        problem = _problem(groups, samples)
        if problem:
            verdict, reason = UNTOLD, problem
        told = [
            f'{group.variant} {interval([values]).mean:{form}}'
            for group, values in zip(groups, samples, strict=True)
        ]
        ours = f'{", ".join(told)}: {difference.told("+" + form)}'
        spread = '; '.join(_told(*pair) for pair in zip(groups, samples, strict=True))
        return Outcome(ours, spread, verdict, reason, place.told(groups))

    return judge


def _mean(values):
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _over_chance(name):
    def number(measured):
        blocks = measured['blocks_entered']
        return blocks[name] - blocks[f'{name}_by_chance']

    return number


def _over_blanks(name):
    def number(measured):
        classes = measured['classes']
        if name not in classes or 'whitespace' not in classes:
            return None
        return classes[name]['entered'] - classes['whitespace']['entered']

    return number


def _first_over_others(measured):
    return measured['first_token']['entered'] - measured['first_token']['others_entered']


def _entropy_correlation(measured):
    return measured['entropy']['correlation']


def _score_correlation(measured):
    return _mean([layer['score_correlation'] for layer in measured['layers']])


def _probe(measured):
    return _mean([layer['probe_r2'] for layer in measured['layers']])


def _off_the_sink(measured):
    """Share of the attention that is not on the first token, the mean over layers."""
    return 1 - _mean(measured['depth_mass']['first_token'])


def _moda_claim(name, claim, source, paper, measure, number, norm=''):
    """`norm`: the ending of the variants' names, '' (pre-norm) or '_post'."""
    variants = (f'moda{norm}', f'dense{norm}')
    rule = (
        f'{measure}, {variants[0]} less {variants[1]} at one size. Holds: the {_WELCH} lies above '
        '0. Does not hold: below.'
    )
    judge, needs = _more_than(*variants, number), _NEEDS.format(' and '.join(variants))
    return Claim(name, TOPIC, claim, source, paper, rule, judge, needs)


def _mod_claim(name, claim, source, paper, rule, judge):
    return Claim(name, TOPIC, claim, source, paper, rule, judge, _NEEDS.format('mod'))


CLAIMS = (
    _mod_claim(
        'every_block_or_none',
        'Some tokens enter every routed block and others none, more than by chance',
        'MoD, figure 5',
        'in words',
        'Share of tokens less what it were if blocks chose independently. Holds: both t intervals '
        'over seeds lie above 0. Does not hold: one lies below.',
        _above({'every block': _over_chance('every'), 'no block': _over_chance('none')}, '+.1%'),
    ),
    _mod_claim(
        'entropy_of_routed',
        'Tokens that enter more blocks predict with higher entropy',
        'MoD, text',
        'a correlation',
        f'Rank correlation of the entropy with the number of blocks entered. {_T}',
        _above({'correlation': _entropy_correlation}),
    ),
    _mod_claim(
        'classes_that_enter',
        'Numbers and keywords enter more often than blanks',
        'a blog, unsourced',
        'numbers, keywords and first tokens enter; articles, prepositions and blanks skip',
        'Python text. Share entered of the class less that of whitespace, over all routed blocks. '
        'Holds: both t intervals over seeds lie above 0. Does not hold: one lies below. Articles '
        'and prepositions are not told apart.',
        _above({f'{name}s less blanks': _over_blanks(name) for name in _CLASSES}, '+.1%'),
    ),
    _mod_claim(
        'first_tokens_enter',
        'First tokens of a row enter more often than others',
        'a blog, unsourced',
        'first tokens enter',
        f'Share entered less that of all other tokens, over all routed blocks. {_T}',
        _above({'first less others': _first_over_others}, '+.1%'),
    ),
    _mod_claim(
        'scores_know_the_delta',
        "The router's score ranks tokens by how much the block changes them",
        'ours (wasted compute)',
        'not measured',
        'Rank correlation of |block(x) - x| / |x| with the score over the tokens that enter, mean '
        f'over routed blocks. {_T}',
        _above({'correlation': _score_correlation}),
    ),
    _moda_claim(
        'sink_to_slots',
        'With depth slots less attention falls on the first token (the sink), pre-norm',
        'MoDA',
        'shown, not measured',
        _SINK,
        _off_the_sink,
    ),
    _moda_claim(
        'sink_to_slots_post',
        'With depth slots less attention falls on the first token (the sink), post-norm',
        'MoDA',
        'shown, not measured',
        _SINK,
        _off_the_sink,
        '_post',
    ),
    _moda_claim(
        'less_dilution',
        "With depth slots the final stream keeps more of each block's output",
        'ours (signal dilution)',
        'not measured',
        "R^2 of a linear probe that finds a block's output in the final stream, mean over blocks",
        _probe,
    ),
)
