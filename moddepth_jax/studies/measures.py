"""Measures the trained models of a study, and keeps what was measured in measures.json."""

import json
import pathlib

import jax

from moddepth_jax.analysis.block_stats import block_stats
from moddepth_jax.data.directory import read_json, write_atomically
from moddepth_jax.data.pipeline import make_dataset
from moddepth_jax.studies.folders import MEASURES_FILE
from moddepth_jax.studies.plan import OWN_VARIANTS
from moddepth_jax.studies.store import NO_RESULTS, EarlierRuns, run_directory, states_of
from moddepth_jax.training.saved_run import load_run

MEASURED = (  # variants whose runs are measured, besides those that a config file adds
    *('dense', 'mod', 'random', 'moda', 'mod_moda', 'dense_post', 'moda_post'),
    *('attnres', 'attnres_block', 'hyper', 'mhc', 'mudd'),
    *('value_residual', 'value_attention', 'value_embeddings'),
)
_MEASURED_BATCHES = 32  # held-out batches


def measured_runs(study: dict) -> list[str]:
    """Return the runs to measure: all seeds at the best size of the largest budget.

    They are of the variants in MEASURED, and of those that this project does not define.
    """
    skipped = OWN_VARIANTS.difference(MEASURED)
    rows = [row for row in study['runs'] if row['at_best_size'] and row['variant'] not in skipped]
    largest = max((row['budget'] for row in rows), default=None)
    return list(dict.fromkeys(row['run'] for row in rows if row['budget'] == largest))


def measures_of(study: dict, measures: dict[str, dict]) -> dict[str, dict]:
    """Return those `measures`, the content of measures.json, whose weights are in the study."""
    states = states_of(study)
    return {
        name: each
        for name, each in measures.items()
        if states.get(name) and each.get('state_sha256') == states[name]
    }


def write_measures(directory, study: dict, earlier: EarlierRuns = NO_RESULTS):
    """Write measures.json, {run name: measures}, and measure the runs that are not in it.

    Measures of these runs in the file, and all those in `earlier`, are kept if their weights are
    those of the study. An earlier run without a directory cannot be measured.
    """
    file, states = pathlib.Path(directory) / MEASURES_FILE, states_of(study)
    kept = read_json(file, 'remove it, and it is measured again') or {}
    old = measures_of(study, earlier.measures)
    kept, measures = old | measures_of(study, kept), {}
    for name in measured_runs(study):
        if name in kept:
            measures[name] = kept[name]
        elif name not in earlier.rows or run_directory(directory, name).exists():
            print(f'measuring {name}', flush=True)
            stats = _measure(run_directory(directory, name))
            measures[name] = {'state_sha256': states[name]} | stats
    measures |= {name: kept[name] for name in old if name not in measures}
    write_atomically(file, json.dumps(measures, indent=1, allow_nan=False) + '\n')


def _measure(directory):
    run = load_run(directory)
    hparams = run.hparams_of_stage
    dataset = make_dataset(hparams.data, hparams.seed)
    stats = block_stats(run.state.variables, hparams, dataset, _MEASURED_BATCHES)
    jax.clear_caches()
    return stats
