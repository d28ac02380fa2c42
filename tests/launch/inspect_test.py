"""launch.inspect writes a page, its numbers and its pictures."""

import json
import subprocess
import sys

import pytest

from moddepth_jax.hparams import from_config
from tests.forked_commands import ROOT
from tests.launch.bad_inputs import snapshot
from tests.launch.commands import call
from tests.saved_run import save_run

HOSTILE = b'def f():\n  """</script>\xc3\xa9"""\n'  # one window of 32 tokens
FILES = ['depth_mass.json', 'depth_mass.png', 'routing.html', 'routing.json', 'routing.png']


@pytest.fixture(scope='module')
def folder(tmp_path_factory, tiny_config):
    """Holds a text, a routed run with depth slots, and a dense one."""
    folder = tmp_path_factory.mktemp('inspect')
    (folder / 'text.py').write_bytes(HOSTILE)
    changes = {'model.depth.stream': 'moda', 'model.routing.router': 'learned'}
    save_run(folder / 'trained', from_config(tiny_config(**changes)))
    save_run(folder / 'dense', from_config(tiny_config()))
    return folder


# Prints what launch.inspect says about an inspection; its flags are those of its own process.
DESCRIBE = """
import json, pathlib, sys
from launch import inspect
for data in json.loads(sys.argv[1]):
    inspect._describe(pathlib.Path('nowhere'), data)
"""


def names(path):
    return sorted(file.name for file in path.iterdir())


def test_the_line_about_the_text():
    """One token is singular. Regression: nothing said that the threshold for exits is not used."""
    about = {'text': 'a.py', 'windows': 1, 'looks_ahead': False, 'routed': False}
    data = [
        {'about': about | {'exit_threshold': threshold}, 'totals': {'tokens': count, 'loss': None}}
        for count, threshold in ((1, ''), (1200, '0.05'))
    ]
    line = [sys.executable, '-c', DESCRIBE, json.dumps(data)]
    how = {'cwd': ROOT, 'capture_output': True, 'text': True, 'check': True}
    one, many = subprocess.run(line, **how).stdout.splitlines()
    dense = 'no block of this model is routed, so there is no routing.png'
    assert one == f'1 token of a.py in 1 window, {dense}'
    exits = 'tokens do not leave the loops here (loop_exit_threshold=0.05)'
    assert many == f'1,200 tokens of a.py in 1 window, {dense}, {exits}'


@pytest.mark.slow
def test_inspection_of_a_text(folder):
    """All files are written, of every byte of the text; the run does not change."""
    before = snapshot(folder / 'trained')
    given = ('--workdir=trained', '--text=text.py', '--out=new/out')
    done = call('inspect', *given, cwd=folder)
    assert (done.status, done.stderr) == (0, ''), done.stderr
    assert before == snapshot(folder / 'trained')
    out = folder / 'new' / 'out'
    assert names(out) == FILES
    data = json.loads((out / 'routing.json').read_text())
    about, tokens = data['about'], data['tokens']
    assert bytes.fromhex(''.join(tokens['bytes'])) == HOSTILE
    assert (about['run'], about['text'], about['language']) == ('trained', 'text.py', 'python')
    assert (about['routing'], about['windows'], about['cut']) == ('predictor', 1, 0)
    kinds = {data['classes'][number] for number in tokens['class']}
    assert {'start of text', 'keyword', 'identifier', 'operator', 'docstring'} <= kinds
    assert len(data['layers']) == 2 and data['layers'][1]['routed']
    assert (out / 'routing.html').read_text().count('</script>') == 2
    for file in ('routing.png', 'depth_mass.png'):
        assert (out / file).read_bytes().startswith(b'\x89PNG')
    depth = json.loads((out / 'depth_mass.json').read_text())
    assert depth['routing'] == 'predictor' and depth['tokens'] == len(HOSTILE) + 1
    assert f'{len(HOSTILE) + 1} tokens of text.py in 1 window,' in done.stdout


@pytest.mark.slow
def test_inspection_by_top_c_and_of_a_dense_run(folder):
    """--routing and --max_tokens take effect; pictures of an earlier inspection are removed."""
    given = ('--text=hello, world', '--out=out')
    more = ('--routing=top_c', '--max_tokens=9', '--language=prose')
    done = call('inspect', '--workdir=trained', *given, *more, cwd=folder)
    assert (done.status, done.stderr) == (0, ''), done.stderr
    about = json.loads((folder / 'out' / 'routing.json').read_text())['about']
    assert about['looks_ahead'] and (about['cut'], about['language']) == (4, 'prose')
    assert 'looks at the future' in done.stdout and names(folder / 'out') == FILES
    done = call('inspect', '--workdir=dense', *given, cwd=folder)
    assert (done.status, done.stderr) == (0, ''), done.stderr
    assert 'no block of this model is routed' in done.stdout
    assert names(folder / 'out') == ['routing.html', 'routing.json']


@pytest.mark.slow
def test_importance_of_the_blocks(folder):
    """The table, the JSON and the picture rank all blocks; the same numbers in a second run."""
    given = ('--workdir=trained', '--importance', '--num_batches=1')
    texts = []
    for out in ('ranked', 'again'):
        done = call('inspect', *given, f'--out={out}', cwd=folder)
        assert done.status == 0, done.stderr
        assert names(folder / out) == ['importance.json', 'importance.png']
        texts.append((folder / out / 'importance.json').read_text())
    assert texts[0] == texts[1]
    found = json.loads(texts[0])
    assert f'--config.model.routing.layers={found["ranking"][0]}\n' in done.stdout
    assert (found['run'], found['routing'], found['batches']) == ('trained', 'predictor', 1)
    assert [row['routed'] for row in found['blocks']] == [False, True]
    assert sorted(found['ranking']) == [0, 1]
