"""The place at which a claim is judged: one budget and size of one study, planned beforehand."""

from typing import NamedTuple

import numpy as np

from moddepth_jax.studies import fit
from moddepth_jax.studies.statistics import MIN_STEPS
from moddepth_jax.training import routing_gap

MIN_SIZES = 3  # dense sizes that must have run for the best one to count as optimal
BEST_DENSE = 'best dense'  # pseudo-variant: the best size of `dense` and `shallow`


class NotMeasured(Exception):
    """No study has the runs that a claim compares."""


class Evidence(NamedTuple):
    """The data by which claims are judged."""

    studies: dict[str, dict]  # content of study.json by study name
    measures: dict[str, dict]  # content of measures.json by study name
    counted: dict[str, dict]  # FLOPs by model shape, see `launch.counted`


class Spec(NamedTuple):
    """A place as planned in claims.toml."""

    study: str  # name of its directory
    seeds: int
    spread: float  # guessed standard deviation of paired differences, bits per byte
    flops: float = 0.0  # the budget of a study at equal FLOPs
    steps: int = 0  # the budget of a study at equal steps
    size: str = ''  # LAYERSxWIDTH; '': the best size of each variant

    @property
    def budget(self) -> float:
        """The budget in the unit of the study."""
        return self.flops or self.steps

    @property
    def text(self) -> str:
        """Study, size and budget, which distinguish the places of a claim."""
        return ', '.join(filter(None, (self.study.removeprefix('study-'), self.size, self._each)))

    @property
    def run(self) -> str:
        """The command that trains the runs, and their number and budget."""
        return f'make {self.study} ({self.seeds} seeds, {self._each} per run)'

    @property
    def _each(self):
        return f'{self.steps} steps' if self.steps else budget_text(self.flops)


def budget_text(flops: float) -> str:
    """Format FLOPs, such as '2e12 FLOPs'."""
    return f'{flops:.3g} FLOPs'.replace('e+', 'e')


class Group(NamedTuple):
    """The runs of one variant at a place, by seed."""

    variant: str
    size: str  # LAYERSxWIDTH
    rows: dict[int, dict]  # rows of study.json without diverged runs
    problem: str = ''  # why no verdict may rest on these runs

    def values(self, seeds, field: str = 'bits_per_byte') -> np.ndarray:
        """Return one number for each seed."""
        return np.array([self.rows[seed][field] for seed in seeds], float)

    def cost(self) -> float:
        """Return the FLOPs of a forward pass, a third of those of a training step."""
        return next(iter(self.rows.values()))['flops_per_forward']

    def text(self, seeds) -> str:
        """Format the bits per byte of each seed."""
        listed = ', '.join(f'{value:.4f}' for value in self.values(seeds))
        return f'{self.variant} {self.size}: {listed}'


