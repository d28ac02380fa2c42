"""Where studies lie in a directory; looked up before the libraries that read them are imported."""

import pathlib

STUDY_FILE = 'study.json'
DEPTH = 3  # directories between the one that is given and a study


def find_studies(directory) -> list[pathlib.Path]:
    """The study.json of each study, at most DEPTH levels below; raises ValueError without one."""
    directory = pathlib.Path(directory)
    if not directory.is_dir():
        raise ValueError(f'--workdir={directory}: no such directory')
    levels = ('*/' * level + STUDY_FILE for level in range(DEPTH + 1))
    files = [file for level in levels for file in sorted(directory.glob(level))]
    if not files:
        found = f'no {STUDY_FILE} in it, nor {DEPTH} levels down'
        raise ValueError(f'--workdir={directory}: {found}; python -m launch.isoflop makes one')
    return files
