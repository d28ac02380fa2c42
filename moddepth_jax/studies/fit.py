"""Which size is best at a budget: a parabola of the loss in the logarithm of the parameters."""

import collections
import math
from typing import NamedTuple

import numpy as np


class Size(NamedTuple):
    """All runs of one variant at one budget and one size, which differ in their seeds."""

    size: str  # layers x width, as '6x64'
    parameters: int
    flops_per_forward: float  # of one step
    losses: tuple[float, ...]  # held-out nats a token of each run, by the causal rule
    loss: float  # their mean


class Fit(NamedTuple):
    """loss = a + b ln(parameters) + c ln(parameters)^2, in nats a token (Raposo et al., figure 3).

    The optimum is the parabola's minimum if that lies `inside` the sizes run, else the best size.
    """

    a: float
    b: float
    c: float
    optimum_parameters: float
    optimum_loss: float
    inside: bool


def select(study: dict, variant: str, budget: float) -> list[dict]:
    """The finished rows of a variant at a budget whose loss is finite."""
    rows = [r for r in study['runs'] if (r['variant'], r['budget']) == (variant, budget)]
    return [row for row in rows if row['loss'] is not None and math.isfinite(row['loss'])]


def found(study: dict, budget: float) -> list[tuple[str, list[dict]]]:
    """(variant, its rows) of each variant that has rows with a finite loss."""
    rows = ((name, select(study, name, budget)) for name in study['variants'])
    return [(name, mine) for name, mine in rows if mine]


def budgets(study: dict) -> list[float]:
    """The budgets at which some run has a finite loss."""
    return [budget for budget in study['budgets'] if found(study, budget)]


def reference(study: dict) -> str:
    """The variant with which all others are compared: dense, or else the first."""
    return 'dense' if 'dense' in study['variants'] else list(study['variants'])[0]


def bits_per_nat(study: dict) -> float:
    """bits/byte of a loss of one nat a token: the same for all runs, since they read one text."""
    pairs = [(row['bits_per_byte'], row['loss']) for row in study['runs']]
    pairs = [pair for pair in pairs if None not in pair and all(map(math.isfinite, pair))]
    bits, losses = map(math.fsum, zip(*(pairs or [(1.0, math.log(2))]), strict=True))
    return bits / losses


def sizes(rows: list[dict]) -> list[Size]:
    """The sizes of one variant at one budget, fewest parameters first, seeds ascending."""
    by_size = {}
    for row in sorted(rows, key=lambda row: (row['parameters'], row['size'], row['seed'])):
        by_size.setdefault(row['size'], []).append(row)
    result = []
    for name, mine in by_size.items():
        losses = tuple(row['loss'] for row in mine)
        mean = math.fsum(losses) / len(losses)
        result.append(Size(name, mine[0]['parameters'], mine[0]['flops_per_forward'], losses, mean))
    return result


def choosing(rows: list[dict]) -> list[dict]:
    """The rows of the seed that ran at the most sizes, which chooses among them: the first.

    Other seeds run where that one was best, so that a mean over seeds would favour such a size.
    """
    at_sizes = collections.Counter(row['seed'] for row in rows)
    seed = min(at_sizes, key=lambda seed: (-at_sizes[seed], seed), default=None)
    return [row for row in rows if row['seed'] == seed]


def best(rows: list[dict]) -> Size:
    """The size of the lowest loss of the choosing seed, with all its seeds."""
    size = min(sizes(choosing(rows)), key=lambda size: size.loss).size
    return next(found for found in sizes(rows) if found.size == size)


def choosing_seeds(study: dict) -> list[int]:
    """The first seed, if it chose among sizes and so must not judge them too; else none."""
    return study['seeds'][: len(study['sizes']) > 1]


def judging(study: dict, rows: list[dict]) -> dict[int, float]:
    """{seed: bits/byte} of a variant's rows at their best size, without the seed that chose it."""
    chose = choosing_seeds(study)
    size = best(rows).size
    mine = [row for row in rows if row['size'] == size and row['seed'] not in chose]
    return {row['seed']: row['bits_per_byte'] for row in mine}


def paired_differences(study: dict, budget: float) -> dict[str, list[float]]:
    """Bits/byte of each variant less those of the reference, of the seeds that both have.

    Each at its best size of the budget, or where it was run.
    """
    by_variant = {name: judging(study, rows) for name, rows in found(study, budget)}
    others = by_variant.get(reference(study), {})
    return {
        name: [bits - others[seed] for seed, bits in mine.items() if seed in others]
        for name, mine in by_variant.items()
    }


def fit(rows: list[dict]) -> Fit | None:
    """Least squares through the losses of the choosing seed; None for fewer than three sizes.

    The parabola is moved to the level of the mean over seeds, which the best size has.
    """
    found = sizes(choosing(rows))
    if len({size.parameters for size in found}) < 3:
        return None
    above = best(rows).loss - best(choosing(rows)).loss
    logs = np.log([size.parameters for size in found])
    # `fit` maps the logarithms to -1 .. 1, since they are nearly proportional to their squares.
    parabola = np.polynomial.Polynomial.fit(logs, [size.loss for size in found], 2)
    a, b, c = map(float, (parabola + above).convert().coef)
    vertex = -b / (2 * c) if c > 0 else math.inf
    if logs[0] <= vertex <= logs[-1]:
        return Fit(a, b, c, math.exp(vertex), float(parabola(vertex)) + above, True)
    lowest = best(rows)
    return Fit(a, b, c, lowest.parameters, lowest.loss, False)


def optimum(rows: list[dict]) -> Size | None:
    """The best size, with parameters, loss and FLOPs of the parabola's vertex if it lies inside.

    FLOPs between two sizes are interpolated, their logarithm in that of the parameters.
    """
    if not rows:
        return None
    parabola, lowest = fit(rows), best(rows)
    if parabola is None or not parabola.inside:
        return lowest
    logs = np.log([(size.parameters, size.flops_per_forward) for size in sizes(rows)])
    flops = np.exp(np.interp(math.log(parabola.optimum_parameters), logs[:, 0], logs[:, 1]))
    values = {'parameters': parabola.optimum_parameters, 'loss': parabola.optimum_loss}
    return lowest._replace(**values, flops_per_forward=float(flops))
