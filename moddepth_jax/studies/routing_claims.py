"""Claims on routers: do they learn anything, what does causality cost, how right are predictors."""

import math

from moddepth_jax.studies.claims import (
    FAILS,
    HOLDS,
    UNTOLD,
    Claim,
    Outcome,
    lower_loss,
    problem_of,
    told_groups,
    verdict_below,
)
from moddepth_jax.studies.judges import against_best_dense
from moddepth_jax.studies.mod_claims import BELOW, STUDY
from moddepth_jax.studies.statistics import MIN_SIZES, choose, interval

TOPIC = 'Routing'
_GAP = 0.003  # of the loss: the paper's cost of causal routing
_ACCURACY = 0.97
_CAPACITY = 0.125
_NEAR_CAPACITY = 0.2  # of the capacity: what still counts as about a fraction `capacity`
_PERPLEXITY = 0.3
_SAVED = 0.3
_ONE = 'The t interval of the mean over seeds'


def _runs(*variants):
    return f'runs: {STUDY} --variants={",".join(variants)} --seeds=0,1,2'


def _of_best(variant, number, judge):
    """A judge of one number of each run of a variant at its best size.

    Args:
      variant: its name.
      number: (row, capacity) -> float.
      judge: (Interval, Group) -> (ours, verdict, reason).
    """

    def judge_evidence(evidence):
        found = choose(evidence.studies, lambda place: [place.best(variant)])
        if not found:
            return None
        place, (group,) = found
        capacity = place.study['variants'][variant]['changes']['model.routing.capacity']
        rows = [row for row in group.rows if row['loss'] is not None]
        values = [number(row, capacity) for row in rows]
        ours, verdict, reason = judge(interval([values]), group)
        if group.problem:
            verdict, reason = UNTOLD, group.problem
        spread = f'{variant} {group.size}: {", ".join(f"{value:.4f}" for value in values)}'
        return Outcome(ours, spread, verdict, reason, place.told([group]))

    return judge_evidence


def _gap(row, _):
    return row['routing_gap'] / row['loss_top_c']


def _judge_gap(found, _):
    verdict, reason = verdict_below(found, _GAP, '.1%')
    return f'{found.told("+.2%")} of the loss', verdict, reason


def _mean_over_layers(row, name):
    """Of one number of the routed layers; one that is not defined, as of nobody, counts 0."""
    return math.fsum(layer[name] or 0.0 for layer in row['routing'].values()) / len(row['routing'])


def accuracy(row: dict, capacity: float) -> float:
    """Share of the tokens on which a causal rule agrees with top-C, the mean over routed layers.

    Of all tokens, selected (1 - precision) enter wrongly and capacity (1 - recall) are missed.

    Args:
      row: of study.json.
      capacity: share of the tokens that top-C takes.
    """
    wrong = [
        layer['selected_fraction'] * (1 - (layer['precision'] or 0.0))
        + capacity * (1 - (layer['recall'] or 0.0))
        for layer in row['routing'].values()
    ]
    return 1 - math.fsum(wrong) / len(wrong)


def _judge_accuracy(found, group):
    names = ('precision', 'recall')
    means = [
        math.fsum(_mean_over_layers(row, n) for row in group.rows) / len(group.rows) for n in names
    ]
    ours = f'accuracy {found.told(".1%")}, precision {means[0]:.2f}, recall {means[1]:.2f}'
    if found.low >= _ACCURACY:
        return ours, HOLDS, f'the whole interval lies at {_ACCURACY:.0%} or above'
    if found.high < _ACCURACY:
        return ours, FAILS, f'the whole interval lies below {_ACCURACY:.0%}'
    return ours, UNTOLD, f'the interval contains {_ACCURACY:.0%}'


def _selected(row, _):
    return _mean_over_layers(row, 'selected_fraction')


def _judge_selected(found, _):
    low, high = (_CAPACITY * (1 + side * _NEAR_CAPACITY) for side in (-1, 1))
    ours, bars = found.told('.1%'), f'{low:.0%} to {high:.0%}'
    if found.within(low, high):
        return ours, HOLDS, f'the whole interval lies within {bars}'
    if found.outside(low, high):
        return ours, FAILS, f'the whole interval lies outside {bars}'
    return ours, UNTOLD, f'the interval contains an end of {bars}'


def _half_in_every_block(evidence):
    found = choose(evidence.studies, lambda place: place.shared('every_0.5', 'dense'))
    if not found:
        return None
    place, groups = found
    routed, dense = ([2**bits for bits in group.values()] for group in groups)
    worse = interval([routed, dense], (1.0, -1.0))
    flops = [group.mean('flops_per_forward') for group in groups]
    saved = 1 - flops[0] / flops[1]
    verdict, reason = verdict_below(worse, _PERPLEXITY)
    if verdict == HOLDS:
        verdict, reason = UNTOLD, 'the claim is of perplexity per token, which differs by more'
    if saved < _SAVED:
        verdict, reason = FAILS, f'saves less than {_SAVED:.0%}'
    if problem_of(groups):
        verdict, reason = UNTOLD, problem_of(groups)
    ours = f'saves {saved:.0%}, perplexity per byte {worse.told("+.3f")}'
    return Outcome(ours, told_groups(groups), verdict, reason, place.told(groups))


