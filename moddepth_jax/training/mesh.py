"""The device mesh, the sharding of a run's arrays over it, and tables that show it."""

import collections
import math
import re

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from moddepth_jax.hparams import Hparams
from moddepth_jax.hparams.flag_values import AXES, mesh_sizes
from moddepth_jax.model.sharding import RULES, axis_names, spec
from moddepth_jax.training.train_step import init_state


def make_mesh(text: str = '') -> Mesh:
    """Make the mesh that `text` describes, such as `data=2,fsdp=4`, from all processes' devices.

    Other axes have size 1; '' puts all devices along `data`. Raises ValueError, one line, if `text`
    is malformed or needs too many devices; with several processes, also if it needs too few.
    """
    devices = jax.devices()
    sizes = mesh_sizes(text) or {'data': len(devices)}
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    wanted = math.prod(shape)
    if wanted > len(devices):
        found = f'needs {wanted} devices, and there are {len(devices)}'
        raise ValueError(f'--mesh={text}: {found}; lower its sizes')
    if wanted < len(devices) and (processes := jax.process_count()) > 1:
        right = f'must use all {len(devices)} devices of the {processes} processes'
        raise ValueError(f'--mesh={text}: uses {wanted} devices; {right}')
    types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(shape, AXES, types, devices=devices[:wanted])


def check_mesh(hparams: Hparams, mesh: Mesh):
    """Raise ValueError, one line, if the mesh does not divide a batch or a size of the model.

    Also if it leaves more than `training.max_unsharded` of the parameters unsharded.
    """
    check_batch(mesh, hparams.data.batch_size, hparams.training.accumulate_steps)
    model, experts = hparams.model, hparams.model.experts
    if mesh.shape['expert'] > 1 and not model.expert_layers:
        found = f'expert={mesh.shape["expert"]} has nothing to split'
        right = 'model.experts.choice=none is a model without experts; use --mesh=data=N'
        raise ValueError(f'--mesh: {found}, {right}')
    divided = [
        ('fsdp', 'model.d_model', model.d_model),
        ('tensor', 'model.num_heads', model.num_heads),
        ('tensor', 'model.num_kv_heads', model.num_kv_heads),
    ]
    if len(model.expert_layers) < model.num_blocks:
        divided += [('tensor', 'model.d_ff', model.d_ff)]
    if model.expert_layers:
        divided += [('tensor', 'model.experts.d_ff', experts.d_ff)]
        divided += [('expert', 'model.experts.num_routed', experts.num_routed)]
    for axis, name, value in divided:
        if value % (size := mesh.shape[axis]):
            right = f'use a divisor of {value} for {axis}'
            raise ValueError(f'{name}={value} does not divide over --mesh={axis}={size}: {right}')
    if mesh.shape['fsdp'] * mesh.shape['tensor'] == 1:
        return
    most = hparams.training.max_unsharded
    share = _unsharded_fraction(mesh, jax.eval_shape(lambda: init_state(hparams, 1)).params)
    if share > most:
        sizes = ','.join(f'{axis}={size}' for axis, size in mesh.shape.items() if size > 1)
        raise ValueError(
            f'--mesh={sizes}: {share:.1%} of the parameters would be on every device, over '
            f'training.max_unsharded={most:g}; use another mesh, or raise that knob'
        )


