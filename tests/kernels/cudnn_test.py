"""The sequence part by cuDNN: what is asked of it, and that it is the right thing to ask for.

cuDNN itself is not run here: its calls are lowered for CUDA, with its version check stubbed.
"""

import functools
import json
import re

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import cudnn
from kernels_pallas.backends import Shapes


@pytest.fixture
def installed(monkeypatch):
    """As on a machine that has cuDNN."""
    monkeypatch.setattr(cudnn.fused, 'check_cudnn_version', lambda: 91000)


def shape(*sides, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sides, dtype)


def lower(function, *arrays):
    """The backend's options, operand types and result types of the one call to cuDNN."""
    text = jax.jit(function).trace(*arrays).lower(lowering_platforms=('cuda',)).as_text()
    pattern = r'@__cudnn\$(\w+)\(.*?backend_config = "(.*?[^\\])".*? : \((.*?)\) -> (.*)'
    [(name, options, operands, results)] = re.findall(pattern, text)
    options = json.loads(re.sub(r'\\(22|")', '"', options))['cudnn_fmha_backend_config']
    types = [re.findall(r'tensor<([\w]+)>', side) for side in (operands, results)]
    return name, options, *types


@pytest.mark.parametrize('window', [0, 40])
@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize('H', [64, 128])
@pytest.mark.parametrize('G', [1, 3, 8])
def test_lowers_for_cuda(installed, G, H, dtype, window):
    """Both passes become a call with our mask, window and scale, and the logsumexp in float32."""
    B, T, K = 2, 97, 2
    q, k = shape(B, T, K * G, H, dtype=dtype), shape(B, T, K, H, dtype=dtype)
    lse = shape(B, K * G, T, dtype=jnp.float32)
    static = {'window': window, 'scale': 0.3}
    forward = functools.partial(cudnn.sequence_forward, **static)
    backward = functools.partial(cudnn.sequence_backward, **static)
    o, found_lse = jax.eval_shape(forward, q, k, k)
    assert (o.shape, o.dtype) == (q.shape, q.dtype)
    assert (found_lse.shape, found_lse.dtype) == (lse.shape, lse.dtype)
    gradients = jax.eval_shape(backward, q, k, k, q, lse, q)
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in (q, k, k)]
    name = jnp.dtype(dtype).name.replace('bfloat', 'bf').replace('float', 'f')
    by_head = f'{B}x{K * G}x{T}xf32'
    q_type, k_type = f'{B}x{T}x{K * G}x{H}x{name}', f'{B}x{T}x{K}x{H}x{name}'
    forward_call = lower(forward, q, k, k)
    backward_call = lower(backward, q, k, k, q, lse, q)
    assert forward_call[0] == 'fmhaSoftmax' and backward_call[0] == 'fmhaSoftmaxBackward'
    assert forward_call[2] == [q_type, k_type, k_type]
    assert forward_call[3][1] == by_head
    assert backward_call[2] == [q_type, k_type, k_type, by_head, q_type, q_type]
    for _, options, *_ in (forward_call, backward_call):
        assert options['mask_type'] == 'CAUSAL' and options['sliding_window_length'] == window
        assert options['fmha_scale'] == 0.3 and options['dropout_rate'] == 0
        assert options['max_seg_per_batch'] == 1


def test_gives_cudnn_lse_output_and_cotangent_in_their_order(installed):
    """The backward call's operands are q, k, v, lse, do, o: o and do have one type."""
    x, lse = shape(1, 8, 1, 8), shape(1, 1, 8, dtype=jnp.float32)
    backward = functools.partial(cudnn.sequence_backward, window=0, scale=1.0)
    jaxpr = jax.make_jaxpr(backward)(x, x, x, x, lse, x)
    [call] = [e for e in jaxpr.jaxpr.eqns if 'dot_product_attention' in e.primitive.name]
    q, k, v, o, given_lse, do = jaxpr.jaxpr.invars
    assert [*call.invars[:3], *call.invars[10:13]] == [q, k, v, given_lse, o, do]


