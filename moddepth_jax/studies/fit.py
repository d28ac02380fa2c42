"""Which size is best at a budget: a parabola of the loss in the logarithm of the parameters.

A row is a run of study.json. Rows without a finite loss (a run that diverged) are left out.
"""

import math
from typing import NamedTuple

import numpy as np


class Size(NamedTuple):
    """All runs of one variant at one budget and one size, which differ in their seeds.

    Attributes:
      size: layers x width, as '6x64'.
      parameters: their number.
      flops_per_forward: counted FLOPs of the forward pass of one step.
      losses: held-out nats a token of each run, by the causal rule; seeds ascending.
      loss: their mean.
    """

    size: str
    parameters: int
    flops_per_forward: float
    losses: tuple[float, ...]
    loss: float


class Fit(NamedTuple):
    """loss = a + b ln(parameters) + c ln(parameters)^2, in nats a token (Raposo et al., figure 3).

    Attributes:
      a, b, c: coefficients.
      optimum_parameters: of the vertex, or, if `inside` is False, of the best size that was run.
      optimum_loss: nats a token at that optimum.
      inside: whether the parabola opens upwards and its vertex lies within the sizes that were run.
    """

    a: float
    b: float
    c: float
    optimum_parameters: float
    optimum_loss: float
    inside: bool


class Optimum(NamedTuple):
    """The best of a variant at a budget; see `optimum`.

    Attributes:
      parameters: may lie between the sizes that were run.
      loss: nats a token.
      flops_per_forward: of one step's forward pass.
    """

    parameters: float
    loss: float
    flops_per_forward: float


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
    if not pairs:
        return 1 / math.log(2)
    bits, losses = map(math.fsum, zip(*pairs, strict=True))
    return bits / losses


def sizes(rows: list[dict]) -> list[Size]:
    """The sizes of one variant at one budget, fewest parameters first."""
    by_size = {}
    for row in sorted(rows, key=lambda row: (row['parameters'], row['size'], row['seed'])):
        by_size.setdefault(row['size'], []).append(row)
    return [
        Size(
            name,
            found[0]['parameters'],
            found[0]['flops_per_forward'],
            losses := tuple(row['loss'] for row in found),
            math.fsum(losses) / len(losses),
        )
        for name, found in by_size.items()
    ]


def best(rows: list[dict]) -> Size:
    """Of the sizes with the most seeds, the one of the lowest mean loss.

    A size with a single run may look best by luck: more seeds run only where a first run was best.

    Raises:
      ValueError: no rows.
    """
    if not rows:
        raise ValueError('rows=[]: must hold a run with a finite loss to have a best size')
    return min(sizes(rows), key=lambda size: (-len(size.losses), size.loss))


def fit(rows: list[dict]) -> Fit | None:
    """Least squares through the mean over the seeds of each size; None for fewer than three sizes.

    Args:
      rows: of one variant at one budget, all with a finite loss.
    """
    found = sizes(rows)
    if len({size.parameters for size in found}) < 3:
        return None
    logs = np.log([size.parameters for size in found])
    # `fit` maps the logarithms to -1 .. 1, since they are nearly proportional to their squares.
    parabola = np.polynomial.Polynomial.fit(logs, [size.loss for size in found], 2)
    a, b, c = map(float, parabola.convert().coef)
    vertex = -b / (2 * c) if c > 0 else math.inf
    if logs[0] <= vertex <= logs[-1]:
        return Fit(a, b, c, math.exp(vertex), float(parabola(vertex)), True)
    lowest = best(rows)
    return Fit(a, b, c, lowest.parameters, lowest.loss, False)


def fits(study: dict) -> list[dict]:
    """The fit of each variant and budget that has one, as dicts with `variant` and `budget`."""
    found = []
    for budget in study['budgets']:
        for variant in study['variants']:
            parabola = fit(select(study, variant, budget))
            if parabola is not None:
                found.append({'variant': variant, 'budget': budget, **parabola._asdict()})
    return found


def optimum(rows: list[dict]) -> Optimum | None:
    """The vertex of the parabola if it lies inside, else the best size; None without rows.

    FLOPs between two sizes are interpolated, their logarithm in that of the parameters.
    """
    if not rows:
        return None
    parabola = fit(rows)
    if parabola is None or not parabola.inside:
        lowest = best(rows)
        return Optimum(lowest.parameters, lowest.loss, lowest.flops_per_forward)
    found = sizes(rows)
    logs = np.log([(size.parameters, size.flops_per_forward) for size in found])
    flops = np.exp(np.interp(math.log(parabola.optimum_parameters), logs[:, 0], logs[:, 1]))
    return Optimum(parabola.optimum_parameters, parabola.optimum_loss, float(flops))
