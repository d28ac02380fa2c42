"""Compiling before there are values: functions that jitted calls make up, of abstract arrays."""

import jax


def abstract(tree):
    """A pytree of arrays as ShapeDtypeStructs, with their shardings."""
    return jax.tree.map(_struct, tree, jax.tree.map(lambda x: x.sharding, tree))


def _struct(x, sharding):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def is_abstract(tree) -> bool:
    """Whether a leaf of the pytree is a ShapeDtypeStruct."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def call(function, *args, **static):
    """`function(*args, **static)` of a jitted function; of abstract `args`, compiles it only.

    Then a call with such arrays, in any thread, neither traces nor compiles. Returns its result, or
    the abstract form of it.
    """
    if not is_abstract(args):
        return function(*args, **static)
    lowered = function.lower(*args, **static)
    return jax.tree.map(_struct, lowered.out_info, lowered.compile().output_shardings)
