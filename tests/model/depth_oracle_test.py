"""The oracle of the depth stream agrees with hand-worked cases, and the model with the oracle."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.model.stack import Stack, unstack_layers
from moddepth_jax.model.transformer import Transformer
from tests.model import depth_oracle
from tests.model.depth_oracle import Shape

_ONE_HEAD = Shape(num_heads=1, num_kv_heads=1, head_dim=2, windows=(None,), norm_eps=1e-30)
_LN3 = math.log(3)
_EYE = np.eye(2)
_SWAP = np.array([[0.0, 1.0], [1.0, 0.0]])
_ZERO = np.zeros((2, 2))


def _shape(**changes):
    return Shape(**{**vars(_ONE_HEAD), **changes})


def _unit(*x):
    x = np.array(x, float)
    return x / np.sqrt(np.mean(x**2))


def _head(matrix):
    return {'kernel': matrix[:, None, :]}


def _layer(out=_ZERO, **more):
    """One head of width D = 2 that weighs all it sees alike, values as they are, and a mute mlp."""
    heads = {'query': _head(_ZERO), 'key': _head(_EYE), 'value': _head(_EYE)}
    return {
        'attention': heads | {'out': {'kernel': out[None]}},
        'mlp': {name: {'kernel': _ZERO} for name in ('w1', 'w3', 'w2')},
        'attention_norm': {'scale': np.ones(2)},
        'mlp_norm': {'scale': np.ones(2)},
        **more,
    }


def _logits(embedding, layers, shape, **more):
    params = {'embedding': np.array(embedding, float), 'layers': layers, 'head': _EYE}
    params |= {'final_norm': {'scale': np.ones(2)}, **more}
    tokens_BT = np.arange(len(embedding))[None]
    return depth_oracle.logits(params, tokens_BT, np.ones_like(tokens_BT), shape)[0]


@pytest.mark.parametrize('place', ['pre', 'post', 'reordered'])
def test_mute_block_leaves_the_embedding(place):
    """Without attention output and mlp, the logits are the normed embedding in every placement."""
    found_TV = _logits([[3, 4]], [_layer()], _shape(norm_placement=place))
    np.testing.assert_allclose(found_TV, [[3 / 12.5**0.5, 4 / 12.5**0.5]], rtol=1e-14)


def test_uniform_attention_over_sequence_and_slots():
    """Two layers of equal weights: the second averages its two tokens and the first's two slots."""
    ffn_slot = {'key': _head(_EYE), 'value': _head(2 * _EYE)}
    layers = [_layer(_EYE, ffn_slot=ffn_slot), _layer(_EYE)]
    shape = _shape(stream='moda', windows=(None, None))
    found_TV = _logits([[1, 1], [1, -1]], layers, shape)
    c = _unit(2, -1)  # layer 1 turns the second token to [1, -1] + ([1, 1] + [1, -1]) / 2
    second = np.array([2, -1]) + ([1, 1] + c + [1, -1] + 2 * c) / 4
    np.testing.assert_allclose(found_TV, [[1, 1], _unit(*second)], rtol=1e-14)
    newest = np.array([2, -1]) + ([1, 1] + c + 2 * c) / 3
    found_TV = _logits([[1, 1], [1, -1]], layers, _shape(**{**vars(shape), 'slot_window': 1}))
    np.testing.assert_allclose(found_TV[1], _unit(*newest), rtol=1e-14)


def test_softmax_of_known_weights():
    """Scores ln 3 and 0, after division by sqrt(H), weigh 3/4 and 1/4."""
    keys, values = [np.array([1, 0]), np.array([0, 5])], [np.array([4, 0]), np.array([0, 8])]
    found_H = depth_oracle.one_query(np.array([2**0.5 * _LN3, 0]), keys, values)
    np.testing.assert_allclose(found_H, [3, 2], rtol=1e-14)


def test_attention_sees_its_segment_within_its_window():
    """A drawn grid: segments of three, one and two (padding) tokens, window 2."""
    weights = _layer()['attention']
    weights['query'] = weights['key'] = {'kernel': np.zeros((6, 1, 6))}
    weights['value'], weights['out'] = _head(np.eye(6)), {'kernel': np.eye(6)[None]}
    segments_T, positions_T = np.array([1, 1, 1, 2, 0, 0]), np.arange(6)
    seen_TS, _, _ = depth_oracle.attention(
        weights, np.eye(6), [], segments_T, positions_T, 2, _shape(head_dim=6)
    )
    grid = ['100000', '110000', '011000', '000100', '000010', '000011']
    assert [''.join(row) for row in np.where(seen_TS > 0, '1', '0')] == grid


