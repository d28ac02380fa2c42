"""Depth streams: what they read, how many parameters they add, causality, and that they train."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.data import synthetic
from moddepth_jax.model.attention import DepthSlots, KeysValues, SelfAttention, TokenInfo
from moddepth_jax.model.layer import Layer
from moddepth_jax.model.layers import apply_rope
from moddepth_jax.model.stack import Stack, unstack_layers
from moddepth_jax.model.streams import STREAMS, LayerKind, layer_kinds
from moddepth_jax.model.transformer import Transformer
from moddepth_jax.training.train_step import init_state, train_step
from tests.model.cases import (
    ATTENTION,
    AVERAGE,
    DENSE,
    FAST,
    MODA,
    ROUTED,
    random_variables,
    small_hparams,
)

RESIDUAL = {'model.depth.stream': 'residual'}
BY_SEGMENT = {'model.routing.capacity': 0.6, 'model.routing.select_per': 'segment'}
PROJECTED = {'model.depth.attention_slot_projection': True}


def like(kinds, of):
    """Of each layer kind one attribute."""
    return [getattr(kind, of) for kind in kinds]


def test_kinds_of_layers(tiny_config):
    """Who reads and writes what: three layers of which the second is routed."""

    def kinds(*knobs):
        three = {'model.num_layers': 3, 'model.windows': (7, 5, 4)}
        return layer_kinds(small_hparams(tiny_config, three, ROUTED, *knobs).model)

    for knobs, slots in (
        ([RESIDUAL], 0),
        ([MODA], 2),
        ([MODA, {'model.depth.slots': 'attention'}], 1),
        ([MODA, {'model.depth.slots': 'block'}], 1),
        ([MODA, PROJECTED], 2),
    ):
        found = kinds(*knobs)
        assert like(found, 'slots') == [slots, slots, 0]
        assert like(found, 'window') == [7, 5, 4] and like(found, 'part') == ['block'] * 3
        assert like(found, 'routed') == [False, True, False]
    one_by_one = [0, 1, 2, 3, 4]
    for stream, inputs in (
        (ATTENTION, [0] * 5),
        (AVERAGE, one_by_one),
        (DENSE, one_by_one),
    ):
        found = kinds(stream)
        assert like(found, 'part') == ['entry', 'block', 'block', 'block', 'exit']
        assert like(found, 'slots') == [1, 1, 1, 1, 0] and like(found, 'inputs') == inputs
        assert like(found, 'window') == [0, 7, 5, 4, 0]
        assert like(found, 'routed') == [False, False, True, False, False]


@pytest.mark.parametrize(('routing', 'kv_heads'), [({}, 1), (ROUTED, 2)])
def test_streams_add_parameters_by_formula(routing, kv_heads, tiny_config):
    """D = 16, L = 4, H = 4, K heads of keys, G = 4 / K: none is made that nobody reads."""

    def count(*knobs):
        shape = {'model.num_kv_heads': kv_heads}
        hparams = small_hparams(tiny_config, routing, shape, *knobs)
        tokens = jnp.zeros((1, 8), jnp.int32)
        params = jax.eval_shape(Transformer(hparams).init, jax.random.key(0), tokens)['params']
        return sum(leaf.size for leaf in jax.tree.leaves(params))

    plain, width, layers, group = count(), 16, 4, 4 // kv_heads
    slot = 2 * width * kv_heads * 4
    assert count(DENSE) - plain == sum(layer * width**2 for layer in range(1, layers + 2))
    assert count(AVERAGE) - plain == (layers + 1) * (layers + 2) / 2
    of_attention = (layers + 1) * (width**2 + 2 * width**2 // group)
    assert count(ATTENTION) - plain == of_attention
    assert count(MODA) - plain == (layers - 1) * slot
    assert count(MODA, PROJECTED) - plain == 2 * (layers - 1) * slot
    assert count(MODA, {'model.depth.slots': 'attention'}) == plain
    assert count(MODA, {'model.depth.slots': 'block'}) - plain == (layers - 1) * slot
    assert count(MODA, {'model.depth.slot_keys': 'unrotated'}) == count(MODA)


@pytest.mark.parametrize(
    'stream',
    [
        pytest.param(DENSE, id='dense'),
        pytest.param(AVERAGE, id='average', marks=pytest.mark.slow),
    ],
)
def test_reads_of_all_outputs_start_as_the_residual_stream(stream, tiny_config):
    """At initialisation the logits are those of the residual model with the same blocks."""
    rng, shape = np.random.default_rng(0), {'model.num_layers': 3}
    tokens_BT = rng.integers(0, 32, (2, 8))
    hparams = small_hparams(tiny_config, shape, ROUTED, stream)
    model, residual = Transformer(hparams), Transformer(small_hparams(tiny_config, shape, ROUTED))
    at_first = jax.jit(model.init, compiler_options=FAST)(jax.random.key(0), tokens_BT)['params']

    def bolder(path, leaf, other):
        return leaf if path[-2:][0].key == 'stream' else other

    params = random_variables(hparams, tokens_BT)['params']
    params = jax.tree_util.tree_map_with_path(bolder, at_first, params)
    plain = {}  # the middle one is routed: no two layers of the residual model share a run
    for kind, mine in unstack_layers(Stack(hparams.model, 'top_c'), params['stack']):
        if kind.part == 'block':
            block = {name: jax.tree.map(lambda x: x[None], mine[name]) for name in mine}
            plain[f'run_{len(plain)}'] = {'layer_0': {n: block[n] for n in block if n != 'stream'}}
    run, expect = (
        jax.jit(lambda p, m=m: m.apply({'params': p}, tokens_BT)[0], compiler_options=FAST)
        for m in (model, residual)
    )
    expected = expect({**params, 'stack': plain})
    assert 0.3 < np.std(expected)
    np.testing.assert_allclose(run(params), expected, rtol=0, atol=1e-5)
    middle = params['stack']['run_2']['layer_0']
    middle['stream'] = jax.tree.map(lambda read: read + 0.1, middle['stream'])
    assert np.abs(run(params) - expected).max() > 0.1


def test_dense_reads_a_weighted_concatenation(tiny_config):
    """W . concat(X_0, X_1, X_2), the oldest first."""
    hparams, rng = small_hparams(tiny_config, DENSE).model, np.random.default_rng(0)
    x_LBTD = rng.normal(size=(3, 2, 5, 16)).astype('f')
    kernel = rng.normal(size=(48, 16)).astype('f')
    stream = STREAMS['dense'](hparams, LayerKind(False, 0, 1, 3))
    read_BTD, _, _ = stream.apply(
        {'params': {'kernel': kernel}}, x_LBTD[-1], DepthSlots(x_LBTD), method='read'
    )
    expected = np.concatenate(x_LBTD, axis=-1) @ kernel
    np.testing.assert_allclose(read_BTD, expected, rtol=0, atol=1e-4)


def _average(hparams, x_LBTD, params):
    stream = STREAMS['average'](hparams, LayerKind(False, 0, 1, len(x_LBTD)))
    given = (x_LBTD[-1], DepthSlots(x_LBTD))
    if params is None:
        params = stream.init(jax.random.key(0), *given, method='read')['params']
    return stream.apply({'params': params}, *given, method='read')[0]


def test_average_reads_a_weighted_sum(tiny_config):
    """a_0 X_0 + a_1 X_1 + a_2 X_2, and its gradient to each scalar: the sum of d . X_l."""
    hparams, rng = small_hparams(tiny_config, AVERAGE).model, np.random.default_rng(0)
    x_LBTD = rng.normal(size=(3, 2, 5, 16)).astype('f')
    d_BTD = rng.normal(size=(2, 5, 16)).astype('f')
    weights = np.array([2.0, -0.5, 0.25], 'f')
    read_BTD, pull = jax.vjp(lambda w: _average(hparams, x_LBTD, {'weights': w}), weights)
    first, second, third = x_LBTD
    np.testing.assert_allclose(read_BTD, 2 * first - 0.5 * second + 0.25 * third, rtol=0, atol=1e-5)
    expected = [np.sum(d_BTD * x_BTD) for x_BTD in x_LBTD]
    np.testing.assert_allclose(pull(d_BTD)[0], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_average_starts_as_its_newest_input_bit_for_bit(dtype, tiny_config):
    """In their dtype; and a weight of 1.003, which bfloat16 would round to 1, shows in both."""
    hparams = small_hparams(tiny_config, AVERAGE, {'model.dtype': dtype}).model
    x_LBTD = jnp.asarray(np.random.default_rng(3).normal(size=(4, 2, 5, 16)), dtype)
    read_BTD = _average(hparams, x_LBTD, None)
    assert read_BTD.dtype == dtype
    np.testing.assert_array_equal(read_BTD, x_LBTD[-1])
    finer = {'weights': jnp.array([0, 0, 0, 1.003])}
    assert np.any(_average(hparams, x_LBTD, finer) != x_LBTD[-1])


def test_attention_stream_reads_slots(tiny_config):
    """One slot, the embedding's: its value itself, a head to each of its queries; several: softmax.

    Of a window of one slot the newest is read.
    """
    rng = np.random.default_rng(0)
    x_BTD = rng.normal(size=(2, 5, 16)).astype('f')
    positions_BT = jnp.broadcast_to(jnp.arange(5), (2, 5))
    tokens = TokenInfo(positions_BT, jnp.ones_like(positions_BT))
    hparams = small_hparams(tiny_config, ATTENTION).model
    entry = Layer(hparams, LayerKind(False, 0, 1, part='entry'), 'top_c')
    shapes = jax.eval_shape(entry.init, jax.random.key(0), x_BTD, None, tokens, None)
    weights = jax.tree.map(lambda leaf: 0.5 * rng.normal(size=leaf.shape).astype('f'), shapes)
    output = entry.apply(weights, x_BTD, None, tokens, None)
    projections = weights['params']['stream']
    values_BTKH = np.tensordot(x_BTD, projections['slot']['value']['kernel'], 1)
    query_BTNH = np.tensordot(x_BTD, projections['query']['kernel'], 1)
    np.testing.assert_allclose(output.written.slots[0].v_BTKH, values_BTKH, rtol=0, atol=1e-5)
    np.testing.assert_allclose(output.x_BTD, query_BTNH.reshape(2, 5, 16), rtol=0, atol=1e-5)

    def read(slots, count, window=0):
        hparams = small_hparams(tiny_config, ATTENTION, {'model.depth.slot_window': window}).model
        stream = STREAMS['attention'](hparams, LayerKind(False, 0, 1))
        depth = DepthSlots(KeysValues(*map(jnp.asarray, slots)), None, count)
        return stream.apply({}, output.x_BTD, depth, method='read')[0]

    def to_heads(values_BTKH):
        return np.repeat(values_BTKH, 2, axis=2).reshape(2, 5, 16)

    slots = rng.normal(size=(2, 4, 2, 5, 2, 4)).astype('f')
    slots[:, 0] = output.written.slots[0]
    np.testing.assert_allclose(read(slots, 1), to_heads(values_BTKH), rtol=0, atol=1e-6)
    newest = to_heads(slots[1, 2])
    np.testing.assert_allclose(read(slots, 3, window=1), newest, rtol=0, atol=1e-6)
    keys_LBTNH, values_LBTNH = np.repeat(slots[:, :3], 2, axis=4)
    weights_LBTN = np.exp(np.einsum('btnh,lbtnh->lbtn', query_BTNH, keys_LBTNH) / 2)
    weights_LBTN /= weights_LBTN.sum(axis=0)
    mixed_BTNH = np.einsum('lbtn,lbtnh->btnh', weights_LBTN, values_LBTNH)
    np.testing.assert_allclose(read(slots, 3), mixed_BTNH.reshape(2, 5, 16), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    'stream',
    [
        pytest.param('dense', marks=pytest.mark.slow),
        pytest.param('average and routed', marks=pytest.mark.slow),
        pytest.param('attention', marks=pytest.mark.slow),
        pytest.param('moda', marks=pytest.mark.slow),
        pytest.param('moda and routed', marks=pytest.mark.slow),
    ],
)
def test_streams_train(stream, tiny_config):
    """Twelve steps on the synthetic language lower the loss, and move every parameter."""
    knobs = {'dense': [DENSE], 'attention': [ATTENTION], 'moda': [MODA]}
    knobs |= {'moda and routed': [MODA, ROUTED], 'average and routed': [AVERAGE, ROUTED]}
    rates = {'optimizer.learning_rate': 0.02, 'optimizer.warmup_fraction': 0.0}
    rates |= {'model.vocab_size': 257, 'model.num_layers': 3}
    hparams = small_hparams(tiny_config, rates, *knobs[stream])
    text = b''.join(synthetic.make_synthetic(num_documents=40))
    text = np.frombuffer(text, np.uint8)[: 12 * 4 * 33].astype(np.int32).reshape(12, 4, 33)
    start = state = jax.jit(lambda: init_state(hparams, 12), compiler_options=FAST)()
    step = jax.jit(train_step, compiler_options=FAST)
    losses = []
    for tokens_BT in text:
        batch = {'tokens_BT': tokens_BT[:, :-1], 'labels_BT': tokens_BT[:, 1:]}
        state, metrics = step(state, batch | {'segment_ids_BT': np.ones((4, 32), np.int32)})
        losses.append(float(metrics['loss']))
    assert np.mean(losses[-3:]) < losses[0] - 0.5
    leaves = jax.tree_util.tree_leaves_with_path(start.params)
    for (path, old), new in zip(leaves, jax.tree.leaves(state.params), strict=True):
        assert np.any(old != new), jax.tree_util.keystr(path)


def normed(x_BTKH, over, scale):
    """Keys or queries divided by their root mean square, over a head or all heads, and scaled."""
    if over == 'none':
        return x_BTKH
    flat = x_BTKH if over == 'head' else x_BTKH.reshape(*x_BTKH.shape[:2], -1)
    flat = flat / np.sqrt(np.mean(flat**2, axis=-1, keepdims=True) + 1e-6) * scale
    return flat.reshape(x_BTKH.shape)


@pytest.mark.parametrize('keys', ['rotated', 'unrotated'])
@pytest.mark.parametrize('over', ['none', 'head', 'full'])
def test_keys_of_slots_as_readers_see_them(over, keys, tiny_config):
    """One token, its own key and one slot: the softmax by hand.

    A `rotated` key is normed and turned by its writer; an `unrotated` one is normed by its reader,
    whose query is turned.
    """
    knobs = {'model.depth.slot_keys': keys, 'model.qk_norm': over}
    hparams, rng = small_hparams(tiny_config, MODA, knobs).model, np.random.default_rng(6)
    x_BTD = rng.normal(size=(3, 1, 16)).astype('f')
    positions_BT = jnp.array([[0], [5], [9]])
    tokens = TokenInfo(positions_BT, jnp.ones_like(positions_BT))
    attention = SelfAttention(hparams, 0)
    weights = [
        jax.tree.map(
            lambda leaf: rng.normal(size=leaf.shape).astype('f'),
            jax.eval_shape(attention.init, jax.random.key(0), x_BTD, tokens),
        )
        for _ in ('writer', 'reader')
    ]

    @jax.jit
    def write_and_read(writer, reader, x_BTD):
        _, _, slot, _ = attention.apply(writer, x_BTD, tokens)
        same = attention.apply(writer, x_BTD, tokens, method='slot')
        depth = DepthSlots(jax.tree.map(lambda side: side[None], slot))
        return slot, same, attention.apply(reader, x_BTD, tokens, depth=depth)[0]

    slot, same, found_BTD = write_and_read(*weights, x_BTD)
    for one, other in zip(slot, same, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    writer, reader = (mine['params'] for mine in weights)

    def project(params, name):
        return np.tensordot(x_BTD, params[name]['kernel'], 1)

    def turned(x_BTNH, params, norm):
        scale = params[norm]['scale'] if over != 'none' else None
        return apply_rope(
            jnp.asarray(normed(x_BTNH, over, scale)), positions_BT, hparams.rope_theta
        )

    q_BTNH = np.asarray(turned(project(reader, 'query'), reader, 'query_norm'))
    own_BTKH = turned(project(reader, 'key'), reader, 'key_norm')
    slot_BTKH = project(writer, 'key')
    if keys == 'rotated':
        slot_BTKH = turned(slot_BTKH, writer, 'key_norm')
    elif over != 'none':
        slot_BTKH = normed(slot_BTKH, over, reader['key_norm']['scale'])
    seen = np.repeat(np.stack([own_BTKH, slot_BTKH]), 2, axis=3)
    scores_SBTN = np.einsum('btnh,sbtnh->sbtn', q_BTNH, seen) / 2
    weights_SBTN = np.exp(scores_SBTN - scores_SBTN.max(axis=0))
    weights_SBTN /= weights_SBTN.sum(axis=0)
    values = np.repeat(np.stack([project(reader, 'value'), project(writer, 'value')]), 2, axis=3)
    mixed_BTNH = np.einsum('sbtn,sbtnh->btnh', weights_SBTN, values)
    expected_BTD = np.einsum('btnh,nhd->btd', mixed_BTNH, reader['out']['kernel'])
    np.testing.assert_allclose(found_BTD, expected_BTD, rtol=0, atol=1e-3)
    assert 0.05 < weights_SBTN.min(axis=0).max()


@pytest.mark.parametrize('name', ['all enter', 'routed', 'average'])
def test_later_tokens_and_other_documents_change_no_bit(name, tiny_config):
    """With slots or an average as without: causality of the logits, and packed documents apart."""
    knobs = {'all enter': MODA, 'routed': MODA | ROUTED | BY_SEGMENT, 'average': AVERAGE}[name]
    hparams = small_hparams(tiny_config, {'model.num_layers': 3, 'model.vocab_size': 64}, knobs)
    model, rng = Transformer(hparams), np.random.default_rng(2)
    tokens_BT = rng.permutation(64)[:24].reshape(2, 12)
    segments_BT = np.tile(np.repeat([1, 2, 3, 0], [4, 3, 3, 2]), (2, 1))
    variables = random_variables(hparams, tokens_BT)
    run = jax.jit(lambda *given: model.apply(variables, *given)[0])
    before_BTV = np.asarray(run(tokens_BT, segments_BT))

    def changed(places):
        other_BTV = run(np.where(places, (tokens_BT + 1) % 64, tokens_BT), segments_BT)
        return np.any(before_BTV != np.asarray(other_BTV), axis=-1)

    for document in (1, 2, 3):
        inside_BT = segments_BT == document
        np.testing.assert_array_equal(changed(~inside_BT), ~inside_BT)
    if name != 'routed':
        for first in range(1, 12):
            later_BT = np.tile(np.arange(12) >= first, (2, 1))
            np.testing.assert_array_equal(changed(later_BT), later_BT)
