"""Judges of claims on MoD that are more than one difference: equal loss, best of all, optima."""

import math

from moddepth_jax.studies import fit
from moddepth_jax.studies.claims import (
    FAILS,
    HOLDS,
    NOTHING,
    UNTOLD,
    Outcome,
    difference_outcome,
    problem_of,
    told_groups,
)
from moddepth_jax.studies.statistics import MIN_SEEDS, MIN_STEPS, choose, interval

MARGIN = 0.01  # of the loss: what an interval may reach of a worse model that counts as equal
NEAR = 0.25  # of FLOPs per forward: how far apart still counts as the same
SHARES = (0.5, 0.85)  # of the dense optimum's FLOPs per forward
BEST_CAPACITY = 0.125


def against_best_dense(variant, dense_first=False, least_budget=0.0):
    """A judge: a variant has a lower loss than the best dense model, each at its own best size.

    Args:
      variant: its name.
      dense_first: the claim is the other way round.
      least_budget: smaller ones do not count.
    """

    def pick(place):
        groups = [place.best(variant), place.best_dense()]
        return (groups[::-1] if dense_first else groups) if place.budget >= least_budget else []

    def judge(evidence):
        found = choose(evidence.studies, pick)
        return difference_outcome(*found) if found else None

    return judge


def _dense_and_sizes(evidence, wanted):
    """(place, the best dense group, MoD groups) where a verdict is likeliest, or None.

    Args:
      evidence: with the studies.
      wanted: called with the dense and a MoD group, whether the second is of interest.
    """

    def usable(place):
        dense = place.best_dense()
        groups = [group for group in place.groups('mod') if dense and wanted(dense, group)]
        good = [group for group in groups if not group.problem]
        return [dense, *(good or groups)] if groups else []

    found = choose(evidence.studies, usable)
    return (found[0], found[1][0], found[1][1:]) if found else None


def _share(group, dense):
    """Interval of (loss - loss of dense) / loss of dense."""
    difference = interval([group.values(), dense.values()], (1.0, -1.0))
    return difference.times(1 / dense.mean())


def equal_loss(tell, paper):
    """A judge of what a MoD step costs at the loss of the best dense model.

    Args:
      tell: FLOPs of a dense step over those of a MoD step -> the text of our number.
      paper: that ratio in the paper.
    """

    def speed(dense, group):
        return dense.mean('flops_per_step') / group.mean('flops_per_step')

    def judge(evidence):
        found = _dense_and_sizes(evidence, lambda dense, group: speed(dense, group) > 1)
        if not found:
            return None
        place, dense, sizes = found
        shares = {group.size: _share(group, dense) for group in sizes}
        no_higher = [group for group in sizes if shares[group.size].mean <= 0]
        equal = [group for group in no_higher if shares[group.size].high < MARGIN]
        best = max(equal or no_higher or sizes, key=lambda group: (speed(dense, group), group.size))
        problem = problem_of([dense, *sizes])
        if problem:
            verdict, reason = UNTOLD, problem
        elif equal:
            verdict, reason = HOLDS, f'the interval excludes a loss that is {MARGIN:.0%} higher'
            if speed(dense, best) < paper:
                reason += "; the paper's number is not reached"
        elif all(share.low > 0 for share in shares.values()):
            verdict, reason = FAILS, 'every cheaper MoD size is worse, its whole interval above 0'
        else:
            verdict, reason = (
                UNTOLD,
                'no cheaper MoD size is shown to be equal, nor all to be worse',
            )
        loss = shares[best.size].told('+.1%')
        ours = (
            f'{tell(speed(dense, best))}, MoD {best.size} against dense {dense.size}, loss {loss}'
        )
        groups = [dense, *sizes]
        return Outcome(ours, told_groups(groups), verdict, reason, place.told(groups))

    return judge