FINE = {
    'q': (2, 97, 6, 64),
    'k': (2, 97, 2, 64),
    'num_slots': 4,
    'dtypes': ('bfloat16',),
    'ordered': True,
    'consecutive': True,
    'segments': False,
    'window': 5,
}


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'dtypes': ('float32',)}, 'dtypes float32 must all be bfloat16 or all float16'),
        ({'dtypes': ('bfloat16', 'float32')}, 'dtypes bfloat16, float32 must all'),
        ({'q': (2, 97, 6, 60)}, 'head width 60 must be divisible by 8 and at most'),
        ({'q': (2, 97, 6, 264)}, 'head width 264 must be .* at most 256'),
        ({'k': (2, 98, 2, 64)}, '98 keys must be as many as the 97 queries'),
        ({'k': (2, 0, 2, 64)}, '0 keys must be'),
        ({'ordered': False}, 'positions must ascend'),
        ({'segments': True}, 'window=5 with segment ids'),
        ({'consecutive': False}, 'window=5 counts indices'),
    ],
)
def test_refuses(installed, change, message):
    """What cuDNN would not compute, or not as we mean it, is refused with its value."""
    assert re.match(f'.*{message}', cudnn.unsupported(Shapes(**{**FINE, **change}), (9, 0)))


def test_refuses_by_the_capability_it_is_given(installed, monkeypatch):
    """Nothing is asked of the devices of this process."""
    monkeypatch.setattr(cudnn.jax, 'devices', None)
    wide = Shapes(**FINE | {'q': (2, 97, 6, 256), 'k': (2, 97, 2, 256)})
    assert cudnn.unsupported(wide, (9, 0)) is None
    for capability in ((8, 0), None):
        assert 'head width 256 must be' in cudnn.unsupported(wide, capability)
    assert (
        cudnn.unsupported(Shapes(**FINE), (7, 5)) == 'compute capability 7.5 must be 8.0 or above'
    )
    assert cudnn.unsupported(Shapes(**FINE), None) is None


def test_takes(installed):
    """Odd lengths, groups of any size; gaps between positions where there is no window."""
    assert cudnn.unsupported(Shapes(**FINE), (9, 0)) is None
    assert cudnn.unsupported(Shapes(**{**FINE, 'window': 0, 'consecutive': False}), None) is None


def test_a_machine_without_cudnn_is_refused(monkeypatch):
    """JAX itself says so when it is asked for the version."""
    monkeypatch.setattr(cudnn.fused, 'cuda_versions', None)
    assert 'cuDNN is not detected' in cudnn.missing(Shapes(**FINE), (9, 0))


def test_jax_is_as_expected():
    """Fails when a new JAX changes its private module: then look at it, and extend cudnn.py."""
    assert cudnn.changed() is None


@pytest.mark.parametrize('way', ['fwd', 'bwd'])
def test_a_changed_jax_is_refused(installed, monkeypatch, way):
    """A function with other parameters is not called; the error names the version of JAX."""
    name = f'_dot_product_attention_{way}_impl'
    monkeypatch.setattr(cudnn.fused, name, lambda query, key, value: query)
    x, lse = jnp.zeros((1, 8, 1, 8), jnp.bfloat16), jnp.zeros((1, 1, 8))
    message = re.escape(f'in jax {jax.__version__}; kernels_pallas/cudnn.py')
    with pytest.raises(ValueError, match=message):
        cudnn.sequence_forward(x, x, x, 0, 1.0)
    with pytest.raises(ValueError, match=message):
        cudnn.sequence_backward(x, x, x, x, lse, x, 0, 1.0)
    assert re.search(message, cudnn.unsupported(Shapes(**FINE), None))


T, N, H, L = 24, 2, 8, 5
SCALE = H**-0.5


