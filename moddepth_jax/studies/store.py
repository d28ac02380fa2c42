"""Reads and writes the directory of a study: plan, finished runs, study.json, measures.json."""

import dataclasses
import hashlib
import json
import math
import pathlib
from typing import NamedTuple

import numpy as np
from flax import traverse_util

from moddepth_jax.data import directory as directory_lib
from moddepth_jax.data.corpus import load_corpus
from moddepth_jax.data.directory import write_atomically
from moddepth_jax.hparams import Hparams
from moddepth_jax.model.flops import train_step_flops
from moddepth_jax.studies.folders import (
    MEASURES_FILE,
    PLAN_FILE,
    RUNS,
    STUDY_FILE,
    check_folder,
)
from moddepth_jax.studies.plan import (
    DIVERGED,
    VARIANTS,
    Plan,
    PlannedRun,
    Study,
    width,
)
from moddepth_jax.training.metrics import read_metrics, replace_nonfinite
from moddepth_jax.training.run_dir import OLDER_RUNS, check_config, check_source, may_differ
from moddepth_jax.training.summary import read_summary

DIVERGED_FILE = 'diverged.json'  # in the directory of a run that diverged, instead of a summary
CURVE_POINTS = 20
PLAN_FIELDS = ('budgets', 'sizes', 'variants', 'seeds', 'learning_rates')  # of a Study
MAY_GROW = ('budgets', 'variants', 'seeds')  # fields of a plan to which a later start may add
MAY_DIFFER = (  # knobs that may differ from those of a finished run: they change rounding at most
    'report',
    'model.remat',
    'data.log_windows',
    'training.log_every',
    'training.checkpoint_every',
    'training.keep_checkpoints',
    'training.max_unsharded',
    'training.compilation_cache',
    'evaluation.every',
    'evaluation.num_batches',
)


def plan_content(description: dict, study: Study) -> dict:
    """Return the content of plan.json: the description and the fields of the study."""
    return description | {name: getattr(study, name) for name in PLAN_FIELDS}


def open_study(directory, plan: dict):
    """Create the directory of a study, or check that it belongs to the same `plan_content`.

    Raises ValueError, before anything is written, if the directory holds something else, or a plan
    that differs by more than additions to the fields of MAY_GROW.
    """
    directory = pathlib.Path(directory)
    file, plan, stored = directory / PLAN_FILE, json.loads(json.dumps(plan)), None
    check_folder(directory)
    if file.exists():
        stored = read_json(file, '')
        _check_grown(stored, plan, file, '--workdir')
    try:
        (directory / RUNS).mkdir(parents=True, exist_ok=True)
        if stored != plan:
            write_atomically(file, json.dumps(plan, indent=2) + '\n')
    except OSError as error:
        right = 'must be a directory that can be written'
        raise ValueError(f'--workdir={directory}: {error.strerror}; {right}') from None


def _check_grown(stored, plan, file, flag):
    """Raise ValueError if `plan` differs from that in `file` by more than additions."""
    for name in stored | plan:
        old, new = stored.get(name), plan.get(name)
        before = old or []
        grown = name in MAY_GROW and isinstance(before, list)
        grown = grown and all(item in (new or ()) for item in before)
        if name == 'seeds':  # the first seed chooses sizes and learning rates
            grown = grown and before[:1] == new[:1]
        if old != new and not grown:
            more = ' (values may only be added)' if name in MAY_GROW else ''
            found = f'{name} is {old!r} in its {file.name} and {new!r} in this study{more}'
            raise ValueError(f'{flag}={file.parent}: {found}; use another {flag}')
    least, tuned = min(plan['budgets']), min(stored.get('budgets') or [math.inf])
    if least < tuned < math.inf and len(stored.get('learning_rates') or ()) > 1:
        found = f'budget {least:g} is below {tuned:g}, at which the learning rates were tuned'
        raise ValueError(f'{flag}={file.parent}: {found}; use another {flag}')


