"""Statistics for few seeds: t intervals, p-values corrected by Holm's procedure, and power."""

import bisect
import functools
import math
from typing import NamedTuple

import numpy as np
import scipy.optimize
import scipy.stats

MIN_SEEDS, MIN_STEPS = 3, 500  # runs with fewer get no verdict
LEVEL = 0.05  # of each interval, and of the family of all claims
POWER = 0.8  # for which detectable differences and required seeds are computed
MOST_SEEDS = 1000  # limit of the search for the required number of seeds


class Interval(NamedTuple):
    """A mean and its 95% interval, which is infinite if the spread is unknown."""

    mean: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        """Format the mean and, in parentheses, both ends by `spec`."""
        mean = format(self.mean, spec)
        if not math.isfinite(self.high - self.low):
            return f'{mean} (no interval)'
        return f'{mean} ({format(self.low, spec)} to {format(self.high, spec)})'


def interval(samples, weights=(1.0,)) -> Interval:
    """Return the weighted sum of the means of independent samples with its 95% interval.

    It is Student's t interval with the degrees of freedom of Welch and Satterthwaite.
    """
    samples = [weight * np.asarray(s, float) for s, weight in zip(samples, weights, strict=True)]
    mean = float(sum(values.mean() for values in samples))
    if not math.isfinite(mean) or any(values.size < 2 for values in samples):
        return Interval(mean, -math.inf, math.inf)
    errors = np.array([scipy.stats.sem(values) ** 2 for values in samples])
    if errors.sum() == 0:
        return Interval(mean, mean, mean)
    freedom = errors.sum() ** 2 / sum(errors**2 / [values.size - 1 for values in samples])
    ends = scipy.stats.t.interval(1 - LEVEL, freedom, mean, math.sqrt(errors.sum()))
    return Interval(mean, *map(float, ends))


class Decision(NamedTuple):
    """The verdict that the data favour, and the smallest level at which they decide it."""

    holds: bool
    p: float


class Sample(NamedTuple):
    """One number for each seed, and the bounds between which a claim says the mean lies."""

    values: np.ndarray
    low: float = -math.inf
    high: float = math.inf

    @property
    def interval(self) -> Interval:
        """The mean over the seeds with its 95% interval (Student's t)."""
        return interval([self.values])

    @property
    def spread(self) -> float:
        """The standard deviation over the seeds; NaN for a single seed."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else math.nan

    @property
    def margin(self) -> float:
        """The distance of the mean from the nearest bound, negative if it lies outside."""
        mean = np.mean(self.values)
        return float(min(mean - self.low, self.high - mean))

    def decide(self) -> Decision:
        """Decide by a two-sided t interval that lies within both bounds, or beyond one of them."""
        error = self.spread / math.sqrt(len(self.values))
        distance = abs(self.margin)
        if not math.isfinite(error) or distance == 0:
            return Decision(self.margin > 0, 1.0)
        if error == 0:
            return Decision(self.margin > 0, 0.0)
        # The nearest bound decides: inside it is excluded last, outside it is the one crossed.
        p = 2 * scipy.stats.t.sf(distance / error, len(self.values) - 1)
        return Decision(self.margin > 0, float(p))


def all_within(samples) -> Decision:
    """Decide the claim that the mean of every sample lies within its bounds.

    It holds at a level if every interval at this level lies inside. It fails if one of n intervals
    lies outside at 1/n of the level (Bonferroni).
    """
    decisions = [sample.decide() for sample in samples]
    outside = [decision.p for decision in decisions if not decision.holds]
    if outside:
        return Decision(False, min(1.0, len(decisions) * min(outside)))
    return Decision(True, max(decision.p for decision in decisions))


def holm(p_values, family: int) -> tuple[list[float], list[float]]:
    """Apply Holm's procedure.

    Args:
      p_values: p-values of the claims that could be tested.
      family: number of all claims; those without a p-value count as undecided.

    Returns:
      The adjusted p-values, and the level that each p-value must not exceed.
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, levels, largest = [1.0] * len(p_values), [LEVEL] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, (family - rank) * p_values[index])
        adjusted[index], levels[index] = min(1.0, largest), LEVEL / (family - rank)
    return adjusted, levels


def _power(effect, seeds, level):
    """The probability that `seeds` decide a mean of `effect` standard deviations, with its sign."""
    threshold = scipy.stats.t.isf(level / 2, seeds - 1)
    return float(scipy.stats.nct.sf(threshold, seeds - 1, effect * math.sqrt(seeds)))


def detectable(spread: float, seeds: int, level: float) -> float:
    """Return the difference that `seeds` decide with probability POWER at a two-sided level."""
    return spread * _detectable_effect(seeds, level)


@functools.cache  # a table of claims needs the same few values many times
def _detectable_effect(seeds, level):
    """As `detectable`, in standard deviations."""
    if seeds < 2:
        return math.inf
    most = 10 * float(scipy.stats.t.isf(level / 2, seeds - 1))
    return scipy.optimize.brentq(lambda e: _power(e, seeds, level) - POWER, 0, most)


def seeds_needed(difference: float, spread: float, level: float) -> int | None:
    """Return the fewest seeds that decide a difference with probability POWER; None if too many."""
    if not spread or not math.isfinite(spread):
        return MIN_SEEDS if difference and spread == 0 else None
    effect = abs(difference) / spread
    seeds = range(MIN_SEEDS, MOST_SEEDS + 1)
    enough = bisect.bisect_left(seeds, POWER, key=lambda count: _power(effect, count, level))
    return seeds[enough] if enough < len(seeds) else None


def seeds_to_decide(samples, level: float) -> int | None:
    """Return the fewest seeds that would decide `samples` by `all_within`; None if too many.

    Each mean and spread is taken as found, and decided with probability POWER.
    """
    outside = [sample for sample in samples if sample.margin <= 0]
    if outside:  # one of them is enough, at its share of the level
        needed = [seeds_needed(s.margin, s.spread, level / len(samples)) for s in outside]
        return min((seeds for seeds in needed if seeds is not None), default=None)
    needed = [seeds_needed(s.margin, s.spread, level) for s in samples]
    return None if None in needed else max(needed)
