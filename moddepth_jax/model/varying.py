"""Arrays that vary over the axes of shard_map, as rules of differentiation of our own need them."""

import jax
import jax.numpy as jnp


def _axes(array):
    return jax.typeof(array).manual_axis_type.varying


def _vary(array, axes):
    missing = tuple(sorted(axes - _axes(array)))
    return jax.lax.pcast(array, missing, to='varying') if missing else array


def alike(*trees):
    """The trees with every leaf varying over the axes that any leaf varies over.

    A custom_vjp must return cotangents that vary as its operands do. The sum over shards that a
    replicated operand needs then belongs to this cast. Outside shard_map nothing changes.
    """
    axes = frozenset().union(*map(_axes, jax.tree.leaves(trees)))
    return jax.tree.map(lambda leaf: _vary(leaf, axes), trees)


def zeros_like_of(array, shape, dtype):
    """Zeros that vary over the axes that `array` varies over, as the carry of a scan must."""
    return _vary(jnp.zeros(shape, dtype), _axes(array))