@pytest.mark.parametrize('over, scale', [('head', [1, 2]), ('full', [1, 2, 3, 4])])
def test_qk_norm_over_a_head_or_over_all(over, scale):
    """Heads [1, 1] and [7, 7]: the root mean square is 1 and 7 by head, 5 over both."""
    x_TNH = np.array([[[1.0, 1.0], [7.0, 7.0]]])
    weights = {'key_norm': {'scale': np.array(scale)}}
    found_TNH = depth_oracle.qk_norm(x_TNH, weights, 'key_norm', _shape(qk_norm=over))
    expected = {'head': [[1, 2], [1, 2]], 'full': [[1 / 5, 2 / 5], [21 / 5, 28 / 5]]}
    np.testing.assert_allclose(found_TNH, [expected[over]], rtol=1e-14)


def test_query_heads_share_key_value_heads_in_runs():
    """Of four query heads over two slots heads, 0 and 1 read head 0, 2 and 3 read head 1."""
    value_TKH = np.array([[[1.0], [2.0]]])
    x_TD = depth_oracle.read_depth(np.ones((1, 4, 1)), [(value_TKH, value_TKH)])
    np.testing.assert_array_equal(x_TD, [[1, 1, 2, 2]])


def test_rope_turns_each_half_split_pair():
    """theta 16, H = 4: at 2 pi the pair (0, 2) is back and the pair (1, 3) a quarter turn on."""
    x_TNH = np.array([[[1.0, 2.0, 3.0, 4.0]]])
    found_TNH = depth_oracle.rope(x_TNH, [2 * math.pi], 16.0)
    np.testing.assert_allclose(found_TNH, [[[1, -4, 3, 2]]], rtol=1e-14)


def test_mlp_of_known_gate():
    """silu(ln 3) is 3/4 ln 3."""
    weights = {'w1': _LN3, 'w3': 2.0, 'w2': 1.0}
    weights = {name: {'kernel': np.array([[value]])} for name, value in weights.items()}
    found_TD = depth_oracle.mlp(weights, np.ones((1, 1)), _ONE_HEAD)
    np.testing.assert_allclose(found_TD, [[1.5 * _LN3]], rtol=1e-14)


_F = np.array([4, 3]) / 12.5**0.5
_PLUS = np.array([3, 4]) + _F


@pytest.mark.parametrize(
    'place, attention_reads, mlp_reads, output',
    [
        ('pre', _F[::-1], 3 * _unit(*_PLUS), _PLUS),
        ('post', [3, 4], [1, 1], [3, 3]),
        ('reordered', [3, 4], _PLUS, _PLUS),
    ],
)
def test_sources_of_the_slots(place, attention_reads, mlp_reads, output):
    """Values of the slots of x = [3, 4]: attention swaps what it reads, the second norm triples."""
    bare = {'key': _head(_EYE), 'value': _head(_EYE)}
    double = {'key': _head(_EYE), 'value': _head(2 * _EYE)}
    layer = _layer(_SWAP, ffn_slot=bare, block_slot=bare, attention_slot=double)
    layer['mlp_norm'] = {'scale': np.array([3.0, 3.0])}

    def values(**changes):
        shape = _shape(norm_placement=place, **changes)
        one = np.ones(1, int)
        _, written = depth_oracle.block(layer, np.array([[3.0, 4]]), [], one, one, None, shape)
        return np.array([value_TKH[0, 0] for _, value_TKH in written])

    own, ffn, twice = np.array(attention_reads), np.array(mlp_reads), 2 * np.array(attention_reads)
    np.testing.assert_allclose(values(slots='attention'), [own], rtol=1e-14)
    np.testing.assert_allclose(values(slots='attention+ffn'), [own, ffn], rtol=1e-14)
    np.testing.assert_allclose(values(slots='block'), [output], rtol=1e-14)
    np.testing.assert_allclose(values(attention_slot_projection=True), [twice, ffn], rtol=1e-14)


@pytest.mark.parametrize('keys, stored', [('rotated', [-8, 9]), ('unrotated', [3, 4])])
def test_stored_keys(keys, stored):
    """A slot's key of [3, 4]: normed, scaled and a quarter turn on; or as it was projected."""
    layer = _layer(_EYE)
    layer['attention'] |= {'query_norm': {'scale': np.ones(2)}}
    layer['attention'] |= {'key_norm': {'scale': 12.5**0.5 * np.array([3.0, 2.0])}}
    shape = _shape(slots='attention', slot_keys=keys, qk_norm='head', norm_placement='post')
    x_TD = np.array([[3.0, 4]])
    _, written = depth_oracle.block(layer, x_TD, [], [1], [math.pi / 2], None, shape)
    np.testing.assert_allclose(written[0][0][0, 0], stored, rtol=1e-14)


