"""Registries: the classes or functions that a knob can name, which register themselves."""

import ast
import collections.abc
import contextlib
import functools
import importlib.util
import pathlib


class Registry(collections.abc.Mapping):
    """The choices of one knob, by name.

    Names and class attributes are read from the source text of `module`, so that a wrong config is
    refused before JAX and Flax are imported. Looking up a choice imports the module.

    Args:
      name: the variable that holds this registry, as it stands in `module`.
      knob: dotted name of the knob, for error messages.
      module: the module or package that registers this project's own choices.
      base: the class in `module` that a choice must be a subclass of; '': none.
    """

    def __init__(self, name: str, knob: str, module: str, base: str = ''):
        self._name, self._knob, self._module, self._base = name, knob, module, base
        self._choices = {}

    def register(self, name: str):
        """Return a decorator that adds a choice.

        It raises ValueError if the project has that name, or the choice lacks the base class.
        """

        def add(choice):
            if name in self._choices and self.is_own(name):
                right = f'{self._module} has this name; choose another'
                raise ValueError(f'{self._knob}={name!r}: {right}')
            # None while the package of this project is imported: it registers its own choices.
            base = getattr(importlib.import_module(self._module), self._base, None)
            if base and not (isinstance(choice, type) and issubclass(choice, base)):
                right = f'must be a subclass of {self._module}.{self._base}'
                raise ValueError(f'{self._knob}={name!r}: {choice.__name__} {right}')
            self._choices[name] = choice
            return choice

        return add

    @functools.cached_property
    def _own_traits(self):
        """The class attributes of this project's choices: _Traits by name."""
        spec = importlib.util.find_spec(self._module)
        folders = spec.submodule_search_locations or ()
        files = [file for folder in folders for file in sorted(pathlib.Path(folder).glob('*.py'))]
        texts = [file.read_text(encoding='utf-8') for file in files or [pathlib.Path(spec.origin)]]
        nodes = [node for text in texts for node in ast.parse(text).body]
        classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
        return {
            (name := call.args[0].value): _Traits(self, name, _literals(node, classes))
            for node in nodes
            for call in _registrations(node)
            if ast.unparse(call.func) == f'{self._name}.register'
        }

    def traits(self, name: str):
        """Return an object with the class attributes of a choice, without importing JAX.

        It is the class if that is imported. Otherwise it has the literals in the source of the
        class and of its base classes in `module`; to read any other attribute imports the class.
        """
        return self._choices[name] if name in self._choices else self._own_traits[name]

    def is_own(self, name: str) -> bool:
        """Return whether this project defines the choice, rather than a config file."""
        return name in self._own_traits

    def added(self, hparams) -> str | None:
        """Return 'KNOB=VALUE' if Hparams have a choice that this project does not define."""
        value = functools.reduce(getattr, self._knob.split('.'), hparams)
        return f'{self._knob}={value!r}' if value in self and not self.is_own(value) else None

    def unknown(self, config) -> str | None:
        """Return 'KNOB=VALUE' if a nested config, maybe damaged, names no choice that is known."""
        value = config
        for part in self._knob.split('.'):
            value = value.get(part) if hasattr(value, 'get') else None
        is_name = isinstance(value, str) and value not in ('none', 'auto')
        return f'{self._knob}={value!r}' if is_name and value not in self else None

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


class _Traits:
    """Attributes of a choice: the literals in its source, and others of the imported class."""

    def __init__(self, registry, name, literals):
        self.__dict__.update(literals)
        self._choice = registry, name

    def __getattr__(self, attribute):
        registry, name = self._choice
        return getattr(registry[name], attribute)


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
        found |= _literals(classes.get(ast.unparse(base).rpartition('.')[2]), classes)
    for line in node.body:
        names = _bound_names(line)
        for name in names:
            found.pop(name, None)
        if isinstance(line, ast.Assign) and len(names) == 1:
            with contextlib.suppress(ValueError):  # not a literal
                found[names[0]] = ast.literal_eval(line.value)
    return found


def _bound_names(line):
    """Return the names that a statement of a class body may bind."""
    if isinstance(line, ast.FunctionDef | ast.ClassDef):
        return [line.name]
    names = (node for node in ast.walk(line) if isinstance(node, ast.Name))
    return [name.id for name in names if isinstance(name.ctx, ast.Store)]


ROUTERS = Registry('ROUTERS', 'model.routing.router', 'moddepth_jax.model.mod.routers', 'Router')

GATES = Registry('GATES', 'model.routing.gate', 'moddepth_jax.model.mod.routers')
CAUSAL_RULES = Registry(
    'CAUSAL_RULES', 'model.routing.causal_rule', 'moddepth_jax.model.mod.causal_rules', 'CausalRule'
)
EXPERT_PRODUCTS = Registry(
    'EXPERT_PRODUCTS', 'model.experts.product', 'moddepth_jax.model.moe.grouped_matmul'
)
STREAMS = Registry('STREAMS', 'model.depth.stream', 'moddepth_jax.model.streams', 'Stream')

OPTIMIZERS = Registry('OPTIMIZERS', 'optimizer.name', 'moddepth_jax.training.optimizer')
SCHEDULES = Registry('SCHEDULES', 'optimizer.schedule', 'moddepth_jax.training.optimizer')
ALL = (ROUTERS, GATES, CAUSAL_RULES, EXPERT_PRODUCTS, STREAMS, OPTIMIZERS, SCHEDULES)
