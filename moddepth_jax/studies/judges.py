"""The judges of claims: each takes the evidence and the arguments of a row of claims.toml.

They decide by 95% intervals, and raise NotMeasured if no study has the runs to compare.
"""

import math
from typing import NamedTuple

import numpy as np

from moddepth_jax.studies import fit, statistics
from moddepth_jax.studies.statistics import Group, Interval, NotMeasured, Place, choose, interval

HOLDS, FAILS, UNDECIDED = 'holds', 'does not hold', 'cannot tell here'
NOTHING = '-'  # where a row has no number, spread or setting
BEST_DENSE = 'best dense'  # stands for a variant: the best of `dense` and `shallow`


class Evidence(NamedTuple):
    """What claims are judged by."""

    studies: dict[str, dict]  # content of study.json, by name of the study
    measures: dict[str, dict]  # content of measures.json, likewise
    counted: dict[str, dict]  # FLOPs by shape; see `launch.study_config.counted_flops`


class Outcome(NamedTuple):
    """The result for a claim: our number, its spread, the verdict, where it was run."""

    ours: str
    spread: str
    verdict: str
    reason: str
    setting: str


def outcome_of(place: Place, groups: list[Group], ours, verdict, reason, spread='') -> Outcome:
    """An outcome that is undecided if one of the groups has a problem."""
    problem = next((group.problem for group in groups if group.problem), '')
    if problem:
        verdict, reason = UNDECIDED, problem
    return Outcome(ours, spread or _losses(groups), verdict, reason, place.setting(groups))


def _losses(groups):
    return '; '.join(map(str, groups))


def verdict_within(
    intervals: list[Interval], low: float = -math.inf, high: float = math.inf, percent=False
) -> tuple[str, str]:
    """(verdict, reason) of the claim that all the intervals lie between two bounds."""
    low_end, high_end = (f'{100 * e:g}%' if percent and e else f'{e:g}' for e in (low, high))
    span = f'{low_end} to {high_end}'
    inside, outside, bound = f'within {span}', f'outside {span}', f'an end of {span}'
    if math.isinf(low):
        inside, outside, bound = f'below {high_end}', f'above {high_end}', high_end
    elif math.isinf(high):
        inside, outside, bound = f'above {low_end}', f'below {low_end}', low_end
    one = len(intervals) == 1
    if all(low < found.low and found.high < high for found in intervals):
        return HOLDS, f'{"the" if one else "each"} whole interval lies {inside}'
    if any(found.high < low or high < found.low for found in intervals):
        return FAILS, f'{"the" if one else "a"} whole interval lies {outside}'
    return UNDECIDED, f'{"the" if one else "an"} interval contains {bound}'


def _difference(first: Group, second: Group) -> Interval:
    """Bits per byte of the first less those of the second."""
    return interval([first.values(), second.values()], (1.0, -1.0))


def _relative(first: Group, second: Group) -> Interval:
    """The same as a share of the second."""
    share = 1 / second.mean()
    return Interval(*(share * end for end in _difference(first, second)))


def _compare(place, first, second):
    """The outcome of the claim that the first of two groups has the lower loss."""
    difference = _difference(first, second)
    losses = ', '.join(f'{group.variant} {group.mean():.3f}' for group in (first, second))
    ours = f'{losses} bits a byte: {_relative(first, second):+.1%}'
    spread = f'{_losses([first, second])}; difference {difference:+.3f}'
    return outcome_of(place, [first, second], ours, *verdict_within([difference], high=0), spread)


def lower_loss(
    evidence: Evidence,
    first: str,
    second: str,
    at: str = 'one size',
    kinds=('flops',),
    least_budget: float = 0.0,
) -> Outcome:
    """The variant `first` has a lower loss than `second` at an equal budget.

    Both have one size, or, for at='best sizes', each its own; then one may be BEST_DENSE.
    """

    def pick(place):
        if place.budget < least_budget:
            return []
        if at == 'one size':
            return place.shared(first, second)
        names = (first, second)
        return [place.best_dense() if name == BEST_DENSE else place.best(name) for name in names]

    place, groups = choose(evidence.studies, pick, kinds)
    return _compare(place, *groups)


def lowest_loss(evidence: Evidence, first: str, others: list[str]) -> Outcome:
    """The variant `first` has a lower loss than each of the others, all at one size."""

    def pick(place):
        there = [name for name in others if place.shared(first, name)]
        return place.shared(first, *there) if there else []

    place, (best, *rest) = choose(evidence.studies, pick)
    outcomes = {group.variant: _compare(place, best, group) for group in rest}
    better = [name for name, outcome in outcomes.items() if outcome.verdict == FAILS]
    close = [name for name, outcome in outcomes.items() if outcome.verdict == UNDECIDED]
    missing = [name for name in others if name not in outcomes]
    verdict, reason = HOLDS, 'each whole interval lies below 0'
    if better:
        verdict, reason = FAILS, f'{", ".join(better)} better, the whole interval above 0'
    elif close:
        verdict, reason = UNDECIDED, f'against {close[0]}: {outcomes[close[0]].reason}'
    elif missing:
        verdict, reason = UNDECIDED, f'not run: {", ".join(missing)}'
    against = ', '.join(f'{group.variant} {_relative(best, group):+.1%}' for group in rest)
    ours = f'{first} {best.mean():.3f} bits a byte; against {against}'
    # A problem of a group is already the reason of its comparison, and does not hide a better one.
    return Outcome(ours, _losses([best, *rest]), verdict, reason, place.setting([best, *rest]))


