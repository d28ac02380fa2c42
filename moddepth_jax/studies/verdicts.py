"""The table of claims: what papers say, our number with its spread, and a verdict by rule."""

import json
import pathlib

from moddepth_jax.studies import measured_claims, mod_claims, moda_claims, routing_claims
from moddepth_jax.studies.claims import Evidence
from moddepth_jax.studies.store import STUDY_FILE
from moddepth_jax.studies.study_measures import MEASURES_FILE

CLAIMS = (
    *mod_claims.CLAIMS,
    *routing_claims.CLAIMS,
    *moda_claims.EXPERT_CLAIMS,
    *moda_claims.CLAIMS,
    *measured_claims.CLAIMS,
)
DEPTH = 2  # directories between the one that is given and a study
# What the judges read.
_OF_STUDY = (
    *('kind', 'config', 'budgets', 'variants', 'batch_tokens', 'sequence_length', 'corpus'),
    *('versions', 'diverged', 'runs'),
)
_OF_RUN = (
    *('run', 'variant', 'size', 'budget', 'seed', 'steps', 'total_flops', 'flops_per_step'),
    *(
        'flops_per_forward',
        'parameters',
        'epochs',
        'loss',
        'bits_per_byte',
        'routing_gap',
        'routing',
    ),
)


def read_evidence(directory, counted: dict[str, dict]) -> Evidence:
    """The studies in a directory and what was measured on their runs.

    Args:
      directory: a study's, or one that holds studies at most DEPTH levels below. A study is called
        by its path from there.
      counted: FLOPs of shapes, see `Evidence`.

    Raises:
      ValueError: no such directory, or a file in it that is not what its name says.
    """
    directory = pathlib.Path(directory)
    if not directory.is_dir():
        raise ValueError(f'--workdir={directory}: no such directory')
    studies, measures = {}, {}
    for level in range(DEPTH + 1):
        for file in sorted(directory.glob('*/' * level + STUDY_FILE)):
            place = file.parent.relative_to(directory).as_posix()
            name = place if level else directory.resolve().name
            studies[name] = _read(file, _OF_STUDY)
            for number, row in enumerate(studies[name]['runs']):
                _check(file, row, _OF_RUN, f'runs[{number}] ')
            if (file.parent / MEASURES_FILE).exists():
                measures[name] = _read(file.parent / MEASURES_FILE, ())
    return Evidence(studies, measures, counted)


def _read(file, names):
    try:
        content = json.loads(file.read_text(encoding='utf-8'))
    except (ValueError, OSError) as error:
        raise ValueError(f'{file}: unreadable; must be JSON ({error})') from None
    _check(file, content, names)
    return content


def _check(file, content, names, place=''):
    right = 'must be what launch.isoflop writes'
    if not isinstance(content, dict):
        raise ValueError(f'{file}: {place}{type(content).__name__}; {right}')
    missing = [name for name in names if name not in content]
    if missing:
        raise ValueError(f'{file}: {place}holds no {missing[0]!r}; {right}')


def fill(evidence: Evidence) -> list[dict[str, str]]:
    """A row for each of CLAIMS, all text: the fields of Claim up to `rule`, those of Outcome."""
    return [claim.row(evidence) for claim in CLAIMS]
