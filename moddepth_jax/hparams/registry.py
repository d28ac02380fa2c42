"""Registries: the classes or functions that a knob can name, which register themselves."""

import ast
import collections.abc
import contextlib
import functools
import importlib.util
import pathlib
import types


class Registry(collections.abc.Mapping):
    """The choices of one knob, by name.

    Names and class attributes are read from the source text of `module`, so that a wrong config is
    refused before JAX and Flax are imported. Looking up a choice imports the module.

    Args:
      name: the variable that holds this registry, as it stands in `module`.
      knob: dotted name of the knob, for error messages.
      module: the module or package that registers this project's own choices.
    """

    def __init__(self, name: str, knob: str, module: str):
        self._name, self._knob, self._module, self._choices = name, knob, module, {}

    def register(self, name: str):
        """Return a decorator that adds a choice. Raises ValueError if the project has that name."""

        def add(choice):
            if name in self._choices and name in self._own_traits:
                right = f'{self._module} has this name; choose another'
                raise ValueError(f'{self._knob}={name!r}: {right}')
            self._choices[name] = choice
            return choice

        return add

    @functools.cached_property
    def _own_traits(self):
        """The literal class attributes of this project's choices: SimpleNamespaces by name."""
        spec = importlib.util.find_spec(self._module)
        folders = spec.submodule_search_locations or ()
        files = [file for folder in folders for file in sorted(pathlib.Path(folder).glob('*.py'))]
        texts = [file.read_text(encoding='utf-8') for file in files or [pathlib.Path(spec.origin)]]
        nodes = [node for text in texts for node in ast.parse(text).body]
        classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
        return {
            call.args[0].value: types.SimpleNamespace(**_literals(node, classes))
            for node in nodes
            for call in _registrations(node)
            if ast.unparse(call.func) == f'{self._name}.register'
        }

    def traits(self, name: str):
        """Return an object with the class attributes of a choice, without importing JAX.

        It is the class if that is imported. Otherwise it has the literals in the source of the
        class and of its base classes in `module`.
        """
        return self._choices[name] if name in self._choices else self._own_traits[name]

    def __getitem__(self, name):
        if name not in self._choices:
            importlib.import_module(self._module)
        return self._choices[name]

    def __contains__(self, name):
        return name in self._choices or name in self._own_traits

    def __iter__(self):
        return iter(dict.fromkeys([*self._own_traits, *self._choices]))

    def __len__(self):
        return len(list(iter(self)))


def _registrations(node):
    """Return the calls that register: decorators of a statement, or f(name) in f(name)(choice)."""
    value = getattr(node, 'value', None)
    calls = [*getattr(node, 'decorator_list', ()), getattr(value, 'func', None)]
    return [call for call in calls if isinstance(call, ast.Call)]


def _literals(node, classes):
    """Return the literal attributes of a class and of its base classes among `classes`."""
    found = {}
    if not isinstance(node, ast.ClassDef):
        return found
    for base in node.bases:
        found |= _literals(classes.get(ast.unparse(base)), classes)
    for line in node.body:
        if isinstance(line, ast.Assign):
            found.pop(name := line.targets[0].id, None)
            with contextlib.suppress(ValueError):  # not a literal
                found[name] = ast.literal_eval(line.value)
    return found


ROUTERS = Registry('ROUTERS', 'model.routing.router', 'moddepth_jax.model.mod.routers')
GATES = Registry('GATES', 'model.routing.gate', 'moddepth_jax.model.mod.routers')
CAUSAL_RULES = Registry(
    'CAUSAL_RULES', 'model.routing.causal_rule', 'moddepth_jax.model.mod.causal_rules'
)
EXPERT_PRODUCTS = Registry(
    'EXPERT_PRODUCTS', 'model.experts.product', 'moddepth_jax.model.moe.grouped_matmul'
)
STREAMS = Registry('STREAMS', 'model.depth.stream', 'moddepth_jax.model.streams')
OPTIMIZERS = Registry('OPTIMIZERS', 'optimizer.name', 'moddepth_jax.training.optimizer')
SCHEDULES = Registry('SCHEDULES', 'optimizer.schedule', 'moddepth_jax.training.optimizer')
