"""What the models of a study do to which tokens: `measure` of the runs whose claims ask for it."""

import json
import pathlib

import jax

from moddepth_jax.analysis.block_stats import block_stats
from moddepth_jax.data.pipeline import make_dataset
from moddepth_jax.studies.store import run_directory
from moddepth_jax.training.run_dir import write_atomically
from moddepth_jax.training.saved_run import load_run

MEASURES_FILE = 'measures.json'
MEASURED = ('dense', 'mod', 'random', 'moda', 'mod_moda', 'dense_post', 'moda_post')  # variants
_BATCHES = 32  # held-out ones


def measured_runs(study: dict) -> list[str]:
    """Names of the runs to measure: all seeds at a variant's best size of the largest budget.

    Args:
      study: content of study.json.
    """
    rows = [row for row in study['runs'] if row['at_best_size'] and row['variant'] in MEASURED]
    largest = max((row['budget'] for row in rows), default=None)
    return list(dict.fromkeys(row['run'] for row in rows if row['budget'] == largest))


def write_measures(directory, study: dict, advance=lambda: None):
    """Writes measures.json, {name of a run: its measures}; what is there already is kept.

    Args:
      directory: of the study.
      study: content of study.json.
      advance: called after each run.
    """
    file = pathlib.Path(directory) / MEASURES_FILE
    kept = json.loads(file.read_text(encoding='utf-8')) if file.exists() else {}
    measures = {}
    for name in measured_runs(study):
        measures[name] = kept.get(name) or _measure(run_directory(directory, name))
        advance()
    write_atomically(file, json.dumps(measures, indent=1, allow_nan=False) + '\n')


def _measure(directory):
    run = load_run(directory)
    hparams = run.hparams_of_stage
    dataset = make_dataset(hparams.data, hparams.seed)
    result = block_stats(run.state.variables, hparams, dataset, _BATCHES)
    jax.clear_caches()
    return result