@pytest.mark.parametrize('position, slot_weight', [(0.0, 3 / 4), (math.pi, 1 / 4)])
def test_reader_norms_an_unrotated_key_and_turns_its_query(position, slot_weight):
    """The slot's key [3, 4] is normed to [sqrt 2, 0]; half a turn of the query negates its ln 3."""
    weights = _layer(_EYE)['attention']
    weights['query'] = _head(_EYE)
    weights['key'] = _head(np.array([[0.0, 0.0], [0.0, 1.0]]))  # normed to 0: its score is 0
    weights['query_norm'] = {'scale': np.array([_LN3, _LN3])}
    weights['key_norm'] = {'scale': np.array([5 / 3, 0.0])}
    slot = (np.array([[[3.0, 4.0]]]), np.array([[[9.0, 1.0]]]))
    shape = _shape(slot_keys='unrotated', qk_norm='head')
    one = np.ones((1, 2))
    y_TD, _, _ = depth_oracle.attention(weights, one, [slot], [1], [position], None, shape)
    np.testing.assert_allclose(y_TD, [[1 + 8 * slot_weight, 1]], rtol=1e-14)


def test_dense_stream_concatenates_in_order():
    """One mute block on twice the embedding, and a final read of swap(X_0) + X_1."""
    layer = _layer(read={'kernel': 2 * _EYE})
    final_read = {'kernel': np.concatenate([_SWAP, _EYE])}
    found_TV = _logits([[1, 3]], [layer], _shape(stream='dense'), final_read=final_read)
    np.testing.assert_allclose(found_TV, [_unit(3 + 2, 1 + 6)], rtol=1e-14)


def test_average_stream_weighs_in_order():
    """One mute block on half the embedding, and a final read of -X_0 + 4 X_1."""
    layer = _layer(_EYE, read={'weights': np.array([0.5])})
    final_read = {'weights': np.array([-1.0, 4.0])}
    shape = _shape(stream='average', norm_placement='reordered')
    found_TV = _logits([[1, 3]], [layer], shape, final_read=final_read)
    halved = np.array([0.5, 1.5])
    expected = 4 * (halved + _unit(*halved)) - [1, 3]  # attention adds what it reads, normed
    np.testing.assert_allclose(found_TV, [_unit(*expected)], rtol=1e-14)


def test_attention_stream_reads_with_the_last_query():
    """The final read weighs the embedding's value 1/4 and the block's 3/4."""
    entry = {'write': {'query': _head(_ZERO), 'key': _head(_ZERO), 'value': _head(_EYE)}}
    first = np.array([[1.0, 0.0], [0.0, 0.0]])
    query = _head(2**0.5 * _LN3 * first)
    write = {'query': query, 'key': _head(first), 'value': _head(2 * _SWAP)}
    found_TV = _logits([[1, 3]], [_layer(write=write)], _shape(stream='attention'), entry=entry)
    np.testing.assert_allclose(found_TV, [_unit(1 / 4 + 6 * 3 / 4, 3 / 4 + 2 * 3 / 4)], rtol=1e-14)