CLAIMS = (
    Claim(
        'learned_beats_random',
        TOPIC,
        'A learned router has a lower loss than a random one, every other block at 12.5%',
        'MoD, section 4.1, figure 3 (Gaussian)',
        'random is drastically worse',
        f'mod against random at one size; {BELOW}',
        lower_loss('mod', 'random'),
        _runs('mod', 'random'),
    ),
    Claim(
        'learned_beats_random_every_block',
        TOPIC,
        'A learned router has a lower loss than a random one, every block at 50%',
        'MoD, section 4.1, figure 3 (Gaussian)',
        'random is drastically worse',
        f'every_0.5 against random_every_0.5 at one size; {BELOW}',
        lower_loss('every_0.5', 'random_every_0.5'),
        _runs('mod', 'every_0.5', 'random_every_0.5'),
    ),
    Claim(
        'dense_beats_random',
        TOPIC,
        'Random routing is worse than the isoFLOP-optimal dense model, too',
        'MoD, section 4.1, figure 3 (Gaussian)',
        'drastically worse',
        f'dense, the best of {MIN_SIZES} sizes or more, against random at the best size of mod; '
        f'{BELOW}',
        against_best_dense('random', dense_first=True),
        _runs('dense', 'mod', 'random'),
    ),
    Claim(
        'learned_beats_position',
        TOPIC,
        'A learned router has a lower loss than positions fixed beforehand',
        'ours (control)',
        'not compared',
        f'mod against position at one size; {BELOW}',
        lower_loss('mod', 'position'),
        _runs('mod', 'position'),
    ),
    Claim(
        'learned_beats_norm',
        TOPIC,
        'A learned router has a lower loss than choosing by the norm of the stream',
        'ours (control)',
        'not compared',
        f'mod against norm at one size; {BELOW}',
        lower_loss('mod', 'norm'),
        _runs('mod', 'norm'),
    ),
    Claim(
        'half_in_every_block',
        TOPIC,
        'Every block at 50% saves 30 to 50% of the FLOPs within 0.3 perplexity of dense',
        'a blog, unsourced',
        '30 to 50%, 0.3 (perplexity per token of its tokenizer: larger than per byte)',
        'every_0.5 against dense at one size and equal training FLOPs, perplexity per byte: not '
        'the unit of the claim. Does not hold: saves less than 30%, or the Welch interval lies '
        'above 0.3, so that it does per token all the more. Cannot hold.',
        _half_in_every_block,
        'dense, with 3 seeds, at the size of every_0.5; ' + _runs('dense', 'mod', 'every_0.5'),
    ),
    Claim(
        'causal_routing_costs',
        TOPIC,
        'Causal routing by a predictor costs at most 0.3% of the loss',
        'MoD, section 3.5',
        '0.2 to 0.3% (auxiliary loss)',
        f'Routing gap over the loss under top-C, of each run. {_ONE}, against 0.3%.',
        _of_best('mod', _gap, _judge_gap),
        _runs('dense', 'mod'),
    ),
    Claim(
        'causal_routing_costs_aux_loss',
        TOPIC,
        'Causal routing by the auxiliary loss costs at most 0.3% of the loss',
        'MoD, section 3.5',
        '0.2 to 0.3%',
        f'Routing gap over the loss under top-C, of each run. {_ONE}, against 0.3%.',
        _of_best('aux_loss', _gap, _judge_gap),
        _runs('mod', 'aux_loss'),
    ),
    Claim(
        'predictor_accuracy',
        TOPIC,
        'The predictor is right about 97% of the tokens or more',
        'MoD, sections 3.5 and 4.2',
        '97 to 99%, early in training',
        'At the end of training, mean over routed layers, from selected fraction, precision and '
        f'recall. {_ONE}, against 97%. Who always skips is right about 87.5%.',
        _of_best('mod', accuracy, _judge_accuracy),
        _runs('dense', 'mod'),
    ),
    Claim(
        'selected_under_aux_loss',
        TOPIC,
        'Under the auxiliary loss about a fraction `capacity` of sigmoid(r) lies above 0.5',
        'MoD, section 3.5, figure 5',
        '12.5%',
        'Selected fraction of aux_loss, mean over routed layers. Holds: the t interval over seeds '
        f'lies within {_NEAR_CAPACITY:.0%} of the capacity. Does not hold: it lies outside.',
        _of_best('aux_loss', _selected, _judge_selected),
        _runs('mod', 'aux_loss'),
    ),
)
