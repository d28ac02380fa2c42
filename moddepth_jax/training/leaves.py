"""The leaves of a train state by name, and how checkpoints store, compare and restore them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from moddepth_jax.training import multihost


class StateMismatchError(ValueError):
    """A checkpoint has other leaves than the wanted state; every process of a run raises this."""

    on_all_processes = True

    def __init__(self, line: str):
        super().__init__(line)
        self.reported_elsewhere = not multihost.is_leader()


def difference(saved: dict[str, str], wanted: dict) -> str:
    """The first difference in path, dtype or shape, and the remedy; '' if there is none.

    Args:
      saved: `spec` of each leaf by path.
      wanted: of `named_leaves`, arrays or jax.ShapeDtypeStruct.
    """
    specs = {path: spec(leaf) for path, leaf in wanted.items()}
    for path in sorted(saved.keys() | specs.keys()):
        old, new = saved.get(path, 'absent'), specs.get(path, 'absent')
        if old != new:
            found = f'{path} is {old} in the checkpoint and {new} in this run'
            return f'{found}; use the config it was saved with'
    return ''


def named_leaves(tree) -> dict:
    """Path to leaf, such as params.stack.run_0.norm.scale, in the order of `jax.tree.leaves`.

    Raises:
      ValueError: two leaves have one path.
    """
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    leaves = {jax.tree_util.keystr(path, simple=True, separator='.'): leaf for path, leaf in pairs}
    if len(leaves) != len(pairs):
        raise ValueError(f'{len(pairs)} leaves have {len(leaves)} paths: no key may contain a dot')
    return leaves


def spec(leaf) -> str:
    """Dtype and shape, such as float32[8,4]."""
    leaf = leaf if hasattr(leaf, 'dtype') else np.asarray(leaf)
    return f'{leaf.dtype}[{",".join(map(str, leaf.shape))}]'


def to_stored(leaf):
    """The array written for a leaf: itself, or the uint32 data of a typed PRNG key."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def target(leaf) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of the array that is read for a leaf.

    Args:
      leaf: array or jax.ShapeDtypeStruct; without a sharding, it goes to the first device.
    """
    stored = jax.eval_shape(to_stored, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=_sharding(leaf))


def from_stored(leaf, array):
    """Inverse of `to_stored`: an array of the shape, dtype and sharding of `leaf`.

    Args:
      leaf: as `target` takes it.
      array: of `target(leaf)`; None for a leaf without elements, which is not written.
    """
    if array is None:
        make = functools.partial(jnp.empty, leaf.shape, leaf.dtype)
        return jax.jit(make, out_shardings=_sharding(leaf))()
    if _is_key(leaf):
        impl = jax.random.key_impl(jnp.empty((), leaf.dtype))
        wrap = functools.partial(jax.random.wrap_key_data, impl=impl)
        return jax.jit(wrap, out_shardings=_sharding(leaf))(array)
    return array


def to_host(leaf) -> np.ndarray:
    """The full stored array of a leaf on the host, however it is split over devices.

    If this process does not hold all of it, every process has to call this, and each device holds
    the full array for a moment.
    """
    if isinstance(leaf, jax.Array) and leaf.is_fully_replicated:
        leaf = leaf.addressable_data(0)
    elif isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return multihost_utils.process_allgather(to_stored(leaf), tiled=True)
    return np.asarray(jax.device_get(to_stored(leaf)))


def _is_key(leaf):
    return jnp.issubdtype(getattr(leaf, 'dtype', None), jax.dtypes.prng_key)


def _sharding(leaf):
    return leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
