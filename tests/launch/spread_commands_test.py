"""launch.evaluate and launch.generate print the same on one device, several, and two processes."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.training import loop

ROOT = pathlib.Path(__file__).parents[2]
EVALUATE = ('launch.evaluate', '--workdir={}/run')
GENERATE = ('launch.generate', '--workdir={}/run', '--prompt=to be', '--temperature=0')
LOCAL = ('launch.local', '--processes=2', '--devices=2', '--')
FAKE = '--xla_force_host_platform_device_count=4'
WRITTEN = r'12 tokens in [\d.]+ s, \d+ tokens/s once compiled\n'
# name: (what starts the command, XLA_FLAGS, --mesh)
PLACES = {
    'fsdp and tensor': ((), FAKE, 'fsdp=2,tensor=2'),
    'data and expert': ((), FAKE, 'data=2,expert=2'),
    'two processes': (LOCAL, '', 'fsdp=2,tensor=2'),
    'two processes, their rows': (LOCAL, '', 'data=4'),
}
BAD = {
    'a long prompt': (
        (*GENERATE, '--prompt=' + 'x' * 40),
        ['prompt of 41 tokens', 'data.sequence_length=32'],
    ),
    'a mesh for eight': ((*EVALUATE, '--mesh=data=8'), ['--mesh=data=8', '4 are here']),
    'a mesh that does not divide': (
        (*GENERATE, '--mesh=tensor=4'),
        ['model.num_kv_heads=2', '--mesh=tensor=4'],
    ),
}


@pytest.fixture(scope='module')
def folder(tiny_config, tmp_path_factory):
    """Where `run` is a run of 4 steps with a routed block and experts."""
    folder = tmp_path_factory.mktemp('spread')
    for i in range(6):
        (folder / f'{i}.txt').write_text(f'{i} to be, or not to be\n' * 40)
    changes = {
        'model.routing.router': 'learned',
        'model.experts.choice': 'token',
        'model.experts.num_routed': 4,
        'data.source': str(folder / '*.txt'),
        'data.held_out_fraction': 0.3,
        'evaluation.every': 0,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('XDG_CACHE_HOME', str(folder / 'cache'))
        loop.train(from_config(tiny_config(**changes)), folder / 'run')
    return folder


def call(folder, *arguments, xla_flags=''):
    """(status, stdout, stderr) of `python -m ARGUMENTS`, {} in them being the folder."""
    environment = os.environ | {
        'PYTHONPATH': str(ROOT),
        'XLA_FLAGS': xla_flags,
        'XDG_CACHE_HOME': str(folder / 'cache'),
        'JAX_DISABLE_MOST_OPTIMIZATIONS': 'true',
    }
    command = [sys.executable, '-m', *(argument.format(folder) for argument in arguments)]
    pipes = {'capture_output': True, 'text': True, 'timeout': 300}
    done = subprocess.run(command, cwd=folder, env=environment, **pipes)
    return done.returncode, done.stdout, done.stderr


def check_report(done, summary):
    """A quiet --json=-: one JSON object, and the losses of the run's own evaluation."""
    status, out, err = done
    assert (status, err) == (0, ''), err
    report = json.loads(out)
    assert {'loss', 'loss_top_c'} <= set(summary['eval'])
    for name in ('loss', 'loss_top_c'):
        assert report[name] == pytest.approx(summary['eval'][name], abs=1e-6), name
    assert report['batches'] == 2 and set(report['routing']) == {'layer_01'}


@pytest.fixture(scope='module')
def summary(folder):
    return json.loads((folder / 'run' / 'summary.json').read_text())


@pytest.mark.slow
def test_two_processes_evaluate_as_the_run_did(folder, summary):
    """With arrays over both, the losses are those of one device, and printed once."""
    check_report(call(folder, *LOCAL, *EVALUATE, '--mesh=fsdp=2,tensor=2', '--json=-'), summary)


@pytest.mark.slow
@pytest.mark.parametrize('place', ['one device', 'fsdp and tensor', 'data and expert'])
def test_any_devices_evaluate_as_the_run_did(folder, summary, place):
    _, xla_flags, mesh = PLACES.get(place, ((), '', ''))
    arguments = (*EVALUATE, f'--mesh={mesh}', '--json=-')
    check_report(call(folder, *arguments, xla_flags=xla_flags), summary)


@pytest.mark.slow
def test_two_processes_print_one_table_and_write_one_file(folder):
    """The table is that of one device, character by character, and the file is valid JSON."""
    status, table, err = call(folder, *EVALUATE)
    assert (status, err) == (0, ''), err
    assert call(folder, *LOCAL, *EVALUATE, '--json={}/two.json') == (0, table, '')
    assert json.loads((folder / 'two.json').read_text())['step'] == 4


@pytest.fixture(scope='module')
def text(folder):
    """The text of one device."""
    status, out, err = call(folder, *GENERATE, '--max_tokens=12')
    assert status == 0 and re.fullmatch(WRITTEN, err), err
    return out


@pytest.mark.slow
@pytest.mark.parametrize('place', PLACES)
def test_any_devices_write_the_same_text(folder, text, place):
    """Greedy, token by token on stdout, with the one line on stderr of one device."""
    start, xla_flags, mesh = PLACES[place]
    arguments = (*start, *GENERATE, '--max_tokens=12', f'--mesh={mesh}')
    status, out, err = call(folder, *arguments, xla_flags=xla_flags)
    assert (status, out) == (0, text), err
    assert re.fullmatch(WRITTEN, err), err


@pytest.mark.slow
@pytest.mark.parametrize('name', BAD)
def test_two_processes_refuse_in_one_line(folder, name):
    """Status 2, and one error that names the culprit; launch.local adds its own line."""
    arguments, words = BAD[name]
    status, out, err = call(folder, *LOCAL, *arguments)
    assert (status, out) == (2, ''), err
    errors = [line for line in err.splitlines() if not line.startswith('launch.local: ')]
    assert len(errors) == 1 and 'error: ' in errors[0], err
    assert all(word in errors[0] for word in words), err
