"""A broken config ends with one line that names the knob, before anything is compiled."""

import collections
import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.hparams.from_config_test import BAD_VALUES
from tests.launch.broken_configs import KINDS, file_text, make_cases, make_folder

ROOT = pathlib.Path(__file__).parents[2]
COUNT, SEED = 260, 8
NAMES = sorted(
    path.stem for path in (ROOT / 'configs').glob('*.py') if 'def get_config' in path.read_text()
)
# Wrong in some configs only.
DEPENDS = {
    'model.depth.slot_window': [1],
    'model.depth.attention_slot_projection': [True],
    'training.num_steps': [0],
    'training.accumulate_steps': [8],
}


def bad_values():
    """Values that are wrong with any values of the other knobs."""
    values = {
        name: [value for value in values if value not in DEPENDS.get(name, [])]
        for name, values in BAD_VALUES.items()
    }
    return {name: wrong for name, wrong in values.items() if wrong}


def command_line(folder, number, name, case):
    """Writes the config file; returns the arguments, with a workdir that does not exist."""
    path = folder / f'config_{number}.py'
    path.write_text(file_text(name, str(folder), case.lines if case else ''))
    # On several devices a run that passes the checks is also shaped, which takes time.
    arguments = case.arguments if case else ('{config}', '--mesh=data=1')
    given = [argument.replace('{config}', f'--config={path}') for argument in arguments]
    return [f'--workdir={folder}/run_{number}', *given]


def environment(folder):
    flags = '--xla_force_host_platform_device_count=8'
    caches = {'XDG_CACHE_HOME': f'{folder}/cache', 'MPLCONFIGDIR': f'{folder}/fonts'}
    return {**os.environ, 'PYTHONPATH': str(ROOT), 'XLA_FLAGS': flags, **caches}


@pytest.fixture(scope='module')
def checked(tmp_path_factory):
    """(cases, their results, results of the configs as they are, the folder, the meter)."""
    folder = tmp_path_factory.mktemp('broken')
    make_folder(folder)
    cases = make_cases(COUNT, SEED, NAMES, folder, bad_values())
    cases += [(name, None) for name in NAMES]
    lines = [command_line(folder, i, *case) for i, case in enumerate(cases)]
    (folder / 'cases.json').write_text(json.dumps(lines))
    worker = [sys.executable, pathlib.Path(__file__).with_name('train_checks.py')]
    given = [folder / 'cases.json', folder / 'results.json']
    done = subprocess.run(
        [*worker, *given], cwd=folder, env=environment(folder), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((folder / 'results.json').read_text())
    runs = results['runs']
    return cases[:COUNT], runs[:COUNT], runs[COUNT:], folder, results['meter']


def test_every_config_is_fine_before_it_is_broken(checked):
    """Unchanged, each small config passes every check, so the error of a case is its own."""
    for name, run in zip(NAMES, checked[2], strict=True):
        assert run['status'] == 77, (name, run)


def test_broken_configs_are_one_line_before_anything_compiles(checked):
    """Status 2, one line with the knob and the value, nothing written or compiled."""
    cases, runs, _, folder, meter = checked
    assert len(cases) == COUNT and meter > 0
    kinds = collections.Counter(case.kind for _, case in cases)
    assert len(kinds) >= len(KINDS) and min(kinds.values()) >= 2, kinds
    assert {name for name, _ in cases} == set(NAMES)
    wrong = []
    for i, ((name, case), run) in enumerate(zip(cases, runs, strict=True)):
        line = run['stderr']
        ok = run['status'] == 2 and run['stdout'] == '' and run['compiled'] == 0
        ok = ok and line.startswith('error: ') and line.count('\n') == 1 and line.endswith('\n')
        ok = ok and all(word in line for word in case.words)
        if not ok or (folder / f'run_{i}').exists():
            wrong.append(f'{i} {name} {case} {run}')
    assert not wrong, f'{len(wrong)} of {COUNT}:\n' + '\n'.join(wrong)
