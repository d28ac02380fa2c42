"""The device mesh, and where a run's arrays live on it: state by the rules, batches by rows."""

import math
import re
from typing import NamedTuple

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from moddepth_jax.hparams import Hparams
from moddepth_jax.model.sharding import AXES, axis_names, spec
from moddepth_jax.training.train_step import init_state


def make_mesh(text: str = '') -> Mesh:
    """The mesh that `text` describes, such as `data=2,fsdp=4`, over the devices of all processes.

    An axis that it does not name has size 1; where it is empty, all devices lie along `data`.

    Raises:
      ValueError: an unknown axis, one named twice, a size that is no positive number, or more
        devices than there are; fewer, where there are several processes.
    """
    devices = jax.devices()
    sizes = {} if text else {'data': len(devices)}
    for pair in text.split(',') if text else ():
        axis, _, size = pair.partition('=')
        if axis not in AXES or not size.isdecimal() or int(size) < 1:
            raise ValueError(f'--mesh={text}: must be AXIS=SIZE with an axis of {", ".join(AXES)}')
        if axis in sizes:
            raise ValueError(f'--mesh={text}: names {axis} twice; must name an axis once')
        sizes[axis] = int(size)
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    wanted = math.prod(shape)
    if wanted > len(devices):
        raise ValueError(f'--mesh={text}: needs {wanted} devices, {len(devices)} are here')
    if wanted < len(devices) and jax.process_count() > 1:
        raise ValueError(
            f'--mesh={text}: is of {wanted} devices; {jax.process_count()} processes need one of '
            f'all {len(devices)} that they have'
        )
    types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(shape, AXES, types, devices=devices[:wanted])


def check_mesh(hparams: Hparams, mesh: Mesh):
    """Raises ValueError, in one line, where rows or a side of the model do not divide over it.

    Also where a mesh with `fsdp` or `tensor` would leave more than `training.max_unsharded` of the
    parameters whole on every device.
    """
    check_batch(mesh, hparams.data.batch_size, hparams.training.accumulate_steps)
    model, experts = hparams.model, hparams.model.experts
    sides = {'fsdp': ['model.d_model'], 'tensor': ['model.num_heads', 'model.num_kv_heads']}
    if len(model.expert_layers) < model.num_layers:
        sides['tensor'] += ['model.d_ff']
    if model.expert_layers:
        sides['tensor'] += ['model.experts.d_ff']
        sides['expert'] = ['model.experts.num_routed']
    elif mesh.shape['expert'] > 1:
        raise ValueError(
            f'--mesh: expert={mesh.shape["expert"]} has nothing to split, '
            f'model.experts.choice=none is a model without experts; use --mesh=data=N'
        )
    for axis, names in sides.items():
        size = mesh.shape[axis]
        for name in names:
            value = getattr(experts if '.experts.' in name else model, name.split('.')[-1])
            if value % size:
                raise ValueError(
                    f'{name}={value} does not divide over --mesh={axis}={size}: every device holds '
                    f'as many; use a divisor of {value}'
                )
    if mesh.shape['fsdp'] * mesh.shape['tensor'] > 1:
        _check_unsharded(hparams, mesh)


def _check_unsharded(hparams, mesh):
    most = hparams.training.max_unsharded
    share = unsharded_fraction(mesh, jax.eval_shape(lambda: init_state(hparams, 1)).params)
    if share > most:
        sizes = ','.join(f'{axis}={size}' for axis, size in mesh.shape.items() if size > 1)
        raise ValueError(
            f'--mesh={sizes}: {share:.1%} of the parameters would be whole on every device, over '
            f'training.max_unsharded={most:g}; take another mesh, or raise that knob'
        )


def check_batch(mesh: Mesh, batch_size: int, accumulate_steps: int):
    """Raises ValueError where the rows of a micro-batch do not divide over the mesh."""
    rows = batch_size // accumulate_steps
    axes = [axis for axis in ('data', 'fsdp', 'expert') if mesh.shape[axis] > 1]
    shards = math.prod(mesh.shape[axis] for axis in axes)
    if rows % shards:
        over = ' x '.join(f'{axis}={mesh.shape[axis]}' for axis in axes)
        raise ValueError(
            f'data.batch_size={batch_size} in {accumulate_steps} micro-batches: {rows} rows do not '
            f'divide over {shards} devices ({over}); use --mesh=data=N or another data.batch_size'
        )


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def state_shardings(mesh: Mesh, state):
    """A NamedSharding for each leaf, by the rules of model.partition; moments as their parameters.

    Args:
      mesh: of `make_mesh`.
      state: a TrainState, or any pytree whose paths end like a Transformer's parameters, of arrays
        or jax.ShapeDtypeStruct.

    Returns:
      The same pytree, of shardings.
    """

    def sharding(path, leaf):
        path = jax.tree_util.keystr(path, simple=True, separator='/')
        return NamedSharding(mesh, spec(mesh, axis_names(path, leaf.ndim), leaf.shape))

    return jax.tree_util.tree_map_with_path(sharding, state)


