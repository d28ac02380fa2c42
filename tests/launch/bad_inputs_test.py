"""A bad command line ends with status 2 and one line that says what is wrong, and no trace."""

import shutil

import pytest

from tests.forked_commands import ROOT, run_commands
from tests.launch.bad_inputs import COMMANDS, SLOW, TOY, make_folder
from tests.launch.toy_command import make_toy


def snapshot(folder):
    """Every path below, with its bytes and the time of its last change."""
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in [folder, *folder.rglob('*')]
        if not path.is_relative_to(folder / 'cache')
    }


def wrong(cases, found):
    """The cases that were not answered with status 2, no output, and one line with their words."""
    return [
        f'{" ".join(line)}: {finished}'
        for (line, words), finished in zip(cases, found, strict=True)
        if (finished.status, finished.stdout) != (2, '')
        or not finished.stderr.startswith('error: ')
        or finished.stderr.count('\n') != 1
        or any(word not in finished.stderr for word in words)
    ]


def filled(argument, folder):
    return argument.replace('{}', str(folder))


def test_frame_of_every_command(tmp_path):
    """Flags, --config, overrides and config files, as a toy command gets them."""
    toy = make_toy(tmp_path)
    cases = [([toy, *(filled(a, tmp_path) for a in line)], words) for line, words in TOY]
    preload = ['launch.cli', 'launch.config_file']
    faults = wrong(cases, run_commands([line for line, _ in cases], ROOT, preload))
    assert not faults, '\n'.join(faults)


@pytest.mark.parametrize(
    'commands', [COMMANDS, pytest.param(SLOW, marks=pytest.mark.slow)], ids=['all', 'slow']
)
def test_bad_input_is_one_line_and_leaves_no_trace(commands, tiny_config, tmp_path):
    """The line names the culprit; nothing is printed, made or changed."""
    folder = tmp_path / 'here'
    folder.mkdir()
    make_folder(folder, tiny_config)
    shutil.copytree(ROOT / 'configs', folder / 'configs')
    cases = [
        ([command, *(filled(argument, folder) for argument in line)], words)
        for command, lines in commands.items()
        for line, words in lines
    ]
    caches = {'XDG_CACHE_HOME': f'{tmp_path}/cache', 'MPLCONFIGDIR': f'{tmp_path}/fonts'}
    caches |= {'HF_HOME': f'{tmp_path}/hf', 'HF_HUB_OFFLINE': '1', 'XLA_FLAGS': ''}
    (folder / 'cache').mkdir()
    before = snapshot(folder)
    found = run_commands([line for line, _ in cases], folder, **caches)
    faults = wrong(cases, found)
    assert not faults, '\n'.join(faults)
    assert snapshot(folder) == before
