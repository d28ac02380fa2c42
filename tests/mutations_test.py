"""The mistakes of mutations.toml can be planted; `make mutations` runs the tests against them."""

import pytest

from tests.mutations import ROOT, read_mutations

MUTATIONS = read_mutations()


@pytest.mark.parametrize('mutation', MUTATIONS, ids=lambda mutation: mutation['name'])
def test_each_mistake_has_one_place_and_its_tests_exist(mutation):
    """The old text stands once in its file, which still parses with the new one."""
    text = (ROOT / mutation['file']).read_text()
    assert text.count(mutation['old']) == 1
    compile(text.replace(mutation['old'], mutation['new']), mutation['file'], 'exec')
    assert all((ROOT / path).is_file() for path in mutation['tests'])


def test_names_are_unique():
    names = [mutation['name'] for mutation in MUTATIONS]
    assert len(set(names)) == len(names)
