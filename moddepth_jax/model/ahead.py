"""Ahead-of-time compilation of functions that consist of jitted calls, by abstract arrays."""

import jax


def abstract(tree):
    """Return ShapeDtypeStructs, with shardings, of a pytree of arrays."""
    return jax.tree.map(_struct, tree, jax.tree.map(lambda x: x.sharding, tree))


def _struct(x, sharding):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def is_abstract(tree) -> bool:
    """Return whether a leaf of the pytree is a ShapeDtypeStruct."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def call(function, *args, **static):
    """Call a jitted function, or only compile it if `args` are abstract.

    A later call with such arrays, in any thread, neither traces nor compiles. Returns the result,
    or its abstract form.
    """
    if not is_abstract(args):
        return function(*args, **static)
    lowered = function.lower(*args, **static)
    return jax.tree.map(_struct, lowered.out_info, lowered.compile().output_shardings)
