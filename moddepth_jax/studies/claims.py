"""The table of claims: what papers say (claims.toml), our number and spread, a verdict by rule."""

import dataclasses
import itertools
import pathlib
import tomllib

from moddepth_jax.studies import judges
from moddepth_jax.studies.judges import FAILS, HOLDS, NOTHING, UNDECIDED, Evidence, Outcome
from moddepth_jax.studies.run_numbers import numbers_within
from moddepth_jax.studies.statistics import NotMeasured
from moddepth_jax.studies.store import MEASURES_FILE, STUDY_FILE, read_json
from moddepth_jax.training.tables import markdown_rows

BEGIN = '<!-- claims: written by python -m launch.claims -->'
END = '<!-- end of claims -->'
DEPTH = 2  # directories between the one that is given and a study
JUDGES = {
    judge.__name__: judge
    for judge in (
        judges.lower_loss,
        judges.lowest_loss,
        judges.falling_loss,
        judges.equal_loss,
        judges.lower_loss_at_cost,
        judges.depth_not_width,
        judges.perplexity,
        judges.larger_gain,
        judges.counted_cost,
        numbers_within,
    )
}
_SOURCES = (
    'MoD is [Raposo et al. 2024](https://arxiv.org/abs/2404.02258), MoDA is '
    '[Zhu et al. 2026](https://arxiv.org/abs/2603.15619).'
)
_STUDY_FIELDS = (  # that the judges read
    'kind config budgets variants batch_tokens sequence_length corpus versions diverged runs'
)
_RUN_FIELDS = (
    'run variant size budget seed steps total_flops flops_per_step flops_per_forward parameters '
    'epochs loss bits_per_byte routing_gap routing'
)


@dataclasses.dataclass(frozen=True)
class Claim:
    """A row of claims.toml, which describes the fields."""

    id: str
    topic: str  # the part of the table that it stands in
    claim: str
    source: str
    paper: str
    rule: str
    needs: str = ''
    judge: str = ''  # name in JUDGES; '' if no study can settle it
    args: dict = dataclasses.field(default_factory=dict)

    def row(self, evidence: Evidence) -> dict[str, str]:
        """The row of claims.json: the fields up to `rule`, then those of `Outcome`."""
        try:
            if not self.judge:
                raise NotMeasured
            outcome = JUDGES[self.judge](evidence, **self.args)
        except NotMeasured:
            reason = 'not measured' if self.judge else 'out of reach of a study'
            reason += f'; needs {self.needs}' if self.needs else ''
            outcome = Outcome(NOTHING, NOTHING, UNDECIDED, reason, NOTHING)
        names = ('id', 'topic', 'claim', 'source', 'paper', 'rule')
        return {name: getattr(self, name) for name in names} | outcome._asdict()


def _read_claims():
    file = pathlib.Path(__file__).parent / 'claims.toml'
    content = tomllib.loads(file.read_text(encoding='utf-8'))
    for topic in content['topic']:
        for row in topic['claim']:
            for name in {'rule', 'needs'} & set(row):
                row[name] = row[name].format_map(content['phrases'])
            yield Claim(topic=topic['name'], **row)


CLAIMS = tuple(_read_claims())


def fill(evidence: Evidence) -> list[dict[str, str]]:
    """The row of each claim, all text."""
    return [claim.row(evidence) for claim in CLAIMS]


def read_evidence(directory, counted: dict[str, dict]) -> Evidence:
    """The studies in a directory, at most DEPTH levels below, and the measures of their runs.

    Raises ValueError for a directory that does not exist or a file that is not what it should be.
    """
    directory = pathlib.Path(directory)
    if not directory.is_dir():
        raise ValueError(f'--workdir={directory}: no such directory')
    studies, measures = {}, {}
    for level in range(DEPTH + 1):
        for file in sorted(directory.glob('*/' * level + STUDY_FILE)):
            place = file.parent.relative_to(directory).as_posix()
            name = place if level else directory.resolve().name
            studies[name] = read_json(file, f'{file}: missing')
            _check(file, studies[name], _STUDY_FIELDS)
            for number, row in enumerate(studies[name]['runs']):
                _check(file, row, _RUN_FIELDS, f'runs[{number}] ')
            if (file.parent / MEASURES_FILE).exists():
                measures[name] = read_json(file.parent / MEASURES_FILE, f'{file}: missing')
    return Evidence(studies, measures, counted)


def _check(file, content, names, place=''):
    missing = [name for name in names.split() if name not in content]
    if missing:
        right = 'must be what launch.isoflop writes'
        raise ValueError(f'{file}: {place}holds no {missing[0]!r}; {right}')


def counts(rows: list[dict]) -> str:
    """How many claims hold, do not hold, and cannot be decided."""
    verdicts = [row['verdict'] for row in rows]
    hold, fail, rest = map(verdicts.count, (HOLDS, FAILS, UNDECIDED))
    return f'{hold} hold, {fail} do not, {rest} are undecided here'


def markdown(rows: list[dict], evidence: Evidence) -> str:
    """The text between BEGIN and END: the rows by topic, details of each claim, the studies."""
    lines = [f'Of {len(rows)} claims: {counts(rows)}.', '', _SOURCES, '']
    for topic, group in itertools.groupby(rows, key=lambda row: row['topic']):
        cells = [
            (f'[{row["claim"]}](#{row["id"]})', row['paper'], row['ours'], f'**{row["verdict"]}**')
            for row in group
        ]
        heads = ('claim', "the paper's number", 'ours', 'verdict')
        lines += [f'## {topic}', '', *markdown_rows(heads, *cells), '']
    lines += ['## How each was judged', '']
    for row in rows:
        title = f'**{row["claim"]}** ({row["source"]}): {row["verdict"]}'
        lines += [f'<a id="{row["id"]}"></a>{title}', '']
        details = [name for name in ('setting', 'spread', 'rule', 'reason') if row[name] != NOTHING]
        lines += [f'- {name}: {_with_code(row[name])}' for name in details]
        lines.append('')
    return '\n'.join([*lines, '## Studies', '', *_studies(evidence)])


def _with_code(text):
    """The text, with the command at its end set as code."""
    before, command, after = text.partition('python -m ')
    return f'{before}`{command}{after}`' if command else text


def _studies(evidence):
    if not evidence.studies:
        return ['No study was found: every claim that needs runs says so.']
    rows, labels = [], {}
    for name, study in sorted(evidence.studies.items()):
        counts = len({row['run'] for row in study['runs']}), len(study.get('missing', []))
        versions = [study['versions'].get(key, '') for key in ('python', 'jax', 'device')]
        row = [f'`{name}`', f'`{study["config"]}`', study['corpus'], *map(str, counts), *versions]
        rows.append(row)
        labels |= {name: variant['label'] for name, variant in study['variants'].items()}
    heads = ('study', 'config', 'corpus', 'runs', 'missing', 'Python', 'JAX', 'device')
    names = '; '.join(f'`{name}` {label}' for name, label in labels.items())
    return [*markdown_rows(heads, *rows), '', f'Names of variants: {names}.']
