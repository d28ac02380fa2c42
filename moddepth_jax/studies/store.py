"""A study as its directory holds it: finished runs, and the dict that all pictures come from."""

import dataclasses
import json
import pathlib

import numpy as np

from moddepth_jax.hparams import Hparams
from moddepth_jax.studies.plan import DIVERGED, VARIANTS, Plan, Planned
from moddepth_jax.training.metrics import read_metrics
from moddepth_jax.training.run_dir import check_config, temporary_files, write_atomically
from moddepth_jax.training.summary import SUMMARY_FILE, replace_nonfinite

STUDY_FILE = 'study.json'
PLAN_FILE = 'plan.json'
RUNS = 'runs'
DIVERGED_FILE = 'diverged.json'  # in a run's directory: why it has no summary
CURVE_POINTS = 20
MAY_GROW = ('budgets', 'variants', 'seeds')  # of a plan: what a later start may add
MAY_DIFFER = (  # between a finished run and the plan: no result depends on them
    'report',
    'data.log_windows',
    'training.log_every',
    'training.checkpoint_every',
    'training.keep_checkpoints',
    'training.max_unsharded',
    'training.compilation_cache',
    'evaluation.every',
    'evaluation.num_batches',
)


def open_study(directory, plan: dict):
    """Makes `directory` that of the study `plan`, or checks that it already is.

    Args:
      directory: made if it is not there.
      plan: JSON values; those named in MAY_GROW may hold more than at an earlier start.

    Raises:
      ValueError: one line, nothing written, where the directory holds something else or a study
        whose plan differs.
    """
    directory = pathlib.Path(directory)
    file = directory / PLAN_FILE
    right = 'use another --workdir'
    if directory.exists() and not directory.is_dir():
        raise ValueError(f'--workdir={directory}: is a file; {right}')
    if directory.exists() and not file.exists():
        names = {path.name for path in directory.iterdir()}
        others = sorted(names - {RUNS} - temporary_files(names, PLAN_FILE))
        if others:
            found = f'holds {others[0]!r} but no {PLAN_FILE}, so it is no study'
            raise ValueError(f'--workdir={directory}: {found}; {right}')
    plan = json.loads(json.dumps(plan))
    if file.exists():
        _check_plan(directory, read_plan(directory), plan)
    try:
        (directory / RUNS).mkdir(parents=True, exist_ok=True)
        if not file.exists() or read_plan(directory) != plan:
            write_atomically(file, json.dumps(plan, indent=2) + '\n')
    except OSError as error:
        right = 'must be a directory that can be written'
        raise ValueError(f'--workdir={directory}: {error.strerror}; {right}') from None


def _check_plan(directory, stored, plan):
    for name in stored | plan:
        was, now = stored.get(name), plan.get(name)
        grown = name in MAY_GROW and set(was or ()) <= set(now or ())
        if name == 'seeds':  # the first chooses sizes and learning rates
            grown = grown and was[:1] == now[:1]
        if was != now and not grown:
            more = ' (it may only gain some)' if name in MAY_GROW else ''
            found = f'{name} is {was!r} in its {PLAN_FILE} and {now!r} in this study{more}'
            raise ValueError(f'--workdir={directory}: {found}; use another --workdir')


def read_plan(directory) -> dict:
    """The plan of a study. Raises ValueError, one line, where there is none that can be read."""
    return _read_json(pathlib.Path(directory) / PLAN_FILE, f'--workdir={directory}: holds no study')


def read_study(directory) -> dict:
    """The content of study.json. Raises ValueError, one line, where there is none to be read."""
    return _read_json(
        pathlib.Path(directory) / STUDY_FILE, f'--workdir={directory}: no {STUDY_FILE} in it'
    )


def _read_json(file, otherwise):
    try:
        content = json.loads(file.read_text(encoding='utf-8'))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f'{otherwise}; python -m launch.isoflop makes one') from None
    except (OSError, ValueError) as error:
        raise ValueError(f'{file}: unreadable; must be JSON ({error})') from None
    if not isinstance(content, dict):
        raise ValueError(f'{file}: {type(content).__name__}; must be a JSON object')
    return content


def run_directory(directory, name: str) -> pathlib.Path:
    """Where the run `name` of a study trains."""
    return pathlib.Path(directory) / RUNS / name


def final_loss(directory, name: str) -> float | None:
    """Nats a held-out token of a finished run, DIVERGED of one that failed, None of any other."""
    run = run_directory(directory, name)
    if (run / DIVERGED_FILE).exists():
        return DIVERGED
    if not (run / SUMMARY_FILE).exists():
        return None
    loss = _read_json(run / SUMMARY_FILE, f'{run}: no summary')['eval']['loss']
    return DIVERGED if loss is None else loss


def known_losses(directory, runs: list[Planned]) -> dict[str, float]:
    """`final_loss` of the runs that have one, by name."""
    losses = {run.name: final_loss(directory, run.name) for run in runs}
    return {name: loss for name, loss in losses.items() if loss is not None}


