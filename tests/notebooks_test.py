"""Every notebook runs from its first cell to its last without warnings, and defines nothing."""

import ast
import json
import os
import pathlib
import re
import types

import matplotlib
import numpy as np
import pytest

from moddepth_jax.hparams import from_config
from tests.data.tokenizer_files import byte_level
from tests.saved_run import save_run

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / 'notebooks').glob('*.py'))
SETTINGS = {
    'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',  # programs that run a few times
    'NOTEBOOK_STEPS': '4',
    'NOTEBOOK_TOKENS': '1024',
    'PYTHONPATH': str(ROOT),
    'MPLCONFIGDIR': matplotlib.get_cachedir(),  # fonts are listed there already
}


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """Run a notebook in a kernel of this Python that keeps its own files in `tmp_path`."""
    for folder in ('CONFIG', 'DATA', 'RUNTIME'):
        monkeypatch.setenv(f'JUPYTER_{folder}_DIR', str(tmp_path / folder.lower()))
    monkeypatch.setenv('JUPYTER_PLATFORM_DIRS', '1')
    for name in ('JUPYTER_PATH', 'NOTEBOOK_WORKDIR', 'NOTEBOOK_BESIDE'):
        monkeypatch.delenv(name, raising=False)
    import nbclient

    def run(notebook, workdir=None):
        environment = os.environ | SETTINGS | dict.fromkeys(('TMPDIR', 'HOME'), str(tmp_path))
        environment |= dict.fromkeys(('IPYTHONDIR', 'XDG_CACHE_HOME'), str(tmp_path / 'cache'))
        if workdir:
            environment['NOTEBOOK_WORKDIR'] = str(workdir)
        # With it a kernel hides from its cells what libraries themselves write to stderr.
        environment.pop('PYTEST_CURRENT_TEST', None)
        where = {'metadata': {'path': str(tmp_path)}}
        options = {'timeout': 1200, 'kernel_name': 'python3', 'resources': where}
        nbclient.NotebookClient(notebook, **options).execute(env=environment)
        return notebook

    return run


def read(source):
    import jupytext

    return jupytext.reads(source, fmt='py:percent')


def check_runs(notebook, tmp_path):
    outputs = [output for cell in notebook.cells for output in cell.get('outputs', ())]
    assert not [output.text for output in outputs if output.get('name') == 'stderr']
    assert sum('image/png' in output.get('data', {}) for output in outputs) >= 2
    ours = {'config', 'data', 'runtime', 'cache', 'run'}
    assert {file.name for file in tmp_path.iterdir() if not file.name.startswith('.')} <= ours
    return json.dumps([output.get('text') for output in outputs])


@pytest.mark.slow
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, execute, tmp_path):
    texts = check_runs(execute(read(path.read_text())), tmp_path)
    assert str(tmp_path) not in texts


@pytest.mark.slow
def test_shows_the_run_of_the_user(execute, tmp_path, tiny_config):
    """It shows heatmaps of the run in NOTEBOOK_WORKDIR instead of training one.

    Its tokenizer is that of the run, whose config may name a file that is nowhere else.
    """
    changes = {'model.routing.router': 'learned', 'model.routing.capacity': 0.25}
    changes |= {'data.tokenizer': 'tokenizer.json', 'model.vocab_size': 320}
    save_run(tmp_path / 'run', from_config(tiny_config(**changes)))
    byte_level().save(tmp_path / 'run' / 'tokenizer')
    path = ROOT / 'notebooks' / 'routing_heatmaps.py'
    texts = check_runs(execute(read(path.read_text()), tmp_path / 'run'), tmp_path)
    assert 'run: 2 layers of width 32, after 4 of 4 steps' in texts


def test_datasets_have_the_tokenizer_of_the_run():
    """Regression: imported runs, whose tokenizer is only in their directory, could not be shown."""
    tree = ast.parse(''.join(path.read_text() for path in NOTEBOOKS))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    made = [call for call in calls if getattr(call.func, 'id', '') == 'make_dataset']
    assert len(made) == 2
    assert all('tokenizer' in [given.arg for given in call.keywords] for call in made)


@pytest.mark.parametrize('across', [False, True])
def test_uniform_attention_stays_in_the_document_and_the_window(across, capsys):
    """Regression: the reference for attention on slots was that of one document per row."""
    cells = read((ROOT / 'notebooks' / 'depth_attention.py').read_text()).cells
    (code,) = (cell.source for cell in cells if 'attention were uniform' in cell.source[-99:])
    segments_BT, windows = np.array([[1, 1, 1, 2, 2], [1, 2, 3, 3, 0]]), (0, 2)
    mass = types.SimpleNamespace(layers=('0', '1'), depth_L=[0.0, 0.5])
    model = types.SimpleNamespace(
        across_documents=across, block_order=(0, 1), window=lambda block: windows[block]
    )
    names = {'mass': mass, 'model': model, 'readers': [(5, 1, 1), (5, 3, 3)], 'length': 5}
    exec(code, names | {'np': np, 'batch': {'segment_ids_BT': segments_BT}})
    printed = [line.split()[5] for line in capsys.readouterr().out.splitlines()]
    for place, (slots, window) in enumerate(((1, 5), (3, 2))):
        shares = []
        for segments_T in segments_BT:
            for t, segment in enumerate(segments_T):
                keys = [s for s in range(t + 1) if across or segments_T[s] == segment]
                keys = [s for s in keys if t - s < window]
                shares += [slots / (slots + len(keys))] if segment else []
        assert printed[place] == f'{np.mean(shares):.1%}'


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_only_import_and_plot(path):
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
    assert not [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
    first = read(path.read_text()).cells[0]
    assert first.cell_type == 'markdown' and first.source.startswith('# ')
    assert any(unit in first.source for unit in ('minute', 'second'))


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_the_rendered_page_has_the_code_of_the_notebook(path):
    page = (ROOT / 'docs' / 'notebooks' / f'{path.stem}.md').read_text()
    shown = re.findall(r'^```python\n(.*?)\n```$', page, re.DOTALL | re.MULTILINE)
    cells = read(path.read_text()).cells
    assert shown == [cell.source for cell in cells if cell.cell_type == 'code']