def read_study(directory) -> dict:
    """Return the content of study.json. Raises ValueError if it is missing or unreadable."""
    missing = f'--workdir={directory}: no {STUDY_FILE} in it'
    return read_json(pathlib.Path(directory) / STUDY_FILE, missing)


def read_json(file, missing: str) -> dict:
    """Return the JSON object in a file. Raises ValueError, `missing`, if there is none."""
    content = directory_lib.read_json(file, 'must be JSON of launch.isoflop')
    if content is None:
        raise ValueError(f'{missing}; python -m launch.isoflop makes one')
    return content


def run_directory(directory, name: str) -> pathlib.Path:
    """Return the directory of a run of the study."""
    return pathlib.Path(directory) / RUNS / name


def final_loss(directory, name: str) -> float | None:
    """Return the held-out loss in nats per token, DIVERGED, or None if the run is not finished."""
    run = run_directory(directory, name)
    if (run / DIVERGED_FILE).exists():
        return DIVERGED
    if (summary := read_summary(run)) is None:
        return None
    loss = summary['eval'].get('loss')
    return DIVERGED if loss is None else loss


class EarlierRuns(NamedTuple):
    """Finished runs in a folder of results, whose own directories may be gone."""

    content: dict  # of study.json
    losses: dict[str, float]  # held-out nats per token, or DIVERGED, by run name
    rows: dict[str, dict]  # rows of study.json, by run name
    measures: dict[str, dict]  # content of measures.json


NO_RESULTS = EarlierRuns({}, {}, {}, {})


def read_earlier(results, description: dict, plan: Plan) -> EarlierRuns:
    """Read the finished runs from a folder written by `copy_results`: they are not trained again.

    Returns NO_RESULTS if `results` is None or holds no study. Raises ValueError if that study has
    another `description`, or if the plan differs from its plan by more than additions to the fields
    of MAY_GROW, or has no place for one of its runs.
    """
    if results is None or not (file := pathlib.Path(results) / STUDY_FILE).exists():
        return NO_RESULTS
    content = read_json(file, '')
    new = json.loads(json.dumps(plan_content(description, plan.study)))
    old = {name: content.get(name) for name in new} | {'variants': [*content.get('variants', ())]}
    tried = [entry['learning_rate'] for entry in content.get('tuning', ())]
    old['learning_rates'] = sorted({*(tried or content.get('learning_rates', {}).values())})
    _check_grown(old, new | {'learning_rates': sorted(new['learning_rates'])}, file, '--results')
    losses = _losses(content)
    _check_kept(losses, plan.possible_names(), results)
    rows = {row['run']: row for row in content['runs']}
    measures = directory_lib.read_json(file.with_name(MEASURES_FILE), 'remove it') or {}
    return EarlierRuns(content, losses, rows, measures)


def _losses(content):
    """The losses of the finished runs in study.json by name, DIVERGED for those that diverged."""
    losses = {entry['run']: entry['loss'] for entry in (*content['tuning'], *content['runs'])}
    losses = {name: loss for name, loss in losses.items() if loss is not None}
    return losses | dict.fromkeys(content['diverged'], DIVERGED)


def _check_kept(earlier, names, results):
    """Raise ValueError if `names` lack one of the earlier runs, which would be lost."""
    if lost := sorted(earlier.keys() - names):
        found = f'{len(lost)} of its runs, such as {lost[0]}, are not in this study'
        raise ValueError(f'--results={results}: {found}; use another --results')


def states_of(study):
    """Return the digests of the weights in study.json by run name, None for runs that diverged."""
    found = {row['run']: row['state_sha256'] for row in study['runs']}
    return found | dict.fromkeys(study['diverged'])


def _compare_state(directory, name, old, new, results):
    """Raise ValueError if `state_sha256` of a run differs; it is None if the run diverged."""
    if old != new:
        digests = [(digest or 'diverged')[:8] for digest in (old, new)]
        found = f'{name} has other weights there (state_sha256 {digests[0]}, not {digests[1]})'
        right = (
            f'remove {run_directory(directory, name)} to keep that run, or use another --results'
        )
        raise ValueError(f'--results={results}: {found}; {right}')


