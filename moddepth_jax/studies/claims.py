"""The table of claims: the papers' claims (claims.toml), our numbers, verdicts by fixed rules."""

import dataclasses
import itertools
import pathlib
import re
import tomllib
from typing import NamedTuple

import numpy as np

from moddepth_jax.studies import fit, judges, places
from moddepth_jax.studies.folders import MEASURES_FILE, find_studies
from moddepth_jax.studies.judges import FAILS, HOLDS, NO_VALUE, UNDECIDED, Finding
from moddepth_jax.studies.measures import measures_of
from moddepth_jax.studies.places import Evidence, NotMeasured, Spec
from moddepth_jax.studies.run_numbers import NUMBERS, numbers_within
from moddepth_jax.studies.statistics import (
    LEVEL,
    MIN_SEEDS,
    MOST_SEEDS,
    POWER,
    detectable,
    holm,
    interval,
    seeds_to_decide,
)
from moddepth_jax.studies.store import read_json
from moddepth_jax.training.tables import markdown_rows

BEGIN = '<!-- claims: written by python -m launch.claims -->'
END = '<!-- end of claims -->'
AT_A_PLACE = {  # judges that compare the runs of one place
    judge.__name__: judge
    for judge in (
        judges.lower_loss,
        judges.lowest_loss,
        judges.rising_with_capacity,
        judges.falling_difference,
        judges.depth_not_width,
        judges.perplexity,
        judges.larger_gain,
        numbers_within,
    )
}
COUNTED = {judge.__name__: judge for judge in (judges.counted_cost, judges.counted_saving)}
JUDGES = AT_A_PLACE | COUNTED
OF_A_DIFFERENCE = ('lower_loss', 'lowest_loss')  # judges for which Spec.spread is a guess
_SOURCES = (
    'MoD is [Raposo et al. 2024](https://arxiv.org/abs/2404.02258), MoDA is '
    '[Zhu et al. 2026](https://arxiv.org/abs/2603.15619).'
)
_DETAILS = {  # fields of a row by their names on the page
    'setting': 'setting',
    'values by seed': 'spread',
    'rule': 'rule',
    'reason': 'reason',
    'power': 'power',
}
_STUDY_FIELDS = (  # that the judges read
    'kind config budgets sizes seeds variants tuning batch_tokens sequence_length corpus versions '
    'diverged runs'
)
_RUN_FIELDS = (
    'run variant size budget seed at_best_size steps total_flops flops_per_step flops_per_forward '
    'parameters epochs loss bits_per_byte routing_gap routing state_sha256'
)


@dataclasses.dataclass(frozen=True)
class Claim:
    """A row of claims.toml, which documents the fields, at one of its places."""

    id: str
    topic: str  # section of the table
    claim: str
    source: str
    paper: str
    rule: str
    needs: str = ''
    judge: str = ''  # key of JUDGES; '' if no study can settle it
    args: dict = dataclasses.field(default_factory=dict)
    spec: Spec | None = None  # the place; None if it needs no run, or cannot be run here
    again: bool = False  # whether an earlier row judges the same claim at another place

    def find(self, evidence: Evidence) -> Finding:
        """Return what the evidence says. Raises NotMeasured with the missing command."""
        try:
            if self.judge in COUNTED:
                return COUNTED[self.judge](evidence, **self.args)
            if self.spec:
                return self._find_at(self._place(evidence))
        except NotMeasured:
            pass
        reason = 'not measured' if self.judge else 'beyond these studies'
        raise NotMeasured(f'{reason}; needs {self.spec.run if self.spec else self.needs}')

    def _find_at(self, place):
        """Judge by the causal losses and, if a routing gap is large, also by those under top-C."""
        judge = AT_A_PLACE[self.judge]
        finding = judge(place, **self.args)
        if not finding.gap:
            return finding
        other = judge(place._replace(top_c=True), **self.args)
        ours = f'{finding.ours}; under top-C {other.ours}'
        return dataclasses.replace(finding, ours=ours, under_top_c=other.samples)

    def _place(self, evidence):
        """The planned place, or one in the user's own study, where each claim is judged once."""
        if not _is_own(evidence):
            return places.find_place(evidence, self.spec)
        if self.again:
            raise NotMeasured
        return places.own_place(evidence, self.spec)

    @property
    def of_measures(self) -> bool:
        """Whether it is judged by numbers in measures.json."""
        return any(NUMBERS[name].measured for name in self.args.get('numbers', ()))

    def power(self, finding: Finding | None, level: float) -> str:
        """Describe the difference that this row can detect at the strictest level."""
        if finding and finding.samples and len(finding.samples[0].values) >= MIN_SEEDS:
            spreads, seeds = [sample.spread for sample in finding.samples], finding.planned
            known = 'measured'
        elif self.spec and self.judge in OF_A_DIFFERENCE:
            spreads, known = [self.spec.spread], 'guessed'
            seeds = finding.planned if finding else self.spec.seeds - (not self.spec.size)
        else:
            return NO_VALUE
        if not seeds:
            return NO_VALUE
        counts = finding.counts if finding else 'seeds'
        shown = [f'{detectable(spread, seeds, level):.2g}' for spread in spreads]
        listed = ', '.join(f'{spread:.2g}' for spread in spreads)
        return (
            f'{seeds} {counts} detect a difference of {", ".join(shown)} with {POWER:.0%} power at '
            f'p < {level:.1g}, for a standard deviation of {listed} ({known})'
        )


