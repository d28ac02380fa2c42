"""From a config to checked hyper-parameters. Nothing else reads a ConfigDict."""

import dataclasses
import difflib
import math
import typing

from moddepth_jax.hparams import checks
from moddepth_jax.hparams.checks import refuse
from moddepth_jax.hparams.run import Hparams


def _convert(field, value, wanted, make):
    """Return `value` as the annotated type `wanted`. Raises a one-line ValueError if it cannot."""
    if dataclasses.is_dataclass(wanted):
        return _build(wanted, value, field + '.', make)
    if typing.get_origin(wanted) is tuple:
        values = value if isinstance(value, (tuple, list)) else (value,)
        return tuple(_convert(field, item, typing.get_args(wanted)[0], make) for item in values)
    if wanted is float and type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            refuse(field, value, f'must be at most {checks.MAX_FLOAT}')
    if type(value) is not wanted:
        refuse(field, value, f'must be {wanted.__name__}, not {type(value).__name__}')
    if wanted is float and math.isnan(value):
        refuse(field, value, 'must be a number')
    return value


def _build(cls, values, prefix='', make=None):
    if not hasattr(values, 'items'):
        right = 'a group of knobs' if prefix else 'a ConfigDict or dict, as get_config() returns'
        refuse(prefix.rstrip('.') or 'config', values, f'must be {right}')
    types = typing.get_type_hints(cls)
    for name, value in values.items():
        name = str(name)
        if name in getattr(cls, 'NOT_BUILT', ()):
            refuse(prefix + name, value, cls.NOT_BUILT[name])
        if name not in types:
            near = difflib.get_close_matches(name, types, n=1, cutoff=0.4)
            known = f'nearest knob is {near[0]!r}' if near else f'knobs are {", ".join(types)}'
            refuse(prefix + name, value, f'no such knob; the {known}')
    for name in types:
        if name not in values:
            raise ValueError(f'{prefix}{name}: missing; a config must have all knobs of base.py')
    made = {name: _convert(prefix + name, values[name], types[name], make) for name in types}
    return make(cls, made) if make else cls(**made)


def from_config(config) -> Hparams:
    """Return the checked, frozen form of a ConfigDict or nested dict.

    Raises a one-line ValueError that names the knob if a value is wrong.
    """
    check_values(config)
    return _build(Hparams, config)


def check_values(config) -> Hparams:
    """As `from_config`, but without the checks of routers and streams, which import JAX."""
    return _build(Hparams, config, make=_checked)


def _checked(cls, fields):
    """Make an instance and run only its checks that need no JAX."""
    made = object.__new__(cls)
    made.__dict__.update(fields)
    getattr(made, 'check_values', made.__post_init__)()
    return made


def unknown_knobs(config: dict, cls=Hparams, prefix: str = '') -> dict:
    """Return the entries of nested dicts that this version does not know, by dotted name."""
    types, unknown = typing.get_type_hints(cls), {}
    for name, value in config.items():
        if name not in types:
            unknown[prefix + name] = value
        elif dataclasses.is_dataclass(types[name]) and isinstance(value, dict):
            unknown |= unknown_knobs(value, types[name], f'{prefix}{name}.')
    return unknown
