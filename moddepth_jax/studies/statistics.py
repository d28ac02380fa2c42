"""Means over seeds and what separates them: 95% intervals of differences between runs of a study.

Runs are rows of study.json. A number that carries a verdict comes from at least MIN_SEEDS runs of
MIN_STEPS steps: fewer seeds give no spread, and shorter runs say little about training.
"""

import math
from typing import NamedTuple

import numpy as np
import scipy.special

from moddepth_jax.studies import fit
from moddepth_jax.studies.study_warnings import INVALID_GAP

MIN_SEEDS, MIN_STEPS = 3, 500
MIN_SIZES = 3  # of dense models, for the best of them to be called optimal
_CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A mean and the 95% interval around it; the ends are infinite where there is no spread."""

    mean: float
    low: float
    high: float

    def times(self, factor: float) -> 'Interval':
        """In another unit; `factor` is above 0."""
        return Interval(*(factor * end for end in self))

    def within(self, low: float, high: float) -> bool:
        """Whether it lies wholly between two bars."""
        return low < self.low and self.high < high

    def outside(self, low: float, high: float) -> bool:
        """Whether it lies wholly below the one bar or wholly above the other."""
        return self.high < low or high < self.low

    def told(self, form: str = '+.4f') -> str:
        """As text, each number by `form`; one without a spread says so."""
        mean = format(self.mean, form)
        if not math.isfinite(self.high - self.low):
            return f'{mean} (no interval)'
        return f'{mean} ({format(self.low, form)} to {format(self.high, form)})'


def interval(samples, weights=(1.0,)) -> Interval:
    """The weighted sum of the means of independent samples, with its 95% interval.

    Student's t with the degrees of freedom of Welch and Satterthwaite; for two samples and weights
    (1, -1) it is Welch's interval. A sample of one has no spread: the ends are then infinite.

    Args:
      samples: sequences of floats, one or more.
      weights: one for each.
    """
    samples = [weight * np.asarray(s, float) for s, weight in zip(samples, weights, strict=True)]
    mean = float(sum(values.mean() for values in samples))
    if not math.isfinite(mean) or any(values.size < 2 for values in samples):
        return Interval(mean, -math.inf, math.inf)
    errors = np.array([values.var(ddof=1) / values.size for values in samples])
    error = errors.sum()
    if error == 0:
        return Interval(mean, mean, mean)
    freedom = error**2 / sum(errors**2 / [values.size - 1 for values in samples])
    half = scipy.special.stdtrit(freedom, (1 + _CONFIDENCE) / 2) * error**0.5
    return Interval(mean, float(mean - half), float(mean + half))


class Group(NamedTuple):
    """The runs of one variant at one size and one budget of a study.

    Attributes:
      variant: its name in the study.
      size: that of the runs, LxD.
      rows: of study.json, by seed.
      diverged: how many more runs of it diverged.
      at_edge: whether it was called the best although no smaller, or no larger, one was run.
    """

    variant: str
    size: str
    rows: tuple[dict, ...]
    diverged: int = 0
    at_edge: bool = False

    def values(self, field: str = 'bits_per_byte') -> list[float]:
        """One number of each run; infinite where the run has none, as one that diverged."""
        given = [row[field] for row in self.rows]
        return [math.inf if value is None else float(value) for value in given]

    def mean(self, field: str = 'bits_per_byte') -> float:
        """Of `values`."""
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
            return f'a routing gap of {gap:.2f} nats makes a run of {what} void'
        if self.at_edge:
            return f'{what} is the smallest or largest of the sizes that were run'
        return ''

    def told(self) -> str:
        """Bits a byte of each seed and their mean, as text."""
        values = ', '.join(f'{value:.3f}' for value in self.values())
        return f'{self.variant} {self.size}: {values} (mean {self.mean():.3f})'


class Place(NamedTuple):
    """One budget of one study: what is compared is of one place.

    Attributes:
      name: of the study.
      study: the dict of study.json.
      budget: one of its budgets.
    """

    name: str
    study: dict
    budget: float

    def groups(self, *variants: str) -> list[Group]:
        """Those of a variant, by size; of several, as the first: they differ in size alone."""
        found = {}
        for row in self.study['runs']:
            if row['variant'] in variants and row['budget'] == self.budget:
                # A shallower dense model can be that of two sizes of MoD: one run, several rows.
                found.setdefault(row['size'], {})[row['seed']] = row
        return [
            Group(variants[0], size, tuple(rows[seed] for seed in sorted(rows)), self._lost(rows))
            for size, rows in found.items()
        ]

    def _lost(self, rows):
        """How many runs that differ from these by the seed alone diverged."""
        stems = {row['run'].rpartition('-seed')[0] for row in rows.values()}
        return sum(name.rpartition('-seed')[0] in stems for name in self.study['diverged'])

    def best(self, *variants: str) -> Group | None:
        """The best size, as `isoflop_fit.best` has it; None where none was run to a finite loss."""
        groups = self.groups(*variants)
        rows = [row for group in groups for row in group.rows if row['loss'] is not None]
        if not rows:
            return None
        size = fit.best(rows).size
        return next(group for group in groups if group.size == size)

    def best_dense(self) -> Group | None:
        """The best of all dense models, the shallower ones too; None of fewer than MIN_SIZES."""
        best, groups = self.best('dense', 'shallow'), self.groups('dense', 'shallow')
        if best is None or len(groups) < MIN_SIZES:
            return None
        sizes = [group.rows[0]['parameters'] for group in groups]
        return best._replace(at_edge=best.rows[0]['parameters'] in (min(sizes), max(sizes)))

    def shared(self, *variants: str) -> list[Group]:
        """One group of each variant, all of one size; [] where no size has them all.

        Of several sizes the one where no group has a problem, then the best of the first variant.
        """
        found = []
        by_size = [{group.size: group for group in self.groups(each)} for each in variants]
        for size in set.intersection(*map(set, by_size)):
            groups = [sizes[size] for sizes in by_size]
            found.append((any(group.problem for group in groups), groups[0].mean(), size, groups))
        return min(found, key=lambda entry: entry[:3])[3] if found else []

    def told(self, groups: list[Group]) -> str:
        """Where and how long the groups were trained, as text."""
        study, rows = self.study, [row for group in groups for row in group.rows]
        steps = sorted({row['steps'] for row in rows})
        span = f'{steps[0]}' if len(steps) == 1 else f'{steps[0]} to {steps[-1]}'
        budget = f'{self.budget:.3g} FLOPs, '.replace('e+', 'e') if study['kind'] == 'flops' else ''
        length, epochs = study['sequence_length'], max(row['epochs'] for row in rows)
        return (
            f'{self.name}: {budget}{span} steps of {study["batch_tokens"]} tokens in rows of '
            f'{length}, {study["corpus"]}, {epochs:.2g} epochs at most'
        )


def places(studies: dict[str, dict], kinds: tuple[str, ...]) -> list[Place]:
    """Every budget of the studies of these kinds, from the most training FLOPs to the fewest."""
    found = []
    for name, study in sorted(studies.items()):
        for budget in study['budgets'] if study['kind'] in kinds else ():
            flops = [row['total_flops'] for row in study['runs'] if row['budget'] == budget]
            if flops:
                found.append((-max(flops), Place(name, study, budget)))
    return [place for _, place in sorted(found, key=lambda entry: entry[0])]


def _rank(place, groups):
    """Lower is judged: without a problem, then of more FLOPs to within 5%, then of more seeds."""
    flops = max(row['total_flops'] for group in groups for row in group.rows)
    seeds = min(len(group.rows) for group in groups)
    return any(group.problem for group in groups), -round(math.log(flops) / 0.05), -seeds


def choose(studies, pick, kinds: tuple[str, ...] = ('flops',)):
    """(place, groups) where a claim is judged, or None where it has no runs at all.

    The largest place whose groups have no problem, of equally large ones that with the most seeds;
    if there is none, the largest that has groups.

    Args:
      studies: by name.
      pick: called with a Place, returns its groups of interest, [] or with None where one lacks.
      kinds: of studies.
    """
    found = [(place, pick(place)) for place in places(studies, kinds)]
    found = [(place, groups) for place, groups in found if groups and None not in groups]
    return min(found, key=lambda entry: _rank(*entry), default=None)
