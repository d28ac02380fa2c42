"""Grouped matmul equals a loop over experts, for any choice of experts."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.hparams.registry import EXPERT_PRODUCTS
from moddepth_jax.model.flops import dot_general_flops
from moddepth_jax.model.moe.grouped_matmul import (
    block_rows,
    combine,
    dispatch,
    grouped_matmul,
    make_layout,
    num_blocks,
    resolve,
)
from tests.model.cases import equations

RNG = np.random.default_rng(0)
MANY = (13, 3)
# name: (experts of each token, the number of experts)
CHOICES = {
    'some nowhere, experts empty': (
        np.append(RNG.choice([-1, 0, 2, 2, 5, 6, 99], (12, 3)), [[7, -1, 99]], axis=0),
        7,
    ),
    'one expert for all': (np.full(MANY, 2), 7),
    'all nowhere': (np.full(MANY, 7), 7),
    'one expert': (np.zeros((5, 1), int), 1),
    'every expert': (np.stack([RNG.permutation(9) for _ in range(6)]), 9),
    'one token': (np.array([[3, 1]]), 4),
}
FORMS = (('blocked', 4), ('blocked', 1), ('batched', 4), ('ragged_dot', 1))
ONE_OF_EACH = (FORMS[0], *FORMS[2:])


@functools.partial(jax.jit, static_argnums=(5, 6))
def both_passes(x_ND, weight_Nk, w_EDF, expert_Nk, dy_NF, implementation, block):
    """Return the sum over each token's experts, and the cotangents of the first three operands."""

    def mixed(x_ND, weight_Nk, w_EDF):
        layout = make_layout(expert_Nk, w_EDF.shape[0], block)
        y_RF = grouped_matmul(dispatch(x_ND, layout), w_EDF, layout, implementation)
        return combine(y_RF, weight_Nk, layout)

    value, pull = jax.vjp(mixed, x_ND, weight_Nk, w_EDF)
    return value, *pull(dy_NF)


def by_hand(x_ND, weight_Nk, w_EDF, expert_Nk, dy_NF):
    """Compute the same in NumPy, by every expert on every token."""
    y_NF, dx_ND = np.zeros_like(dy_NF), np.zeros_like(x_ND)
    dweight_Nk, dw_EDF = np.zeros_like(weight_Nk), np.zeros_like(w_EDF)
    for expert, w_DF in enumerate(w_EDF):
        chosen_Nk = expert_Nk == expert
        weight_N1 = np.sum(weight_Nk * chosen_Nk, axis=1, keepdims=True)
        y_NF += weight_N1 * (x_ND @ w_DF)
        dx_ND += weight_N1 * (dy_NF @ w_DF.T)
        dw_EDF[expert] = x_ND.T @ (weight_N1 * dy_NF)
        dweight_Nk += chosen_Nk * np.sum(x_ND @ w_DF * dy_NF, axis=1, keepdims=True)
    return y_NF, dx_ND, dweight_Nk, dw_EDF


def operands(expert_Nk, num_experts, seed=0, width=6, out=4):
    rng, (tokens, per_token) = np.random.default_rng(seed), expert_Nk.shape
    shapes = (tokens, width), (tokens, per_token), (num_experts, width, out), (tokens, out)
    x_ND, weight_Nk, w_EDF, dy_NF = (rng.normal(size=shape) for shape in shapes)
    return x_ND, weight_Nk, w_EDF, expert_Nk, dy_NF


def cast(arrays, dtype):
    return [jnp.asarray(array, dtype if array.dtype.kind == 'f' else None) for array in arrays]


@pytest.mark.parametrize('choice', CHOICES)
@pytest.mark.parametrize(
    ('dtype', 'tolerance'),
    [('float64', 1e-12), pytest.param('float32', 1e-5, marks=pytest.mark.slow)],
)
def test_equals_a_loop_over_experts(choice, dtype, tolerance):
    """The forward pass and all gradients, for each implementation and several block sizes."""
    arrays = operands(*CHOICES[choice])
    many = arrays[3].shape == MANY
    forms = FORMS if many or dtype == 'float32' else FORMS[:1]
    with jax.enable_x64(dtype == 'float64'):
        for form in forms:
            ours = both_passes(*cast(arrays, dtype), *form)
            for mine, right in zip(ours, by_hand(*arrays), strict=True):
                assert mine.dtype == dtype
                np.testing.assert_allclose(mine, right, rtol=tolerance, atol=tolerance)


