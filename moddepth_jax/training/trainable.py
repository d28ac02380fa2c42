"""Splits the parameters into trainable and frozen ones, by the globs of optimizer.trainable."""

import difflib
import fnmatch

from flax import traverse_util

from moddepth_jax.hparams import Hparams
from moddepth_jax.model.transformer import abstract_variables

ALL = ('*',)


def split_params(params: dict, patterns: tuple[str, ...]) -> tuple[dict, dict]:
    """Return (trainable, frozen) parameters, nested like `params`.

    Only trainable parameters have gradients, clipping, weight decay and moments. Raises ValueError,
    one line, for a pattern that matches no parameter.
    """
    if tuple(patterns) in ((), ALL):
        return params, {}
    leaves = traverse_util.flatten_dict(params, sep='/')
    chosen = _named(leaves, patterns, 'optimizer.trainable')
    parts = ({}, {})
    for name, leaf in leaves.items():
        parts[name not in chosen][name] = leaf
    trainable, frozen = (traverse_util.unflatten_dict(part, sep='/') for part in parts)
    return trainable, frozen


def merge_params(trainable: dict, frozen: dict) -> dict:
    """Join the two results of `split_params`."""
    if not frozen:
        return trainable
    leaves = traverse_util.flatten_dict(frozen) | traverse_util.flatten_dict(trainable)
    return traverse_util.unflatten_dict(leaves)


def check_trainable(hparams: Hparams):
    """Raise ValueError, one line, for a glob that matches no parameter.

    Checks optimizer.trainable, optimizer.rate_factors and model.adapters.params.
    """
    optimizer = hparams.optimizer
    if optimizer.trainable not in ((), ALL) or optimizer.factors or hparams.model.adapters.rank:
        params, _ = split_params(abstract_variables(hparams)['params'], optimizer.trainable)
        globs = [glob for glob, _ in optimizer.factors]
        _named(traverse_util.flatten_dict(params, sep='/'), globs, 'optimizer.rate_factors')


def _named(names, patterns, knob):
    """Return the names that some pattern matches; each pattern must match a name."""
    chosen = set()
    for pattern in patterns:
        found = fnmatch.filter(names, pattern)
        if not found:
            nearest = ', '.join(_nearest(pattern, names))
            right = f'matches no parameter; the nearest are {nearest}'
            raise ValueError(f'{knob}={pattern!r}: {right}')
        chosen.update(found)
    return chosen


def _nearest(pattern, names):
    """Return the three names whose parts are most similar to those of the pattern."""
    words = [word.strip('*?') for word in pattern.split('/')]

    def similarity(name):
        parts = name.split('/')
        ratios = [
            max(difflib.SequenceMatcher(None, word, part).ratio() for part in parts)
            for word in words
            if word
        ]
        return sum(ratios)

    return sorted(names, key=similarity, reverse=True)[:3]
