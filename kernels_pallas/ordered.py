"""Order between reads and writes of one array, which XLA on CPUs otherwise pays for with copies."""

from jax import lax


def order_before_writes(arrays, step):
    """The same arrays, none of which is to be had before all of them are.

    In a loop that adds into a large array in place, a part that is read of it first must be passed
    through here together with the whole: else XLA may put the read last, and copy the whole for it.

    Args:
      arrays: a pytree.
      step: a traced integer; its value is of no importance.

    Returns:
      arrays. Not differentiable in reverse mode.
    """

    # XLA on CPUs drops a bare barrier before it decides on copies; it does not see that this loop
    # has no rounds.
    def none_left(carry):
        return carry[0] < step

    def one(carry):
        return lax.optimization_barrier((carry[0] + 1, carry[1]))

    return lax.while_loop(none_left, one, (step, arrays))[1]
