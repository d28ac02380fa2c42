"""How often the judges find a difference where there is none: labels permuted within each seed."""

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


class Blind(NamedTuple):
    """Errors of the judges on evidence without differences."""

    tables: int  # how many were judged
    claims: int  # comparisons of each
    wrong_tables: float  # share of tables that give one of these a verdict; LEVEL at most is right
    wrong_claims: float  # share of the comparisons decided if each stood alone, likewise

    def __str__(self) -> str:
        return (
            f'Of {self.tables} tables of {self.claims} comparisons, with labels permuted within '
            f'each seed, {self.wrong_tables:.1%} give one of them a verdict. Alone, before Holm, '
            f'{self.wrong_claims:.1%} of the comparisons are decided. Stated: {LEVEL:.0%} at most.'
        )


def blind_check(evidence: Evidence, tables: int, seed: int = 0) -> Blind:
    """Judges the whole table on permuted evidence, and counts verdicts on comparisons of losses.

    It tests the judges, not whether differences are normal: permuted ones are symmetric. Raises
    ValueError if no comparison has all its seeds.
    """
    tested = [
        number
        for number, judged in enumerate(claims.judge(evidence))
        if _is_tested(judged.claim) and judged.compared
    ]
    if not tested:
        right = 'needs a comparison of losses that has all its seeds; docs/isoflop.md has studies'
        raise ValueError(f'--blind={tables}: {right}')
    generator, wrong_tables, decided = np.random.default_rng(seed), 0, 0
    for _ in range(tables):
        table = claims.judge(permuted(evidence, generator))
        found = [table[number] for number in tested]
        wrong_tables += any(judged.verdict != UNDECIDED for judged in found)
        decided += sum(judged.p <= LEVEL for judged in found)
    return Blind(tables, len(tested), wrong_tables / tables, decided / tables / len(tested))


def _is_tested(claim):
    """Whether a verdict of a claim, of either kind, is an error where all variants are alike."""
    return claim.judge in COMPARING and 'margin' not in claim.args


def permuted(evidence: Evidence, generator: np.random.Generator) -> Evidence:
    """The evidence with losses that differ between variants by chance alone.

    What a run's loss has over the mean of its variant and size is noise: it is given to another
    variant of the same seed, budget and study, and added to the mean of them all. The seed that
    chose among sizes keeps its losses, as it judges nothing.
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