def falling_loss(evidence: Evidence, variants: list[str]) -> Outcome:
    """The loss falls from the first of some capacities that was run to the last, at one size."""

    def pick(place):
        there = [name for name in variants if place.shared(variants[-1], name)]
        return place.shared(variants[-1], *there)[1:] if len(there) > 1 else []

    place, groups = choose(evidence.studies, pick)
    steps = [_difference(low, high) for high, low in zip(groups, groups[1:], strict=False)]
    total = _difference(groups[-1], groups[0])
    verdict, reason = verdict_within([total], high=0)
    if any(step.low > 0 for step in steps):
        verdict, reason = FAILS, 'a step to fewer tokens is worse, its whole interval above 0'
    changes = [place.study['variants'][group.variant]['changes'] for group in groups]
    pairs = zip(changes, groups, strict=True)
    losses = [f'{knobs["model.routing.capacity"]:.1%} {group.mean():.3f}' for knobs, group in pairs]
    share = _relative(groups[-1], groups[0])
    ours = f'{", ".join(losses)} bits a byte; from first to last {share:+.1%}'
    return outcome_of(place, groups, ours, verdict, reason)


def _cost(group, dense):
    """FLOPs of a forward pass, and so of a step, over those of the dense model."""
    return group.mean('flops_per_forward') / dense.mean('flops_per_forward')


def _cheaper_sizes(evidence, least, most):
    """(place, best dense group, MoD groups that cost between two shares of it)."""

    def pick(place):
        dense = place.best_dense()
        groups = [g for g in place.groups('mod') if dense and least <= _cost(g, dense) < most]
        sound = [group for group in groups if not group.problem]
        return [dense, *(sound or groups)] if groups else []

    place, (dense, *sizes) = choose(evidence.studies, pick)
    return place, dense, sizes


def equal_loss(evidence: Evidence, margin: float, paper: float, unit: str) -> Outcome:
    """A cheaper MoD size is as good as the best dense model: the cheapest such size is shown.

    The interval of an equal size excludes a loss that is higher by the share `margin`. `paper` are
    FLOPs of the dense step over those of the MoD step, `unit` is 'faster' or 'fewer FLOPs'.
    """
    place, dense, sizes = _cheaper_sizes(evidence, 0.0, 1.0)
    losses = {group.size: _relative(group, dense) for group in sizes}
    not_worse = [group for group in sizes if losses[group.size].mean <= 0]
    equal = [group for group in not_worse if losses[group.size].high < margin]
    best = min(equal or not_worse or sizes, key=lambda group: (_cost(group, dense), group.size))
    speed = 1 / _cost(best, dense)
    verdict, reason = UNDECIDED, 'no cheaper MoD size is shown to be equal, nor all to be worse'
    if equal:
        verdict, reason = HOLDS, f'the interval excludes a loss that is {margin:.0%} higher'
        reason += "; the paper's number is not reached" if speed < paper else ''
    elif all(loss.low > 0 for loss in losses.values()):
        verdict, reason = FAILS, 'every cheaper MoD size is worse, its whole interval above 0'
    saved = {'faster': speed - 1, 'fewer FLOPs': 1 - 1 / speed}[unit]
    sizes_compared = f'MoD {best.size} against dense {dense.size}'
    ours = f'{saved:.0%} {unit}, {sizes_compared}, loss {losses[best.size]:+.1%}'
    return outcome_of(place, [dense, *sizes], ours, verdict, reason)


def lower_loss_at_cost(evidence: Evidence, least: float, most: float) -> Outcome:
    """A MoD size that costs between two shares of the best dense model has a lower loss."""
    place, dense, sizes = _cheaper_sizes(evidence, least, most)
    sizes.sort(key=lambda group: _cost(group, dense))
    losses = [_relative(group, dense) for group in sizes]
    verdict, reason = UNDECIDED, 'the intervals contain 0'
    if any(loss.high < 0 for loss in losses):
        verdict, reason = HOLDS, 'the whole interval of a MoD size lies below 0'
    elif all(loss.low > 0 for loss in losses):
        verdict, reason = FAILS, 'each whole interval lies above 0'
    pairs = zip(sizes, losses, strict=True)
    ours = [f'{_cost(group, dense):.2f}: {1 + loss.mean:.3f}' for group, loss in pairs]
    groups = [dense, *sizes]
    spread = f'{_losses(groups)}; differences {"; ".join(f"{loss:+.1%}" for loss in losses)}'
    return outcome_of(place, groups, '; '.join(ours), verdict, reason, spread)


