"""The stream `average`: a layer reads a weighted sum of the outputs of all earlier layers."""

import jax.numpy as jnp

from moddepth_jax.hparams.registry import STREAMS
from moddepth_jax.model.attention import DepthSlots
from moddepth_jax.model.streams.dense import DepthDense


@STREAMS.register('average')
class DepthAverage(DepthDense):
    """DenseFormer's average (Pagliardini et al. 2024, arXiv 2402.02622).

    read: a_l0 X_0 + .. + a_l(l-1) X_(l-1), with learned scalars.
    write: append X_l, the block's output.

    It starts as the residual stream.
    """

    parameter_axes = ()

    def setup(self):
        if self.kind.inputs:
            self.weights = self.param('weights', _one_on_newest, self.kind.inputs)

    def read(self, x_BTD, depth: DepthSlots | None):
        x_LBTD = depth.slots[: self.kind.inputs]
        y_BTD = jnp.einsum('lbtd,l->btd', x_LBTD, self.weights, precision='highest')
        return y_BTD.astype(x_BTD.dtype), None, depth

    @classmethod
    def projection_flops(cls, hparams, kind, length, num_selected) -> float:
        return 2 * length * kind.inputs * hparams.d_model


def _one_on_newest(key, count):
    return jnp.zeros(count).at[-1].set(1)
