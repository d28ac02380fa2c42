"""The tree passes the rules and the format of ruff."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize('command', [['check'], ['format', '--check']], ids=' '.join)
def test_tree_is_clean(command, tmp_path):
    """ruff finds nothing here, and finds something in a planted file under the same settings."""
    ruff = [sys.executable, '-m', 'ruff', *command, '--no-cache', '--quiet']
    settings = ['--config', str(ROOT / 'pyproject.toml')]
    planted = tmp_path / 'planted.py'
    planted.write_text('import os\nx = "double quotes"\n')
    assert subprocess.run([*ruff, *settings, planted], capture_output=True).returncode == 1
    tree = subprocess.run([*ruff, *settings, '.'], cwd=ROOT, capture_output=True, text=True)
    assert tree.returncode == 0, tree.stdout + tree.stderr