def settings_sha256(hparams: Hparams) -> str:
    """Return a digest of all knobs on which the result of a run depends.

    Without the seed and the learning rate, by which runs of a model differ, and without MAY_DIFFER.
    A knob at the value that older runs get is left out, so that a new knob changes no digest.
    """
    knobs = traverse_util.flatten_dict(json.loads(json.dumps(dataclasses.asdict(hparams))), sep='.')
    free = (*MAY_DIFFER, 'seed', 'optimizer.learning_rate')
    knobs = {
        name: value
        for name, value in knobs.items()
        if not may_differ(name, free) and (name not in OLDER_RUNS or value != OLDER_RUNS[name])
    }
    return hashlib.sha256(json.dumps(knobs, sort_keys=True).encode()).hexdigest()


def models_without_digest(earlier: EarlierRuns) -> set[str]:
    """Return the models with earlier runs but no `settings_sha256`, which older versions lack."""
    models = {name.rpartition('-lr')[0] for name in earlier.rows}
    return models - earlier.content.get('settings_sha256', {}).keys()


def check_earlier(earlier: EarlierRuns, run: PlannedRun, hparams: Hparams, steps: int):
    """Raise ValueError if earlier runs of this model and budget differ from the plan.

    Steps, FLOPs and the data source are compared, and the digest of the knobs, except for
    `models_without_digest`.
    """
    old = earlier.content.get('settings_sha256', {}).get(run.model_name)
    if old not in (None, new := settings_sha256(hparams)):
        found = f'{run.model_name} has other knobs there (settings_sha256 {old[:8]}, not {new[:8]})'
        raise ValueError(f'--results: {found}; use another folder')
    planned = run.variant, run.trained, run.budget
    rows = [
        row
        for row in earlier.rows.values()
        if (row['variant'], row['size'], row['budget']) == planned
    ]
    new = rows and {
        'steps': steps,
        'flops_per_step': train_step_flops(hparams),
        'corpus': hparams.data.source,
    }
    for row in rows:
        for name, value in new.items():
            old = (row | earlier.content)[name]
            if old != value:
                found = f'{row["run"]} has {name} {old!r} there and {value!r} in this study'
                raise ValueError(f'--results: {found}; use another folder')


class Progress(NamedTuple):
    """Progress of a study."""

    runs: list[PlannedRun]  # the runs that follow from the known losses
    losses: dict[str, float]  # losses of the finished runs, by name
    missing: list[PlannedRun]  # runs that are not finished, without duplicates
    complete: bool  # whether `runs` holds all runs of the study


def progress(directory, plan: Plan, earlier: EarlierRuns = NO_RESULTS) -> Progress:
    """Read the progress of a study from its directory; `earlier` runs count as finished."""
    losses, runs, complete = {}, [], False
    while True:
        known = {run.name: final_loss(directory, run.name) for run in runs}
        known = {k: earlier.losses.get(k) if v is None else v for k, v in known.items()}
        known = {name: loss for name, loss in known.items() if loss is not None}
        if runs and len(known) == len(losses):
            missing = {run.name: run for run in runs if run.name not in losses}
            return Progress(runs, losses, list(missing.values()), complete)
        losses = known
        runs, complete = plan.runs(losses)


def check_run(directory, run: PlannedRun, hparams: Hparams, source: str | None = None):
    """Raise ValueError if a finished run has another config, or other code, than the planned one.

    The code is that which `source`, the file of --config, defines; with None it is not compared.
    """
    place = run_directory(directory, run.name)
    check_config(place, dataclasses.asdict(hparams), MAY_DIFFER)
    check_source(place, source, hparams)


