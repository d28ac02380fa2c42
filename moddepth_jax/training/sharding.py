"""Where arrays live: the device mesh, rows of a batch over it, which parameters it splits."""

import math
import re

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from moddepth_jax.hparams import Hparams

AXES = ('data', 'expert')

# The first rule whose pattern ends a leaf's path and which has an entry for each of its axes says
# over what these are split; a leaf without a rule is whole on every device. A dense mlp has the
# paths of experts, and one axis less.
RULES = ((r'/mlp/w[123]/kernel', PartitionSpec(None, 'expert', None, None)),)


def make_mesh(spec: str = '') -> Mesh:
    """The mesh that `spec` describes, such as `data=2,expert=4`.

    An axis that it does not name has size 1; where `spec` is empty, all devices lie along `data`.

    Raises:
      ValueError: an unknown axis, one named twice, a size that is no positive number, or more
        devices than there are.
    """
    devices = jax.devices()
    sizes = {} if spec else {'data': len(devices)}
    for pair in filter(None, spec.split(',')):
        axis, _, size = pair.partition('=')
        if axis not in AXES or not size.isdecimal() or int(size) < 1:
            raise ValueError(f'--mesh={spec}: must be AXIS=SIZE with an axis of {", ".join(AXES)}')
        if axis in sizes:
            raise ValueError(f'--mesh={spec}: names {axis} twice; must name an axis once')
        sizes[axis] = int(size)
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    wanted = math.prod(shape)
    if wanted > len(devices):
        raise ValueError(f'--mesh={spec}: needs {wanted} devices, {len(devices)} are here')
    types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(shape, AXES, types, devices=devices[:wanted])


def check_mesh(hparams: Hparams, mesh: Mesh):
    """Raises ValueError, in one line, where rows or experts do not divide over the mesh."""
    check_batch(mesh, hparams.data.batch_size, hparams.training.accumulate_steps)
    shards, num_routed = mesh.shape['expert'], hparams.model.experts.num_routed
    if shards == 1:
        return
    if not hparams.model.expert_layers:
        raise ValueError(
            f'--mesh: expert={shards} has nothing to split, model.experts.choice=none is a model '
            f'without experts; use --mesh=data=N'
        )
    if num_routed % shards:
        raise ValueError(
            f'model.experts.num_routed={num_routed} does not divide over --mesh=expert={shards}: '
            f'every device holds as many experts; use a divisor of {num_routed}'
        )


def check_batch(mesh: Mesh, batch_size: int, accumulate_steps: int):
    """Raises ValueError where the rows of a micro-batch do not divide over the mesh."""
    rows, shards = batch_size // accumulate_steps, mesh.shape['data']
    if rows % shards:
        raise ValueError(
            f'data.batch_size={batch_size} in {accumulate_steps} micro-batches: {rows} rows do not '
            f'divide over {shards} devices; use --mesh=data=N or another data.batch_size'
        )


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def state_shardings(mesh: Mesh, state):
    """A NamedSharding for each leaf, by RULES: of parameters, and alike of their moments.

    Args:
      mesh: of `make_mesh`.
      state: a TrainState, or any pytree whose paths end like a Transformer's parameters, of arrays
        or jax.ShapeDtypeStruct.

    Returns:
      The same pytree, of shardings.
    """

    def sharding(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        specs = (spec for pattern, spec in RULES if re.search(f'{pattern}$', name))
        specs = (spec for spec in specs if len(spec) == leaf.ndim)
        return NamedSharding(mesh, next(specs, PartitionSpec()))

    return jax.tree_util.tree_map_with_path(sharding, state)


def put_batch(mesh: Mesh, batch):
    """Host arrays with a leading axis of rows, on the devices, rows split over `data`."""
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec('data')))
