"""The tables of what a knob can name: classes or functions that register themselves."""

import collections.abc
import functools
import importlib.util
import pathlib
import re


class Registry(collections.abc.Mapping):
    """The choices of one knob, by name: classes or functions that register themselves.

    Names are looked up in the source of `module`, so that a config with a wrong one is refused
    before JAX and Flax are imported; a choice itself imports the module.

    Args:
      name: of the table in the code.
      knob: dotted name of the knob, for error messages.
      module: the module or package in which this package's own choices register themselves.
    """

    def __init__(self, name: str, knob: str, module: str):
        self._name, self._knob, self._module, self._choices = name, knob, module, {}

    def register(self, name: str):
        """A decorator that adds a choice; ValueError if this package has one of that name."""

        def add(choice):
            known = self._choices.get(name)
            if known is not None and known.__module__.startswith('moddepth_jax.'):
                raise ValueError(f'{self._knob}={name!r}: registered by {known.__module__}')
            self._choices[name] = choice
            return choice

        return add

    @functools.cached_property
    def _own_names(self):
        spec = importlib.util.find_spec(self._module)
        folders = spec.submodule_search_locations or ()
        files = [file for folder in folders for file in sorted(pathlib.Path(folder).glob('*.py'))]
        pattern = rf"\b{self._name}\.register\('(\w+)'\)"
        texts = [file.read_text(encoding='utf-8') for file in files or [pathlib.Path(spec.origin)]]
        return [name for text in texts for name in re.findall(pattern, text)]

    def __getitem__(self, name):
        if name not in self._choices:
            importlib.import_module(self._module)
        return self._choices[name]

    def __contains__(self, name):
        return name in self._choices or name in self._own_names

    def __iter__(self):
        return iter(dict.fromkeys([*self._own_names, *self._choices]))

    def __len__(self):
        return len(list(iter(self)))


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
