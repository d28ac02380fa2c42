"""The judges of claims: functions that collect the numbers of a claim and its bounds.

Each takes a place (or counted FLOPs) and arguments from claims.toml, and returns a Finding. It
raises NotMeasured if the place lacks runs. claims.py decides all claims together.
"""

import dataclasses
import math

import numpy as np

from moddepth_jax.studies import fit
from moddepth_jax.studies.places import Evidence, Group, NotMeasured, Place, find_place
from moddepth_jax.studies.statistics import (
    MIN_SEEDS,
    MIN_STEPS,
    Decision,
    Sample,
    all_within,
)

HOLDS, FAILS, UNDECIDED = 'holds', 'does not hold', 'undecided'
NO_VALUE = '-'  # where a row has no number, spread or setting


@dataclasses.dataclass(frozen=True)
class Finding:
    """The numbers that were found for a claim."""

    ours: str  # our number
    spread: str = NO_VALUE  # the number of each seed
    setting: str = NO_VALUE  # study, budget and data
    samples: tuple[Sample, ...] = ()  # the claim holds if all lie within their bounds
    problem: str = ''  # why no verdict may rest on the samples
    verdict: str = ''  # verdict on a counted number, which needs no samples
    reason: str = ''  # reason for `verdict`
    missing: int = 0  # planned seeds that were not run
    planned: int = 0  # planned seeds
    counts: str = 'seeds'  # what the samples have one number for
    flops: float = 0.0  # cost of one more seed of all groups
    gap: str = ''  # why the claim is also judged by the losses under top-C
    under_top_c: tuple[Sample, ...] = ()  # the samples of these

    def decide(self) -> Decision:
        """Decide by the samples and, with a large routing gap, also by those under top-C.

        Both must agree: p is the larger of the two, or 1 if they disagree.
        """
        decision = all_within(self.samples)
        if not self.under_top_c:
            return decision
        other = all_within(self.under_top_c)
        return decision._replace(p=max(decision.p, other.p) if self.agree else 1.0)

    @property
    def agree(self) -> bool:
        """Whether the losses under top-C, if they count, favour the same verdict."""
        if not self.under_top_c:
            return True
        return all_within(self.samples).holds == all_within(self.under_top_c).holds


def found_at(place: Place, groups: list[Group], ours, samples, problem='', **fields) -> Finding:
    """Return the Finding of some groups, with the first problem among them."""
    seeds = place.seeds(groups)
    problems = [group.problem for group in groups if group.problem]
    if place.planned < MIN_SEEDS:
        problem = f'{place.planned} seeds judge, {MIN_SEEDS} are needed'
    fields.setdefault('spread', '; '.join(group.text(seeds) for group in groups))
    return Finding(
        ours,
        setting=place.setting(groups),
        samples=tuple(samples),
        problem=(problems or [problem])[0],
        missing=place.planned - len(seeds),
        planned=place.planned,
        flops=sum(next(iter(group.rows.values()))['total_flops'] for group in groups),
        **fields,
    )


def _compared(place, *variants, one_size=False):
    """(groups, seeds that judge, the large routing gap if there is one)."""
    groups = place.groups(*variants, one_size=one_size)
    seeds = place.seeds(groups)
    if not seeds:
        raise NotMeasured
    return groups, seeds, place.gap(groups)


def _difference(first, second, seeds):
    """Bits per byte of the first group minus those of the second, by seed."""
    return first.values(seeds) - second.values(seeds)


def _ours(first, second, seeds):
    """Both means, and their difference relative to the second."""
    means = [group.values(seeds).mean() for group in (first, second)]
    share = Sample(_difference(first, second, seeds) / means[1]).interval
    pairs = zip((first, second), means, strict=True)
    losses = ', '.join(f'{group.variant} {mean:.3f}' for group, mean in pairs)
    return f'{losses} bits per byte: {share:+.1%}'


def lower_loss(
    place: Place,
    first: str,
    second: str,
    margin: float = 0.0,
    least_cost: float = 0.0,
    most_cost: float = math.inf,
) -> Finding:
    """Judge: variant `first` has a lower loss than `second`, or exceeds it by at most a margin.

    Args:
      place: where the runs are.
      first: a variant.
      second: the variant it is compared with.
      margin: share of the loss of `second`.
      least_cost: lower bound on the ratio of FLOPs per forward pass, first over second; there is no
        verdict outside the bounds.
      most_cost: upper bound on that ratio.
    """
    (one, other), seeds, gap = _compared(place, first, second, one_size=bool(place.spec.size))
    differences = _difference(one, other, seeds)
    ours, cost = _ours(one, other, seeds), one.cost() / other.cost()
    if least_cost or not math.isinf(most_cost):
        ours = f'{one.size} against {other.size}, {cost:.2f} of the FLOPs: {ours}'
    problem = ''
    if not least_cost <= cost <= most_cost:
        problem = f'{first} {one.size} has {cost:.2f} of the FLOPs of {other.variant} {other.size}'
    sample = Sample(differences, high=margin * other.values(seeds).mean())
    return found_at(place, [one, other], ours, [sample], problem, gap=gap)


