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
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def section(docstring: str, title: str) -> list[str]:
    """The names that a section such as `Args:` describes; `a, b: ...` describes two."""
    lines = docstring.splitlines()
    if f'{title}:' not in map(str.strip, lines):
        return []
    start = next(n for n, line in enumerate(lines) if line.strip() == f'{title}:')
    indent = len(lines[start]) - len(lines[start].lstrip()) + 2
    names = []
    for line in lines[start + 1 :]:
        if line.strip() and len(line) - len(line.lstrip()) < indent:
            break
        match = re.match(
            rf' {{{indent}}}(\*{{0,2}}\w+(?:, \*{{0,2}}\w+)*(?: and \w+)?)( \(.*?\))?:', line
        )
        if match:
            names += re.split(', | and ', match[1].replace('*', ''))
    return names


def arguments(function) -> list[str]:
    """Names of a function's arguments, without self and cls."""
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return [a.arg for a in every if a is not None and a.arg not in ('self', 'cls')]


def fields(node) -> set[str]:
    """Names of a class: its fields, its methods, and what its methods set on self."""
    found = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.AnnAssign | ast.Assign):
            targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
            for target in (t for found in targets for t in getattr(found, 'elts', [found])):
                found.add(getattr(target, 'attr', getattr(target, 'id', '')))
        elif isinstance(inner, _FUNCTIONS):
            found.add(inner.name)
    return found


def faults(tree) -> list[str]:
    """The faults of the docstrings of a module, one line each."""
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            found += _of_class(node)
        elif isinstance(node, _FUNCTIONS):
            found += _of_names(node, section(ast.get_docstring(node) or '', 'Args'), node)
    for node in tree.body:
        if isinstance(node, _FUNCTIONS):
            found += _missing(node, '')
        elif isinstance(node, ast.ClassDef) and not node.name.startswith('_'):
            inherited = [
                n.name for base in _above(node, classes) for n in base.body if hasattr(n, 'name')
            ]
            for method in node.body:
                if isinstance(method, _FUNCTIONS) and method.name not in inherited:
                    found += _missing(method, f'{node.name}.')
    return found


def _above(node, classes):
    names = [getattr(base, 'id', '') for base in node.bases]
    return [classes[name] for name in names if name in classes]


def _of_class(node):
    docstring = ast.get_docstring(node) or ''
    strange = set(section(docstring, 'Attributes')) - fields(node)
    found = [f'{node.name}: Attributes: {name}: no such field' for name in sorted(strange)]
    made = next((n for n in node.body if getattr(n, 'name', '') == '__init__'), None)
    names = section(docstring, 'Args')
    if made is None:
        return found + [f'{node.name}: Args: {n}: no such field' for n in set(names) - fields(node)]
    return found + _of_names(node, names, made)


def _of_names(node, names, function):
    own = arguments(function)
    strange = [name for name in names if name not in own]
    found = [f'{node.name}: Args: {name}: no such argument' for name in strange]
    docstring = ast.get_docstring(node) or ''
    if not names or docstring.startswith('As '):  # describes only what it adds to another
        return found
    lacking = [name for name in own if not re.search(rf'\b{name}\b', docstring)]
    return found + [f'{node.name}: Args: lacks {name}' for name in lacking]


def _missing(function, prefix):
    name = function.name
    if name.startswith('_') or name in DESCRIBED_ELSEWHERE or ast.get_docstring(function):
        return []
    return [f'{prefix}{name}: has no docstring']


def test_docstrings_of_the_tree():
    """Each name in a section is an argument or a field, and `Args:` lacks none."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob('*.py')):
            found += [
                f'{path.relative_to(ROOT)}: {fault}'
                for fault in faults(ast.parse(path.read_text()))
            ]
    assert not found, '\n'.join(found)


@pytest.mark.parametrize(
    ('source', 'fault'),
    [
        ('def f(x):\n    """F.\n\n    Args:\n      y: no.\n      x: yes.\n    """', 'y: no such'),
        ('def f(x, y):\n    """F.\n\n    Args:\n      x: yes.\n    """', 'lacks y'),
        ('def f():\n    pass', 'f: has no docstring'),
        ('class A:\n    """A."""\n    def g(self):\n        pass', 'A.g: has no docstring'),
        ('class A:\n    """A.\n\n    Attributes:\n      b: no.\n    """\n    c: int', 'b: no such'),
        (
            'class A:\n    """A.\n\n    Args:\n      b: no.\n    """\n'
            '    def __init__(self, c):\n        self.c = c',
            'b: no such argument',
        ),
    ],
)
def test_planted_faults_are_found(source, fault):
    """Each kind of fault is found."""
    assert any(fault in found for found in faults(ast.parse(source)))


@pytest.mark.parametrize(
    'source',
    [
        'def f(x, y, *z):\n    """F.\n\n    Args:\n      x, y: yes.\n      *z: yes: too.\n    """',
        'def f(x, y):\n    """As g, by y.\n\n    Args:\n      y: added.\n    """',
        'def f(x):\n    """F of x."""\ndef _g():\n    pass',
        'class A:\n    """A."""\n    def g(self):\n        """G."""\n'
        'class B(A):\n    """B."""\n    def g(self):\n        pass',
    ],
)
def test_correct_docstrings_have_no_fault(source):
    """Arguments in one line, additions to another function, methods that a base describes."""
    assert not faults(ast.parse(source))
