"""The text of the running Python: its standard library, and the installed packages."""

import contextlib
import importlib.metadata
import os
import pathlib
import re
import sysconfig

from moddepth_jax.data.compression import read_small

_TESTS = {'test', 'tests', 'idle_test'}
_TEST_FILE = re.compile(r'(test_.*|.*_test|conftest)\.py')
_EXCLUDED = _TESTS | {'idlelib', 'lib2to3', 'site-packages', 'dist-packages', '__pycache__'}
_MACHINE_FILES = ('_sysconfigdata', 'sitecustomize.py', 'usercustomize.py', '__editable__')
_THIS_PROJECT = 'moddepth-jax'


def _documents_below(root, excluded):
    root, documents = pathlib.Path(root), []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in excluded and name[:7] != 'config-']
        for name in names:
            if name.endswith('.py') and not name.startswith(_MACHINE_FILES):
                path = pathlib.Path(folder, name)
                documents.append((path.relative_to(root).as_posix(), read_small(path)))
    return sorted(documents)


def stdlib_documents(root: str | None = None) -> list[tuple[str, bytes]]:
    """Read Python's standard library as (name, bytes) of every .py file below `root`, by path.

    Excludes tests, idlelib, lib2to3, installed packages, and files in which a build describes its
    machine. Raises ValueError if there is no .py file.
    """
    root = root or sysconfig.get_paths()['stdlib']
    documents = _documents_below(root, _EXCLUDED)
    if not documents:
        right = 'use a Python that ships its library as .py files, or set data.source to a glob'
        raise ValueError(f"data.source='stdlib': no .py file below {root}; {right}")
    return documents


def environment_documents(
    roots: tuple[str, ...] | None = None,
) -> tuple[list[tuple[str, bytes]], tuple[str, ...]]:
    """Read the standard library and every installed package as (documents, packages).

    Documents are (name, bytes), sorted. Excluded are the files that `stdlib_documents` excludes,
    tests of packages, this project itself, files that are empty or not UTF-8, and repeated files.
    Packages are name==version, sorted, without this project; they have their own licenses. Raises
    ValueError if there is no .py file of a package below `roots`.
    """
    paths = sysconfig.get_paths()
    roots = tuple(dict.fromkeys(roots or (paths['purelib'], paths['platlib'])))
    packages, ours = set(), set()
    for distribution in importlib.metadata.distributions(path=list(map(str, roots))):
        name = distribution.metadata['Name'] or 'unnamed'
        if re.sub('[-_.]+', '-', name).lower() == _THIS_PROJECT:
            ours |= {file.as_posix() for file in distribution.files or ()}
        else:
            packages.add(f'{name}=={distribution.version}')
    found = [
        (name, text)
        for root in roots
        for name, text in _documents_below(root, _TESTS | {'__pycache__'})
        if name not in ours and not _TEST_FILE.fullmatch(name.rpartition('/')[2])
    ]
    if not found:
        right = "install packages there, or set data.source to 'stdlib' or a glob"
        where = ' or '.join(map(str, roots))
        raise ValueError(f"data.source='python_environment': no .py file below {where}; {right}")
    found = _documents_below(paths['stdlib'], _EXCLUDED) + found
    return sorted(_distinct(found)), tuple(sorted(packages, key=str.lower))


def _distinct(documents):
    seen = {b''}
    for name, text in documents:
        with contextlib.suppress(UnicodeDecodeError):
            if text not in seen and text.decode():
                seen.add(text)
                yield name, text