def causal_loss_by_flops(evidence):
    """A judge: by its causal rule, MoD is below the best dense loss at SHARES of its FLOPs."""

    def ratio(dense, group):
        return group.mean('flops_per_forward') / dense.mean('flops_per_forward')

    def wanted(dense, group):
        return SHARES[0] <= ratio(dense, group) <= SHARES[1]

    found = _dense_and_sizes(evidence, wanted)
    if not found:
        return None
    place, dense, sizes = found
    sizes.sort(key=lambda group: ratio(dense, group))
    shares = [_share(group, dense) for group in sizes]
    verdict, reason = UNTOLD, 'the intervals contain 0'
    if problem_of([dense, *sizes]):
        reason = problem_of([dense, *sizes])
    elif any(share.high < 0 for share in shares):
        verdict, reason = HOLDS, 'the whole interval of a MoD size lies below 0'
    elif all(share.low > 0 for share in shares):
        verdict, reason = FAILS, 'each whole interval lies above 0'
    pairs = zip(sizes, shares, strict=True)
    ours = '; '.join(f'{ratio(dense, group):.2f}: {1 + share.mean:.3f}' for group, share in pairs)
    spread = '; '.join(share.told('+.1%') for share in shares)
    groups = [dense, *sizes]
    told = f'{told_groups(groups)}; differences {spread}'
    return Outcome(ours, told, verdict, reason, place.told(groups))


def best_of(first: str, *others: str):
    """A judge: the variant `first` has a lower loss than each of the others, all at one size."""

    def pick(place):
        there = [name for name in others if place.shared(first, name)]
        return place.shared(first, *there) if there else []

    def judge(evidence):
        found = choose(evidence.studies, pick)
        if not found:
            return None
        place, (best, *rest) = found
        pairs = {group.variant: difference_outcome(place, [best, group]) for group in rest}
        of = {
            verdict: [name for name, outcome in pairs.items() if outcome.verdict == verdict]
            for verdict in (HOLDS, FAILS, UNTOLD)
        }
        lacking = [name for name in others if name not in pairs]
        verdict, reason = HOLDS, 'each whole interval lies below 0'
        if of[FAILS]:
            verdict, reason = FAILS, f'{", ".join(of[FAILS])} better, the whole interval above 0'
        elif of[UNTOLD]:
            name = of[UNTOLD][0]
            verdict, reason = UNTOLD, f'against {name}: {pairs[name].reason}'
        elif lacking:
            verdict, reason = UNTOLD, f'not run: {", ".join(lacking)}'
        losses = [f'{name} {out.ours.split(": ")[1]}' for name, out in pairs.items()]
        ours = f'{first} {best.mean():.3f} bits a byte; against {", ".join(losses)}'
        groups = [best, *rest]
        return Outcome(ours, told_groups(groups), verdict, reason, place.told(groups))

    return judge


def _capacity(name):
    """Of the variants mod and mod_SHARE; None of others."""
    share = name.removeprefix('mod_')
    if name == 'mod':
        return BEST_CAPACITY
    return float(share) if share.replace('.', '', 1).isdecimal() else None


def _by_capacity(place):
    """Groups with every other block routed, all of one size, from most tokens to fewest."""
    names = [name for name in place.study['variants'] if _capacity(name) is not None]
    there = [name for name in names if place.shared('mod', name)]
    groups = place.shared('mod', *there)[1:] if 'mod' in there else []
    return sorted(groups, key=lambda group: -_capacity(group.variant))


