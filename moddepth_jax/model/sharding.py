"""Sharding: how named axes of arrays are split over the axes of the context's mesh, if any."""

import functools
import math
import re

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from moddepth_jax.hparams.registry import STREAMS

# Each axis of an array has a name. It is split over the mesh axes of the first rule of its name
# that fits: they divide its size, and no earlier rule has split another axis of the array over
# them. An axis without such a rule is replicated.
RULES = (
    ('batch', ('data', 'fsdp', 'expert')),
    ('experts', ('expert',)),
    ('heads', ('tensor',)),
    ('kv_heads', ('tensor',)),
    ('ffn', ('tensor',)),
    ('vocab', ('tensor',)),
    ('embed', ('fsdp', 'tensor')),  # if no other axis of the array is split over tensor
    ('embed', ('fsdp',)),
)
STORED = 'embed'  # the axis along which stored parameters are split; computations gather it

# The axis names of parameters: those of the first pattern that matches the end of the path and has
# as many axes. Leaves of a stack have a replicated axis of layers in front. A dense mlp has the
# same paths as experts, but one axis less. Leaves without a pattern are vectors and narrow
# matrices, which are replicated. A depth stream adds patterns as its `parameter_axes`.
LEAVES = (
    (r'embedding', ('vocab', 'embed')),
    (r'value_embedding/embedding', ('vocab', 'kv_heads', 'embed')),
    (r'head/kernel', ('embed', 'vocab')),
    (r'query/kernel', ('embed', 'heads', None)),
    (r'query/bias', ('heads', None)),
    (r'(key|value)/kernel', ('embed', 'kv_heads', None)),
    (r'(key|value)/bias', ('kv_heads', None)),
    (r'attention/out/kernel', ('heads', None, 'embed')),
    (r'mlp(/shared)?/w[13]/kernel', ('embed', 'ffn')),
    (r'mlp(/shared)?/w2/kernel', ('ffn', 'embed')),
    (r'mlp/w[13]/kernel', ('experts', 'embed', 'ffn')),
    (r'mlp/w2/kernel', ('experts', 'ffn', 'embed')),
    (r'mlp(/shared)?/w[13]/bias', ('ffn',)),
)


def axis_names(path: str, ndim: int) -> tuple:
    """Return a name or None for each axis of a parameter with a path such as params/head/kernel."""
    layers = ('stack' in path.split('/')) * (None,)
    if side := re.fullmatch('(.*/)adapter/([ab])', path):
        path = f'{side[1]}kernel'
    streams = (leaf for stream in STREAMS.values() for leaf in stream.parameter_axes)
    for pattern, names in (*LEAVES, *((f'stream/{end}', names) for end, names in streams)):
        names = layers + (_of_adapter(names, side[2]) if side else names)
        if len(names) == ndim and re.search(f'(^|/){pattern}$', path):
            return names
    return (None,) * ndim


def matrix_sides(names) -> tuple[list[int], list[int], list[int]] | None:
    """Return the batch, input and output axes of a matrix; None if it has no `embed` axis.

    `names` are those of `axis_names` without the axis of layers.
    """
    if 'embed' not in names:
        return None
    batch = [i for i, name in enumerate(names) if name == 'experts']
    rest = [i for i in range(len(names)) if i not in batch]
    last = names[rest[-1]] == 'embed'
    return (batch, rest[:-1], rest[-1:]) if last else (batch, rest[:1], rest[1:])


def _of_adapter(names, side):
    """Return the axis names of A (`a`) or B of a matrix's adapter; the rank is replicated."""
    sides = matrix_sides(names)
    if sides is None:
        return ()
    batch, inputs, outputs = ([names[i] for i in axes] for axes in sides)
    return (*batch, *inputs, None) if side == 'a' else (*batch, None, *outputs)


def spec(mesh, names, shape, without: str | None = None) -> PartitionSpec:
    """Return the PartitionSpec of an array by RULES; axes named `without` are replicated."""
    used, entries = set(), [None] * len(shape)
    for name, axes in RULES:
        axes = tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1)
        size = math.prod(mesh.shape[axis] for axis in axes)
        for i, axis_name in enumerate(names):
            fits = axis_name == name != without and entries[i] is None and shape[i] % size == 0
            if fits and axes and not used & set(axes):
                entries[i] = axes[0] if len(axes) == 1 else axes
                used |= set(axes)
    return PartitionSpec(*entries) if used else PartitionSpec()


def _mesh():
    """Return the mesh of the context; None if it has one device, or inside a shard_map.

    Raises ValueError unless all axes have the type Auto, with which XLA chooses other shardings.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size <= 1 or mesh.manual_axes:
        return None
    if any(kind != jax.sharding.AxisType.Auto for kind in mesh.axis_types):
        kinds = ', '.join(kind.name for kind in mesh.axis_types)
        right = 'make the mesh with axis_types=(AxisType.Auto,) * number of axes'
        raise ValueError(f'mesh axes {mesh.axis_names} of type {kinds}: must be Auto; {right}')
    return mesh


def check_axis_types():
    """Raise ValueError if the mesh of the context has an axis of another type than Auto."""
    _mesh()


def constrain(array, *names) -> jax.Array:
    """Shard an array and its cotangent by RULES over the mesh of the context."""
    mesh = _mesh()
    if mesh is None:
        return array
    return jax.lax.with_sharding_constraint(array, spec(mesh, names, array.shape))


def part_shape(names, shape) -> tuple[int, ...]:
    """Return the shape of one device's part of an array that `constrain` or `map_shards` splits."""
    mesh = _mesh()
    if mesh is None:
        return tuple(shape)
    return jax.sharding.NamedSharding(mesh, spec(mesh, names, shape)).shard_shape(tuple(shape))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _unshard(array, names):
    return jax.lax.with_sharding_constraint(array, spec(_mesh(), names, array.shape, STORED))


