"""Cross-entropy equals its definition, and chunks of tokens give the same result."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from moddepth_jax.hparams import from_config
from moddepth_jax.model import cross_entropy as module
from moddepth_jax.model.cross_entropy import (
    SoftTargets,
    chunk_size,
    cross_entropy,
    distillation,
    token_losses,
)
from moddepth_jax.model.sharding import axis_names, spec
from moddepth_jax.training.mesh import make_mesh
from moddepth_jax.training.train_step import init_state, train_step
from tests.devices import collectives, on_devices
from tests.model.cases import equations

B, T, D, V = 3, 37, 16, 53
ALL_AT_ONCE = B * T


def test_losses_are_those_of_float64():
    """A counted target costs log sum exp - its logit. An ignored target costs 0.

    The log-partition, whose square is the z-loss, is exact too. Ignored targets get no gradient.
    """
    random = np.random.default_rng(0)
    logits_BTV = random.normal(size=(3, 7, 11), scale=5).astype(np.float32)
    labels_BT = random.integers(0, 11, (3, 7)).astype(np.int32)
    labels_BT[0, 3] = labels_BT[1, 6] = labels_BT[2] = -100
    counted = labels_BT != -100
    picked_BT = np.take_along_axis(logits_BTV, np.maximum(labels_BT, 0)[..., None], -1)[..., 0]
    exact_BT = np.log(np.exp(logits_BTV.astype(np.float64)).sum(-1))
    found, pull = jax.vjp(lambda logits_BTV: token_losses(logits_BTV, labels_BT), logits_BTV)
    for got, exact in zip(found, (exact_BT - picked_BT, exact_BT, counted), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, np.where(counted, exact, 0), rtol=1e-6, atol=1e-6)
    for slopes in ((1, 0, 0), (0, 1, 0)):
        (slope_BTV,) = pull(tuple(jnp.full((3, 7), slope, jnp.float32) for slope in slopes))
        np.testing.assert_array_equal(np.abs(slope_BTV).max(-1) > 0, counted)


def drawn(tied, dtype='float32', B=B, V=V):
    """Return x_BTD, parameters of the head or of a tied table, and labels, some of them ignored."""
    random = np.random.default_rng(1)
    x_BTD = jnp.asarray(random.normal(size=(B, T, D)), dtype)
    matrix = random.normal(size=(V, D) if tied else (D, V)).astype(np.float32)
    labels_BT = random.integers(0, V, (B, T)).astype(np.int32)
    labels_BT[0, 3:9] = labels_BT[2] = -100
    return x_BTD, {'embedding': matrix} if tied else {'head': {'kernel': matrix}}, labels_BT


@functools.partial(jax.jit, static_argnums=(3, 4))
def losses(x_BTD, params, labels_BT, z_loss, loss_chunk):
    """Return (total, parts) and the gradients of a multiple of the total."""

    def scaled(x_BTD, params):
        total, *parts = cross_entropy(x_BTD, params, labels_BT, z_loss, loss_chunk)
        return total / 70, (total, *parts)

    return jax.value_and_grad(scaled, (0, 1), has_aux=True)(x_BTD, params)


def assert_close(found, expected, tolerance):
    """Compare all arrays, relative to their largest number."""
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        got, want = np.float64(got), np.float64(want)
        assert got.shape == want.shape
        assert np.abs(got - want).max() <= tolerance * np.abs(want).max() > 0


@pytest.mark.parametrize('tied', [False, True], ids=['head', 'tied'])
def test_chunks_give_the_losses_and_gradients_of_all_at_once(tied):
    """To 1e-6 in float32, for chunks that divide the tokens, that do not, and of one token."""
    inputs = drawn(tied)
    for z_loss, chunks in ((0.0, (16,)), (0.1, (1, 37, 110))):
        expected = losses(*inputs, z_loss, ALL_AT_ONCE)
        for chunk in chunks:
            assert_close(losses(*inputs, z_loss, chunk), expected, 1e-6)


def test_chunks_of_bfloat16_are_as_exact_as_all_at_once():
    """Their error against float32 is at most twice that of all at once. Dtypes are kept."""
    x_BTD, params, labels_BT = drawn(True, 'bfloat16')
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params)
    exact = losses(x_BTD.astype(jnp.float32), rounded, labels_BT, 0.1, ALL_AT_ONCE)
    at_once = losses(x_BTD, rounded, labels_BT, 0.1, ALL_AT_ONCE)
    chunks = losses(x_BTD, rounded, labels_BT, 0.1, 16)
    pairs = zip(jax.tree.leaves(chunks), jax.tree.leaves(at_once), strict=True)
    assert all(one.dtype == other.dtype for one, other in pairs)
    for one, other, right in zip(*map(jax.tree.leaves, (chunks, at_once, exact)), strict=True):
        error, allowed = (np.linalg.norm(np.float64(side) - right) for side in (one, other))
        assert error <= 2 * allowed + 1e-6 * np.linalg.norm(right)


def test_large_logits_have_finite_losses():
    """Logits of a thousand do not overflow, with and without chunks.

    Ignored targets get gradients of exactly 0.
    """
    x_BTD, params = jnp.ones((1, 2, 1)), {'head': {'kernel': jnp.array([[1000.0, 996, -1000]])}}
    for chunk in (1, 2):
        (_, (_, nll_BT, log_z_BT)), _ = losses(x_BTD, params, jnp.array([[1, 1]]), 0.0, chunk)
        np.testing.assert_allclose(nll_BT, [[4 + np.log1p(np.exp(-4.0))] * 2], rtol=1e-5)
        np.testing.assert_allclose(log_z_BT, [[1000 + np.log1p(np.exp(-4.0))] * 2], rtol=1e-6)
        _, gradients = losses(x_BTD, params, jnp.array([[-100, -100]]), 0.1, chunk)
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradients))


def test_parts_of_the_total_carry_no_gradient():
    """Only the total has gradients, with and without chunks. The parts are metrics."""
    x_BTD, params, labels_BT = drawn(False)

    def parts(x_BTD, chunk):
        _, nll_BT, log_z_BT = cross_entropy(x_BTD, params, labels_BT, 0.1, chunk)
        return jnp.sum(nll_BT) + jnp.sum(log_z_BT)

    for chunk in (16, ALL_AT_ONCE):
        np.testing.assert_array_equal(jax.grad(parts)(x_BTD, chunk), jnp.zeros_like(x_BTD))


def test_chunks_are_as_large_as_allowed_or_divide():
    """A chunk has at most the allowed tokens, and no padding if a divisor exceeds half of them."""
    for tokens in (1, 7, 64, 97, 4096, 5000):
        for most in (1, 3, 8, 100, 668, 4096):
            chunk = chunk_size(tokens, most)
            assert 1 <= chunk <= most or chunk <= tokens
            assert -(-tokens // chunk) <= 2 * -(-tokens // most)
    assert chunk_size(4096, 668) == 512 and chunk_size(97, 50) == 49 and chunk_size(64, 100) == 64


@pytest.mark.parametrize('tied', [False, True], ids=['head', 'tied'])
def test_no_step_holds_the_logits_of_all_tokens(tied, tiny_config, monkeypatch):
    """A step with many ids has no array of B x T x V, by the knob and by default."""
    knobs = {'model.vocab_size': 2048, 'model.num_layers': 1, 'model.tie_embeddings': tied}
    rows, length = 4, 64

    def largest_of_step(**more):
        hparams = from_config(tiny_config(**knobs, **more))
        state = jax.eval_shape(functools.partial(init_state, hparams, 10))
        row = jax.ShapeDtypeStruct((rows, length), jnp.int32)
        batch = dict.fromkeys(('tokens_BT', 'labels_BT', 'segment_ids_BT'), row)
        traced = equations(jax.make_jaxpr(lambda *given: train_step(*given))(state, batch).jaxpr)
        return max(var.aval.size for equation in traced for var in equation.outvars)

    everything = rows * length * 2048
    assert largest_of_step() == everything  # small enough for one chunk
    assert largest_of_step(**{'training.loss_chunk': 32}) < everything / 4
    monkeypatch.setattr(module, 'LOGITS_BYTES', (4 * 2048 * 16, 4 * 2048 * 32))
    assert largest_of_step() < everything / 4


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def soft_losses(x_BTD, params, labels_BT, z_loss, loss_chunk, weight, temperature, other=None):
    """Return `losses` with the distributions of a teacher: hidden states and parameters."""

    def scaled(x_BTD, params):
        targets = SoftTargets(*other, weight, temperature)
        total, *parts = distillation(x_BTD, params, labels_BT, z_loss, loss_chunk, targets)
        return total / 70, (total, *parts)

    return jax.value_and_grad(scaled, (0, 1), has_aux=True)(x_BTD, params)


def other_drawn(tied, V=V, B=B):
    """Return hidden states [B, T, 9] and the head of a teacher over the same ids."""
    random = np.random.default_rng(3)
    matrix = random.normal(size=(V, 9) if tied else (9, V)).astype(np.float32)
    params = {'embedding': matrix} if tied else {'head': {'kernel': matrix}}
    return jnp.asarray(random.normal(size=(B, T, 9)), jnp.float32), params


@pytest.mark.parametrize(('tied', 'temperature'), [(False, 1.0), (True, 2.5)])
def test_distillation_is_that_of_float64(tied, temperature):
    """Value and gradients equal the plain formula in float64, with any chunks.

    The teacher, of another width, gets no gradients, and ignored targets do not count.
    """
    (x_BTD, params, labels_BT), other = drawn(tied), other_drawn(not tied)
    weight, z_loss, ids = 0.7, 0.1, jnp.maximum(labels_BT, 0)[..., None]

    def plain(x_BTD, params):
        logits_BTV, other_BTV = (
            x @ (p['embedding'].T if 'embedding' in p else p['head']['kernel'])
            for x, p in ((x_BTD, params), other)
        )
        log_q_BTV, log_p_BTV = (
            jax.nn.log_softmax(side / temperature) for side in (logits_BTV, other_BTV)
        )
        log_z_BT = jax.nn.logsumexp(logits_BTV, -1)
        nll_BT = log_z_BT - jnp.take_along_axis(logits_BTV, ids, -1)[..., 0]
        kl_BT = temperature**2 * jnp.sum(jnp.exp(log_p_BTV) * (log_p_BTV - log_q_BTV), -1)
        parts = [jnp.where(labels_BT >= 0, side, 0) for side in (nll_BT, log_z_BT, kl_BT)]
        nll, log_z, kl = parts
        total = jnp.sum((1 - weight) * nll + z_loss * log_z**2 + weight * kl)
        return total / 70, (total, *parts)

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), (x_BTD, params, other))
        exact, other_given = wide[:2], other
        other = wide[2]
        expected = jax.device_get(jax.value_and_grad(plain, (0, 1), has_aux=True)(*exact))
    for chunk in (ALL_AT_ONCE, 37, 16):
        found = soft_losses(
            x_BTD, params, labels_BT, z_loss, chunk, weight, temperature, other_given
        )
        assert_close(found, expected, 3e-6)

    def of_other(other):
        targets = SoftTargets(*other, weight, temperature)
        return distillation(x_BTD, params, labels_BT, z_loss, 16, targets)[0]

    assert not any(np.any(leaf) for leaf in jax.tree.leaves(jax.grad(of_other)(other_given)))


@pytest.mark.parametrize('chunk', [16, ALL_AT_ONCE])
def test_a_model_does_not_diverge_from_itself(chunk):
    """The divergence and all its gradients are exactly 0."""
    x_BTD, params, labels_BT = drawn(True)
    (_, (total, *_, kl_BT)), gradients = soft_losses(
        x_BTD, params, labels_BT, 0.0, chunk, 1.0, 3.0, (x_BTD, params)
    )
    assert total == 0 and not np.any(kl_BT)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradients))


LAYOUTS = [
    ('tensor=4', False, 4, 52),  # the ids are split over all devices
    ('data=2,tensor=2', True, 4, 52),
    ('fsdp=2,tensor=2', True, 4, 53),  # ids that do not divide
    ('data=2,fsdp=2', True, 3, 52),  # rows that do not divide
]


def on_four_devices():
    for layout, tied, rows, num_ids in LAYOUTS:
        x_BTD, params, labels_BT = drawn(tied, B=rows, V=num_ids)
        alone = losses(x_BTD, params, labels_BT, 0.1, ALL_AT_ONCE)
        mesh, names = make_mesh(layout), axis_names('embedding' if tied else 'head/kernel', 2)

        def put(leaf, *names, mesh=mesh):
            return jax.device_put(leaf, NamedSharding(mesh, spec(mesh, names, leaf.shape)))

        other_BTE, other_params = other_drawn(tied, num_ids, rows)
        soft_alone = soft_losses(
            x_BTD, params, labels_BT, 0.1, ALL_AT_ONCE, 0.7, 2.0, (other_BTE, other_params)
        )
        stored, other_params = jax.tree.map(
            lambda leaf, names=names: put(leaf, *names), (params, other_params)
        )
        inputs = put(x_BTD, 'batch', None, None), stored, put(labels_BT, 'batch', None)
        with jax.set_mesh(mesh):
            compiled = losses.lower(*inputs, 0.1, 5).compile()
        several = compiled(*inputs)
        assert_close(several, alone, 1e-6)
        other = put(other_BTE, 'batch', None, None), other_params
        with jax.set_mesh(mesh):
            assert_close(soft_losses(*inputs, 0.1, 5, 0.7, 2.0, other), soft_alone, 2e-6)
        pairs = zip(*map(jax.tree.leaves, (several[1][1], stored)), strict=True)
        assert all(one.sharding.is_equivalent_to(other.sharding, 2) for one, other in pairs)
        moved = collectives(compiled.as_text())
        assert not moved.keys() & {'all-to-all', 'collective-permute'}, layout
        assert not any(f',{T},' in shape for shape in moved.get('all-gather', ())), layout
    print('null')


def test_devices_sum_up_their_own_tokens():
    """Losses and gradients equal those of one device, whether rows and ids divide or not.

    Gradients are sharded like the stored parameters, and no row is gathered.
    """
    on_devices(4, 'from tests.model import cross_entropy_test as test; test.on_four_devices()')
