"""Measures the false positive rate of the judges by permuting labels within each seed."""

from typing import NamedTuple

import numpy as np

from moddepth_jax.studies import claims, fit
from moddepth_jax.studies.judges import UNDECIDED
from moddepth_jax.studies.places import Evidence
from moddepth_jax.studies.statistics import LEVEL

COMPARING = (
    'lower_loss',
    'lowest_loss',
    'rising_with_capacity',
    'falling_difference',
    'larger_gain',
)


class BlindResult(NamedTuple):
    """Errors of the judges on evidence without differences. Both shares should not exceed LEVEL."""

    tables: int  # number of judged tables
    claims: int  # comparisons in each table
    wrong_tables: float  # share of tables with at least one verdict on a comparison
    wrong_claims: float  # share of comparisons that are decided without Holm's correction

    def __str__(self) -> str:
        return (
            f'{self.tables} tables of {self.claims} comparisons with labels permuted within each '
            f'seed: {self.wrong_tables:.1%} of the tables have a verdict. Without the correction '
            f'by Holm, {self.wrong_claims:.1%} of the comparisons are decided. Both should be at '
            f'most {LEVEL:.0%}.'
        )


def blind_check(evidence: Evidence, tables: int) -> BlindResult:
    """Judge the whole table on permuted evidence and count verdicts on comparisons of losses.

    This tests the judges, but not whether differences are normally distributed: permuted ones are
    symmetric. Raises ValueError if no comparison has all its seeds.
    """
    tested = [
        number
        for number, judged in enumerate(claims.judge(evidence))
        if _is_tested(judged.claim) and judged.compared
    ]
    if not tested:
        right = 'needs a comparison of losses that has all its seeds; docs/isoflop.md has studies'
        raise ValueError(f'--blind={tables}: {right}')
    generator, wrong_tables, decided = np.random.default_rng(0), 0, 0
    for _ in range(tables):
        table = claims.judge(permuted(evidence, generator))
        found = [table[number] for number in tested]
        wrong_tables += any(judged.verdict != UNDECIDED for judged in found)
        decided += sum(judged.p <= LEVEL for judged in found)
    return BlindResult(tables, len(tested), wrong_tables / tables, decided / tables / len(tested))


def _is_tested(claim):
    """Whether any verdict on a claim is an error if all variants are equal."""
    return claim.judge in COMPARING and 'margin' not in claim.args


def permuted(evidence: Evidence, generator: np.random.Generator) -> Evidence:
    """Return evidence in which losses differ between variants only by chance.

    The noise of a run is its loss minus the mean of its variant and size. Noise is permuted among
    the variants of the same seed, budget and study, and added to the mean of all. The seed that
    chose the sizes keeps its losses, because it does not judge.
    """
    studies = {
        name: study | {'runs': _permuted(study, generator)}
        for name, study in evidence.studies.items()
    }
    return evidence._replace(studies=studies)


def _permuted(study, generator):
    by_stem, noise, chose = {}, {}, fit.choosing_seeds(study)
    for row in study['runs']:
        stem = row['run'].rpartition('-seed')[0]
        if row['bits_per_byte'] is not None and row['seed'] not in chose:
            by_stem.setdefault((row['budget'], stem), {})[row['seed']] = row
    for (budget, _), rows in by_stem.items():
        mean = np.mean([row['bits_per_byte'] for row in rows.values()])
        for seed, row in rows.items():  # {run: its noise}, for each budget and seed
            noise.setdefault((budget, seed), {})[row['run']] = row['bits_per_byte'] - mean
    level = np.mean([row['bits_per_byte'] for rows in by_stem.values() for row in rows.values()])
    losses = {}
    for of_seed in noise.values():
        order = generator.permutation(list(of_seed.values()))
        losses |= {run: float(level + each) for run, each in zip(of_seed, order, strict=True)}
    nats = 1 / fit.bits_per_nat(study)
    new = {run: {'bits_per_byte': bits, 'loss': bits * nats} for run, bits in losses.items()}
    return [row | new.get(row['run'], {}) for row in study['runs']]
