"""Where a claim is judged: one budget and size of one study, fixed beforehand, and its groups."""

from typing import NamedTuple

import numpy as np

from moddepth_jax.studies import fit
from moddepth_jax.studies.statistics import INVALID_GAP, MIN_STEPS

MIN_SIZES = 3  # of dense models, for the best of them to be called optimal
BEST_DENSE = 'best dense'  # stands for a variant: the best of `dense` and `shallow`


class NotMeasured(Exception):
    """No study has the runs that a claim compares."""


class Evidence(NamedTuple):
    """What claims are judged by."""

    studies: dict[str, dict]  # content of study.json, by name of the study
    measures: dict[str, dict]  # content of measures.json, likewise
    counted: dict[str, dict]  # FLOPs by shape; see `launch.counted`


class Spec(NamedTuple):
    """A place as claims.toml plans it."""

    study: str  # the name of a directory
    seeds: int
    spread: float  # guess of the standard deviation of paired differences, bits per byte
    flops: float = 0.0  # of the budget
    steps: int = 0  # instead, in a study at equal steps
    size: str = ''  # LxD; '' for each variant's own best

    @property
    def budget(self) -> float:
        """In the unit of the study."""
        return self.flops or self.steps

    @property
    def text(self) -> str:
        """Study, size and budget, to tell the places of a claim apart."""
        return ', '.join(filter(None, (self.study.removeprefix('study-'), self.size, self._each)))

    @property
    def run(self) -> str:
        """The command that trains it, and how much that is."""
        return f'make {self.study} ({self.seeds} seeds, {self._each} per run)'

    @property
    def _each(self):
        return f'{self.steps} steps' if self.steps else budget_text(self.flops)


def budget_text(flops: float) -> str:
    """Such as 2e12 FLOPs."""
    return f'{flops:.3g} FLOPs'.replace('e+', 'e')


class Group(NamedTuple):
    """The runs of one variant at a place, by seed."""

    variant: str
    size: str  # LxD
    rows: dict[int, dict]  # of study.json, without those that diverged
    problem: str = ''  # why no verdict may rest on them

    def values(self, seeds, field: str = 'bits_per_byte') -> np.ndarray:
        """One number of each of some seeds."""
        return np.array([self.rows[seed][field] for seed in seeds], float)

    def cost(self) -> float:
        """FLOPs of a forward pass, and so a third of those of a step."""
        return next(iter(self.rows.values()))['flops_per_forward']

    def text(self, seeds) -> str:
        """The bits per byte of some seeds."""
        listed = ', '.join(f'{value:.4f}' for value in self.values(seeds))
        return f'{self.variant} {self.size}: {listed}'