def down_to_best_capacity(evidence):
    """A judge: the loss falls from the largest capacity that was run to 12.5%, worse at no step."""

    def pick(place):
        groups = [g for g in _by_capacity(place) if _capacity(g.variant) >= BEST_CAPACITY]
        return groups if len(groups) > 1 else []

    found = choose(evidence.studies, pick)
    if not found:
        return None
    place, groups = found
    total = difference_outcome(place, [groups[-1], groups[0]])
    steps = [
        difference_outcome(place, pair[::-1]) for pair in zip(groups, groups[1:], strict=False)
    ]
    verdict, reason = total.verdict, total.reason
    if problem_of(groups):
        verdict, reason = UNTOLD, problem_of(groups)
    elif FAILS in [step.verdict for step in steps]:
        verdict, reason = FAILS, 'a step to fewer tokens is worse, its whole interval above 0'
    losses = ', '.join(f'{_capacity(g.variant):.1%} {g.mean():.3f}' for g in groups)
    share = total.ours.split(': ')[1]
    ours = f'{losses} bits a byte; from first to last {share}'
    return Outcome(ours, told_groups(groups), verdict, reason, place.told(groups))


def below_best_capacity(evidence):
    """A judge: 12.5% has a lower loss than the smallest capacity that was run below it."""

    def pick(place):
        groups = _by_capacity(place)
        if not groups or _capacity(groups[-1].variant) >= BEST_CAPACITY:
            return []
        return [next(group for group in groups if group.variant == 'mod'), groups[-1]]

    found = choose(evidence.studies, pick)
    return difference_outcome(*found) if found else None


def depth_not_width(evidence):
    """A judge of parameters and FLOPs per forward at the optima of MoD and dense, seed by seed."""

    def pick(place):
        sizes = [place.groups('mod'), place.groups('dense')]
        return sizes[0] + sizes[1] if all(len(groups) > 2 for groups in sizes) else []

    found = choose(evidence.studies, pick)
    if not found:
        return None
    place, groups = found
    seeds = sorted({row['seed'] for group in groups for row in group.rows})
    by_seed = {seed: _ratios(groups, seed) for seed in seeds}
    by_seed = {seed: ratios for seed, ratios in by_seed.items() if ratios}
    over_means, reason = _ratios(groups), ''
    ours = 'an optimum does not lie inside the sizes that were run'
    if over_means:
        ours = '{:.2f} x the parameters, {:.2f} x the FLOPs per forward'.format(*over_means)
    spread = '; '.join('seed {}: {:.2f} x, {:.2f} x'.format(s, *r) for s, r in by_seed.items())
    steps = min(row['steps'] for group in groups for row in group.rows)
    verdict = UNTOLD
    if len(by_seed) < MIN_SEEDS:
        reason = f'{len(by_seed)} seeds have both optima inside, {MIN_SEEDS} are needed'
    elif steps < MIN_STEPS:
        reason = f'the shortest run has {steps} steps, {MIN_STEPS} are needed'
    else:
        verdict, reason = _judge_ratios(list(by_seed.values()))
    return Outcome(ours, spread or NOTHING, verdict, reason, place.told(groups))


def _ratios(groups, seed=None):
    """Parameters and FLOPs per forward at MoD's optimum over dense's; None if one is not inside.

    By the runs of one seed, or of all.
    """
    optima = []
    for variant in ('mod', 'dense'):
        rows = [row for group in groups if group.variant == variant for row in group.rows]
        rows = [row for row in rows if row['loss'] is not None and seed in (None, row['seed'])]
        parabola = fit.fit(rows)
        if parabola is None or not parabola.inside:
            return None
        optima.append(fit.optimum(rows))
    mod, dense = optima
    return mod.parameters / dense.parameters, mod.flops_per_forward / dense.flops_per_forward


def _judge_ratios(ratios):
    logs = [[math.log(ratio) for ratio in pair] for pair in ratios]
    parameters, flops = (interval([values]) for values in zip(*logs, strict=True))
    bars = (math.log(1 - NEAR), math.log(1 + NEAR))
    if parameters.high < 0 or flops.outside(*bars):
        return FAILS, 'fewer parameters, or other FLOPs per forward, by a whole interval'
    if parameters.low > 0 and flops.within(*bars):
        return HOLDS, 'more parameters and the same FLOPs per forward, by whole intervals'
    return UNTOLD, 'an interval over the seeds contains its bar'
