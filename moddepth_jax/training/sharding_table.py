"""Which parameters a mesh splits, over what, and how many bytes a device holds: for the user."""

import math
import re
from typing import NamedTuple

import jax

from moddepth_jax.training.sharding import state_shardings, unsharded_share


class Row(NamedTuple):
    """Parameters of one name, of all layers.

    Attributes:
      name: such as attention/query/kernel.
      split: the mesh axes of each of its axes, such as `(whole, fsdp, tensor, whole)`, or `whole`.
      parameters: their number.
      device_bytes: of the largest part of them that a device holds.
    """

    name: str
    split: str
    parameters: int
    device_bytes: int


def _bytes(leaf, sharding):
    return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def device_bytes(mesh, state) -> int:
    """Bytes of a state that one device holds at most.

    Args:
      mesh: of `make_mesh`.
      state: pytree of arrays or jax.ShapeDtypeStruct whose paths are those of a TrainState.
    """
    shardings = jax.tree.leaves(state_shardings(mesh, state))
    return sum(map(_bytes, jax.tree.leaves(state), shardings))


def _split(sharding, ndim):
    entries = (tuple(sharding.spec) + (None,) * ndim)[:ndim]
    if not any(entries):
        return 'whole'
    words = ['+'.join(e) if isinstance(e, tuple) else e or 'whole' for e in entries]
    return f'({", ".join(words)})'


def sharding_rows(mesh, params) -> list[Row]:
    """A Row for each name and way of splitting, the largest number of parameters first.

    Args:
      mesh: of `make_mesh`.
      params: of a Transformer, arrays or jax.ShapeDtypeStruct.
    """
    shardings = jax.tree.leaves(state_shardings(mesh, params))
    found = {}
    for (path, leaf), sharding in zip(
        jax.tree_util.tree_leaves_with_path(params), shardings, strict=True
    ):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        name = re.sub(r'stack/run_\d+/layer_\d+/(block/)?', '', name)
        key = name, _split(sharding, leaf.ndim)
        parameters, held = found.get(key, (0, 0))
        found[key] = parameters + leaf.size, held + _bytes(leaf, sharding)
    rows = [Row(*key, *sums) for key, sums in found.items()]
    return sorted(rows, key=lambda row: (-row.parameters, row.name))


def table_lines(mesh, params) -> list[str]:
    """The rows as lines of text under a header, their sum, and what share of it is unsplit.

    Vectors and narrow matrices, which are whole, are one line.
    """
    rows = sharding_rows(mesh, params)
    whole = [row for row in rows if row.split == 'whole']
    lines = [row for row in rows if row.split != 'whole']
    parameters, held = sum(r.parameters for r in whole), sum(r.device_bytes for r in whole)
    lines.append(Row(f'{len(whole)} others', 'whole', parameters, held))
    total = Row('all parameters', '', sum(r.parameters for r in rows), 0)
    lines.append(total._replace(device_bytes=sum(r.device_bytes for r in rows)))
    name, split = max(len(row.name) for row in lines), max(len(row.split) for row in lines)
    text = [f'{"":{name}}  {"split over":{split}}  {"parameters":>13}  {"MB a device":>11}']
    for row in lines:
        numbers = f'{row.parameters:>13,}  {row.device_bytes / 1e6:>11.3f}'
        text.append(f'{row.name:{name}}  {row.split:{split}}  {numbers}')
    return [*text, f'{unsharded_share(mesh, params):.2%} of the parameters whole on every device']


def mesh_lines(mesh, state) -> list[str]:
    """What a run on several devices says of them at its start; nothing of one device alone."""
    if mesh.size == 1:
        return []
    sizes = ' x '.join(f'{axis}={size}' for axis, size in mesh.shape.items() if size > 1)
    held = device_bytes(mesh, state)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    lines = [f'mesh      {sizes}: {held / 1e6:.2f} MB of {total / 1e6:.2f} MB of state a device']
    splits = any(mesh.shape[axis] > 1 for axis in mesh.shape if axis != 'data')
    return lines + [f'          {line}' for line in table_lines(mesh, state.params) if splits]