def known_plan(directory, plan: Plan) -> tuple[list[Planned], list[Planned], bool]:
    """All runs that the finished ones decide, those of them left to train, and if that is all."""
    losses, runs, whole = {}, [], False
    while True:
        more = known_losses(directory, runs)
        if runs and len(more) == len(losses):
            return runs, _unique(run for run in runs if run.name not in losses), whole
        losses = more
        runs, whole = plan.runs(losses)


def _unique(runs):
    return list({run.name: run for run in runs}.values())


def check_run(directory, run: Planned, hparams: Hparams):
    """Raises ValueError, one line, where a finished run is not the one that is planned."""
    check_config(run_directory(directory, run.name), dataclasses.asdict(hparams), MAY_DIFFER)


def collect(directory, plan: Plan, told: dict, hparams_of) -> dict:
    """Reads the finished runs of a study.

    Nothing in it depends on when, where or in how many starts they were trained.

    Args:
      directory: of the study.
      plan: of it.
      told: what else is to be in it: kind, config, overrides.
      hparams_of: Planned -> Hparams.

    Returns:
      The content of study.json but for `fits`: see docs/isoflop.md.

    Raises:
      ValueError: a run is not the one that is planned.
    """
    runs, left, whole = known_plan(directory, plan)
    missing = {run.name for run in left}
    losses = known_losses(directory, runs)
    diverged = {name for name, loss in losses.items() if loss == DIVERGED}
    order = list(VARIANTS)
    rows = [
        _row(directory, run, hparams_of(run))
        for run in runs[len(plan.tuning()) :]
        if run.name not in missing | diverged
    ]
    rows.sort(key=lambda row: (row['budget'], order.index(row['variant']), *_place(row)))
    study = plan.study
    summaries = [row.pop('summary') for row in rows]
    return replace_nonfinite(
        told
        | {
            'budgets': list(study.budgets),
            'sizes': list(study.sizes),
            'seeds': list(study.seeds),
            'variants': {name: VARIANTS[name]._asdict() for name in study.variants},
            'learning_rates': {str(k): v for k, v in (plan.learning_rates(losses) or {}).items()},
            'tuning': [
                {'width': int(run.size.partition('x')[2]), 'learning_rate': run.learning_rate}
                | {'loss': losses.get(run.name), 'run': run.name}
                for run in plan.tuning()
            ],
            **_common(hparams_of, runs, summaries),
            'whole': whole and not missing,
            'missing': sorted(missing),
            'diverged': sorted(diverged),
            'runs': rows,
        }
    )


def _place(row):
    return row['layers'] * row['width'] ** 2, row['size'], row['seed']


def _common(hparams_of, runs, summaries):
    data = hparams_of(runs[0]).data
    names = sorted({name for summary in summaries for name in summary['versions']})
    versions = {
        name: ', '.join(sorted({str(summary['versions'].get(name)) for summary in summaries}))
        for name in names
    }
    return {
        'batch_tokens': data.batch_size * data.sequence_length,
        'sequence_length': data.sequence_length,
        'corpus': data.source,
        'corpus_sha256': ', '.join(sorted({summary['corpus_sha256'] for summary in summaries})),
        'versions': versions,
    }


def _row(directory, run, hparams):
    check_run(directory, run, hparams)
    place = run_directory(directory, run.name)
    summary = _read_json(place / SUMMARY_FILE, f'{place}: no summary')
    evaluation, model = summary['eval'], hparams.model
    row = {'run': run.name, 'variant': run.variant, 'size': run.trained}
    if run.trained != run.size:
        row['beside'] = run.size
    row |= {'layers': model.num_layers, 'width': model.d_model}
    for name in ('budget', 'seed', 'learning_rate', 'at_best_size'):
        row[name] = getattr(run, name)
    for name in ('parameters', 'active_parameters', 'flops_per_step', 'total_flops', 'epochs'):
        row[name] = summary.get(name)  # summaries of older runs lack the second
    row['steps'], row['skipped_steps'] = summary['final_step'], summary['skipped_steps']
    row['flops_per_forward'] = summary['flops_per_step'] / 3
    for name in ('loss', 'loss_top_c', 'routing_gap', 'bits_per_byte'):
        row[name] = evaluation.get(name)
    row['rule'] = model.routing.causal_rule if model.routed_layers else None
    row |= {'routing': summary['routing'], 'experts': summary['experts']}
    row['curve'] = curve(read_metrics(place))
    row['state_sha256'] = summary['state_sha256']
    return row | {'summary': summary}


def curve(rows: list[dict], points: int = CURVE_POINTS) -> list[list[float]]:
    """[step, training loss in nats] at `points` places or fewer.

    Args:
      rows: of `read_metrics`; rows without a loss are passed over.
      points: each the mean over the rows since the one before.
    """
    known = [(row['step'], row['loss']) for row in rows if row.get('loss') is not None]
    parts = np.array_split(np.arange(len(known)), min(points, len(known)) or 1)
    return [
        [known[part[-1]][0], float(np.mean([known[i][1] for i in part]))]
        for part in parts
        if len(part)
    ]