def batch_sharding(mesh: Mesh, batch_size: int) -> NamedSharding:
    """Of an array whose first axis are the rows of a batch."""
    return NamedSharding(mesh, spec(mesh, ('batch',), (batch_size,)))


def local_rows(mesh: Mesh, batch_size: int) -> slice:
    """The rows of a batch that this process's devices need: all of them in a single process.

    A slice from the first to the last of them; processes that share rows, as where `tensor` spans
    them, have the same.
    """
    held = batch_sharding(mesh, batch_size).addressable_devices_indices_map((batch_size,))
    bounds = [rows.indices(batch_size)[:2] for (rows,) in held.values()]
    return slice(min(first for first, _ in bounds), max(last for _, last in bounds))


def shard_rows(mesh: Mesh, batch, rows: slice, batch_size: int):
    """Host arrays of the rows `rows` of a batch as global arrays, rows split over the mesh.

    Args:
      mesh: of `make_mesh`.
      batch: pytree of NumPy arrays [len(rows), ...].
      rows: of `own_rows`.
      batch_size: of the whole batch.
    """
    sharding = batch_sharding(mesh, batch_size)
    if jax.process_count() == 1:
        return jax.device_put(batch, sharding)

    def put(array):
        def part(index):
            first, last, _ = index[0].indices(batch_size)
            return array[first - rows.start : last - rows.start]

        shape = (batch_size, *array.shape[1:])
        return jax.make_array_from_callback(shape, sharding, part)

    return jax.tree.map(put, batch)


def shard_batch(mesh: Mesh, batch):
    """`put_rows` of a batch of which every process has all rows."""
    batch_size = len(jax.tree.leaves(batch)[0])
    return shard_rows(mesh, batch, slice(0, batch_size), batch_size)


def unsharded_fraction(mesh: Mesh, params) -> float:
    """Share of the parameters that every device holds: those that no axis but `data` could split.

    Args:
      mesh: of `make_mesh`.
      params: of a Transformer, arrays or jax.ShapeDtypeStruct.
    """
    leaves, shardings = jax.tree.leaves(params), jax.tree.leaves(state_shardings(mesh, params))
    pairs = zip(leaves, shardings, strict=True)
    whole = sum(leaf.size for leaf, sharding in pairs if sharding.is_fully_replicated)
    return whole / sum(leaf.size for leaf in leaves)


class ShardingRow(NamedTuple):
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


def sharding_rows(mesh, params) -> list[ShardingRow]:
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
    rows = [ShardingRow(*key, *sums) for key, sums in found.items()]
    return sorted(rows, key=lambda row: (-row.parameters, row.name))


def sharding_lines(mesh, params) -> list[str]:
    """The rows as lines of text under a header, their sum, and what share of it is unsplit.

    Vectors and narrow matrices, which are whole, are one line.
    """
    rows = sharding_rows(mesh, params)
    whole = [row for row in rows if row.split == 'whole']
    lines = [row for row in rows if row.split != 'whole']
    parameters, held = sum(r.parameters for r in whole), sum(r.device_bytes for r in whole)
    lines.append(ShardingRow(f'{len(whole)} others', 'whole', parameters, held))
    total = ShardingRow('all parameters', '', sum(r.parameters for r in rows), 0)
    lines.append(total._replace(device_bytes=sum(r.device_bytes for r in rows)))
    name, split = max(len(row.name) for row in lines), max(len(row.split) for row in lines)
    text = [f'{"":{name}}  {"split over":{split}}  {"parameters":>13}  {"MB a device":>11}']
    for row in lines:
        numbers = f'{row.parameters:>13,}  {row.device_bytes / 1e6:>11.3f}'
        text.append(f'{row.name:{name}}  {row.split:{split}}  {numbers}')
    return [
        *text,
        f'{unsharded_fraction(mesh, params):.2%} of the parameters whole on every device',
    ]


def mesh_lines(mesh, state) -> list[str]:
    """What a run on several devices says of them at its start; nothing of one device alone."""
    if mesh.size == 1:
        return []
    sizes = ' x '.join(f'{axis}={size}' for axis, size in mesh.shape.items() if size > 1)
    held = device_bytes(mesh, state)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    lines = [f'mesh      {sizes}: {held / 1e6:.2f} MB of {total / 1e6:.2f} MB of state a device']
    splits = any(mesh.shape[axis] > 1 for axis in mesh.shape if axis != 'data')
    return lines + [f'          {line}' for line in sharding_lines(mesh, state.params) if splits]
