"""Over the mesh of the context: experts by the devices that hold them, rows each for itself."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


def sharded_routed_mlp(
    routed_mlp, x_BTD, expert_BTk, weight_BTk, w1_EDF, w3_EDF, w2_EFD, *static
) -> jax.Array:
    """`routed_mlp` over the mesh of the context (`jax.set_mesh`), whose axes are those of
    training.sharding; the plain call where there is none, or one device.

    Rows are split over `data`, experts over `expert`. A device sorts its own rows' pairs, keeps
    those of its own experts, and what the devices of one row add is summed: no token and no weight
    moves, but the sum (and in the backward pass that of the weights' gradients over `data`) is
    communicated. Rows that do not divide over `data`, such as the one of an initialisation or of a
    generated text, are computed by all of it.

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
    mesh = jax.sharding.get_abstract_mesh()
    arrays = (x_BTD, expert_BTk, weight_BTk, w1_EDF, w3_EDF, w2_EFD)
    if mesh.size <= 1:  # 0: there is none
        return routed_mlp(*arrays, *static)

    def own(x_BTD, expert_BTk, weight_BTk, w1_EDF, w3_EDF, w2_EFD):
        expert_BTk -= jax.lax.axis_index('expert') * w1_EDF.shape[0]
        y_BTD = routed_mlp(x_BTD, expert_BTk, weight_BTk, w1_EDF, w3_EDF, w2_EFD, *static)
        return y_BTD[None]

    rows = 'data' if x_BTD.shape[0] % mesh.shape['data'] == 0 else None
    in_specs = (PartitionSpec(rows),) * 3 + (PartitionSpec('expert'),) * 3
    # With check_vma the weights would be cast, and a backward pass keep them a second time. The sum
    # stands outside since without check_vma the transpose of a psum is another one.
    part_XBTD = jax.shard_map(
        own, in_specs=in_specs, out_specs=PartitionSpec('expert', rows), check_vma=False
    )(*arrays)
    return jnp.sum(part_XBTD, axis=0)


def by_rows(function, array_BX) -> jax.Array:
    """`function` of rows that have nothing to do with each other, over the mesh of the context.

    Of its own accord XLA has every device take the top_k of all rows, and gathers them for it.

    Args:
      function: of an array of any number of rows; returns one with as many.
      array_BX: with a leading axis of rows, split over `data` where they divide.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size <= 1 or array_BX.shape[0] % mesh.shape['data']:
        return function(array_BX)
    rows = PartitionSpec('data')
    return jax.shard_map(function, in_specs=rows, out_specs=rows, check_vma=False)(array_BX)