def plain_forward(q, k, v):
    """Causal attention, and its logsumexp."""
    scores = jnp.einsum('tnh,snh->nts', q, k) * SCALE
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool))[None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    return jnp.einsum('nts,snh->tnh', jnp.exp(scores - lse[..., None]), v), lse


def plain_backward(q, k, v, o, lse, do):
    """What the backward pass of any fused attention computes, cuDNN's too."""
    scores = jnp.einsum('tnh,snh->nts', q, k) * SCALE
    weights = jnp.where(jnp.tril(jnp.ones((T, T), bool))[None], jnp.exp(scores - lse[..., None]), 0)
    delta = jnp.einsum('tnh,tnh->nt', do, o)
    dscores = weights * (jnp.einsum('tnh,snh->nts', do, v) - delta[..., None]) * SCALE
    dq, dk = jnp.einsum('nts,snh->tnh', dscores, k), jnp.einsum('nts,tnh->snh', dscores, q)
    return dq, dk, jnp.einsum('nts,tnh->snh', weights, do)


def slots_forward(q, kd, vd):
    scores = jnp.einsum('tnh,ltnh->ntl', q, kd) * SCALE
    lse = jax.nn.logsumexp(scores, axis=-1)
    return jnp.einsum('ntl,ltnh->tnh', jnp.exp(scores - lse[..., None]), vd), lse


def merged(sequence, q, kd, vd):
    """One softmax out of two, by their logsumexps."""
    (o, lse), (o_slots, lse_slots) = sequence, slots_forward(q, kd, vd)
    joint = jnp.logaddexp(lse, lse_slots)
    keep, add = (jnp.exp(x - joint).T[..., None] for x in (lse, lse_slots))
    return o * keep + o_slots * add, joint


def random_inputs():
    shapes = 3 * [(T, N, H)] + 2 * [(L, T, N, H)] + [(T, N, H)]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def true_gradients(q, k, v, kd, vd, do):
    """Of k and v, whose gradients come from the sequence's part alone."""

    def joint(k, v):
        return merged(plain_forward(q, k, v), q, kd, vd)[0]

    return jax.vjp(joint, k, v)[1](do)


def distance(found, true):
    return float(jnp.linalg.norm(found - true) / jnp.linalg.norm(true))


def test_the_stock_backward_pass_takes_the_joint_softmax():
    """Given the joint output and logsumexp it yields the sequence's part of the true gradients."""
    q, k, v, kd, vd, do = random_inputs()
    o, lse = merged(plain_forward(q, k, v), q, kd, vd)
    dq, dk, dv = plain_backward(q, k, v, o, lse, do)
    true_dk, true_dv = true_gradients(q, k, v, kd, vd, do)
    assert distance(dk, true_dk) < 1e-5 and distance(dv, true_dv) < 1e-5

    def queries_apart(q_sequence, q_slots):
        return merged(plain_forward(q_sequence, k, v), q_slots, kd, vd)[0]

    true_dq, _ = jax.vjp(queries_apart, q, q)[1](do)
    assert distance(dq, true_dq) < 1e-5
    # Its own output and logsumexp would not do.
    wrong_dk = plain_backward(q, k, v, *plain_forward(q, k, v), do)[1]
    assert distance(wrong_dk, true_dk) > 0.05


def test_the_public_residual_is_a_trap():
    """A merge by the logsumexp of jax.nn.dot_product_attention is right, its gradient is not.

    JAX drops the cotangent of that residual without a word. When this fails, JAX may have mended
    it: then cudnn.py can take the public function.
    """
    q, k, v, kd, vd, do = random_inputs()

    def public(k, v):
        o, lse = jax.nn.dot_product_attention(
            q[None], k[None], v[None], is_causal=True, implementation='xla', return_residual=True
        )
        return merged((o[0], lse[0].T), q, kd, vd)[0]

    o, vjp = jax.vjp(public, k, v)
    assert distance(o, merged(plain_forward(q, k, v), q, kd, vd)[0]) < 1e-5
    true_dk, true_dv = true_gradients(q, k, v, kd, vd, do)
    dk, dv = vjp(do)
    assert distance(dv, true_dv) < 1e-5
    assert distance(dk, true_dk) > 0.05