TOKENS = np.random.default_rng(1).integers(0, 257, (2, 7))
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 3, 3, 3]])  # 0: padding
FAST = {'xla_backend_optimization_level': 0}
SIZES = {'num_layers': 3, 'd_model': 24, 'd_ff': 20, 'num_heads': 6, 'num_kv_heads': 2}
SIZES |= {'head_dim': 4, 'dtype': 'float64', 'norm_eps': 1e-3, 'rope_theta': 50.0}
BOTH = {'depth.stream': 'moda', 'depth.slots': 'attention+ffn', 'depth.slot_keys': 'rotated'}
OWN, BLOCK = (BOTH | {'depth.slots': slots} for slots in ('attention', 'block'))
UNROTATED = {'depth.slot_keys': 'unrotated'}
PROJECTED = {'depth.attention_slot_projection': True}
NEWEST = {'depth.slot_window': 3}
ATTENTION = {'depth.stream': 'attention'}
UNROLLED = {'layer_loop': 'unrolled'}
DENSE = UNROLLED | {'depth.stream': 'dense'}
AVERAGE = UNROLLED | {'depth.stream': 'average'}
PRE, POST, REORDERED = ({'norm_placement': place} for place in ('pre', 'post', 'reordered'))
HEAD, FULL = {'qk_norm': 'head'}, {'qk_norm': 'full'}
BIAS, TIED = {'use_bias': True}, {'tie_embeddings': True}
WIDE, ONE_EACH = {'head_dim': 6}, {'num_kv_heads': 6}
WINDOWS = {'windows': (2, 0, 3)}
CASES = {
    'residual': PRE | WINDOWS | WIDE,
    'block slots': BLOCK | POST,
    'block slots, normed keys': BLOCK | POST | HEAD | BIAS | UNROLLED,
    'both slots': BOTH | REORDERED | FULL | BIAS,
    'both slots, one key head each': BOTH | POST | HEAD | ONE_EACH | WIDE,
    'attention slots': OWN | PRE | WINDOWS | TIED,
    'unrotated': BOTH | UNROTATED | PRE | HEAD,
    'unrotated, full norm': BOTH | UNROTATED | REORDERED | FULL | BIAS | WINDOWS | NEWEST,
    'unrotated block slots': BLOCK | UNROTATED | POST | UNROLLED,
    'attention slot projection': BOTH | PROJECTED | PRE | HEAD | BIAS,
    'attention slot projection alone': OWN | PROJECTED | REORDERED | FULL | UNROLLED,
    'newest slots': BOTH | NEWEST | PRE | UNROLLED,
    'attention stream': ATTENTION | PRE | HEAD,
    'attention stream, newest slots': ATTENTION | {'depth.slot_window': 2} | POST | BIAS | UNROLLED,
    'dense stream': DENSE | PRE | HEAD | WINDOWS,
    'dense stream, bias': DENSE | REORDERED | BIAS | TIED,
    'average stream': AVERAGE | POST | FULL,
    'average stream, bias': AVERAGE | PRE | BIAS | TIED | WINDOWS,
}


def _random_weights(params):
    """Float64 weights of a size that makes every part matter, and norm scales about 1."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        noise = rng.standard_normal(leaf.shape)
        return 1 + noise / 2 if path[-1].key == 'scale' else 0.3 * noise

    return jax.tree_util.tree_map_with_path(draw, params)


def _named_as_in_the_oracle(params, model):
    """The model's parameters in the oracle's dict: layers in order, streams' matrices by use."""
    named = {name: params[name] for name in ('embedding', 'final_norm')}
    if 'head' in params:
        named['head'] = params['head']['kernel']
    named['layers'] = []
    for kind, layer in unstack_layers(Stack(model, 'top_c'), params['stack']):
        layer = dict(layer)
        stream = layer.pop('stream', {})
        if model.depth.stream == 'attention' and stream:
            stream = {'write': {'query': stream['query'], **stream['slot']}}
        elif model.depth.stream in ('dense', 'average') and stream:
            stream = {'read': stream}
        if kind.part == 'block':
            named['layers'].append(layer | stream)
        elif kind.part == 'entry':
            named['entry'] = stream
        elif 'read' in stream:
            named['final_read'] = stream['read']
    return named


def _oracle_shape(model):
    """The oracle's Shape of a ConfigDict `model` of three windows, or one."""
    names = {field.name for field in dataclasses.fields(Shape)}
    knobs = {**model, **model.depth}
    knobs = {name: knobs[name] for name in names if knobs[name] != 'auto'}
    windows = [window or None for window in model.windows]
    return Shape(**knobs | {'windows': windows * (model.num_layers // len(windows))})


FEW = {
    'block slots',
    'both slots',
    'unrotated',
    'attention slot projection',
    'newest slots',
    'attention stream',
    'dense stream, bias',
    'average stream, bias',
}


@pytest.mark.parametrize(
    'case', [case if case in FEW else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_model_equals_the_oracle(tiny_config, case):
    """The logits of every real token, with random parameters and packed segments, in float64."""
    knobs = {f'model.{name}': value for name, value in (SIZES | CASES[case]).items()}
    config = tiny_config(**knobs)
    with jax.enable_x64(True), jax.numpy_rank_promotion('allow'):
        hparams = from_config(config)
        model = Transformer(hparams)
        params = _random_weights(jax.eval_shape(model.init, jax.random.key(0), TOKENS)['params'])
        apply = jax.jit(model.apply, compiler_options=FAST)
        found_BTV, _ = apply({'params': params}, TOKENS, SEGMENTS)
        named = jax.tree.map(np.asarray, _named_as_in_the_oracle(params, hparams.model))
    expected_BTV = depth_oracle.logits(named, TOKENS, SEGMENTS, _oracle_shape(config.model))
    assert found_BTV.dtype == np.float64
    real = SEGMENTS > 0
    np.testing.assert_allclose(found_BTV[real], expected_BTV[real], rtol=1e-10, atol=1e-12)
