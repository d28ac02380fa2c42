"""Sequence and depth slots are one softmax: values, gradients, and who sees what."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import depth_attention
from tests.kernels.cases import CASES, KINDS, SEQUENCE, SIZES, exact, jit, make_case, run


@pytest.mark.parametrize('name', CASES)
def test_equals_float64_softmax_over_the_concatenation(name):
    """Output, logsumexp and all gradients; NaN in slots that nobody sees changes nothing."""
    case = SIZES | KINDS | SEQUENCE | CASES[name]
    traced, own_query, num = case.pop('traced'), case['own_query'], case['num']
    inputs, cotangents, arguments, *seen = make_case(**case)
    if not own_query:
        inputs[5] = inputs[0]
    o, lse, gradients = exact(inputs, cotangents, *seen, case['scale'] or case['H'] ** -0.5)
    if not own_query:
        gradients[0] += gradients[5]
        gradients[5] *= 0
    hidden = np.isnan(inputs[3])
    for implementation in ('reference', 'xla', 'pallas'):
        options = {'implementation': implementation, **arguments}
        got = run(inputs, cotangents, num, traced, own_query, **options)
        np.testing.assert_allclose(got[0], o, rtol=0, atol=2e-6)
        np.testing.assert_allclose(got[1], lse, rtol=5e-7, atol=2e-6)
        assert got[0].dtype == got[1].dtype == np.float32
        for mine, right in zip(got[2], gradients, strict=True):
            np.testing.assert_allclose(mine, right, rtol=0, atol=1e-5)
        assert not got[2][3][hidden].any() and not got[2][4][hidden].any()


def test_reference_is_as_wide_as_its_inputs():
    """In float64, where JAX has it, the reference is right to 12 digits."""
    case = SIZES | KINDS | SEQUENCE | {'own_query': True, 'scale': 0.4}
    case.pop('traced')
    inputs, cotangents, arguments, *seen = make_case(**case)
    o, lse, gradients = exact(inputs, cotangents, *seen, 0.4)
    with jax.enable_x64(True):
        wide = [[np.asarray(x, np.float64) for x in side] for side in (inputs, cotangents)]
        got = run(*wide, None, False, True, implementation='reference', **arguments)
    for mine, right in zip(jax.tree.leaves(got), [o, lse, *gradients], strict=True):
        np.testing.assert_allclose(mine, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize('implementation', [None, 'reference'])
def test_bfloat16_is_near(implementation):
    """Softmax and sums in float32 on rounded inputs: near the exact result, in bfloat16."""
    case = SIZES | KINDS | SEQUENCE | {'num': 7, 'mask': True}
    case.pop('traced')
    inputs, cotangents, arguments, *seen = make_case(**case)
    inputs = [jnp.asarray(x, jnp.bfloat16) for x in (*inputs[:5], inputs[0])]
    cotangents = jnp.asarray(cotangents[0], jnp.bfloat16), 0 * cotangents[1]
    o, _, gradients = exact(inputs, cotangents, *seen, 8**-0.5)
    arguments['implementation'] = implementation
    got_o, _, got = run(inputs, cotangents, 7, False, False, **arguments)
    gradients[0] += gradients[5]
    for mine, right in zip((got_o, *got[:5]), (o, *gradients[:5]), strict=True):
        assert mine.dtype == jnp.bfloat16
        np.testing.assert_allclose(mine.astype(float), right, rtol=0.02, atol=0.03)


@pytest.mark.parametrize('implementation', ['reference', 'xla'])
def test_visibility_is_the_drawn_grid(implementation):
    """T = 5, L = 4, layer l sees the l slots before it: columns are keys 0 to 4, slots 0 to 3.

    Probed by perturbing one key or one slot of one token at a time, and by the gradient.
    """
    layers = {0: '0000', 2: '1100', 4: '1111'}
    rng = np.random.default_rng(0)
    draw = [
        rng.normal(size=s).astype(np.float32) for s in [(1, 5, 1, 4)] * 3 + [(4, 1, 5, 1, 4)] * 2
    ]

    def values(keys_moved, slots_moved, num_slots):
        q, k, v, kd, vd = (jnp.asarray(x) for x in draw)
        v, vd = v + keys_moved[None, :, None, None], vd + slots_moved[:, None, :, None, None]
        options = {'num_slots': num_slots, 'implementation': implementation}
        return depth_attention(q, k, v, kd, vd, **options)[0, :, 0, 0]

    probe, jacobian = jit(values), jit(jax.jacrev(values, argnums=(0, 1)))
    for num_slots, seen in layers.items():
        at = (jnp.zeros(5), jnp.zeros((4, 5)), num_slots)
        by_keys, by_slots = jacobian(*at)
        np.testing.assert_array_equal(by_keys != 0, np.tri(5))
        own = np.array([[int(c) for c in seen]] * 5)
        for token in range(5):
            drawn = np.zeros((5, 4), int)
            drawn[token] = own[token]
            np.testing.assert_array_equal(by_slots[:, :, token] != 0, drawn)
            for slot in range(4):
                moved = jnp.zeros((4, 5)).at[slot, token].set(3.0)
                changed = probe(at[0], moved, num_slots) != probe(*at)
                np.testing.assert_array_equal(changed, drawn[:, slot])


def test_output_is_a_mixture_for_any_keys():
    """o = (1 - w) o_sequence + w o_depth with w = Z_depth / (Z_sequence + Z_depth)."""
    case = SIZES | KINDS | SEQUENCE
    case.pop('traced')
    (q, k, v, kd, vd, _), *_ = make_case(**case)
    k = k + 2.0
    both, sequence = depth_attention(q, k, v, kd, vd), depth_attention(q, k, v, return_lse=True)
    none = np.zeros((2, 0, 2, 8), np.float32)
    depth = depth_attention(q, none, none, kd, vd, return_lse=True)
    weight = jnp.moveaxis(jax.nn.sigmoid(depth[1] - sequence[1]), 1, 2)[..., None]
    assert weight.min() < 0.1 and weight.max() > 0.9
    mixture = sequence[0] * (1 - weight) + depth[0] * weight
    np.testing.assert_allclose(both, mixture, rtol=0, atol=2e-6)
