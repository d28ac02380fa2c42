"""The mistakes of mutations.toml can be planted; `make mutations` runs the tests against them."""

import subprocess
import sys

import pytest

from tests.mutations import ROOT, mutated, read_mutations

MUTATIONS = read_mutations()


@pytest.mark.parametrize('mutation', MUTATIONS, ids=lambda mutation: mutation['name'])
def test_each_mistake_has_one_place_and_its_tests_exist(mutation):
    """The old texts stand once in their file, which still parses with the new ones."""
    compile(mutated(mutation), mutation['file'], 'exec')
    assert all((ROOT / path).is_file() for path in mutation['tests'])


def test_no_mistake_uses_a_name_that_does_not_exist(tmp_path):
    """Such a mistake would fail every test and seem to be caught."""
    for mutation in MUTATIONS:
        (tmp_path / f'{mutation["name"]}.py').write_text(mutated(mutation))
    command = [sys.executable, '-m', 'ruff', 'check', '--isolated', '--select=F821', '--quiet']
    found = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_names_are_unique():
    names = [mutation['name'] for mutation in MUTATIONS]
    assert len(set(names)) == len(names)
