"""Finds studies in a directory. It needs no JAX, so that commands can refuse bad paths quickly."""

import pathlib

from moddepth_jax.training.run_dir import temporary_files

MEASURES_FILE = 'measures.json'
PLAN_FILE = 'plan.json'
RUNS = 'runs'
STUDY_FILE = 'study.json'
DEPTH = 3  # levels of directories that are searched


def find_studies(directory) -> list[pathlib.Path]:
    """Return the study.json files at most DEPTH levels below. Raises ValueError if none exists."""
    directory = pathlib.Path(directory)
    if not directory.is_dir():
        raise ValueError(f'--workdir={directory}: no such directory')
    levels = ('*/' * level + STUDY_FILE for level in range(DEPTH + 1))
    files = [file for level in levels for file in sorted(directory.glob(level))]
    if not files:
        found = f'no {STUDY_FILE} in it or up to {DEPTH} levels below'
        raise ValueError(f'--workdir={directory}: {found}; python -m launch.isoflop makes one')
    return files


def check_folder(directory):
    """Raise ValueError if the path is a file, or a directory with other content than a study."""
    directory = pathlib.Path(directory)
    where, right = f'--workdir={directory}', 'use another --workdir'
    if directory.is_file():
        raise ValueError(f'{where}: is a file; {right}')
    if directory.exists() and not (directory / PLAN_FILE).exists():
        names = {path.name for path in directory.iterdir()}
        for other in sorted(names - {RUNS} - temporary_files(names, PLAN_FILE)):
            found = f'holds {other!r} but no {PLAN_FILE}, so it is not a study'
            raise ValueError(f'{where}: {found}; {right}')
