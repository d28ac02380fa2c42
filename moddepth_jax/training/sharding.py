"""The device mesh, and where a run's arrays live on it: state by the rules, batches by rows."""

import math

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from moddepth_jax.hparams import Hparams
from moddepth_jax.model.partition import AXES, axis_names, spec
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
    share = unsharded_share(mesh, jax.eval_shape(lambda: init_state(hparams, 1)).params)
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
    return NamedSharding(mesh, spec(mesh, ('rows',), (batch_size,)))


def own_rows(mesh: Mesh, batch_size: int) -> slice:
    """The rows of a batch that this process's devices need: all of them in a single process.

    A slice from the first to the last of them; processes that share rows, as where `tensor` spans
    them, have the same.
    """
    held = batch_sharding(mesh, batch_size).addressable_devices_indices_map((batch_size,))
    bounds = [rows.indices(batch_size)[:2] for (rows,) in held.values()]
    return slice(min(first for first, _ in bounds), max(last for _, last in bounds))


def put_rows(mesh: Mesh, batch, rows: slice, batch_size: int):
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


def put_batch(mesh: Mesh, batch):
    """`put_rows` of a batch of which every process has all rows."""
    batch_size = len(jax.tree.leaves(batch)[0])
    return put_rows(mesh, batch, slice(0, batch_size), batch_size)


def unsharded_share(mesh: Mesh, params) -> float:
    """Share of the parameters that every device holds: those that no axis but `data` could split.

    Args:
      mesh: of `make_mesh`.
      params: of a Transformer, arrays or jax.ShapeDtypeStruct.
    """
    leaves, shardings = jax.tree.leaves(params), jax.tree.leaves(state_shardings(mesh, params))
    pairs = zip(leaves, shardings, strict=True)
    whole = sum(leaf.size for leaf, sharding in pairs if sharding.is_fully_replicated)
    return whole / sum(leaf.size for leaf in leaves)