def depth_not_width(evidence: Evidence, near: float) -> Outcome:
    """At each seed's optima MoD has more parameters and FLOPs per forward within a share `near`."""

    def pick(place):
        sizes = [place.groups('mod'), place.groups('dense')]
        return sizes[0] + sizes[1] if all(len(groups) > 2 for groups in sizes) else []

    place, groups = choose(evidence.studies, pick)
    seeds = sorted({row['seed'] for group in groups for row in group.rows})
    by_seed = {seed: ratios for seed in seeds if (ratios := _ratios(groups, [seed]))}
    over_means = _ratios(groups, seeds)
    ours = 'an optimum does not lie inside the sizes that were run'
    if over_means:
        ours = '{:.2f} x the parameters, {:.2f} x the FLOPs per forward'.format(*over_means)
    spread = '; '.join('seed {}: {:.2f} x, {:.2f} x'.format(s, *r) for s, r in by_seed.items())
    steps = min(row['steps'] for group in groups for row in group.rows)
    verdict = UNDECIDED
    if len(by_seed) < statistics.MIN_SEEDS:
        reason = f'{len(by_seed)} seeds have both optima inside, {statistics.MIN_SEEDS} are needed'
    elif steps < statistics.MIN_STEPS:
        reason = f'the shortest run has {steps} steps, {statistics.MIN_STEPS} are needed'
    else:
        parameters, flops = ([interval([logs])] for logs in np.log(list(by_seed.values())).T)
        same = math.log(1 - near), math.log(1 + near)
        verdicts = [verdict_within(parameters, 0)[0], verdict_within(flops, *same)[0]]
        reason = 'an interval over the seeds contains its bound'
        if FAILS in verdicts:
            verdict = FAILS
            reason = 'fewer parameters, or other FLOPs per forward, by a whole interval'
        elif verdicts == [HOLDS, HOLDS]:
            verdict = HOLDS
            reason = 'more parameters and the same FLOPs per forward, by whole intervals'
    return Outcome(ours, spread or NOTHING, verdict, reason, place.setting(groups))


def _ratios(groups, seeds):
    """Parameters and FLOPs at MoD's optimum over dense's; None if one does not lie inside."""
    optima = []
    for variant in ('mod', 'dense'):
        rows = [row for group in groups if group.variant == variant for row in group.rows]
        rows = [row for row in rows if row['loss'] is not None and row['seed'] in seeds]
        parabola = fit.fit(rows)
        if parabola is None or not parabola.inside:
            return None
        optima.append(fit.optimum(rows))
    mod, dense = optima
    return mod.parameters / dense.parameters, mod.flops_per_forward / dense.flops_per_forward


def perplexity(evidence: Evidence, first: str, second: str, margin: float, saved: float) -> Outcome:
    """The variant `first` saves a share of FLOPs within a margin of the perplexity of `second`.

    The claim is of perplexity per token, ours is per byte and differs by less: it cannot hold.
    """
    place, groups = choose(evidence.studies, lambda place: place.shared(first, second))
    worse = interval([[2**bits for bits in group.values()] for group in groups], (1.0, -1.0))
    share = 1 - _cost(*groups)
    verdict, reason = verdict_within([worse], high=margin)
    if verdict == HOLDS:
        verdict, reason = UNDECIDED, 'the claim is of perplexity per token, which differs by more'
    if share < saved:
        verdict, reason = FAILS, f'saves less than {saved:.0%}'
    ours = f'saves {share:.0%}, perplexity per byte {worse:+.3f}'
    return outcome_of(place, groups, ours, verdict, reason)


def larger_gain(evidence: Evidence, first: list[str], second: list[str], kinds) -> Outcome:
    """The difference of a pair of variants lies below that of another pair, all at one size."""
    place, groups = choose(evidence.studies, lambda place: place.shared(*first, *second), kinds)
    difference = interval([group.values() for group in groups], (1.0, -1.0, -1.0, 1.0))
    post, pre = _difference(*groups[:2]), _difference(*groups[2:])
    ours = f'post {post.mean:+.3f}, pre {pre.mean:+.3f} bits a byte: {difference:+.3f}'
    return outcome_of(place, groups, ours, *verdict_within([difference], high=0))


def counted_cost(
    evidence: Evidence, shape: str, paper: float, margin: float, published: bool = True
) -> Outcome:
    """MoDA costs the FLOPs over dense that the paper says, to a margin; counted, needs no run."""
    if shape not in evidence.counted:
        raise NotMeasured
    counted = evidence.counted[shape]
    halved, full = (counted['moda'][way] / counted['dense'][way] - 1 for way in ('halved', 'full'))
    verdict, reason = HOLDS, f'within one percentage point of {paper:.1%}'
    if abs(halved - paper) > margin:
        verdict, reason = FAILS, f'more than one percentage point from {paper:.1%}'
    if not published:
        verdict, reason = UNDECIDED, 'the paper does not give this shape; ours is a guess'
    ours = f'+{halved:.1%} (attention not halved for causality: +{full:.1%})'
    setting = f'configs/{shape}.py, rows of {counted["length"]} tokens, counted, no run'
    return Outcome(ours, 'none: a count', verdict, reason, setting)
