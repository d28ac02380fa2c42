"""The tables of what a knob can name: classes or functions that register themselves."""

import collections.abc
import importlib


class Registry(collections.abc.Mapping):
    """The choices of one knob, by name: classes or functions that register themselves.

    A look-up imports the module in which they do so: `hparams` itself needs neither JAX nor Flax.
    """

    def __init__(self, knob: str, module: str):
        self._knob, self._module, self._choices = knob, module, {}

    def register(self, name: str):
        """A decorator that adds a choice; ValueError if this package has one of that name."""

        def add(choice):
            known = self._choices.get(name)
            if known is not None and known.__module__.startswith('moddepth_jax.'):
                raise ValueError(f'{self._knob}={name!r}: registered by {known.__module__}')
            self._choices[name] = choice
            return choice

        return add

    def _all(self):
        importlib.import_module(self._module)
        return self._choices

    def __getitem__(self, name):
        return self._all()[name]

    def __iter__(self):
        return iter(self._all())

    def __len__(self):
        return len(self._all())


ROUTERS = Registry('model.routing.router', 'moddepth_jax.model.mod.routers')
CAUSAL_RULES = Registry('model.routing.causal_rule', 'moddepth_jax.model.mod.causal_rules')
EXPERT_PRODUCTS = Registry('model.experts.product', 'moddepth_jax.model.moe.grouped_matmul')
STREAMS = Registry('model.depth.stream', 'moddepth_jax.model.streams')
