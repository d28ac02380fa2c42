"""launch.inspect writes a page, its numbers and its pictures, or says in one line why not."""

import concurrent.futures
import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.training.checkpoint import Checkpoints
from moddepth_jax.training.run_dir import open_workdir
from moddepth_jax.training.train_step import init_state

ROOT = pathlib.Path(__file__).parents[2]
HOSTILE = b'def f(x):\n  """</script>\xff"""\n'  # one window of 32 tokens
FILES = ['depth_mass.json', 'depth_mass.png', 'routing.html', 'routing.json', 'routing.png']


def save_run(path, hparams):
    """A run of 4 steps with the state that training begins with."""
    state = jax.jit(functools.partial(init_state, hparams, 4))()
    open_workdir(path, dataclasses.asdict(hparams))
    with Checkpoints(path / 'checkpoints', keep=1) as checkpoints:
        checkpoints.save(4, state, {'num_steps': 4, 'fingerprint': {}})


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Some texts, and `run`, which has no checkpoint."""
    folder = tmp_path_factory.mktemp('inspect')
    (folder / 'text.py').write_bytes(HOSTILE)
    (folder / 'empty.py').write_bytes(b'')
    (folder / 'run').mkdir()
    (folder / 'run' / 'config.json').write_text('{}')
    return folder


@pytest.fixture(scope='module')
def trained(folder, tiny_config, compiled_in_haste):
    """Name of a routed run with depth slots."""
    changes = {'model.depth.stream': 'moda', 'model.routing.router': 'learned'}
    save_run(folder / 'trained', from_config(tiny_config(**changes)))
    return 'trained'


def inspect(folder, *arguments, **options):
    environment = {
        **os.environ,
        'PYTHONPATH': str(ROOT),
        'XLA_FLAGS': '',
        'JAX_DISABLE_MOST_OPTIMIZATIONS': 'true',
    }
    arguments = [argument.format(folder) for argument in arguments]
    command = [sys.executable, '-m', 'launch.inspect', *arguments]
    pipes = {'capture_output': True, 'timeout': 300, **options}
    return subprocess.run(command, cwd=folder, env=environment, **pipes)


def names(path):
    return sorted(file.name for file in path.iterdir())


@pytest.mark.slow
def test_everything_about_a_text(folder, trained):
    """All files, of every byte of the text; the run is left alone."""
    run = folder / trained
    before = {path: path.stat().st_mtime_ns for path in run.rglob('*')}
    done = inspect(folder, f'--workdir={run}', '--text={}/text.py', '--out={}/new/out')
    assert (done.returncode, done.stderr) == (0, b''), done.stderr
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob('*')}
    out = folder / 'new' / 'out'
    assert names(out) == FILES
    data = json.loads((out / 'routing.json').read_text())
    about, tokens = data['about'], data['tokens']
    assert bytes.fromhex(''.join(tokens['bytes'])) == HOSTILE
    assert (about['run'], about['text'], about['language']) == (trained, 'text.py', 'python')
    assert (about['routing'], about['windows'], about['cut']) == ('predictor', 1, 0)
    kinds = {data['classes'][number] for number in tokens['class']}
    assert {'start of text', 'keyword', 'identifier', 'operator', 'docstring'} <= kinds
    assert len(data['layers']) == 2 and data['layers'][1]['routed']
    assert (out / 'routing.html').read_text().count('</script>') == 2
    for file in ('routing.png', 'depth_mass.png'):
        assert (out / file).read_bytes().startswith(b'\x89PNG')
    depth = json.loads((out / 'depth_mass.json').read_text())
    assert depth['routing'] == 'predictor' and depth['tokens'] == len(HOSTILE) + 1
    assert f'{len(HOSTILE) + 1} tokens of text.py in 1 window,' in done.stdout.decode()


@pytest.mark.slow
def test_top_c_from_stdin_and_a_dense_run(folder, trained, tiny_config):
    """--routing, --max_tokens and stdin do what they say; old pictures that do not fit are gone.

    A dense run has its page, without routing.png.
    """
    arguments = (f'--workdir={folder / trained}', '--text=-', '--out={}/out')
    more = ('--routing=top_c', '--max_tokens=9', '--language=prose')
    done = inspect(folder, *arguments, *more, input=b'hello, world')
    assert (done.returncode, done.stderr) == (0, b''), done.stderr
    about = json.loads((folder / 'out' / 'routing.json').read_text())['about']
    assert about['looks_ahead'] and (about['cut'], about['language']) == (4, 'prose')
    assert b'looks at the future' in done.stdout and names(folder / 'out') == FILES
    save_run(folder / 'dense', from_config(tiny_config()))
    done = inspect(folder, '--workdir={}/dense', '--text=two words', '--out={}/out')
    assert (done.returncode, done.stderr) == (0, b''), done.stderr
    assert b'no block of this model is routed' in done.stdout
    assert names(folder / 'out') == ['routing.html', 'routing.json']


# name: (arguments with {} for the folder, words of the line)
REFUSED = {
    'empty file': (['--text={}/empty.py', '--out={}/no'], ['/empty.py: is empty']),
    'empty text': (['--text=', '--out={}/no'], ['--text=: is empty']),
    'no file': (['--text={}/gone.py', '--out={}/no'], ['/gone.py: no such file', '--text=-']),
    'directory': (['--text={}', '--out={}/no'], ['is a directory']),
    'out is a file': (['--text=a b', '--out={}/text.py'], ['text.py: is a file']),
    'out is a run': (['--text=a b', '--out={}/run'], ['/run: is the directory of a run']),
}
SLOWLY_REFUSED = {
    'no such rule': (
        ['--workdir={}/trained', '--text=a b', '--out={}/no', '--routing=aux_loss'],
        ["'aux_loss'"],
    ),
    'no run': (['--workdir={}', '--text=a b', '--out={}/no'], ['--workdir=', 'config.json']),
}


@pytest.fixture(scope='module')
def refused(folder):
    """What `inspect` makes of the cases of a dict, two at a time."""

    @functools.cache
    def start(name):
        arguments, _ = (REFUSED | SLOWLY_REFUSED)[name]
        return pool.submit(inspect, folder, '--workdir={}/run', *arguments)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        yield lambda cases, name: [start(each) for each in cases] and start(name).result()


def check_refused(refused, folder, cases, name):
    done = refused(cases, name)
    assert (done.returncode, done.stdout) == (2, b''), done.stderr
    line = done.stderr.decode()
    assert line.startswith('error: ') and line.count('\n') == 1, line
    for word in cases[name][1]:
        assert word in line
    assert not (folder / 'no').exists()


@pytest.mark.parametrize('name', REFUSED)
def test_bad_input_is_one_line(refused, folder, name):
    """Status 2, one line that names the culprit, and nothing is written."""
    check_refused(refused, folder, REFUSED, name)


@pytest.mark.slow
@pytest.mark.parametrize('name', SLOWLY_REFUSED)
def test_bad_run_is_one_line(refused, folder, trained, name):
    """As above, of what is known only once the run is read."""
    check_refused(refused, folder, SLOWLY_REFUSED, name)