def lowest_loss(place: Place, first: str, others: list[str]) -> Finding:
    """Judge: variant `first` has a lower loss than each of the others, all at one size."""
    groups, seeds, gap = _compared(place, first, *others, one_size=True)
    best, *rest = groups
    samples = [Sample(_difference(best, group, seeds), high=0.0) for group in rest]
    pairs = zip(rest, samples, strict=True)
    against = ', '.join(f'{group.variant} {sample.interval:+.3f}' for group, sample in pairs)
    ours = f'{first} {best.values(seeds).mean():.3f} bits per byte; against {against}'
    return found_at(place, groups, ours, samples, gap=gap)


def _slopes(values, positions):
    """The least-squares slope of each column of `values` over `positions`."""
    positions = np.asarray(positions) - np.mean(positions)
    return positions @ np.asarray(values) / (positions @ positions)


def rising_with_capacity(place: Place, variants: list[str]) -> Finding:
    """Judge: at one size, the loss has a positive slope over log2(capacity) of the variants."""
    groups, seeds, gap = _compared(place, *variants, one_size=True)
    changes = [place.study['variants'][name]['changes'] for name in variants]
    capacities = [knobs['model.routing.capacity'] for knobs in changes]
    losses = [group.values(seeds) for group in groups]
    sample = Sample(_slopes(losses, np.log2(capacities)), low=0.0)
    means = [f'{c:.1%} {each.mean():.3f}' for c, each in zip(capacities, losses, strict=True)]
    ours = f'{", ".join(means)} bits per byte; {sample.interval:+.4f} per doubling of the capacity'
    return found_at(place, groups, ours, [sample], gap=gap)


def falling_difference(place: Place, first: str, second: str, budgets: list[float]) -> Finding:
    """Judge: the relative difference of two variants falls as the budget grows."""
    places = [_at_budget(place, budget) for budget in budgets]
    pairs = [each.groups(first, second) for each in places]
    groups = [group for pair in pairs for group in pair]
    seeds = place.seeds(groups)
    if not seeds:
        raise NotMeasured
    shares = [_difference(*pair, seeds) / pair[1].values(seeds) for pair in pairs]
    sample = Sample(_slopes(shares, np.log10(budgets)), high=0.0)
    means = [f'{each.mean():+.1%}' for each in shares]
    ours = f'{", ".join(means)} at {_budgets(budgets)}; {sample.interval:+.2%} per tenfold budget'
    return found_at(place, groups, ours, [sample], gap=place.gap(groups))


def _at_budget(place, budget):
    """The place at another budget of the same study."""
    at_budget = find_place(place.evidence, place.spec._replace(flops=budget))
    return at_budget._replace(top_c=place.top_c)


def _budgets(budgets):
    return ', '.join(f'{budget:.0e}'.replace('e+', 'e') for budget in budgets) + ' FLOPs'


def depth_not_width(place: Place, near: float, budgets: list[float]) -> Finding:
    """Judge: MoD's optimum has more parameters than dense, and FLOPs per forward within `near`.

    The optima are those of the parabolas of the first seed. Budgets at which both optima lie inside
    the sizes are the samples.
    """
    ratios = {budget: _ratios(_at_budget(place, budget).study, budget) for budget in budgets}
    inside = {budget: each for budget, each in ratios.items() if each}
    if not inside:
        return Finding('-', problem='no budget has both optima inside the sizes that ran')
    parameters, flops = (Sample(logs) for logs in np.log(list(inside.values())).T)
    means = [math.exp(sample.interval.mean) for sample in (parameters, flops)]
    few = f'{len(inside)} budgets have both optima inside, {MIN_SEEDS} are needed'
    return Finding(
        '{:.2f} x the parameters, {:.2f} x the FLOPs per forward pass'.format(*means),
        '; '.join('{:.0e}: {:.2f} x, {:.2f} x'.format(b, *r) for b, r in inside.items()),
        f'{place.spec.study}: {_budgets(budgets)}, first seed',
        (
            parameters._replace(low=0.0),
            flops._replace(low=math.log(1 - near), high=math.log(1 + near)),
        ),
        few if len(inside) < MIN_SEEDS else '',
        planned=len(inside),
        counts='budgets',
    )


