"""The parts are joined into one softmax whichever backends compute them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import cudnn, depth_attention
from kernels_pallas.backends import Parts
from kernels_pallas.joint_softmax import SequenceMask, Slots, Static, joint_attention
from tests.kernels.cases import draw, jit
from tests.kernels.hopper import lower

CASE = {'B': 1, 'T': 11, 'K': 2, 'N': 2, 'H': 64, 'L': 9, 'num': 6}


class StandIn:
    """What cuDNN computes, on a CPU: the causal forward pass, and the stock backward pass."""

    @staticmethod
    def forward(q, k, v, window, scale):
        return depth_attention(q, k, v, window=window, scale=scale, return_lse=True)

    @staticmethod
    def backward(q, k, v, o, lse, do, window, scale):
        scores = jnp.einsum('btnh,bsnh->bnts', q, k) * scale
        weights = jnp.where(jnp.tri(q.shape[1], dtype=bool), jnp.exp(scores - lse[..., None]), 0)
        delta = jnp.einsum('btnh,btnh->bnt', o, do)[..., None]
        dscores = weights * (jnp.einsum('btnh,bsnh->bnts', do, v) - delta) * scale
        dk = jnp.einsum('bnts,btnh->bsnh', dscores, q)
        dv = jnp.einsum('bnts,btnh->bsnh', weights, do)
        return jnp.einsum('bnts,bsnh->btnh', dscores, k), dk, dv


@pytest.mark.parametrize('dlse', [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_backend_without_lse_cotangents_does_not_lose_them(dlse, monkeypatch):
    """The trap of cuDNN: its backward pass takes no dlse. float32, equal head counts."""
    for name in ('forward', 'backward'):
        monkeypatch.setattr(cudnn, name, getattr(StandIn, name))
    inputs, cotangents, *_ = draw(**CASE)
    cotangents = cotangents[: 1 + dlse]
    positions_BT = jnp.arange(11)[None]

    def by_cudnn(*inputs):
        static = Static(0, True, 0, 64**-0.5, dlse, Parts('cudnn', 'xla'))
        mask, slots = SequenceMask(positions_BT, positions_BT), Slots(*inputs[3:], 6)
        return joint_attention(static, *inputs[:3], mask, None, slots, None)[: 1 + dlse]

    def right(*inputs):
        options = {'num_slots': 6, 'implementation': 'reference', 'return_lse': True}
        return depth_attention(*inputs, **options)[: 1 + dlse]

    def results(attention, *inputs):
        result, pull = jax.vjp(attention, *inputs)
        return result[0], *pull(cotangents)

    pair = (jit(lambda *x, f=f: results(f, *x))(*inputs[:5]) for f in (by_cudnn, right))
    for mine, theirs in zip(*pair, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize('dlse', [False, True])
@pytest.mark.parametrize('depth', ['pallas', 'mosaic_gpu', 'mosaic_gpu_fused'])
@pytest.mark.filterwarnings('ignore:The Pallas Triton backend is deprecated:DeprecationWarning')
def test_parts_for_gpus_lower_together(depth, dlse, monkeypatch):
    """A step through cuDNN and each depth part: its kernels once a pass, dlse by XLA alone."""
    monkeypatch.setattr(cudnn.fused, 'check_cudnn_version', lambda: 91000)
    static = Static(0, True, 0, 1.0, dlse, Parts('cudnn', depth))

    def loss(q, k, v, *sides):
        positions_BT = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
        mask, slots = SequenceMask(positions_BT, positions_BT), Slots(*sides, 5)
        o, lse, *_ = joint_attention(static, q, k, v, mask, None, slots, None)
        return jnp.sum(o.astype(jnp.float32)) + dlse * jnp.sum(lse)

    def shape(*sides):
        return jax.ShapeDtypeStruct(sides, jnp.bfloat16)

    k, slot = shape(1, 200, 1, 64), shape(7, 1, 200, 1, 64)
    step = jax.grad(loss, argnums=tuple(range(5)))
    text = lower(step, shape(1, 200, 8, 64), k, k, slot, slot)
    assert text.count('cudnn$fmhaSoftmax(') == (depth != 'mosaic_gpu_fused')
    assert text.count('cudnn$fmhaSoftmaxBackward(') == (not dlse)
    assert text.count('@mosaic_gpu') + text.count('@__gpu$xla.gpu.triton') == 2