def _planned(evidence):
    """Whether the evidence contains a study that claims.toml plans."""
    return not STUDIES.isdisjoint(part for name in evidence.studies for part in name.split('/'))


def _is_own(evidence):
    """Whether the evidence is one study of the user's own."""
    return len(evidence.studies) == 1 and not _planned(evidence)


def _read_claims():
    file = pathlib.Path(__file__).parent / 'claims.toml'
    content = tomllib.loads(file.read_text(encoding='utf-8'))
    specs = {name: Spec(**fields) for name, fields in content['place'].items()}
    for topic in content['topic']:
        for row in topic['claim']:
            for name in {'rule', 'needs'} & set(row):
                row[name] = row[name].format_map(content['phrases'])
            at = row.pop('at', [])
            fields = row | {'topic': topic['name']}
            for number, name in enumerate(at or [None]):
                more = {'spec': specs[name]} if name else {}
                if number:
                    more |= {'id': f'{row["id"]}_at_{name}', 'again': True}
                if len(at) > 1:
                    more['claim'] = f'{row["claim"]} ({specs[name].text})'
                yield Claim(**fields | more)


CLAIMS = tuple(_read_claims())
STUDIES = {claim.spec.study for claim in CLAIMS if claim.spec}


class Judged(NamedTuple):
    """A claim, what was found for it, and its p-value among all claims."""

    claim: Claim
    finding: Finding | None
    needs: str = ''  # what is missing if there is no finding
    p: float = 1.0  # smallest level at which the finding decides the claim, without correction
    adjusted: float = 1.0  # p after Holm's correction
    level: float = LEVEL  # the level that p must not exceed

    @property
    def compared(self) -> bool:
        """Whether all planned seeds were run and no problem forbids a verdict."""
        found = self.finding
        return bool(found and found.samples and not found.problem and found.missing <= 0)

    @property
    def verdict(self) -> str:
        """The verdict by the rule of docs/claims.md."""
        if self.finding and self.finding.verdict:
            return self.finding.verdict if not self.finding.problem else UNDECIDED
        if not self.compared or self.adjusted > LEVEL:
            return UNDECIDED
        return HOLDS if self.finding.decide().holds else FAILS


def judge(evidence: Evidence) -> list[Judged]:
    """Judge all claims, with Holm's correction over all claims that rest on seeds.

    The family is every claim with a place even if its runs are missing, so that no verdict is lost
    when another study finishes. In the user's own study it is the claims that can be compared.
    """
    found = []
    for claim in CLAIMS:
        try:
            found.append(Judged(claim, claim.find(evidence)))
        except NotMeasured as needs:
            found.append(Judged(claim, None, str(needs)))
    tested = [index for index, each in enumerate(found) if each.compared]
    p_values = [found[index].finding.decide().p for index in tested]
    adjusted, levels = holm(p_values, _family(evidence, found))
    for index, p, of_all, level in zip(tested, p_values, adjusted, levels, strict=True):
        found[index] = found[index]._replace(p=p, adjusted=of_all, level=level)
    return found


def _family(evidence, found):
    """The number of claims that rest on seeds."""
    if _planned(evidence) or not evidence.studies:
        return sum(claim.spec is not None for claim in CLAIMS)
    return max(1, sum(bool(each.finding and each.finding.samples) for each in found))


