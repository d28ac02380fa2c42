"""How arrays are split over the axes of a device mesh: one table, and functions that keep to it.

The mesh is that of the context (`jax.set_mesh`), with the axes AXES; without one, or on one device,
every function here leaves its argument alone.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

AXES = ('data', 'fsdp', 'tensor', 'expert')

# An axis of an array has a name, and lies along the mesh axes of the first rule of that name that
# fits: its mesh axes divide it, and no axis of the same array lies along them by an earlier rule.
# An axis without a rule that fits is whole.
RULES = (
    ('rows', ('data', 'fsdp', 'expert')),
    ('experts', ('expert',)),
    ('heads', ('tensor',)),
    ('kv_heads', ('tensor',)),
    ('ffn', ('tensor',)),
    ('vocab', ('tensor',)),
    ('embed', ('fsdp', 'tensor')),  # where nothing else of the array lies along tensor
    ('embed', ('fsdp',)),
)
STORED = 'embed'  # the axis along which parameters are split where they lie, not where they work

# The first pattern that ends a leaf's path and has as many axes names them. Layers of a stack have
# one more in front, which is whole. A dense mlp has the paths of experts, and one axis less. Leaves
# without a pattern are vectors and narrow matrices, and whole.
LEAVES = (
    (r'embedding', ('vocab', 'embed')),
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
    (r'stream/kernel', (None, 'embed')),
)


def axis_names(path: str, ndim: int) -> tuple:
    """The names of the axes of a parameter, None for one without.

    Args:
      path: of the leaf, such as params/stack/run_0/layer_0/attention/query/kernel.
      ndim: of the leaf.
    """
    layers = ('stack' in path.split('/')) * (None,)
    for pattern, names in LEAVES:
        names = layers + names
        if len(names) == ndim and re.search(f'(^|/){pattern}$', path):
            return names
    return (None,) * ndim


def spec(mesh, names, shape, without: str | None = None) -> PartitionSpec:
    """The PartitionSpec of an array by RULES.

    Args:
      mesh: Mesh or AbstractMesh.
      names: of its axes, None for one that is whole.
      shape: of the same.
      without: a name whose axes are whole here.

    Returns:
      An entry for each axis; empty where nothing is split. Mesh axes of size 1 are left out.
    """
    used, entries = set(), [None] * len(shape)
    for name, axes in RULES:
        axes = tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1)
        size = math.prod(mesh.shape[axis] for axis in axes)
        for i, mine in enumerate(names):
            fits = mine == name != without and entries[i] is None and shape[i] % size == 0
            if fits and axes and not used & set(axes):
                entries[i] = axes[0] if len(axes) == 1 else axes
                used |= set(axes)
    return PartitionSpec(*entries) if used else PartitionSpec()


def _mesh():
    """The mesh of the context, or None where it has one device, or its devices run apart."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.size <= 1 or mesh.manual_axes else mesh


def constrain(array, *names) -> jax.Array:
    """The array, split by RULES over the mesh of the context; so is its cotangent."""
    mesh = _mesh()
    if mesh is None:
        return array
    return jax.lax.with_sharding_constraint(array, spec(mesh, names, array.shape))


def part_shape(names, shape) -> tuple[int, ...]:
    """The shape of a device's part of an array that `constrain` or `by_shards` has split."""
    mesh = _mesh()
    if mesh is None:
        return tuple(shape)
    return jax.sharding.NamedSharding(mesh, spec(mesh, names, shape)).shard_shape(tuple(shape))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(array, names):
    return jax.lax.with_sharding_constraint(array, spec(_mesh(), names, array.shape, STORED))


def _gathered_forward(array, names):
    return _gathered(array, names), None


def _gathered_backward(names, residuals, cotangent):
    # As it is stored: a sum over devices whose parts stay apart, not one that all of them get.
    del residuals
    return (constrain(cotangent, *names),)


_gathered.defvjp(_gathered_forward, _gathered_backward)