# The gradient is split like the stored parameter: a reduce-scatter, not an all-reduce.
_unshard.defvjp(
    lambda array, names: (_unshard(array, names), None),
    lambda names, _, cotangent: (constrain(cotangent, *names),),
)


def unshard_params(params, dtype):
    """Return the parameters of one layer in `dtype`, gathered along `embed` after rounding."""
    mesh = _mesh()
    if mesh is None:
        return params

    def gather(path, leaf):
        names = axis_names(jax.tree_util.keystr(path, simple=True, separator='/'), leaf.ndim)
        if STORED not in names:
            return leaf
        if {'vocab', 'kv_heads'} <= {*names}:  # a lookup table, as in `unshard_embedding`
            return _unshard_wide(leaf, names, dtype)
        # This constraint makes XLA round the parts rather than the gathered matrix.
        return _unshard(constrain(leaf.astype(dtype), *names), names)

    return jax.tree_util.tree_map_with_path(gather, params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _unshard_wide(array, names, dtype):
    rounded = constrain(array.astype(dtype), *names)
    return _unshard(rounded, names).astype(array.dtype)


# The devices that hold the batch sum the gradient. By a single constraint XLA would move all rows.
_unshard_wide.defvjp(
    lambda array, names, dtype: (_unshard_wide(array, names, dtype), None),
    lambda names, dtype, _, cotangent: (constrain(_unshard(cotangent, names), *names),),
)


def unshard_embedding(embedding_VD, dtype):
    """Return the unsharded embedding in its own dtype, in which gradients of a token are summed."""
    if _mesh() is None:
        return embedding_VD
    return _unshard_wide(embedding_VD, axis_names('embedding', 2), dtype)


def map_shards(function, arrays: dict, names: dict, names_out):
    """Call a function with `arrays` by name on each device's own parts, which are independent.

    Without this, XLA would run a kernel on all parts on every device. `names` and `names_out` are
    the axis names of the arguments and of the results.
    """
    mesh = _mesh()
    if mesh is None:
        return function(**arrays)
    axes = {
        axis: _axes(mesh, axis, size)
        for name, array in arrays.items()
        if array is not None
        for axis, size in zip(names[name], jnp.shape(array), strict=True)
    }
    if None in (axes.get('heads', ()), axes.get('kv_heads', ())):
        axes |= {'heads': None, 'kv_heads': None}  # a query head stays with its keys

    def split(names):
        return PartitionSpec(*[axes.get(axis) for axis in names])

    single = not isinstance(names_out[0], tuple)
    # With check_vma, arrays would be cast and the backward pass would save them twice.
    return jax.shard_map(
        lambda arrays: function(**arrays),
        in_specs=({name: split(names[name]) for name in arrays},),
        out_specs=split(names_out) if single else tuple(split(names) for names in names_out),
        check_vma=False,
    )(arrays)


def _axes(mesh, name, size):
    """Return the mesh axes of the first rule for a name; None if they do not divide the size."""
    axes = next((axes for rule, axes in RULES if rule == name), ())
    axes = tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1)
    return axes if axes and size % math.prod(mesh.shape[axis] for axis in axes) == 0 else None


def map_batch_shards(function, array_BX) -> jax.Array:
    """Apply a function that maps rows to rows, such as top_k, on each device's own rows.

    Without this, XLA would gather all rows on every device for a top_k.
    """
    names = ('batch',) + (None,) * (array_BX.ndim - 1)
    return map_shards(lambda rows: function(rows), {'rows': array_BX}, {'rows': names}, names)


def sharded_routed_mlp(
    routed_mlp, x_BTD, expert_BTk, weight_BTk, w1_EDF, w3_EDF, w2_EFD, *static
) -> jax.Array:
    """Run `experts.routed_mlp` over the mesh of the context, or as a plain call without one.

    Experts are split along the mesh axis `expert`, if the mesh has it and it divides them. The
    devices along it share their rows. Otherwise it only splits rows.
    """
    mesh = _mesh()
    # The gradients are split in the same way: a device gets those of its own rows.
    x_BTD, weight_BTk = (constrain(side, 'batch', None, None) for side in (x_BTD, weight_BTk))
    arrays = (x_BTD, expert_BTk, weight_BTk, w1_EDF, w3_EDF, w2_EFD)
    if mesh is None:
        return routed_mlp(*arrays, *static)

    experts = _axes(mesh, 'experts', w1_EDF.shape[0]) or ()
    inner = _axes(mesh, 'ffn', w1_EDF.shape[2]) or ()
    rows = _axes(mesh, 'batch', x_BTD.shape[0]) or ()
    rows = tuple(axis for axis in rows if axis not in experts)

    def own(x_BTD, expert_BTk, weight_BTk, w1_EDF, w3_EDF, w2_EFD):
        if experts:
            expert_BTk -= jax.lax.axis_index(experts) * w1_EDF.shape[0]
        y_BTD = routed_mlp(x_BTD, expert_BTk, weight_BTk, w1_EDF, w3_EDF, w2_EFD, *static)
        return y_BTD[None]

    tokens, inwards = PartitionSpec(rows), PartitionSpec(experts, None, inner)
    in_specs = (tokens, tokens, tokens, inwards, inwards, PartitionSpec(experts, inner))
    # The sum is outside because, without check_vma, the transpose of a psum is a psum.
    part_XBTD = jax.shard_map(
        own, in_specs=in_specs, out_specs=PartitionSpec((*experts, *inner), rows), check_vma=False
    )(*arrays)
    return constrain(jnp.sum(part_XBTD, axis=0), 'batch', None, None)
