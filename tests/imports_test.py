"""Imports between our packages point downwards only, and no source file grows too long."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
OURS = ('configs', 'launch', 'moddepth_jax', 'kernels_pallas')
MAX_LINES = 500

HPARAMS = 'moddepth_jax.hparams'
# A package may import from lower floors only, and not from others on its own floor.
FLOORS = {
    'kernels_pallas': 0,
    'moddepth_jax.host': 0,
    'moddepth_jax.model': 1,
    'moddepth_jax.data': 1,
    'moddepth_jax.inference': 2,
    'moddepth_jax.training': 2,
    'moddepth_jax.conversion': 2,
    'moddepth_jax.analysis': 3,
    'moddepth_jax.compiled': 3,
    'moddepth_jax.studies': 4,
    'moddepth_jax.benchmarks': 5,
    'launch': 6,
}


def part_of(module):
    names = module.split('.')
    return '.'.join(names[:2]) if names[0] == 'moddepth_jax' else names[0]


def may_import(source, target):
    if source == target:
        return True
    if source in FLOORS and target in FLOORS:
        return FLOORS[target] < FLOORS[source]
    if target == HPARAMS:
        return source in FLOORS and source != 'kernels_pallas'
    return source in ('launch', 'moddepth_jax.benchmarks') and target == 'configs'


def violations(source, module, is_package=False):
    """'module imports target' for each import of the text `source` that is not allowed.

    `from package import name` counts as package.name: the name may be a module.
    """
    package = module.split('.') if is_package else module.split('.')[:-1]
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = '.'.join(above + ([node.module] if node.module else []))
            found += [f'{base}.{alias.name}' for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            if ast.unparse(node.func).endswith('import_module'):
                found.append(str(node.args[0].value))
    ours = [name for name in found if name.split('.')[0] in OURS]
    wrong = [name for name in ours if not may_import(part_of(module), part_of(name))]
    return [f'{module} imports {name}' for name in wrong]


def test_imports_point_downwards():
    parts, wrong = set(), []
    for path in (path for top in OURS for path in sorted((ROOT / top).rglob('*.py'))):
        names = path.relative_to(ROOT).with_suffix('').parts
        is_package = names[-1] == '__init__'
        module = '.'.join(names[:-1] if is_package else names)
        parts.add(part_of(module))
        wrong += violations(path.read_text(), module, is_package)
    assert parts == {*FLOORS, HPARAMS, 'configs', 'moddepth_jax'}
    assert not wrong, '\n'.join(wrong)


@pytest.mark.parametrize(
    ('module', 'source', 'number'),
    [
        ('kernels_pallas.joint_softmax', 'from moddepth_jax import hparams', 1),
        ('moddepth_jax.data.pipeline', 'from moddepth_jax.model import layers', 1),
        ('moddepth_jax.model.layers', 'from ..training import losses', 1),
        ('moddepth_jax.training.loop', 'def f():\n    import moddepth_jax.inference.generate', 1),
        ('moddepth_jax.training.loop', 'from configs import base', 1),
        ('moddepth_jax.studies.plan', 'importlib.import_module("launch.train")', 1),
        ('kernels_pallas.depth_attention', 'from kernels_pallas import joint\nimport jax', 0),
        ('moddepth_jax.model.layers', 'import kernels_pallas\nfrom . import routing', 0),
        ('moddepth_jax.model.layers', 'from moddepth_jax.hparams import Hparams', 0),
        ('launch.train', 'from moddepth_jax.studies import plan\nfrom launch import cli', 0),
    ],
)
def test_planted_violations_are_found(module, source, number):
    assert len(violations(source, module)) == number


def test_files_stay_short():
    tops = [*OURS, 'notebooks']
    paths = [*ROOT.glob('*.py'), *(p for top in tops for p in (ROOT / top).rglob('*.py'))]
    lengths = {path: len(path.read_text().splitlines()) for path in paths}
    assert lengths[ROOT / 'configs' / 'base.py'] > 50
    assert not {str(path): n for path, n in lengths.items() if n > MAX_LINES}
