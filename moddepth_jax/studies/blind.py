"""How often the judges find a difference where there is none: labels permuted within each seed."""

from typing import NamedTuple

import numpy as np

from moddepth_jax.studies.claims import CLAIMS, Claim
from moddepth_jax.studies.places import Evidence, NotMeasured
from moddepth_jax.studies.statistics import LEVEL, all_within, holm

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
    wrong_tables: float  # share of tables with a verdict after Holm, which should be LEVEL at most
    wrong_claims: float  # share of comparisons decided before Holm, likewise

    def __str__(self) -> str:
        if not self.claims:
            return 'No comparison has all the seeds that were planned.'
        return (
            f'Of {self.tables} tables of {self.claims} comparisons, with labels permuted within '
            f'each seed, {self.wrong_tables:.1%} have a verdict. Before Holm '
            f'{self.wrong_claims:.1%} of the comparisons are decided. Stated: {LEVEL:.0%} at most.'
        )


def blind_check(evidence: Evidence, tables: int, seed: int = 0) -> Blind:
    """Judges all comparisons of losses that have their planned seeds on permuted evidence."""
    generator, tested = np.random.default_rng(seed), [claim for claim in CLAIMS if _tests(claim)]
    tested = [claim for claim in tested if _p_value(claim, evidence) is not None]
    if not tested:
        return Blind(tables, 0, 0.0, 0.0)
    wrong_tables = decided = 0
    for _ in range(tables):
        blinded = permuted(evidence, generator)
        p_values = [_p_value(claim, blinded) for claim in tested]
        wrong_tables += min(holm(p_values, len(p_values))[0]) <= LEVEL
        decided += sum(p <= LEVEL for p in p_values)
    return Blind(tables, len(tested), wrong_tables / tables, decided / tables / len(tested))


def _tests(claim):
    """Whether a verdict of a claim, of either kind, is an error where all variants are alike."""
    return claim.judge in COMPARING and 'margin' not in claim.args


def _p_value(claim: Claim, evidence):
    """None if the claim can have no verdict."""
    try:
        found = claim.find(evidence)
    except NotMeasured:
        return None
    return all_within(found.samples).p if not found.problem and found.missing <= 0 else None


def permuted(evidence: Evidence, generator: np.random.Generator) -> Evidence:
    """The evidence with losses (bits a byte) that differ between variants by chance alone.

    What a variant's loss at one seed has over its mean is noise: it is given to another variant of
    the same seed, budget and study, and added to the mean of them all.
    """
    studies = {}
    for name, study in evidence.studies.items():
        noise = {}  # by budget and seed: {run: what it has over the mean of its variant and size}
        for budget in study['budgets']:
            by_stem = {}
            for row in study['runs']:
                if row['budget'] == budget and row['bits_per_byte'] is not None:
                    stem = row['run'].rpartition('-seed')[0]
                    by_stem.setdefault(stem, {})[row['seed']] = row['run'], row['bits_per_byte']
            for runs in by_stem.values():
                mean = np.mean([bits for _, bits in runs.values()])
                for seed, (run, bits) in runs.items():
                    if len(runs) > 1:
                        noise.setdefault((budget, seed), {})[run] = bits - mean
        losses = {}
        for of_seed in noise.values():
            order = generator.permutation(list(of_seed.values()))
            losses |= dict(zip(of_seed, order, strict=True))
        level = np.mean([row['bits_per_byte'] or 0.0 for row in study['runs']])
        rows = [
            row | {'bits_per_byte': float(level + losses.get(row['run'], 0.0))}
            for row in study['runs']
        ]
        studies[name] = study | {'runs': rows}
    return evidence._replace(studies=studies)
