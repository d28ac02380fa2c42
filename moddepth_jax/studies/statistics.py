"""What separates two groups of runs: means over seeds, and the 95% interval of their difference."""

import math
from typing import NamedTuple

import numpy as np
import scipy.stats

from moddepth_jax.studies import fit

MIN_SEEDS, MIN_STEPS = 3, 500  # of the runs of a verdict
MIN_SIZES = 3  # of dense models, for the best of them to be called optimal
INVALID_GAP = 0.05  # nats between causal and top-C routing, see docs/mixture_of_depths.md


class NotMeasured(Exception):
    """No study has the runs that a claim compares."""


class Interval(NamedTuple):
    """A mean and its 95% interval, which is infinite if the spread is unknown."""

    mean: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        """The mean and, in parentheses, both ends, each formatted by `spec`."""
        mean = format(self.mean, spec)
        if not math.isfinite(self.high - self.low):
            return f'{mean} (no interval)'
        return f'{mean} ({format(self.low, spec)} to {format(self.high, spec)})'


def interval(samples, weights=(1.0,)) -> Interval:
    """The weighted sum of the means of independent samples, with its 95% interval.

    Student's t with the degrees of freedom of Welch and Satterthwaite.
    """
    samples = [weight * np.asarray(s, float) for s, weight in zip(samples, weights, strict=True)]
    mean = float(sum(values.mean() for values in samples))
    if not math.isfinite(mean) or any(values.size < 2 for values in samples):
        return Interval(mean, -math.inf, math.inf)
    errors = np.array([scipy.stats.sem(values) ** 2 for values in samples])
    if errors.sum() == 0:
        return Interval(mean, mean, mean)
    freedom = errors.sum() ** 2 / sum(errors**2 / [values.size - 1 for values in samples])
    ends = scipy.stats.t.interval(0.95, freedom, mean, math.sqrt(errors.sum()))
    return Interval(mean, *map(float, ends))


class Group(NamedTuple):
    """The runs of one variant at one size and one budget of a study."""

    variant: str
    size: str  # LxD
    rows: tuple[dict, ...]  # of study.json, by seed
    diverged: int = 0  # how many more runs of it diverged
    at_edge: bool = False  # called the best although no smaller, or no larger, size was run

    def values(self, field: str = 'bits_per_byte') -> list[float]:
        """One number of each run; infinite where it is None, as for a run that diverged."""
        values = [row[field] for row in self.rows]
        return [math.inf if value is None else float(value) for value in values]

    def mean(self, field: str = 'bits_per_byte') -> float:
        """The mean of `values`."""
        return float(np.mean(self.values(field)))

    @property
    def problem(self) -> str:
        """Why no verdict may rest on these runs, or ''."""
        what, seeds = f'{self.variant} {self.size}', len(self.rows)
        if self.diverged or not all(map(math.isfinite, self.values())):
            return f'a run of {what} diverged'
        if seeds < MIN_SEEDS:
            return f'{what} has {seeds} seed{"s" * (seeds > 1)}, {MIN_SEEDS} are needed'
        steps = min(row['steps'] for row in self.rows)
        if steps < MIN_STEPS:
            return f'{what} has {steps} steps, {MIN_STEPS} are needed'
        gap = max(row['routing_gap'] or 0.0 for row in self.rows)
        if gap >= INVALID_GAP:
            return f'a routing gap of {gap:.2f} nats makes a run of {what} invalid'
        if self.at_edge:
            return f'{what} is the smallest or largest of the sizes that were run'
        return ''

    def __str__(self) -> str:
        """The bits per byte of each seed and their mean."""
        values = ', '.join(f'{value:.3f}' for value in self.values())
        return f'{self.variant} {self.size}: {values} (mean {self.mean():.3f})'


