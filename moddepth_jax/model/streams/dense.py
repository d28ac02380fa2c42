"""The stream `dense`: a layer reads the outputs of all earlier layers through one matrix."""

import jax.numpy as jnp

from moddepth_jax.hparams import ModelHparams
from moddepth_jax.hparams.registry import STREAMS
from moddepth_jax.model.attention import DepthSlots
from moddepth_jax.model.streams.base import LayerKind, Stream


@STREAMS.register('dense')
class DepthDense(Stream):
    """Dense connections between all layers.

    read: W_l . concat(X_0 .. X_{l-1}), where X_0 is the embedding.
    write: append X_l, the block's output.

    It starts as the residual stream: W_l is the identity on X_{l-1}.
    """

    scans = False  # W_l grows with l
    has_ends = True
    reads_outputs = True
    sums_gradients = True
    parameter_axes = (('kernel', (None, 'embed')),)

    def setup(self):
        if self.kind.inputs:
            width = self.hparams.d_model
            self.kernel = self.param('kernel', _newest, (self.kind.inputs * width, width))

    def read(self, x_BTD, depth: DepthSlots | None):
        kernel_LDE = self.kernel.reshape(self.kind.inputs, *x_BTD.shape[-1:], -1)
        kernel_LDE = kernel_LDE.astype(x_BTD.dtype)
        x_LBTD = depth.slots[: self.kind.inputs]
        return jnp.einsum('lbtd,lde->bte', x_LBTD, kernel_LDE), None, depth

    @classmethod
    def layer_kinds(cls, hparams: ModelHparams) -> list[LayerKind]:
        """Every layer reads all earlier outputs. All but the exit write one."""
        return [
            kind._replace(slots=int(kind.part != 'exit'), inputs=i)
            for i, kind in enumerate(super().layer_kinds(hparams))
        ]

    @classmethod
    def projection_flops(cls, hparams, kind, length, num_selected) -> float:
        return 2 * length * kind.inputs * hparams.d_model**2


def _newest(key, shape):
    older = jnp.zeros((shape[0] - shape[1], shape[1]))
    return jnp.concatenate([older, jnp.eye(shape[1])])
