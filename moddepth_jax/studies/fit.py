"""Finds the best model size at a budget by fitting a parabola to loss over log(parameters)."""

import collections
import math
from typing import NamedTuple

import numpy as np


class Size(NamedTuple):
    """The seeds of one variant at one budget and one size: those that judge, if any of them ran."""

    size: str  # LAYERSxWIDTH, such as '6x64'
    parameters: int
    flops_per_forward: float  # of one step
    losses: tuple[float, ...]  # held-out loss of each run in nats per token, by the causal rule
    loss: float  # mean of `losses`


class Fit(NamedTuple):
    """The fit loss = a + b ln(parameters) + c ln(parameters)^2, in nats per token.

    The optimum is the minimum of the parabola if it lies `inside` the range of sizes, else the best
    size (Raposo et al. 2024, figure 3).
    """

    a: float
    b: float
    c: float
    optimum_parameters: float
    optimum_loss: float
    inside: bool


def select(study: dict, variant: str, budget: float) -> list[dict]:
    """Return the rows of a variant at a budget that have a finite loss.

    Each gets the field `judges`: whether its seed chose neither a size nor a learning rate. The
    loss of the best of several sizes is too low by chance for the seed that chose it.
    """
    rows = [r for r in study['runs'] if (r['variant'], r['budget']) == (variant, budget)]
    rows = [row for row in rows if row['loss'] is not None and math.isfinite(row['loss'])]
    # A `shallow` run that is the control of two sizes of MoD has two rows.
    rows.sort(key=lambda row: row.get('at_best_size', False))
    rows = {row['run']: row for row in rows}.values()
    chose = choosing_seeds(study)
    return [row | {'judges': row['seed'] not in chose} for row in rows]


def found(study: dict, budget: float) -> list[tuple[str, list[dict]]]:
    """Return (variant, rows) for each variant that has rows with a finite loss at the budget."""
    rows = ((name, select(study, name, budget)) for name in study['variants'])
    return [(name, mine) for name, mine in rows if mine]


def budgets(study: dict) -> list[float]:
    """Return the budgets at which some run has a finite loss."""
    return [budget for budget in study['budgets'] if found(study, budget)]


def reference(study: dict) -> str:
    """Return the baseline of all comparisons: dense, or else the first variant."""
    return 'dense' if 'dense' in study['variants'] else list(study['variants'])[0]


def bits_per_nat(study: dict) -> float:
    """Return bits per byte over nats per token: equal for all runs, since they read one text."""
    pairs = [(row['bits_per_byte'], row['loss']) for row in study['runs']]
    pairs = [pair for pair in pairs if None not in pair and all(map(math.isfinite, pair))]
    bits, losses = map(math.fsum, zip(*(pairs or [(1.0, math.log(2))]), strict=True))
    return bits / losses


def sizes(rows: list[dict]) -> list[Size]:
    """Group rows of one variant and budget by size: fewest parameters first, seeds ascending."""
    by_size = {}
    for row in sorted(rows, key=lambda row: (row['parameters'], row['size'], row['seed'])):
        by_size.setdefault(row['size'], []).append(row)
    result = []
    for name, mine in by_size.items():
        losses = tuple(row['loss'] for row in _judging_or_all(mine))
        mean = math.fsum(losses) / len(losses)
        result.append(Size(name, mine[0]['parameters'], mine[0]['flops_per_forward'], losses, mean))
    return result


def choosing(rows: list[dict]) -> list[dict]:
    """Return the rows of the seed that chooses the size: the first seed that ran at the most sizes.

    Other seeds only run where this seed was best, so a mean over seeds would be biased.
    """
    at_sizes = collections.Counter(row['seed'] for row in rows)
    seed = min(at_sizes, key=lambda seed: (-at_sizes[seed], seed), default=None)
    return [row for row in rows if row['seed'] == seed]


def best(rows: list[dict]) -> Size:
    """Return the size at which the choosing seed has the lowest loss."""
    (size,) = sizes(at_best_size(rows))
    return size


def at_best_size(rows: list[dict]) -> list[dict]:
    """Return the rows of the best size: of the seeds that judge, or else of the choosing seed."""
    size = min(sizes(choosing(rows)), key=lambda size: size.loss).size
    return _judging_or_all([row for row in rows if row['size'] == size])


def _judging_or_all(rows):
    return [row for row in rows if row['judges']] or rows


def choosing_seeds(study: dict) -> list[int]:
    """Return [first seed] if it chose a size or a learning rate, and so must not judge, else []."""
    return study['seeds'][: len(study['sizes']) > 1 or bool(study['tuning'])]


def judging(rows: list[dict]) -> dict[int, float]:
    """Return {seed: bits/byte} at the best size of a variant, without the seed that chose it."""
    return {row['seed']: row['bits_per_byte'] for row in at_best_size(rows) if row['judges']}


def paired_differences(study: dict, budget: float) -> dict[str, list[float]]:
    """Return the differences in bits/byte to the reference by variant, one for each common seed.

    Each variant is taken at its best size at the budget.
    """
    by_variant = {name: judging(rows) for name, rows in found(study, budget)}
    others = by_variant.get(reference(study), {})
    return {
        name: [bits - others[seed] for seed, bits in mine.items() if seed in others]
        for name, mine in by_variant.items()
    }


def fit(rows: list[dict]) -> Fit | None:
    """Fit the losses of the choosing seed by least squares; None for fewer than three sizes.

    If the width of the best size has three sizes or more, the others are left out: their losses
    depend on how well the learning rate suits each width. The parabola is then shifted to the loss
    of the best size.
    """
    found = fitted_sizes(rows)
    if len({size.parameters for size in found}) < 3:
        return None
    logs = np.log([size.parameters for size in found])
    # Polynomial.fit maps the logarithms to [-1, 1], which keeps the problem well conditioned.
    parabola = np.polynomial.Polynomial.fit(logs, [size.loss for size in found], 2)
    lowest = best(rows)
    parabola += lowest.loss - parabola(math.log(lowest.parameters))
    a, b, c = map(float, parabola.convert().coef)
    vertex = -b / (2 * c) if c > 0 else math.inf
    if logs[0] <= vertex <= logs[-1]:
        return Fit(a, b, c, math.exp(vertex), float(parabola(vertex)), True)
    return Fit(a, b, c, lowest.parameters, lowest.loss, False)


def fitted_sizes(rows: list[dict]) -> list[Size]:
    """Return the sizes that `fit` uses, with the choosing seed alone."""
    every = sizes(choosing(rows))
    if not every:
        return []
    width = min(every, key=lambda size: size.loss).size.partition('x')[2]
    of_width = [size for size in every if size.size.partition('x')[2] == width]
    return of_width if len(of_width) >= 3 else every


def optimum(rows: list[dict]) -> Size | None:
    """Return the best size, or the minimum of the parabola if it lies inside; None without rows.

    FLOPs between two sizes are interpolated linearly on logarithmic axes.
    """
    if not rows:
        return None
    parabola, lowest = fit(rows), best(rows)
    if parabola is None or not parabola.inside:
        return lowest
    logs = np.log([(size.parameters, size.flops_per_forward) for size in fitted_sizes(rows)])
    flops = np.exp(np.interp(math.log(parabola.optimum_parameters), logs[:, 0], logs[:, 1]))
    values = {'parameters': parabola.optimum_parameters, 'loss': parabola.optimum_loss}
    return lowest._replace(**values, flops_per_forward=float(flops))