class Place(NamedTuple):
    """One budget of one study; only runs of the same place are compared."""

    name: str
    study: dict  # content of study.json
    budget: float

    def groups(self, *variants: str) -> list[Group]:
        """The groups of a variant, by size; several variants count as the first."""
        by_size = {}
        for row in self.study['runs']:
            if row['variant'] in variants and row['budget'] == self.budget:
                # One run of a shallower dense model may stand in several rows, for two MoD sizes.
                by_size.setdefault(row['size'], {})[row['seed']] = row
        groups = []
        for size, rows in by_size.items():
            # Runs that differ from these only in their seed.
            stems = {row['run'].rpartition('-seed')[0] for row in rows.values()}
            lost = sum(name.rpartition('-seed')[0] in stems for name in self.study['diverged'])
            rows = tuple(rows[seed] for seed in sorted(rows))
            groups.append(Group(variants[0], size, rows, lost))
        return groups

    def best(self, *variants: str) -> Group | None:
        """The best size, as chosen by `fit.best`; None if no run has a finite loss."""
        groups = self.groups(*variants)
        rows = [row for group in groups for row in group.rows if row['loss'] is not None]
        if not rows:
            return None
        size = fit.best(rows).size
        return next(group for group in groups if group.size == size)

    def best_dense(self) -> Group | None:
        """The best of all dense models, including `shallow`; None if fewer than MIN_SIZES ran."""
        best, groups = self.best('dense', 'shallow'), self.groups('dense', 'shallow')
        if best is None or len(groups) < MIN_SIZES:
            return None
        sizes = [group.rows[0]['parameters'] for group in groups]
        return best._replace(at_edge=best.rows[0]['parameters'] in (min(sizes), max(sizes)))

    def shared(self, *variants: str) -> list[Group]:
        """One group of each variant, all of one size: without problems if possible, then the best.

        [] if no size has them all.
        """
        by_variant = [{group.size: group for group in self.groups(each)} for each in variants]
        candidates = [
            [by_size[size] for by_size in by_variant]
            for size in set.intersection(*map(set, by_variant))
        ]

        def rank(groups):
            return any(group.problem for group in groups), groups[0].mean(), groups[0].size

        return min(candidates, key=rank, default=[])

    def setting(self, groups: list[Group]) -> str:
        """Where and for how long the groups were trained."""
        study, rows = self.study, [row for group in groups for row in group.rows]
        steps = sorted({row['steps'] for row in rows})
        span = f'{steps[0]}' if len(steps) == 1 else f'{steps[0]} to {steps[-1]}'
        budget = f'{self.budget:.3g} FLOPs, '.replace('e+', 'e') if study['kind'] == 'flops' else ''
        length, epochs = study['sequence_length'], max(row['epochs'] for row in rows)
        tokens = f'{study["batch_tokens"]} tokens in rows of {length}, {study["corpus"]}'
        return f'{self.name}: {budget}{span} steps of {tokens}, {epochs:.2g} epochs at most'


def choose(studies: dict[str, dict], pick, kinds=('flops',)) -> tuple[Place, list[Group]]:
    """The place where a claim is judged, of studies by name, and the groups compared there.

    `pick(place)` returns the groups to compare: [] or a None if one is missing. The place is the
    largest whose groups have no problem; of places equal to within 5% of their FLOPs, the one with
    the most seeds. If all have problems it is the largest. Raises NotMeasured if none has the
    groups.
    """

    def rank(found):
        place, groups = found
        flops = max(row['total_flops'] for group in groups for row in group.rows)
        most = max(r['total_flops'] for r in place.study['runs'] if r['budget'] == place.budget)
        seeds = min(len(group.rows) for group in groups)
        problem = any(group.problem for group in groups)
        return problem, -round(math.log(flops) / 0.05), -seeds, -most

    found = [
        (place, groups)
        for name, study in sorted(studies.items())
        for place in (Place(name, study, budget) for budget in study['budgets'])
        if study['kind'] in kinds and (groups := pick(place)) and None not in groups
    ]
    if not found:
        raise NotMeasured
    return min(found, key=rank)
