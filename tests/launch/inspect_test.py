"""launch.inspect writes a page, its numbers and its pictures."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from moddepth_jax.hparams import from_config
from tests.saved_run import save_run

ROOT = pathlib.Path(__file__).parents[2]
HOSTILE = b'def f(x):\n  """</script>\xff"""\n'  # one window of 32 tokens
FILES = ['depth_mass.json', 'depth_mass.png', 'routing.html', 'routing.json', 'routing.png']


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Holds a text."""
    folder = tmp_path_factory.mktemp('inspect')
    (folder / 'text.py').write_bytes(HOSTILE)
    return folder


@pytest.fixture(scope='module')
def trained(folder, tiny_config):
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
    """All files are written, of every byte of the text; the run does not change."""
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
    """--routing, --max_tokens and stdin are obeyed; pictures of an earlier inspection are removed.

    A dense run has a page, and no routing.png.
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