def check_text(directory, plan: Plan, hparams_of, earlier: EarlierRuns = NO_RESULTS):
    """Raise ValueError if the missing runs would read another text than the finished ones did.

    The text of `stdlib` and `python_environment` depends on the versions of Python and packages.
    """
    found = progress(directory, plan, earlier)
    if not found.missing:
        return
    new = load_corpus(hparams_of(found.missing[0]).data).sha256
    texts = {'--results': earlier.content.get('corpus_sha256')}
    for run in found.runs:
        if summary := read_summary(place := run_directory(directory, run.name)):
            texts[place] = summary['corpus_sha256']
    for place, old in texts.items():
        if old and old != new:
            read = f'another text was read there (corpus_sha256 {old[:8]}, here {new[:8]})'
            right = 'use the same versions of Python and packages, or another folder'
            raise ValueError(f'{place}: {read}; {right}')


def check_state(directory, name: str, earlier: EarlierRuns, results):
    """Raise ValueError if a finished run has other weights than the one of that name in results."""
    if name in earlier.rows:
        summary = read_summary(run_directory(directory, name)) or {}
        old, new = earlier.rows[name]['state_sha256'], summary.get('state_sha256')
        _compare_state(directory, name, old, new, results)


def collect(
    directory, plan: Plan, description: dict, hparams_of, earlier: EarlierRuns = NO_RESULTS
) -> dict:
    """Return the content of study.json: the description and the finished runs (docs/isoflop.md).

    It does not depend on when, where or in how many starts the runs were trained. A model with
    earlier runs of unknown knobs gets no digest. Raises ValueError if a run differs from the plan,
    or if runs read different texts.
    """
    runs, losses, to_train, complete = progress(directory, plan, earlier)
    missing = {run.name for run in to_train}
    settings = dict(earlier.content.get('settings_sha256', {}))
    known = settings.keys() | models_without_digest(earlier)
    for run in runs:
        if run.model_name not in known and final_loss(directory, run.name) is not None:
            settings[run.model_name] = settings_sha256(hparams_of(run))
    diverged = {name for name, loss in losses.items() if loss == DIVERGED}
    rows, sources = [], []  # dicts with corpus_sha256 and versions
    for run in runs[len(plan.tuning()) :]:
        if run.name in missing | diverged:
            continue
        hparams, place = hparams_of(run), run_directory(directory, run.name)
        if (summary := read_summary(place)) is None:
            sources.append(earlier.content)
            row, old = _row(run, hparams.model), earlier.rows[run.name]
            known = (*row, 'size_of_mod')
            rows.append(row | {name: old[name] for name in old if name not in known})
        else:
            check_run(directory, run, hparams)
            sources.append(summary)
            curve = training_curve(read_metrics(place), CURVE_POINTS)
            rows.append(_row(run, hparams.model) | _of_summary(hparams.model, summary, curve))
    rows.sort(key=_order)
    if len(texts := {source['corpus_sha256'] for source in sources}) > 1:
        found = f'runs read different texts, with SHA-256 {" and ".join(sorted(texts))}'
        raise ValueError(f'--results: {found}; use another folder')
    study, data = plan.study, hparams_of(runs[0]).data
    content = description | {
        'budgets': list(study.budgets),
        'sizes': list(study.sizes),
        'seeds': list(study.seeds),
        'variants': {
            name: {'label': VARIANTS[name].label, 'changes': VARIANTS[name].changes}
            for name in study.variants
        },
        'learning_rates': {str(k): v for k, v in (plan.learning_rates(losses) or {}).items()},
        'tuning': [
            {'width': width(run.size), 'learning_rate': run.learning_rate}
            | {'loss': losses.get(run.name), 'run': run.name}
            for run in plan.tuning()
        ],
        'batch_tokens': data.batch_size * data.sequence_length,
        'sequence_length': data.sequence_length,
        'corpus': data.source,
        'corpus_sha256': ''.join(texts),
        'versions': {
            name: _joined(str(source['versions'].get(name)) for source in sources)
            for name in sorted({name for source in sources for name in source['versions']})
        },
        'settings_sha256': dict(sorted(settings.items())),
        'complete': complete and not missing,
        'missing': sorted(missing),
        'diverged': sorted(diverged),
        'runs': rows,
    }
    return replace_nonfinite(content)


