"""launch.wheels: what a machine lacks, from the metadata of what is installed here."""

import importlib.metadata
import subprocess
import sys

import pytest

from moddepth_jax.benchmarks import wheels


def test_reads_what_pip_prints():
    """pip list, pip freeze, names alone; names are those that pip compares."""
    text = (
        '# held\nPackage Version Editable\n------- -------\nml_dtypes 0.5.1 /x\nRich==15.0.0\njax\n'
    )
    assert wheels.read_installed(text) == {'ml-dtypes': '0.5.1', 'rich': '15.0.0', 'jax': None}
    with pytest.raises(ValueError, match="line 1 of the installed packages, 'a @ file:///x'"):
        wheels.read_installed('a @ file:///x')


NEEDS = {
    'a': ['b>=2', 'c; extra == "fast"', 'd; sys_platform == "win32"'],
    'b': ['e', 'f; python_version < "3.12"'],
    'c': [],
    'e': [],
}


def requires(name):
    """What each of some made-up packages needs."""
    if name not in NEEDS:
        raise importlib.metadata.PackageNotFoundError(name)
    return NEEDS[name]


@pytest.mark.parametrize(
    ('asked', 'installed', 'lacking'),
    [
        (['a'], {}, 'a b e'),  # f is for an older Python
        (['a[fast]'], {}, 'a b c e'),
        (['a'], {'a': None}, ''),  # an installed package has what it needs
        (['a'], {'b': '1.9'}, 'a b e'),  # too old
        (['a'], {'b': '2.1'}, 'a'),
        (['a'], {'b': '2.1rc1', 'e': None}, 'a'),
        (['jax>=9', 'a'], {'jax': '8', 'b': None}, 'a jax'),
        (['unknown'], {}, 'unknown'),
    ],
)
def test_missing_packages_and_what_they_need(asked, installed, lacking, monkeypatch):
    """By extras, markers of the other machine, and versions that do not fit."""
    monkeypatch.setattr(wheels.importlib.metadata, 'requires', requires)
    found = wheels.find_needed(asked, '3.12', installed)
    assert sorted(name for name, lacks in found.items() if lacks) == lacking.split()


def test_the_list_of_the_h200_machine():
    """Some megabytes, without JAX and Triton; the list is made without a network."""
    command = [sys.executable, '-m', 'launch.wheels', '--installed=docs/gpu_machine.txt']
    done = subprocess.run(
        [*command, '--dry_run', '--pins=jax-triton==0.3.1'], capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    names = {line.partition('==')[0] for line in done.stdout.split()}
    assert {'grain', 'ml-collections', 'array-record', 'tensorboardx'} < names
    assert not names & {'jax', 'jaxlib', 'triton', 'numpy', 'flax'} and len(names) < 12
    assert 'jax-triton==0.3.1' in done.stdout.split()
