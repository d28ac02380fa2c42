"""What a few seeds can decide: t intervals, p-values over a table by Holm, power beforehand."""

import functools
import math
from typing import NamedTuple

import numpy as np
import scipy.optimize
import scipy.stats

MIN_SEEDS, MIN_STEPS = 3, 500  # of the runs of a verdict
INVALID_GAP = 0.05  # nats between causal and top-C routing, see docs/mixture_of_depths.md
LEVEL = 0.05  # of each interval, and of the family of all claims
POWER = 0.8  # chance to decide, of the differences and seeds that are said to suffice
MOST_SEEDS = 1000  # what needs more is not decided by seeds


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
    ends = scipy.stats.t.interval(1 - LEVEL, freedom, mean, math.sqrt(errors.sum()))
    return Interval(mean, *map(float, ends))


class Decision(NamedTuple):
    """What the data are in favour of, and the smallest level at which they decide it."""

    holds: bool
    p: float


class Sample(NamedTuple):
    """One number of each seed, and the bounds between which a claim says that its mean lies."""

    values: np.ndarray
    low: float = -math.inf
    high: float = math.inf

    @property
    def interval(self) -> Interval:
        """The mean over the seeds with its 95% interval (Student's t)."""
        return interval([self.values])

    @property
    def spread(self) -> float:
        """The standard deviation over the seeds; NaN of a single one."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else math.nan

    @property
    def margin(self) -> float:
        """How far the mean lies from the nearest bound; below 0 if outside."""
        mean = np.mean(self.values)
        return float(min(mean - self.low, self.high - mean))

    def decide(self) -> Decision:
        """By the t interval, two-sided: it lies within both bounds, or beyond one of them."""
        error = self.spread / math.sqrt(len(self.values))
        distance = abs(self.margin)
        if not math.isfinite(error) or distance == 0:
            return Decision(self.margin > 0, 1.0)
        if error == 0:
            return Decision(self.margin > 0, 0.0)
        # Inside, the nearest bound is excluded last; outside, it is the one that was crossed.
        p = 2 * scipy.stats.t.sf(distance / error, len(self.values) - 1)
        return Decision(self.margin > 0, float(p))


def all_within(samples) -> Decision:
    """Of the claim that the mean of every sample lies within its bounds.

    It holds at a level at which each interval lies inside; it fails if one of n lies outside at the
    n-th part of the level (Bonferroni).
    """
    decisions = [sample.decide() for sample in samples]
    outside = [decision.p for decision in decisions if not decision.holds]
    if outside:
        return Decision(False, min(1.0, len(decisions) * min(outside)))
    return Decision(True, max(decision.p for decision in decisions))


def holm(p_values, family: int) -> tuple[list[float], list[float]]:
    """(adjusted p-values, the level that each p-value must not exceed) by Holm's procedure.

    Args:
      p_values: of the claims that could be tested.
      family: the number of all claims; those without a p-value count as not decided.
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, levels, largest = [1.0] * len(p_values), [LEVEL] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, (family - rank) * p_values[index])
        adjusted[index], levels[index] = min(1.0, largest), LEVEL / (family - rank)
    return adjusted, levels


def _power(effect, seeds, level):
    """Chance that `seeds` decide a mean of `effect` standard deviations, in its direction."""
    threshold = scipy.stats.t.isf(level / 2, seeds - 1)
    return float(scipy.stats.nct.sf(threshold, seeds - 1, effect * math.sqrt(seeds)))


def detectable(spread: float, seeds: int, level: float) -> float:
    """The difference that `seeds` decide with a chance of POWER, at a two-sided level."""
    return spread * _detectable_effect(seeds, level)


@functools.cache  # a table of claims asks for the same few again and again
def _detectable_effect(seeds, level):
    """The same, in standard deviations."""
    if seeds < 2:
        return math.inf
    most = 10 * float(scipy.stats.t.isf(level / 2, seeds - 1))
    return scipy.optimize.brentq(lambda e: _power(e, seeds, level) - POWER, 0, most)


def seeds_needed(difference: float, spread: float, level: float) -> int | None:
    """The fewest seeds that decide a difference with a chance of POWER; None above MOST_SEEDS."""
    few, many = MIN_SEEDS - 1, MOST_SEEDS
    if not spread or not math.isfinite(spread):
        return MIN_SEEDS if difference and spread == 0 else None
    effect = abs(difference) / spread
    if _power(effect, many, level) < POWER:
        return None
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if _power(effect, middle, level) >= POWER else (middle, many)
    return many