def fill(judged: list[Judged], evidence: Evidence) -> list[dict[str, str]]:
    """Return the rows of claims.json, all text: fields of `Claim`, then what was found."""
    strictest = LEVEL / _family(evidence, judged)
    return [_row(each, strictest, _is_own(evidence)) for each in judged]


def _row(judged, strictest, is_own):
    claim, finding = judged.claim, judged.finding
    names = ('id', 'topic', 'claim', 'source', 'paper', 'rule')
    row = {name: getattr(claim, name) for name in names}
    if is_own and claim.spec:  # the title may name a place that claims.toml plans
        row['claim'] = row['claim'].removesuffix(f' ({claim.spec.text})')
    row |= {name: getattr(finding, name, NO_VALUE) for name in ('ours', 'spread', 'setting')}
    row |= {'verdict': judged.verdict, 'reason': _reason(judged, strictest)}
    return row | {'power': claim.power(finding, strictest)}


def _reason(judged, strictest):
    """The reason for a verdict, or what is needed for one."""
    finding = judged.finding
    if finding is None:
        return judged.needs
    if finding.problem or finding.reason:
        return finding.problem or finding.reason
    if finding.missing > 0:
        known = finding.planned - finding.missing
        done = 'run and measured' if judged.claim.of_measures else 'run'
        return f'{known} of the {finding.planned} planned seeds were {done}'
    if not finding.agree:
        return f'{finding.gap}, and the losses under top-C favour the other verdict'
    found, level = f'p = {judged.p:.2g}', f"Holm's threshold is {judged.level:.2g}"
    if finding.gap:
        found += f' (the larger of two: {finding.gap}, so the losses under top-C must agree)'
    if judged.adjusted <= LEVEL:
        return f'{found}; {level}'
    alone = 'decided on its own but not' if judged.p <= LEVEL else 'decided neither on its own nor'
    return f'{found}, {alone} among all claims ({level}); {_would_decide(finding, strictest)}'


def _would_decide(finding, strictest):
    """The seeds and FLOPs that would decide a difference as large as the one found."""
    needed = [seeds_to_decide(finding.samples, strictest)]
    if finding.under_top_c:
        needed.append(seeds_to_decide(finding.under_top_c, strictest))
    if None in needed:
        return f'even {MOST_SEEDS:,} {finding.counts} would not decide a difference this small'
    seeds = max(needed)
    if not finding.flops:
        return f'{seeds} {finding.counts} would decide a difference of this size'
    flops = f'{max(1, seeds - finding.planned) * finding.flops:.1g}'.replace('e+', 'e')
    return f'{seeds} seeds would decide a difference of this size ({flops} more FLOPs)'


def read_evidence(directory, counted: dict[str, dict]) -> Evidence:
    """Read the studies in and below a directory, and the measures of their runs.

    Measures of other weights than those of the run are left out. Raises ValueError if there is no
    study, if there are several but none is planned, or if a file lacks a field.
    """
    directory, studies, measures = pathlib.Path(directory), {}, {}
    for file in find_studies(directory):
        name = pathlib.PurePath(directory.resolve().name) / file.parent.relative_to(directory)
        name = name.as_posix()
        studies[name] = read_json(file, f'{file}: missing')
        _check(file, studies[name], _STUDY_FIELDS)
        for number, row in enumerate(studies[name]['runs']):
            _check(file, row, _RUN_FIELDS, f'runs[{number}] ')
        if (file.parent / MEASURES_FILE).exists():
            found = read_json(file.parent / MEASURES_FILE, f'{file}: missing')
            measures[name] = measures_of(studies[name], found)
    evidence = Evidence(studies, measures, counted)
    if len(studies) > 1 and not _planned(evidence):
        found = f'{len(studies)} studies, none of which claims.toml plans'
        raise ValueError(f'--workdir={directory}: {found}; give the directory of one of them')
    return evidence


def _check(file, content, names, place=''):
    missing = [name for name in names.split() if name not in content]
    if missing:
        right = 'must be what launch.isoflop writes'
        raise ValueError(f'{file}: {place}holds no {missing[0]!r}; {right}')


def summary(rows: list[dict]) -> str:
    """Count the claims that hold, do not hold, and are undecided."""
    verdicts = [row['verdict'] for row in rows]
    hold, fail, rest = map(verdicts.count, (HOLDS, FAILS, UNDECIDED))
    return f'Of {len(rows)} claims: {hold} hold, {fail} do not, {rest} are undecided.'