class Place(NamedTuple):
    """One budget and size of one study; only runs of the same place are compared."""

    evidence: Evidence
    name: str  # of the study
    spec: Spec
    top_c: bool = False  # whether losses are those of routing by top-C instead of a causal rule

    @property
    def study(self) -> dict:
        """The content of study.json."""
        return self.evidence.studies[self.name]

    @property
    def planned(self) -> int:
        """How many seeds judge, by the plan."""
        return self.spec.seeds - len(fit.choosing_seeds(self.study))

    def seeds(self, groups) -> list[int]:
        """The seeds that judge: planned ones that all the groups have."""
        chose = fit.choosing_seeds(self.study)
        judging = [seed for seed in self._planned_seeds if seed not in chose]
        return [seed for seed in judging if all(seed in group.rows for group in groups)]

    def group(self, variant: str) -> Group:
        """The runs of a variant, or of BEST_DENSE. Raises NotMeasured if there are none."""
        if variant == BEST_DENSE:
            return self._best_dense()
        rows, at_edge = self._rows(variant), False
        if self.spec.size:
            mine = [row for row in rows if row.get('size_of_mod', row['size']) == self.spec.size]
        else:
            mine = [row for row in rows if row['at_best_size']]
            at_edge = bool(mine) and self._at_edge(rows, mine[0])
        if not mine:
            raise NotMeasured
        return self._group(variant, mine, at_edge)

    def groups(self, *variants: str, one_size: bool = False) -> list[Group]:
        """One group of each variant; if `one_size`, NotMeasured is raised if the sizes differ."""
        groups = [self.group(variant) for variant in variants]
        if one_size and len({group.size for group in groups if group.variant != 'shallow'}) > 1:
            raise NotMeasured
        return groups

    @property
    def _planned_seeds(self):
        return self.study['seeds'][: self.spec.seeds]

    def _rows(self, *variants):
        """The runs of some variants at this budget, of the seeds that were planned."""
        rows = [row for row in self.study['runs'] if row['budget'] == self.spec.budget]
        seeds = self._planned_seeds
        return [row for row in rows if row['variant'] in variants and row['seed'] in seeds]

    def _tried(self, rows):
        """Those by which the size was chosen."""
        first = self.study['seeds'][0]
        return [row for row in rows if row['seed'] == first and row['loss'] is not None]

    def _at_edge(self, rows, best):
        """Whether a better size may lie beyond those tried; none is shallower than one layer."""
        tried = [row['parameters'] for row in self._tried(rows)] or [best['parameters']]
        smallest = best['parameters'] <= min(tried) and not best['size'].startswith('1x')
        return smallest or best['parameters'] >= max(tried)

    def _group(self, variant, rows, at_edge):
        size = rows[0]['size']
        group = Group(variant, size, {row['seed']: row for row in rows if row['size'] == size})
        finite = {seed: row for seed, row in group.rows.items() if row['loss'] is not None}
        if not finite:
            raise NotMeasured
        if self.top_c:
            finite = {seed: self._under_top_c(row) for seed, row in finite.items()}
        return group._replace(problem=self._problem(group, at_edge), rows=finite)

    def _under_top_c(self, row):
        """The row with the loss of routing by top-C; of a model without routing, as it is."""
        gap = row['routing_gap'] or 0.0
        bits = row['bits_per_byte'] - gap * fit.bits_per_nat(self.study)
        return row | {'loss': row['loss'] - gap, 'bits_per_byte': bits}

    def _best_dense(self):
        """The best of all dense models, including `shallow`, by the first seed."""
        rows = self._rows('dense', 'shallow')
        tried = self._tried(rows)
        if len({row['size'] for row in tried}) < MIN_SIZES:
            raise NotMeasured
        best = min(tried, key=lambda row: row['loss'])
        mine = [row for row in rows if row['size'] == best['size']]
        return self._group('dense', mine, self._at_edge(rows, best))

    def _problem(self, group, at_edge):
        what, rows = f'{group.variant} {group.size}', group.rows.values()
        # Planned runs that differ from these only in their seed.
        stems = {row['run'].rpartition('-seed')[0] for row in rows}
        names = {f'{stem}-seed{seed}' for stem in stems for seed in self._planned_seeds}
        if names & set(self.study['diverged']) or any(row['loss'] is None for row in rows):
            return f'a run of {what} diverged'
        steps = min(row['steps'] for row in rows)
        if steps < MIN_STEPS:
            return f'{what} has {steps} steps, {MIN_STEPS} are needed'
        if at_edge:
            return f'{what} is the smallest or largest of the sizes that were run'
        return ''

    def gap(self, groups) -> str:
        """The first group whose loss by a causal rule is far from that under top-C; '' if none."""
        for group in groups:
            gap = max((row['routing_gap'] or 0.0 for row in group.rows.values()), key=abs)
            if abs(gap) >= INVALID_GAP:
                return f'{group.variant} {group.size} has a routing gap of {gap:.2f} nats'
        return ''

    def setting(self, groups) -> str:
        """Where and for how long the groups were trained."""
        study, rows = self.study, [row for group in groups for row in group.rows.values()]
        steps = sorted({row['steps'] for row in rows})
        span = f'{steps[0]}' if len(steps) == 1 else f'{steps[0]} to {steps[-1]}'
        budget = f'{budget_text(self.spec.budget)}, ' if study['kind'] == 'flops' else ''
        length, epochs = study['sequence_length'], max(row['epochs'] for row in rows)
        tokens = f'{study["batch_tokens"]} tokens in sequences of {length}, {study["corpus"]}'
        return f'{self.name}: {budget}{span} steps of {tokens}, at most {epochs:.2g} epochs'


def find_place(evidence: Evidence, spec: Spec) -> Place:
    """The place that was planned. Raises NotMeasured if no study has it, ValueError if two do."""
    names = [
        name
        for name, study in evidence.studies.items()
        if spec.study in name.split('/') and _has(study, spec)
    ]
    if len(names) > 1:
        right = 'must be one; give --workdir the directory of one of them'
        raise ValueError(f'{" and ".join(names)}: both are {spec.study}, {spec.text}; {right}')
    if not names:
        raise NotMeasured
    return Place(evidence, names[0], spec)


def _has(study, spec):
    """Whether a study has the budget and the size of a place."""
    if spec.budget not in study['budgets']:
        return False
    sizes = {row.get('size_of_mod', row['size']) for row in study['runs']}
    return not spec.size or spec.size in sizes


def own_place(evidence: Evidence, spec: Spec) -> Place:
    """The place of a claim in the only study there is, if that is not one of those planned.

    It is judged at its largest budget with the seeds it was started with; what is planned at one
    size, at the best size of MoD, or else of the first variant. Raises NotMeasured if its budget is
    in another unit or it has no runs.
    """
    ((name, study),) = evidence.studies.items()
    unit, budget = 'steps' if spec.steps else 'flops', study['budgets'][-1]
    best = [row for row in study['runs'] if row['at_best_size'] and row['budget'] == budget]
    best.sort(key=lambda row: row['variant'] != 'mod')
    if study['kind'] != unit or not best:
        raise NotMeasured
    own = {'study': name.split('/')[-1], 'flops': 0.0, 'steps': 0, 'seeds': len(study['seeds'])}
    size = best[0]['size'] if spec.size else ''
    return Place(evidence, name, spec._replace(**own | {unit: budget, 'size': size}))
