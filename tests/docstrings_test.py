"""Docstrings name the arguments and fields that exist, which ruff does not check.

Public functions and methods have a docstring, unless a base class or a library describes them.
"""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ('configs', 'kernels_pallas', 'launch', 'moddepth_jax')
# Described by Flax or absl, or by the docstring of the class or the module.
DESCRIBED_ELSEWHERE = ('setup', 'main', 'get_config')


def section(docstring: str, title: str) -> list[str]:
    """The names that a section such as `Args:` describes; `a, b: ...` describes two."""
    _, _, text = f'\n{docstring}\n'.partition(f'\n{title}:\n')
    lines = re.match(r'(?:  .*\n|\n)*', text)[0]
    names = re.findall(r'^  (\*{0,2}\w+(?:(?:, | and )\*{0,2}\w+)*)(?: \(.*?\))?:', lines, re.M)
    return [name.strip('*') for group in names for name in re.split(', | and ', group)]


def faults(tree, elsewhere=()) -> list[str]:
    """Return a line per fault in the docstrings of a module; `elsewhere` has other classes."""
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    found = [fault for node in classes.values() for fault in _of_class(node)]
    found += [fault for node in functions for fault in _of_arguments(node, node)]
    described = [(node, ()) for node in tree.body]
    for node in classes.values():
        every = {**dict(elsewhere), **classes}
        bases = [every[base.id].body for base in node.bases if getattr(base, 'id', '') in every]
        inherited = [method.name for body in bases for method in body if hasattr(method, 'name')]
        if not node.name.startswith('_') and node in tree.body:
            described += [(method, inherited) for method in node.body]
    for node, inherited in described:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith('_'):
            known = node.name in (*DESCRIBED_ELSEWHERE, *inherited) or ast.get_docstring(node)
            found += [] if known else [f'{node.name}: has no docstring']
    return found


def _of_class(node):
    init = next((n for n in node.body if getattr(n, 'name', '') == '__init__'), None)
    docstring, fields = ast.get_docstring(node) or '', set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.AnnAssign | ast.Assign):
            targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
            for target in (t for some in targets for t in getattr(some, 'elts', [some])):
                fields.add(getattr(target, 'attr', getattr(target, 'id', '')))
        fields.add(getattr(inner, 'name', ''))
    names = section(docstring, 'Attributes') + ([] if init else section(docstring, 'Args'))
    found = [f'{node.name}: {name}: no such field' for name in names if name not in fields]
    return found + (_of_arguments(node, init) if init else [])


def _of_arguments(node, function):
    docstring, given = ast.get_docstring(node) or '', function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    own = [a.arg for a in every if a is not None and a.arg not in ('self', 'cls')]
    names = section(docstring, 'Args')
    found = [f'{node.name}: Args: {name}: no such argument' for name in names if name not in own]
    if not names or docstring.startswith('As '):  # describes only what it adds to another
        return found
    lacking = [name for name in own if not re.search(rf'\b{name}\b', docstring)]
    return found + [f'{node.name}: Args: lacks {name}' for name in lacking]


def test_docstrings_of_the_tree():
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob('*.py'))
    trees = {path: ast.parse(path.read_text()) for path in paths}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    found = [f'{path}: {fault}' for path in paths for fault in faults(trees[path], classes)]
    assert not found, '\n'.join(found)


@pytest.mark.parametrize(
    ('source', 'fault'),
    [
        ('def f(x):\n    """F.\n\n    Args:\n      y: no.\n      x: yes.\n    """', 'y: no such'),
        ('def f(x, y):\n    """F.\n\n    Args:\n      x: yes.\n    """', 'lacks y'),
        ('def f():\n    pass', 'f: has no docstring'),
        ('class A:\n    """A.\n\n    Attributes:\n      b: no.\n    """\n    c: int', 'b: no such'),
        ('def f(x, *z):\n    """F.\n\n    Args:\n      x: a.\n      *z: b: too.\n    """', None),
        ('def f(x):\n    """F of x."""\ndef _g():\n    pass', None),
    ],
)
def test_planted_faults_are_found(source, fault):
    found = faults(ast.parse(source))
    assert any(fault in each for each in found) if fault else not found
