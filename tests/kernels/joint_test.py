"""One softmax whatever computes its parts: gradients through the public function, and on GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import _compat, cudnn, depth_attention
from kernels_pallas.joint_softmax import Parts, Static, joint_attention
from tests.kernels.cases import KINDS, SEQUENCE, SIZES, exact, make_case
from tests.kernels.lowering_test import lower

HOPPER = ('mosaic_gpu', 'mosaic_gpu_fused')
CASE = {'B': 1, 'T': 11, 'K': 1, 'N': 8, 'H': 64, 'L': 9, 'num': 6, 'mask': True}
NAMES = ('q', 'k', 'v', 'k_depth', 'v_depth')


def drawn(**changes):
    """Inputs and cotangents in bfloat16, arguments, and what is seen."""
    case = SIZES | KINDS | SEQUENCE | CASE | changes
    case.pop('traced')
    inputs, cotangents, arguments, *seen = make_case(**case)
    inputs = [jnp.asarray(x, jnp.bfloat16) for x in inputs[:5]]
    return inputs, (jnp.asarray(cotangents[0], jnp.bfloat16), cotangents[1]), arguments, seen


def by(attention, inputs, cotangents, dlse):
    """o and the five gradients; dlse: the logsumexp is returned and has a cotangent."""

    def results(*inputs):
        result = attention(*inputs, return_lse=dlse)
        return result if dlse else (result,)

    result, pull = jax.vjp(results, *inputs)
    return (result[0], *pull(cotangents if dlse else cotangents[:1]))


def errors(found, right):
    pairs = zip(found, right, strict=True)
    return [np.abs(np.nan_to_num(np.asarray(x, float)) - y).max() for x, y in pairs]


@pytest.mark.parametrize('dlse', [False, True])
@pytest.mark.parametrize('implementation', ['reference', 'pallas', *HOPPER])
def test_every_implementation_has_the_right_gradients(implementation, dlse):
    """In bfloat16: output at most twice as far off as that of `xla`, gradients three times."""
    if implementation in HOPPER and not _compat.CAN_INTERPRET:
        pytest.skip('the Mosaic GPU interpreter before JAX 0.11.2 lacks primitives')
    inputs, cotangents, arguments, seen = drawn()
    arguments = arguments | {'num_slots': 6}
    given = [np.nan_to_num(np.asarray(x, float)) for x in (*inputs, inputs[0])]
    both = (np.asarray(cotangents[0], float), dlse * cotangents[1])
    o, _, gradients = exact(given, both, *seen, 64**-0.5)
    gradients[0] += gradients[5]
    right = (o, *gradients[:5])

    def attention(name):
        return lambda *x, **more: depth_attention(*x, **arguments, **more, implementation=name)

    plain = errors(by(attention('xla'), inputs, cotangents, dlse), right)
    found = errors(by(attention(implementation), inputs, cotangents, dlse), right)
    for name, mine, theirs, most in zip(('o', *NAMES), found, plain, (2, *5 * (3,)), strict=True):
        assert mine <= most * theirs, (name, mine, theirs)
    for name, mine, value in zip(('o', *NAMES), found, right, strict=True):
        assert mine <= 0.02 * np.abs(value).max(), (name, mine)


class StandIn:
    """What cuDNN computes, on a CPU: the causal forward pass, and the stock backward pass."""

    @staticmethod
    def sequence_forward(q, k, v, window, scale):
        return depth_attention(q, k, v, window=window, scale=scale, return_lse=True)

    @staticmethod
    def sequence_backward(q, k, v, o, lse, do, window, scale):
        scores = jnp.einsum('btnh,bsnh->bnts', q, k) * scale
        weights = jnp.where(jnp.tri(q.shape[1], dtype=bool), jnp.exp(scores - lse[..., None]), 0)
        delta = jnp.einsum('btnh,btnh->bnt', o, do)[..., None]
        dscores = weights * (jnp.einsum('btnh,bsnh->bnts', do, v) - delta) * scale
        dk = jnp.einsum('bnts,btnh->bsnh', dscores, q)
        dv = jnp.einsum('bnts,btnh->bsnh', weights, do)
        return jnp.einsum('bnts,bsnh->btnh', dscores, k), dk, dv


@pytest.mark.parametrize('dlse', [False, True])
def test_a_backend_without_lse_cotangents_does_not_lose_them(dlse, monkeypatch):
    """The trap of cuDNN: its backward pass knows of no dlse. float32, equal head counts."""
    for name in ('sequence_forward', 'sequence_backward'):
        monkeypatch.setattr(cudnn, name, getattr(StandIn, name))
    inputs, cotangents, arguments, _ = drawn(K=2, N=2, mask=False)
    inputs, cotangents = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (inputs, cotangents))
    positions_BT = jnp.arange(11)[None]

    def attention(*inputs, return_lse):
        static = Static(0, True, 0, 64**-0.5, return_lse, Parts('cudnn', 'xla'))
        masks = (positions_BT, positions_BT, None, None)
        slots = inputs[3:], (6, None, None), None
        result = joint_attention(static, *inputs[:3], masks, None, *slots)
        return result[:2] if return_lse else result[0]

    def right(*inputs, **more):
        return depth_attention(*inputs, num_slots=6, implementation='reference', **more)

    found = by(attention, inputs, cotangents, dlse)
    for mine, theirs in zip(found, by(right, inputs, cotangents, dlse), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize('dlse', [False, True])
@pytest.mark.parametrize('depth', ['pallas', 'mosaic_gpu', 'fused'])
def test_parts_for_gpus_lower_together(depth, dlse, monkeypatch):
    """A step through cuDNN and each depth part: its kernels once a pass, dlse by XLA alone."""
    monkeypatch.setattr(cudnn.fused, 'check_cudnn_version', lambda: 91000)
    parts = Parts('cudnn', 'mosaic_gpu' if depth == 'fused' else depth, depth == 'fused')
    static = Static(0, True, 0, 1.0, dlse, parts)

    def loss(q, k, v, *slots):
        positions_BT = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
        masks = (positions_BT, positions_BT, None, None)
        o, lse, *_ = joint_attention(static, q, k, v, masks, None, slots, (5, None, None), None)
        return jnp.sum(o.astype(jnp.float32)) + dlse * jnp.sum(lse)

    def shape(*sides):
        return jax.ShapeDtypeStruct(sides, jnp.bfloat16)

    k, slot = shape(1, 200, 1, 64), shape(7, 1, 200, 1, 64)
    step = jax.grad(loss, argnums=tuple(range(5)))
    text = lower(step, shape(1, 200, 8, 64), k, k, slot, slot)
    assert text.count('cudnn$fmhaSoftmax(') == (depth != 'fused')
    assert text.count('cudnn$fmhaSoftmaxBackward(') == (not dlse)
    kernels = text.count('@mosaic_gpu') + text.count('@__gpu$xla.gpu.triton')
    assert kernels == 2, kernels
