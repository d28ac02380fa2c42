"""Every notebook runs from its first cell to its last, silently, and only imports and plots."""

import ast
import json
import os
import pathlib
import sys

import matplotlib
import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / 'notebooks').glob('*.py'))
SETTINGS = {
    'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',  # programs that run a few times
    'NOTEBOOK_STEPS': '10',
    'PYTHONPATH': str(ROOT),
    'MPLCONFIGDIR': matplotlib.get_cachedir(),  # fonts are listed there already
}


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """Runs a notebook in a kernel of this Python, all of whose own files lie in `tmp_path`."""
    for folder in ('CONFIG', 'DATA', 'RUNTIME'):
        monkeypatch.setenv(f'JUPYTER_{folder}_DIR', str(tmp_path / folder.lower()))
    monkeypatch.setenv('JUPYTER_PLATFORM_DIRS', '1')
    for name in ('JUPYTER_PATH', 'NOTEBOOK_WORKDIR', 'NOTEBOOK_BESIDE'):
        monkeypatch.delenv(name, raising=False)
    import nbclient

    def run(notebook):
        environment = os.environ | SETTINGS | dict.fromkeys(('TMPDIR', 'HOME'), str(tmp_path))
        environment |= dict.fromkeys(('IPYTHONDIR', 'XDG_CACHE_HOME'), str(tmp_path / 'cache'))
        # With it a kernel would leave out of its cells what libraries write to stderr themselves.
        environment.pop('PYTEST_CURRENT_TEST', None)
        where = {'metadata': {'path': str(tmp_path)}}
        client = nbclient.NotebookClient(
            notebook, timeout=1200, kernel_name='python3', resources=where
        )
        client.execute(env=environment)
        return notebook

    return run


def read(source):
    """The notebook of a py:percent text."""
    import jupytext

    return jupytext.reads(source, fmt='py:percent')


def complaints(notebook):
    """What cells wrote to stderr, each beside the first line of its cell."""
    return [
        f'{cell.source.partition(chr(10))[0]}: {output.text}'
        for cell in notebook.cells
        for output in cell.get('outputs', ())
        if output.get('name') == 'stderr'
    ]


def definitions(source):
    """Functions and classes of a notebook: what would belong into a module."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
    return [ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, execute, tmp_path):
    """No cell raises or writes to stderr, pictures come out, and no file is left behind."""
    notebook = execute(read(path.read_text()))
    assert not complaints(notebook)
    outputs = [output for cell in notebook.cells for output in cell.get('outputs', ())]
    assert sum('image/png' in output.get('data', {}) for output in outputs) >= 3
    ours = {'config', 'data', 'runtime', 'cache'}
    assert {file.name for file in tmp_path.iterdir() if not file.name.startswith('.')} <= ours
    assert str(tmp_path) not in json.dumps([output.get('text') for output in outputs])


def test_failures_are_seen(execute):
    """A warning is a complaint, an exception ends the run; the kernel is this very Python."""
    from nbclient.exceptions import CellExecutionError

    source = 'import os, sys, warnings\n{}\n# %%\n{}\n# %%\nraise ValueError("planted")\n'
    notebook = read(source.format('print(sys.executable)', 'warnings.warn("planted")'))
    with pytest.raises(CellExecutionError, match='planted'):
        execute(notebook)
    assert notebook.cells[0].outputs[0].text.strip() == sys.executable
    assert len(complaints(notebook)) == 1 and 'planted' in complaints(notebook)[0]


def test_only_import_and_plot():
    """The three notebooks define nothing, hold no outputs, and first say how long they take."""
    names = {path.stem for path in NOTEBOOKS}
    assert names == {'routing_heatmaps', 'depth_attention', 'isoflop'}
    for path in NOTEBOOKS:
        assert not definitions(path.read_text()), path
        cells = read(path.read_text()).cells
        assert cells[0].cell_type == 'markdown' and cells[0].source.startswith('# ')
        assert any(unit in cells[0].source for unit in ('minute', 'second')), path
        assert not any(cell.get('outputs') for cell in cells)
    assert len(definitions('def f():\n    pass\nclass A:\n    g = lambda: 0')) == 3