def markdown(rows: list[dict], judged: list[Judged], evidence: Evidence) -> str:
    """Return the text between BEGIN and END: rows by topic, details of each claim, studies."""
    family = _family(evidence, judged)
    counted = sum(bool(one.verdict != UNDECIDED and one.finding.verdict) for one in judged)
    decided = sum(row['verdict'] != UNDECIDED for row in rows)
    lines = [
        f'{summary(rows)} {family} of them rest on seeds. Of the verdicts, '
        f'{decided - counted} rest on seeds and {counted} on counted FLOPs.',
        *('', _SOURCES, ''),
    ]
    for topic, group in itertools.groupby(rows, key=lambda row: row['topic']):
        cells = [
            (f'[{row["claim"]}](#{row["id"]})', row['paper'], row['ours'], f'**{row["verdict"]}**')
            for row in group
        ]
        heads = ('claim', "the paper's number", 'ours', 'verdict')
        lines += [f'## {topic}', '', *markdown_rows(heads, *cells), '']
    lines += ['## How each claim was judged', '']
    for row in rows:
        title = f'**{row["claim"]}** ({row["source"]}): {row["verdict"]}'
        lines += [f'<a id="{row["id"]}"></a>{title}', '']
        details = {name: row[field] for name, field in _DETAILS.items() if row[field] != NO_VALUE}
        lines += [f'- {name}: {_with_code(text)}' for name, text in details.items()]
        lines.append('')
    lines += ['## What a number of seeds can detect', '', *_seeds(family), '']
    return '\n'.join([*lines, '## Studies', '', *_studies(evidence)])


def _seeds(family):
    """Return a table of the differences, in standard deviations, that seeds can detect."""
    seeds = (3, 4, 6, 8, 10, 12, 16)
    levels = {'a single claim': LEVEL, f'the strictest of {family}': LEVEL / family}
    rows = [
        [f'{name}, p < {level:.1g}', *(f'{detectable(1.0, n, level):.2g}' for n in seeds)]
        for name, level in levels.items()
    ]
    text = (
        f'The difference detected with {POWER:.0%} power, in standard deviations of the paired '
        'differences, by the number of seeds that judge:'
    )
    return [text, '', *markdown_rows(('', *map(str, seeds)), *rows)]


def _with_code(text):
    """Return the text with its command in backticks."""
    return re.sub(r'python -m .*|make study[\w-]*', r'`\g<0>`', text)


def _studies(evidence):
    if not evidence.studies:
        return ['No study was found, so no claim that needs runs is judged.']
    rows, labels = [], {}
    for name, study in sorted(evidence.studies.items()):
        counts = len({row['run'] for row in study['runs']}), len(study.get('missing', []))
        versions = [study['versions'].get(key, '') for key in ('python', 'jax', 'device')]
        row = [f'`{name}`', f'`{study["config"]}`', study['corpus'], *map(str, counts), *versions]
        rows.append(row)
        labels |= {name: variant['label'] for name, variant in study['variants'].items()}
    heads = ('study', 'config', 'corpus', 'runs', 'missing', 'Python', 'JAX', 'device')
    names = '; '.join(f'`{name}` {label}' for name, label in labels.items())
    losses = [line for name in sorted(evidence.studies) for line in _losses(evidence, name)]
    return [*markdown_rows(heads, *rows), '', f'Names of variants: {names}.', *losses]


def _losses(evidence, name):
    """A table of the variants of a study at its largest budget by loss, if it has enough seeds."""
    study = evidence.studies[name]
    if len(study['seeds']) <= MIN_SEEDS:
        return []
    budget, reference, rows = study['budgets'][-1], fit.reference(study), []
    for variant, differences in fit.paired_differences(study, budget).items():
        of_variant = fit.select(study, variant, budget)
        losses = fit.judging(of_variant)
        if not losses:
            continue
        size, mean = fit.best(of_variant).size, np.mean([*losses.values()])
        known = differences and variant != reference
        difference = f'{interval([differences]):+.3f}' if known else ''
        rows.append((f'`{variant}`', size, str(len(losses)), f'{mean:.3f}', difference))
    rows.sort(key=lambda row: row[3])
    each = f'{budget:g} steps' if study['kind'] == 'steps' else places.budget_text(budget)
    heads = ('variant', 'size', 'seeds', 'bits per byte', f'minus `{reference}`, in pairs')
    return ['', f'**{name}**, {each}', '', *markdown_rows(heads, *rows)]