def test_blocks_suffice_and_none_is_always_idle():
    """The number of blocks is the most that any assignment of the pairs fills."""
    for pairs, experts, block in itertools.product(range(1, 8), range(1, 4), range(1, 4)):
        dealt = itertools.product(range(pairs + 1), repeat=experts)
        filled = [sum(-(-n // block) for n in counts) for counts in dealt if sum(counts) <= pairs]
        assert num_blocks(pairs, experts, block) == max(filled)


def test_fewer_pairs_need_fewer_blocks():
    """If few pairs have an expert, a bound on them shortens the layout and changes nothing."""
    arrays = operands(np.array([[0, 9], [9, 9], [2, 9], [9, 2]]), 3)
    x_ND, weight_Nk, w_EDF, expert_Nk, _ = cast(arrays, 'float32')

    @jax.jit
    def run():
        layout = make_layout(expert_Nk, 3, 2, most=3)
        y_RF = grouped_matmul(dispatch(x_ND, layout), w_EDF, layout, 'blocked')
        return layout, combine(y_RF, weight_Nk, layout)

    layout, y_NF = run()
    assert layout.expert_M.shape == (3,) and layout.source_R.tolist() == [0, 4, 2, 3, 4, 4]
    np.testing.assert_allclose(y_NF, by_hand(*arrays)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('form', ONE_OF_EACH, ids=EXPERT_PRODUCTS)
def test_pairs_without_an_expert_have_no_effect(form):
    """NaN in their tokens, weights and cotangents reaches no other number."""
    expert_Nk, num_experts = CHOICES['some nowhere, experts empty']
    nowhere_Nk = (expert_Nk < 0) | (expert_Nk >= num_experts)
    nowhere_N1 = nowhere_Nk.all(axis=1, keepdims=True)
    assert nowhere_N1.any() and not nowhere_N1.all()
    x_ND, weight_Nk, w_EDF, _, dy_NF = operands(expert_Nk, num_experts)
    clean = (x_ND, weight_Nk, w_EDF, expert_Nk, dy_NF)
    x_ND, dy_NF = (np.where(nowhere_N1, np.nan, rows) for rows in (x_ND, dy_NF))
    dirty = (x_ND, np.where(nowhere_Nk, np.inf, weight_Nk), w_EDF, expert_Nk, dy_NF)
    right = both_passes(*cast(clean, 'float32'), *form)
    for mine, theirs in zip(both_passes(*cast(dirty, 'float32'), *form), right, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert not np.any(right[1][nowhere_N1[:, 0]]) and not np.any(right[2][nowhere_Nk])


@pytest.mark.parametrize('implementation', EXPERT_PRODUCTS)
def test_blocks_without_expert_are_not_read(implementation):
    """Their rows give 0 and get gradients of 0, whatever values they have."""
    filled = jnp.array([[True], [True], [False], [False]])

    @jax.jit
    def run(x_RX, w_EXY, dy_RY):
        layout = make_layout(jnp.array([[0], [7], [7], [1]]), 2, 1)
        product = functools.partial(grouped_matmul, layout=layout, implementation=implementation)
        y_RY, pull = jax.vjp(product, x_RX, w_EXY)
        return y_RY, *pull(dy_RY)

    rows = [jnp.where(filled, jnp.ones((4, width)), jnp.nan) for width in (3, 2)]
    y_RY, dx_RX, dw_EXY = run(rows[0], jnp.ones((2, 3, 2)), rows[1])
    np.testing.assert_array_equal(y_RY, jnp.where(filled, 3, jnp.zeros((4, 2))))
    np.testing.assert_array_equal(dx_RX, jnp.where(filled, 2, jnp.zeros((4, 3))))
    np.testing.assert_array_equal(dw_EXY, np.ones((2, 3, 2)))


@pytest.mark.parametrize(
    'form', [('blocked', 32), ('batched', 32), ('ragged_dot', 1)], ids=EXPERT_PRODUCTS
)
def test_sums_are_wide(form):
    """In bfloat16, where a sum of ones stops at 256, any number of ones adds up."""
    width, out, many = 300, 320, 340
    x_ND, weight_Nk = jnp.ones((many, width), jnp.bfloat16), jnp.ones((many, 1))
    w_EDF, expert_Nk = jnp.ones((1, width, out)), jnp.zeros((many, 1), int)
    dy_NF = jnp.ones((many, out), jnp.bfloat16)
    results = both_passes(x_ND, weight_Nk, w_EDF, expert_Nk, dy_NF, *form)
    assert [result.dtype.name for result in results] == ['bfloat16', 'bfloat16', *['float32'] * 2]
    for result, right in zip(results, (width, out, width * out, many), strict=True):
        assert np.all(result == jnp.asarray(right, result.dtype))


def test_places_add_wide():
    """The places of a bfloat16 token add up in float32, forward and backward."""

    @jax.jit
    def run(y_RD):
        layout = make_layout(jnp.arange(4)[None], 4, 1)
        pull = jax.vjp(lambda x_ND: dispatch(x_ND, layout), y_RD[:1])[1]
        return combine(y_RD, jnp.ones((1, 4)), layout), *pull(y_RD)

    for total_ND in run(jnp.array([[256.0], [1.0], [1.0], [-256.0]], jnp.bfloat16)):
        assert total_ND == 2 and total_ND.dtype == jnp.bfloat16


@pytest.mark.parametrize('form', ONE_OF_EACH, ids=EXPERT_PRODUCTS)
def test_reruns_are_bit_equal_by_construction(form):
    """No two values are added to the same place, an order that a GPU would leave to chance."""
    arrays = cast(operands(*CHOICES['some nowhere, experts empty']), 'float32')
    traced = jax.make_jaxpr(lambda *arrays: both_passes(*arrays, *form))(*arrays)
    scatters = [e for e in equations(traced.jaxpr) if e.primitive.name.startswith('scatter')]
    assert scatters and all(eqn.params['unique_indices'] for eqn in scatters)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('form', ONE_OF_EACH, ids=EXPERT_PRODUCTS)
def test_lowers_for_cuda(form, dtype, monkeypatch):
    """Both passes lower for GPUs, with factors in the dtype of the tokens."""
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
    arrays = cast(operands(*CHOICES['every expert'], width=5), 'float32')
    arrays[0], arrays[4] = arrays[0].astype(dtype), arrays[4].astype(dtype)
    # Trace again, since both_passes may have been traced for a CPU.
    traced = jax.jit(lambda *arrays: both_passes.__wrapped__(*arrays, *form)).trace(*arrays)
    text = traced.lower(lowering_platforms=('cuda',)).as_text()
    products = re.findall(r'(?:dot_general|ragged_dot).* : \((.*)\) -> ', text)
    narrow = {'float32': 'xf32>', 'bfloat16': 'xbf16>'}[dtype]
    assert len(products) >= 3 and all(factors.count(narrow) == 2 for factors in products)


@pytest.mark.parametrize('pairs', [8192, 2048])
def test_executed_products(pairs):
    """With busy experts, `blocked` multiplies at most 15% more than needed, including padding."""
    experts, width, out = 8, 16, 24
    expert_Nk = jax.ShapeDtypeStruct((pairs // 2, 2), jnp.int32)
    shapes = [(pairs // 2, width), (pairs // 2, 2), (experts, width, out), (pairs // 2, out)]
    x_ND, weight_Nk, w_EDF, dy_NF = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    form = ('blocked', block_rows(pairs, experts, 'blocked'))
    traced = both_passes.trace(x_ND, weight_Nk, w_EDF, expert_Nk, dy_NF, *form)
    assert 1 < dot_general_flops(traced.jaxpr) / (3 * 2 * pairs * width * out) < 1.15


def test_block_rows():
    """A power of two: 1 if experts have few pairs, and bounded if they have many."""
    for product, rows in (('blocked', [1, 2, 32, 128]), ('batched', [1, 2, 32, 128])):
        assert [block_rows(pairs, 64, product) for pairs in (48, 384, 6144, 10**5)] == rows
    assert block_rows(10**7, 4, 'ragged_dot') == 1


def test_platform_and_bad_input(monkeypatch):
    """`auto` depends on the platform. Unknown names and sizes below 1 are refused."""
    assert resolve('auto') == 'blocked' and resolve('ragged_dot') == 'ragged_dot'
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
    assert resolve('auto') == 'batched'
    with pytest.raises(ValueError, match="product='dense': must be one of auto, .*blocked"):
        resolve('dense')
    for bad in ({'num_experts': 0, 'block': 1}, {'num_experts': 1, 'block': 0}):
        with pytest.raises(ValueError, match='=0: must be 1 or more'):
            make_layout(jnp.zeros((1, 1), int), **bad)
