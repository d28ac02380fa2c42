"""Where arrays live: the device mesh, rows of a batch over it, the state on every device."""

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ('data',)


def make_mesh(spec: str = '') -> Mesh:
    """The mesh that `spec` describes, such as `data=4`; all devices along `data` where empty.

    Raises:
      ValueError: an unknown axis, a size that is no positive number, or more devices than there
        are.
    """
    devices = jax.devices()
    sizes = dict.fromkeys(AXES, 1) | ({} if spec else {'data': len(devices)})
    for pair in filter(None, spec.split(',')):
        axis, _, size = pair.partition('=')
        if axis not in AXES or not size.isdecimal() or int(size) < 1:
            raise ValueError(f'--mesh={spec}: must be AXIS=SIZE with an axis of {", ".join(AXES)}')
        sizes[axis] = int(size)
    wanted = sizes['data']
    if wanted > len(devices):
        raise ValueError(f'--mesh={spec}: needs {wanted} devices, {len(devices)} are here')
    types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(tuple(sizes.values()), AXES, types, devices=devices[:wanted])


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


def put_batch(mesh: Mesh, batch):
    """Host arrays with a leading axis of rows, on the devices, rows split over `data`."""
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec('data')))
