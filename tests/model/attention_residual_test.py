"""Attention residuals: initial values, visible sources, gradients and precision."""

import functools
import itertools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.conversion.transfer_params import transfer_params
from moddepth_jax.model.attention import DepthSlots
from moddepth_jax.model.stack import Stack, unstack_layers
from moddepth_jax.model.streams import layer_kinds
from moddepth_jax.model.streams.attention_residual import mix_sources
from moddepth_jax.model.transformer import Transformer
from tests.model import oracle
from tests.model.cases import (
    SMALL_BT,
    SMALL_SEGMENTS_BT,
    SOURCES,
    initial_params,
    parameters,
    random_variables,
    small_hparams,
    with_leaves,
)

EPSILON = 1e-6


def size_of(sublayers):
    """Return knobs for sources of that many sublayers."""
    return SOURCES | {'model.depth.sublayers_per_source': sublayers}


def draw(*shape, seed=0):
    """Return normal float32 numbers."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_a_zero_query_reads_the_mean_of_the_visible_sources():
    """The mean covers written slots and newer sources. Hidden sources would change it visibly.

    Each of the 7 gets a seventh of the gradient, and the query gets one too, so that it can learn.
    """
    slots, newer, dx = draw(6, 2, 3, 8), draw(2, 2, 3, 8, seed=1), draw(2, 3, 8, seed=2)
    slots[5] = 1e9

    def mix(query, newer, slots):
        return mix_sources(EPSILON, query, tuple(newer), DepthSlots(slots, count=5))[0]

    @jax.jit
    def differentiate(*inputs):
        found, vjp = jax.vjp(mix, *inputs)
        return found, *vjp(dx)

    found, dquery, dnewer, dslots = differentiate(np.zeros(8, np.float32), newer, slots)
    visible = np.concatenate([slots[:5], newer])
    np.testing.assert_allclose(found, visible.mean(axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dnewer, [dx / 7] * 2, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dslots, [dx / 7] * 5 + [0 * dx], rtol=1e-5, atol=1e-6)
    keys = visible / np.sqrt(np.mean(visible**2, axis=-1, keepdims=True))
    dlogits = np.sum((visible - visible.mean(axis=0)) / 7 * dx, axis=-1, keepdims=True)
    np.testing.assert_allclose(dquery, np.sum(dlogits * keys, axis=(0, 1, 2)), rtol=1e-4, atol=1e-5)


def test_sources_are_read_as_they_are_and_keys_are_normed():
    """A float64 loop computes the softmax of w . v / rms(v) for tokens with different sources."""
    query, slots = (
        2 * draw(8, seed=3),
        draw(4, 2, 3, 8) * [[[[1.0]]], [[[9.0]]], [[[0.1]]], [[[1.0]]]],
    )
    newer, valid = draw(1, 2, 3, 8, seed=1), np.random.default_rng(2).random((4, 2, 3)) < 0.6
    depth = DepthSlots(jnp.float32(slots), jnp.asarray(valid), 3)
    found, _ = mix_sources(EPSILON, query, tuple(newer), depth)
    for b, t in np.ndindex(2, 3):
        of_token = [slots[i, b, t] for i in range(3) if valid[i, b, t]] + [newer[0, b, t]]
        logits = [query @ v / np.sqrt(np.mean(v**2) + EPSILON) for v in of_token]
        p = np.exp(logits) / np.exp(logits).sum()
        expected = sum(one * v for one, v in zip(p, of_token, strict=True))
        np.testing.assert_allclose(found[b, t], expected, rtol=1e-4, atol=1e-5)


def plain_mix(query, slots, visible, newer):
    """Compute the mixture by one softmax over all sources at once."""
    sources = jnp.concatenate([slots, *(one[None].astype(slots.dtype) for one in newer)])
    rms = jnp.sqrt(jnp.mean(sources**2, axis=-1) + EPSILON)
    logits = jnp.einsum('lbtd,d->lbt', sources, query) / rms
    seen = jnp.concatenate(
        [jnp.broadcast_to(visible, slots.shape[:3]), np.ones((len(newer), *slots.shape[1:3]), bool)]
    )
    p = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=0)
    return jnp.sum(p[..., None] * sources, axis=0)


@pytest.mark.parametrize(
    ('gathered', 'masked', 'dtype'),
    parameters(
        ((True, True, 'float32'), (False, False, 'bfloat16')),
        list(itertools.product((False, True), (False, True), ('float32', 'bfloat16'))),
    ),
)
def test_gradients_of_slots_are_those_of_the_sums(gathered, masked, dtype):
    """Gradients of slots are float32 for any dtype of the slots.

    Query and newer source get gradients too.
    """
    slots, newer = (
        jnp.asarray(draw(4, 2, 3, 8), dtype),
        (jnp.asarray(draw(2, 3, 8, seed=1), dtype),),
    )
    query = draw(8, seed=3)
    valid = np.random.default_rng(2).random((4, 2, 3)) < 0.6 if masked else None
    indices = np.array([[0, 2], [1, 3]]) if gathered else None  # 3 names no token
    if gathered:
        newer = (newer[0][:, :2],)

    def read(query, newer, slots, sums):
        depth = DepthSlots(slots, valid, 3, indices, sums)
        return mix_sources(EPSILON, query, newer, depth)[0]

    def plain(query, newer, slots):
        visible = np.arange(4)[:, None, None] < 3
        if masked:
            visible = visible & valid
        if gathered:
            rows, places = np.arange(2)[:, None], np.minimum(indices, 2)
            slots = slots[:, rows, places] * (indices < 3)[None, ..., None]
            visible = np.broadcast_to(visible, (4, 2, 3))[:, rows, places]
            visible = visible & (indices < 3) if masked else visible
        return plain_mix(query, slots, visible, newer)

    dx = draw(2, newer[0].shape[1], 8, seed=7)

    def differentiate(function, *inputs):
        output, vjp = jax.vjp(function, *inputs)
        return output, *vjp(dx)

    expected, dquery, dnewer, dslots = jax.jit(functools.partial(differentiate, plain))(
        query, newer, slots.astype('float32')
    )
    found, *rest, dsums = jax.jit(functools.partial(differentiate, read))(
        query, newer, slots, jnp.zeros(slots.shape)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert dsums.dtype == 'float32' and not np.any(rest[2])
    np.testing.assert_allclose(dsums, dslots, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(rest[0], dquery, rtol=1e-4, atol=1e-5)
    same = {'rtol': 8 * float(jnp.finfo(dtype).eps), 'atol': 1e-6}
    np.testing.assert_allclose(*(np.float32(one[0]) for one in (rest[1], dnewer)), **same)


@pytest.mark.parametrize('size', parameters((3,), (1, 3)))
def test_n_sources_act_as_n_squared_epsilon(size, tiny_config, monkeypatch):
    """With zero queries, n sources equal a plain model whose norms have n^2 times the epsilon.

    Logits and gradients of all common parameters.
    """
    knobs = {'model.dtype': 'float64', 'model.norm_eps': 0.3, 'model.remat': 'none'}
    real_BT = SMALL_SEGMENTS_BT > 0
    rng = np.random.default_rng(7)
    with jax.enable_x64(True), jax.numpy_rank_promotion('allow'):
        plain, other = (small_hparams(tiny_config, knobs, some) for some in ({}, size_of(size)))
        weights_BTV = real_BT[..., None] * rng.normal(size=(*real_BT.shape, plain.model.vocab_size))
        params = with_leaves(random_variables(other, SMALL_BT)['params'], {'query': 0})

        def loss(params):
            logits_BTV, _ = Transformer(other).apply(
                {'params': params}, SMALL_BT, SMALL_SEGMENTS_BT
            )
            return jnp.sum(logits_BTV * weights_BTV), logits_BTV

        run = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (_, logits_BTV), slopes = jax.device_get(run(params))
        params, slopes = (transfer_params(other.model, of, plain)[0] for of in (params, slopes))

    def by_layer(params):
        layers = unstack_layers(Stack(plain.model, 'top_c'), params['stack'])
        rest = {name: leaf for name, leaf in params.items() if name != 'stack'}
        return jax.device_get(rest | {'layers': [layer for _, layer in layers]})

    params, slopes = by_layer(params), by_layer(slopes)
    reads = range(2 * plain.model.num_layers + 1)  # for all sublayers and the final norm
    sources = itertools.cycle(1 + math.ceil(read / size) for read in reads)
    norm = oracle.rms_norm

    def norm_of_a_sum(x, weights, model):
        return norm(x, weights, types.SimpleNamespace(norm_eps=next(sources) ** 2 * model.norm_eps))

    monkeypatch.setattr(oracle, 'rms_norm', norm_of_a_sum)

    def forward(params):
        return oracle.forward(params, SMALL_BT, SMALL_SEGMENTS_BT, plain.model, oracle.Pass())

    expected_BTV = forward(params)
    np.testing.assert_allclose(logits_BTV[real_BT], expected_BTV[real_BT], rtol=1e-10, atol=1e-12)
    oracle.assert_gradients(
        slopes, lambda params: np.sum(forward(params) * weights_BTV), params, 1e-9, rng
    )
    monkeypatch.setattr(oracle, 'rms_norm', norm)
    without_BTV = forward(params)
    assert np.abs(logits_BTV - without_BTV)[real_BT].max() > 0.01


def test_queries_start_at_zero(tiny_config):
    """Queries start at 0 and key scales at 1."""
    hparams = small_hparams(tiny_config, SOURCES)
    params = initial_params(hparams)['stack']
    found = [
        (path[-1].key, leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if 'connection' in jax.tree_util.keystr(path) or 'reader' in jax.tree_util.keystr(path)
    ]
    assert len(found) == 6
    for name, leaf in found:
        np.testing.assert_array_equal(leaf, np.full(leaf.shape, name == 'scale'))


def test_blocks_of_one_sublayer_are_the_full_form(tiny_config):
    """Every n-th sublayer opens a source, counted from the first; n = 1 is the full form."""

    def opens(size, layers=4):
        knobs = size_of(size) | {'model.num_layers': layers}
        kinds = layer_kinds(small_hparams(tiny_config, knobs).model)
        assert kinds[-1].part == 'exit' and not kinds[-1].slots
        assert all(kind.slots == sum(kind.opens) for kind in kinds)
        return [opens for kind in kinds[:-1] for opens in kind.opens]

    assert opens(0) == opens(1) == [True] * 8
    for size in (2, 3, 4, 5, 8):
        assert opens(size) == [sublayer % size == 0 for sublayer in range(8)]


def test_blocks_of_one_sublayer_compute_the_full_form(tiny_config):
    """Both have one program for the loss and its gradients, and blocks of two have another."""

    def program(size):
        knobs = {'model.num_layers': 2, 'model.remat': 'none'}
        model = Transformer(small_hparams(tiny_config, size_of(size), knobs))

        def loss(params):
            return jnp.sum(model.apply({'params': params}, SMALL_BT, SMALL_SEGMENTS_BT)[0])

        params = jax.eval_shape(model.init, jax.random.key(0), SMALL_BT)['params']
        return jax.jit(jax.value_and_grad(loss)).lower(params).as_text()

    full = program(0)
    assert program(1) == full != program(2)


@pytest.mark.parametrize('gathered', [False, True])
def test_a_token_reads_only_its_own_sources(gathered):
    """Sources of other tokens change no bit of a read or of the gradients of its sources."""
    slots, newer, query = draw(4, 2, 3, 8), draw(2, 3, 8, seed=1), draw(8, seed=3)
    indices = np.array([[0, 1], [0, 1]]) if gathered else None
    newer = newer[:, :2] if gathered else newer

    def run(slots, newer):
        depth = DepthSlots(jnp.asarray(slots), None, 3, indices)

        def read(slots, newer):
            return mix_sources(EPSILON, query, (newer,), depth._replace(slots=slots))[0]

        found, vjp = jax.vjp(read, depth.slots, jnp.asarray(newer))
        return found, *vjp(jnp.ones_like(found))

    other_slots, other_newer = slots.copy(), newer.copy()
    other_slots[:, :, [0, 2]], other_newer[:, 0] = 7.0, -3.0
    (found, dslots, dnewer), (other, dother, dother_newer) = (
        run(slots, newer),
        run(other_slots, other_newer),
    )
    np.testing.assert_array_equal(found[:, 1], other[:, 1])
    np.testing.assert_array_equal(dslots[:, :, 1], dother[:, :, 1])
    np.testing.assert_array_equal(dnewer[:, 1], dother_newer[:, 1])
    assert np.all(np.any(found[:, 0] != other[:, 0], axis=-1))


def test_logits_and_sums_of_bfloat16_are_float32():
    """A query of 1.003, which bfloat16 rounds to 1, has an effect: nothing is rounded too early."""
    slots, newer = (jnp.asarray(x, 'bfloat16') for x in (draw(4, 2, 3, 64), draw(2, 3, 64, seed=1)))

    def mix(query, slots, newer):
        return mix_sources(EPSILON, query, (newer,), DepthSlots(slots))[0]

    query = np.full(64, 1.003, np.float32)
    found = mix(query, slots, newer)
    wide = mix(query, slots.astype('float32'), newer.astype('float32'))
    rounded = mix(np.ones(64, np.float32), slots, newer)
    assert found.dtype == 'float32'
    np.testing.assert_allclose(found, wide, rtol=1e-6, atol=1e-6)
    assert np.abs(found - rounded).max() > 1e-4