def _joined(texts):
    return ', '.join(sorted({text for joined in texts for text in joined.split(', ')}))


def _order(row):
    parameters = row['layers'] * row['width'] ** 2
    variant = list(VARIANTS).index(row['variant'])
    return row['budget'], variant, parameters, row['size'], row['seed']


def _row(run, model):
    """The fields of a row of `runs` in study.json that are known before the run."""
    row = {'run': run.name, 'variant': run.variant, 'size': run.trained}
    if run.trained != run.size:
        row['size_of_mod'] = run.size
    row |= {'layers': model.num_layers, 'width': model.d_model}
    for name in ('budget', 'seed', 'learning_rate', 'at_best_size'):
        row[name] = getattr(run, name)
    return row


def _of_summary(model, summary, curve):
    """The fields of a row that come from the summary of the finished run."""
    names = ('parameters', 'active_parameters', 'flops_per_step', 'total_flops', 'epochs')
    row = {name: summary.get(name) for name in names}  # older runs have no active_parameters
    row['steps'], row['skipped_steps'] = summary['final_step'], summary['skipped_steps']
    # Older runs lack it. No study had a teacher then.
    row['flops_per_forward'] = summary.get('flops_per_forward', summary['flops_per_step'] / 3)
    for name in ('loss', 'loss_top_c', 'routing_gap', 'bits_per_byte'):
        row[name] = summary['eval'].get(name)
    row['rule'] = model.routing.causal_rule if model.routed_layers else None
    row |= {'routing': summary['routing'], 'experts': summary['experts'], 'curve': curve}
    stages = [
        {name: stage[name] for name in ('first_step', 'flops_per_step')}
        for stage in summary.get('stages', ())
    ]
    if any(stage['flops_per_step'] != row['flops_per_step'] for stage in stages):
        row['stages'] = stages
    return row | {'state_sha256': summary['state_sha256']}


def flops_at(run: dict, steps) -> np.ndarray:
    """Return the training FLOPs after each number of steps, by the `stages` of a run.

    `run` is a summary or a row of study.json. A row without `stages` has `flops_per_step` in all.
    """
    stages = run.get('stages') or [{'first_step': 0, 'flops_per_step': run['flops_per_step']}]
    ends = [stage['first_step'] for stage in stages[1:]] + [math.inf]
    total = np.zeros(len(steps))
    for stage, end in zip(stages, ends, strict=True):
        total += stage['flops_per_step'] * np.clip(steps, stage['first_step'], end)
        total -= stage['flops_per_step'] * stage['first_step']
    return total


def training_curve(rows: list[dict], points: int) -> list[list[float]]:
    """Reduce metrics.jsonl to `points` pairs [step, mean loss since the previous pair], in nats."""
    known = [(row['step'], row['loss']) for row in rows if isinstance(row.get('loss'), int | float)]
    parts = np.array_split(np.array(known), min(points, len(known))) if known else []
    return [[int(part[-1, 0]), float(np.mean(part[:, 1]))] for part in parts]


def copy_results(directory, results, study: dict):
    """Copy study.json, measures.json and the figures (.png) to the folder `results`.

    A study of one size has only one useful figure, `seeds`. Raises ValueError, before anything is
    written, if a run that the folder has would be lost, or has other weights in the study.
    """
    directory, results = pathlib.Path(directory), pathlib.Path(results)
    if (results / STUDY_FILE).exists():
        old, states = read_json(results / STUDY_FILE, ''), states_of(study)
        _check_kept(_losses(old), _losses(study).keys(), results)
        for name, state in states_of(old).items():
            _compare_state(directory, name, state, states.get(name), results)
    figures = 'seeds.png' if len(study['sizes']) == 1 else '*.png'
    results.mkdir(parents=True, exist_ok=True)
    for file in (directory / MEASURES_FILE, *directory.glob(figures), directory / STUDY_FILE):
        write_atomically(results / file.name, file.read_bytes())