def unshard_params(params, dtype):
    """Parameters as they work: whole along `embed`, in `dtype` (what is not so split is as it was).

    Called for each layer where it is used, so that no more than one layer is whole at a time. The
    gradients come out split as the parameters are.

    Args:
      params: of one layer, or a dict of others; paths end as in LEAVES, without an axis of layers.
      dtype: in which the matrices are used, so that no more is communicated.
    """
    mesh = _mesh()
    if mesh is None:
        return params

    def gather(path, leaf):
        names = axis_names(jax.tree_util.keystr(path, simple=True, separator='/'), leaf.ndim)
        if STORED not in names:
            return leaf
        # Told where the rounded one lies, XLA rounds it there and not after it is gathered.
        return _gathered(constrain(leaf.astype(dtype), *names), names)

    return jax.tree_util.tree_map_with_path(gather, params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered_wide(array, names, dtype):
    rounded = constrain(array.astype(dtype), *names)
    return _gathered(rounded, names).astype(array.dtype)


def _wide_forward(array, names, dtype):
    return _gathered_wide(array, names, dtype), None


def _wide_backward(names, dtype, residuals, cotangent):
    # Summed where the rows are; asked for the parts at once, XLA moves all rows instead.
    del dtype, residuals
    return (constrain(_gathered(cotangent, names), *names),)


_gathered_wide.defvjp(_wide_forward, _wide_backward)


def unshard_embedding(embedding_VD, dtype):
    """The embedding as tokens look it up: as `gathered`, but as wide as it is stored.

    So the gradients of equal tokens are added, over devices too, in the parameter's own dtype.
    """
    if _mesh() is None:
        return embedding_VD
    return _gathered_wide(embedding_VD, axis_names('embedding', 2), dtype)


def map_shards(function, arrays: dict, names: dict, names_out):
    """`function` by each device on its own parts, which have nothing to do with those of others.

    What XLA cannot see into, such as a kernel, it would otherwise run on all of them everywhere.

    Args:
      function: called with `arrays` by name, of any of these parts.
      arrays: by name; None for one that is not there.
      names: of the axes of each, as `axis_names` returns them. An axis that its mesh axes do not
        divide is whole, in all arrays.
      names_out: of the output, or of each of a tuple of outputs.
    """
    mesh = _mesh()
    if mesh is None:
        return function(**arrays)
    held = {name: array for name, array in arrays.items() if array is not None}
    absent = dict.fromkeys(arrays.keys() - held.keys())
    axes = {
        axis: _axes(mesh, axis, size)
        for name, array in held.items()
        for axis, size in zip(names[name], jnp.shape(array), strict=True)
    }
    if None in (axes.get('heads', ()), axes.get('kv_heads', ())):
        axes |= {'heads': None, 'kv_heads': None}  # a query head goes where its keys are

    def split(names):
        return PartitionSpec(*[axes.get(axis) for axis in names])

    single = not isinstance(names_out[0], tuple)
    # With check_vma arrays would be cast, and a backward pass keep them a second time.
    return jax.shard_map(
        lambda held: function(**held, **absent),
        in_specs=({name: split(names[name]) for name in held},),
        out_specs=split(names_out) if single else tuple(split(names) for names in names_out),
        check_vma=False,
    )(held)


def _axes(mesh, name, size):
    """The mesh axes of an axis of that name and size by its first rule; None where it is whole."""
    axes = next((axes for rule, axes in RULES if rule == name), ())
    axes = tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1)
    return axes if axes and size % math.prod(mesh.shape[axis] for axis in axes) == 0 else None


def map_batch_shards(function, array_BX) -> jax.Array:
    """`function` of rows that have nothing to do with each other, over the mesh of the context.

    Of its own accord XLA has every device take the top_k of all rows, and gathers them for it.

    Args:
      function: of an array of any number of rows; returns one with as many.
      array_BX: with a leading axis of rows, split where they divide.
    """
    names = ('rows',) + (None,) * (array_BX.ndim - 1)
    return map_shards(lambda rows: function(rows), {'rows': array_BX}, {'rows': names}, names)


def sharded_routed_mlp(
    routed_mlp, x_BTD, expert_BTk, weight_BTk, w1_EDF, w3_EDF, w2_EFD, *static
) -> jax.Array:
    """`routed_mlp` over the mesh of the context; the plain call where there is none.

    Experts lie along `expert`, their inner width along `tensor`. The devices along `expert` have
    rows of their own everywhere else; here all of them take all of these rows, sort the pairs, keep
    those of their own experts, and what they add is summed, each getting the sum of its own rows.
    No weight moves but along `fsdp`. Rows that do not divide, such as the one of an initialisation
    or of a generated text, are computed by all.

    Args:
      routed_mlp: called with the other arguments, of any number of rows and experts. Pairs with an
        expert outside [0, E) must add nothing.
      x_BTD: tokens.
      expert_BTk: int32, experts of each token.
      weight_BTk: factors on what they add.
      w1_EDF, w3_EDF, w2_EFD: of the experts; the mesh divides E, see `check_mesh`.
      *static: passed on.

    Returns:
      What the experts add, as x_BTD.
    """
    mesh = _mesh()
    # So split are their gradients too: a device gets those of its own rows.
    x_BTD, weight_BTk = (constrain(side, 'rows', None, None) for side in (x_BTD, weight_BTk))
    arrays = (x_BTD, expert_BTk, weight_BTk, w1_EDF, w3_EDF, w2_EFD)
    if mesh is None:
        return routed_mlp(*arrays, *static)

    def own(x_BTD, expert_BTk, weight_BTk, w1_EDF, w3_EDF, w2_EFD):
        expert_BTk -= jax.lax.axis_index('expert') * w1_EDF.shape[0]
        y_BTD = routed_mlp(x_BTD, expert_BTk, weight_BTk, w1_EDF, w3_EDF, w2_EFD, *static)
        return y_BTD[None]

    rows = _axes(mesh, 'rows', x_BTD.shape[0]) or ()
    rows = tuple(axis for axis in rows if axis != 'expert')
    inner = 'tensor' if _axes(mesh, 'ffn', w1_EDF.shape[2]) else None
    in_specs = (PartitionSpec(rows or None),) * 3 + (
        PartitionSpec('expert', None, inner),
        PartitionSpec('expert', None, inner),
        PartitionSpec('expert', inner),
    )
    parts = ('expert', inner) if inner else ('expert',)
    # The sum stands outside since without check_vma the transpose of a psum is another one.
    part_XBTD = jax.shard_map(
        own, in_specs=in_specs, out_specs=PartitionSpec(parts, rows or None), check_vma=False
    )(*arrays)
    return constrain(jnp.sum(part_XBTD, axis=0), 'rows', None, None)