class Place(NamedTuple):
    """One budget and size of one study. Only runs of the same place are compared."""

    evidence: Evidence
    name: str  # name of the study
    spec: Spec
    top_c: bool = False  # use the losses under top-C routing instead of a causal rule

    @property
    def study(self) -> dict:
        """The content of study.json."""
        return self.evidence.studies[self.name]

    @property
    def planned(self) -> int:
        """The number of seeds that judge according to the plan."""
        return self.spec.seeds - len(fit.choosing_seeds(self.study))

    def seeds(self, groups) -> list[int]:
        """Return the seeds that judge: planned seeds that all groups have."""
        chose = fit.choosing_seeds(self.study)
        judging = [seed for seed in self._planned_seeds if seed not in chose]
        return [seed for seed in judging if all(seed in group.rows for group in groups)]

    def group(self, variant: str) -> Group:
        """Return the runs of a variant, or of BEST_DENSE. Raises NotMeasured if there are none."""
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
        """Return one group per variant. With `one_size`, raises NotMeasured if sizes differ."""
        groups = [self.group(variant) for variant in variants]
        if one_size and len({group.size for group in groups if group.variant != 'shallow'}) > 1:
            raise NotMeasured
        return groups

    @property
    def _planned_seeds(self):
        return self.study['seeds'][: self.spec.seeds]

    def _rows(self, *variants):
        """The runs of some variants at this budget with planned seeds."""
        rows = [row for row in self.study['runs'] if row['budget'] == self.spec.budget]
        seeds = self._planned_seeds
        return [row for row in rows if row['variant'] in variants and row['seed'] in seeds]

    def _tried(self, rows):
        """The runs by which the size was chosen."""
        first = self.study['seeds'][0]
        return [row for row in rows if row['seed'] == first and row['loss'] is not None]

    def _at_edge(self, rows, best):
        """Whether a better size may lie beyond those tried. Nothing is shallower than 1 layer.

        If several sizes of the best one's width ran, it must lie between these: the learning rate
        may suit other widths less, so they show no limit to its depth.
        """
        tried = {row['size']: row['parameters'] for row in self._tried(rows)}
        width = best['size'].partition('x')[2]
        of_width = {size: n for size, n in tried.items() if size.partition('x')[2] == width}
        counts = (of_width if len(of_width) > 1 else tried).values() or [best['parameters']]
        smallest = best['parameters'] <= min(counts) and not best['size'].startswith('1x')
        return smallest or best['parameters'] >= max(counts)

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
        """The row with the losses under top-C routing; unchanged if the model has no routing."""
        gap = row['routing_gap'] or 0.0
        bits = row['bits_per_byte'] - gap * fit.bits_per_nat(self.study)
        return row | {'loss': row['loss'] - gap, 'bits_per_byte': bits}

    def _best_dense(self):
        """The best dense model, including `shallow`, by the loss of the first seed."""
        rows = self._rows('dense', 'shallow')
        tried = self._tried(rows)
        if len({row['size'] for row in tried}) < MIN_SIZES:
            raise NotMeasured
        best = min(tried, key=lambda row: row['loss'])
        mine = [row for row in rows if row['size'] == best['size']]
        return self._group('dense', mine, self._at_edge(rows, best))

    def _problem(self, group, at_edge):
        what, rows = f'{group.variant} {group.size}', group.rows.values()
        # All planned seeds of these runs.
        stems = {row['run'].rpartition('-seed')[0] for row in rows}
        names = {f'{stem}-seed{seed}' for stem in stems for seed in self._planned_seeds}
        if names & set(self.study['diverged']) or any(row['loss'] is None for row in rows):
            return f'a run of {what} diverged'
        steps = min(row['steps'] for row in rows)
        if steps < MIN_STEPS:
            return f'{what} has {steps} steps, {MIN_STEPS} are needed'
        if at_edge:
            return f'{what} is the smallest or largest of the sizes of its width that ran'
        return ''

    def gap(self, groups) -> str:
        """Describe the first group with a large gap between causal and top-C loss; '' if none."""
        for group in groups:
            gap = max((row['routing_gap'] or 0.0 for row in group.rows.values()), key=abs)
            if routing_gap.is_large(gap):
                return f'{group.variant} {group.size} has a routing gap of {gap:.2f} nats'
        return ''

    def setting(self, groups) -> str:
        """Describe the study, steps and data of the groups."""
        study, rows = self.study, [row for group in groups for row in group.rows.values()]
        steps = sorted({row['steps'] for row in rows})
        span = f'{steps[0]}' if len(steps) == 1 else f'{steps[0]} to {steps[-1]}'
        budget = f'{budget_text(self.spec.budget)}, ' if study['kind'] == 'flops' else ''
        length, epochs = study['sequence_length'], max(row['epochs'] for row in rows)
        tokens = f'{study["batch_tokens"]} tokens in sequences of {length}, {study["corpus"]}'
        return f'{self.name}: {budget}{span} steps of {tokens}, at most {epochs:.2g} epochs'


def find_place(evidence: Evidence, spec: Spec) -> Place:
    """Find a planned place. Raises NotMeasured if no study has it, ValueError if several do."""
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
    """Return the place of a claim in the user's own study, which claims.toml does not plan.

    It is the largest budget with the seeds of that study. A claim that is planned at a fixed size
    is judged at the best size of MoD, or else of the first variant. Raises NotMeasured if the unit
    of the budget differs or if there are no runs.
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
