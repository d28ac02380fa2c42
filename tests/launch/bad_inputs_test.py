"""A bad command line ends with status 2 and a one-line message, and leaves no files."""

import re
import shlex
import shutil

import pytest

from tests.forked_commands import ROOT, run_commands
from tests.launch.bad_inputs import COMMANDS, SLOW, TOY, make_folder, snapshot
from tests.launch.toy_command import PRELOAD, make_toy


def check(table, run):
    """Each case ends with status 2, no output, and one line with its words."""
    lines = {f'{first} {more}': words for first in table for more, words in table[first]}
    # JAX_LOG_COMPILES shows abstract traces, too.
    found = [
        done._replace(stderr=re.sub('(?m)^.* Finished tracing .*\n', '', done.stderr))
        for done in run([shlex.split(line) for line in lines])
    ]
    wrong = [
        f'{line}: {str(done)[:500]}'
        for (line, words), done in zip(lines.items(), found, strict=True)
        if (done.status, done.stdout) != (2, '')
        or not done.stderr.startswith('error: ')
        or done.stderr.count('\n') != 1
        or any(word not in done.stderr for word in words)
    ]
    assert not wrong, '\n'.join(wrong)


def test_bad_input_to_the_shared_frame_is_one_line(tmp_path):
    """Flags, --config, overrides and config files of a toy command."""
    toy = make_toy(tmp_path)

    def run(lines):
        lines = [[toy, *(word.replace('{}', str(tmp_path)) for word in line)] for line in lines]
        return run_commands(lines, ROOT, PRELOAD)

    check(TOY, run)


@pytest.mark.parametrize(
    'commands', [COMMANDS, pytest.param(SLOW, marks=pytest.mark.slow)], ids=['all', 'slow']
)
def test_bad_input_is_one_line_and_leaves_no_files(commands, tiny_config, tmp_path):
    """The line names the culprit; nothing is printed, made, changed or compiled."""
    folder = tmp_path / 'here'
    folder.mkdir()
    make_folder(folder, tiny_config)
    shutil.copytree(ROOT / 'configs', folder / 'configs')
    variables = {'XDG_CACHE_HOME': f'{tmp_path}/cache', 'MPLCONFIGDIR': f'{tmp_path}/fonts'}
    variables |= {'HF_HOME': f'{tmp_path}/hf', 'HF_HUB_OFFLINE': '1', 'XLA_FLAGS': ''}
    (folder / 'cache').mkdir()
    before = snapshot(folder)
    check(commands, lambda lines: run_commands(lines, folder, JAX_LOG_COMPILES='1', **variables))
    assert snapshot(folder) == before