def _ratios(study, budget):
    """Parameters and FLOPs at MoD's optimum relative to dense.

    None if an optimum does not lie inside, or if a run of its parabola has less than MIN_STEPS.
    """
    optima = []
    for variant in ('mod', 'dense'):
        rows = fit.select(study, variant, budget)
        parabola = fit.fit(rows)
        if parabola is None or not parabola.inside or min(r['steps'] for r in rows) < MIN_STEPS:
            return None
        optima.append(fit.optimum(rows))
    mod, dense = optima
    return mod.parameters / dense.parameters, mod.flops_per_forward / dense.flops_per_forward


def perplexity(place: Place, first: str, second: str, margin: float, saved: float) -> Finding:
    """Judge: `first` saves a share `saved` of FLOPs within a margin of the perplexity of `second`.

    The claim is about perplexity per token. Ours is per byte, which differs by less, so the claim
    can fail here but not hold.
    """
    groups, seeds, gap = _compared(place, first, second, one_size=True)
    one, other = (2 ** group.values(seeds) for group in groups)
    share, sample = 1 - groups[0].cost() / groups[1].cost(), Sample(one - other, high=margin)
    ours = f'saves {share:.0%}, perplexity per byte {sample.interval:+.3f}'
    if share < saved:
        counted = {'verdict': FAILS, 'reason': f'saves less than {saved:.0%}'}
        return found_at(place, groups, ours, [], **counted)
    problem = ''
    if sample.margin > 0:
        problem = 'the claim is about perplexity per token, which differs by more'
    return found_at(place, groups, ours, [sample], problem, gap=gap)


def larger_gain(place: Place, first: list[str], second: list[str]) -> Finding:
    """Judge: the difference of one pair of variants is below that of another, all at one size."""
    groups, seeds, gap = _compared(place, *first, *second, one_size=True)
    post, pre = _difference(*groups[:2], seeds), _difference(*groups[2:], seeds)
    sample = Sample(post - pre, high=0.0)
    ours = f'post {post.mean():+.3f}, pre {pre.mean():+.3f} bits per byte: {sample.interval:+.3f}'
    return found_at(place, groups, ours, [sample], gap=gap)


def counted_cost(
    evidence: Evidence, shape: str, stated: float, margin: float, published: bool = True
) -> Finding:
    """Judge by counting: MoDA costs the FLOPs over dense that the paper states, within a margin.

    There is a verdict only if all ways to count agree.
    """
    if shape not in evidence.counted:
        raise NotMeasured
    counted = evidence.counted[shape]
    ways = {way: flops / counted['dense'][way] - 1 for way, flops in counted['moda'].items()}
    rounding = 0.0005  # of the paper's number
    found = {way: _counted(share, stated, margin, rounding) for way, share in ways.items()}
    first, *rest = found.values()
    if not published:
        first = _undecided('the paper does not give this shape; ours is a guess')
    elif any(other['verdict'] != first['verdict'] for other in rest):
        near = [way for way, one in found.items() if one['verdict'] == HOLDS]
        first = _undecided(f'within {100 * margin:g} points only if one counts {" or ".join(near)}')
    others = ', '.join(f'{way}: {share:+.2%}' for way, share in ways.items())
    setting = f'configs/{shape}.py, rows of {counted["length"]} tokens, counted without a run'
    ours = f'{min(ways.values()):+.1%} to {max(ways.values()):+.1%}, by what is counted'
    return Finding(ours, others, setting, **first)


def counted_saving(evidence: Evidence, capacity: float, stated: float, margin: float) -> Finding:
    """Judge by counting: MoD in every block saves the stated share of FLOPs, within a margin."""
    counted = evidence.counted.get('mod_7b')
    if counted is None:
        raise NotMeasured
    saved = 1 - counted[f'{capacity:g}'] / counted['dense']
    setting = f'7B, rows of {counted["length"]} tokens, counted without a run'
    return Finding(f'{saved:.0%}', setting=setting, **_counted(saved, stated, margin))


def _undecided(reason):
    return {'verdict': UNDECIDED, 'reason': reason}


def _counted(share, stated, margin, rounding=0.0):
    """Verdict and reason of a counted share."""
    if abs(share - stated) <= margin + rounding:
        return {'verdict': HOLDS, 'reason': f'within {100 * margin:g} points of {stated:.1%}'}
    return {'verdict': FAILS, 'reason': f'more than {100 * margin:g} points from {stated:.1%}'}