def check_batch(mesh: Mesh, batch_size: int, accumulate_steps: int):
    """Raise ValueError, one line, if the rows of a micro-batch do not divide over the mesh."""
    rows = batch_size // accumulate_steps
    axes = [axis for axis in dict(RULES)['batch'] if mesh.shape[axis] > 1]
    shards = math.prod(mesh.shape[axis] for axis in axes)
    if rows % shards:
        over = ' x '.join(f'{axis}={mesh.shape[axis]}' for axis in axes)
        raise ValueError(
            f'data.batch_size={batch_size} in {accumulate_steps} micro-batches: {rows} rows do not '
            f'divide over {shards} devices ({over}); use --mesh=data=N or another data.batch_size'
        )


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that every device holds in full."""
    return NamedSharding(mesh, PartitionSpec())


def state_shardings(mesh: Mesh, state):
    """Return a NamedSharding for each leaf; optimizer moments are sharded like their parameters.

    `state` is a pytree of arrays or jax.ShapeDtypeStruct whose paths end like those of parameters.
    `model.sharding` has the rules.
    """

    def place(path, leaf):
        return NamedSharding(mesh, spec(mesh, axis_names(_name(path), leaf.ndim), leaf.shape))

    return jax.tree_util.tree_map_with_path(place, state)


def _name(path):
    return jax.tree_util.keystr(path, simple=True, separator='/')


def abstract_on_mesh(mesh: Mesh, abstract):
    """Add the sharding of `state_shardings` to each jax.ShapeDtypeStruct of a pytree."""
    shardings = state_shardings(mesh, abstract)
    return jax.tree.map(lambda leaf, to: leaf.update(sharding=to), abstract, shardings)


def batch_sharding(mesh: Mesh, batch_size: int) -> NamedSharding:
    """Return the sharding of an array whose first axis is the rows of a batch."""
    return NamedSharding(mesh, spec(mesh, ('batch',), (batch_size,)))


def local_rows(mesh: Mesh, batch_size: int) -> slice:
    """Return the slice of batch rows that the devices of this process need.

    Processes that share rows, because the axis `tensor` spans them, have the same slice.
    """
    held = batch_sharding(mesh, batch_size).addressable_devices_indices_map((batch_size,))
    bounds = [rows.indices(batch_size)[:2] for (rows,) in held.values()]
    return slice(min(first for first, _ in bounds), max(last for _, last in bounds))


def shard_rows(mesh: Mesh, batch, rows: slice, batch_size: int):
    """Make global arrays of a batch, split by rows over the mesh, from this process's rows.

    `batch` is a pytree of NumPy arrays, which hold the rows `rows` (of `local_rows`) out of
    `batch_size`.
    """
    sharding = batch_sharding(mesh, batch_size)

    def put(array):
        def part(index):
            first, last, _ = index[0].indices(batch_size)
            return array[first - rows.start : last - rows.start]

        shape = (batch_size, *array.shape[1:])
        return jax.make_array_from_callback(shape, sharding, part)

    return jax.tree.map(put, batch)


def shard_batch(mesh: Mesh, batch):
    """Like `shard_rows`, for a batch of which every process has all rows."""
    batch_size = len(jax.tree.leaves(batch)[0])
    return shard_rows(mesh, batch, slice(0, batch_size), batch_size)


def _placed(mesh, tree):
    """Yield (name, leaf, sharding, bytes on each device) of each leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    shardings = jax.tree.leaves(state_shardings(mesh, tree))
    for (path, leaf), sharding in zip(leaves, shardings, strict=True):
        held = math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        yield _name(path), leaf, sharding, held


def device_bytes(mesh: Mesh, state) -> int:
    """Return the bytes that each device holds of a state; `state` as in `state_shardings`."""
    return sum(held for *_, held in _placed(mesh, state))


def _unsharded_fraction(mesh, params):
    """Return the fraction of the parameters that every device holds in full."""
    sizes = [(leaf.size, to.is_fully_replicated) for _, leaf, to, _ in _placed(mesh, params)]
    return sum(size for size, everywhere in sizes if everywhere) / sum(size for size, _ in sizes)


def _split(sharding, ndim):
    """Format the mesh axes of each axis of an array, such as `(-, fsdp, tensor, -)`."""
    entries = (tuple(sharding.spec) + (None,) * ndim)[:ndim]
    words = ['+'.join(e) if isinstance(e, tuple) else e or '-' for e in entries]
    return f'({", ".join(words)})'


def sharding_lines(mesh: Mesh, params) -> list[str]:
    """Return a table of parameters, summed over layers: their split, and bytes per device.

    A last line says if `tensor` does not divide the vocabulary.
    """
    sizes, bytes_held = collections.Counter(), collections.Counter()
    for name, leaf, sharding, held in _placed(mesh, params):
        name = re.sub(r'stack/run_\d+/layer_\d+/(block/)?', '', name)
        split = _split(sharding, leaf.ndim)
        row = ('others', 'replicated') if sharding.is_fully_replicated else (name, split)
        sizes[row] += leaf.size
        bytes_held[row] += held
    rows = [(*row, size, bytes_held[row]) for row, size in sizes.most_common()]
    rows.sort(key=lambda row: row[1] == 'replicated')
    rows.append(('all parameters', '', sizes.total(), bytes_held.total()))
    name_width, split_width = (max(len(row[i]) for row in rows) for i in (0, 1))
    heads = 'split over', 'parameters', 'MB per device'
    text = [f'{"":{name_width}}  {heads[0]:{split_width}}  {heads[1]:>13}  {heads[2]:>11}']
    for name, split, size, held in rows:
        numbers = f'{size:>13,}  {held / 1e6:>11.3f}'
        text.append(f'{name:{name_width}}  {split:{split_width}}  {numbers}')
    text.append(f'{_unsharded_fraction(mesh, params):.2%} of the parameters on every device')
    vocab_size, tensor = params['embedding'].shape[0], mesh.shape['tensor']
    if vocab_size % tensor:
        found = f'model.vocab_size={vocab_size} is not a multiple of tensor={tensor}'
        text.append(f'every device computes all logits: {found}')
    return text


def mesh_lines(mesh: Mesh, state) -> list[str]:
    """Return lines about the devices, for the start of a run; none for a single device."""
    if mesh.size == 1:
        return []
    sizes = ' x '.join(f'{axis}={size}' for axis, size in mesh.shape.items() if size > 1)
    held = device_bytes(mesh, state)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    lines = [f'mesh      {sizes}: {held / 1e6:.2f} MB of {total / 1e6:.2f} MB of state a device']
    splits = any(mesh.shape[axis] > 1 for axis in mesh.shape if axis != 'data')
    return lines + [f'          {line}' for line in sharding_lines(mesh, state.params) if splits]
