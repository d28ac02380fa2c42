"""The oracle of experts agrees with hand-worked cases, and models with experts with the oracle."""

import math
from typing import NamedTuple

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from configs import openmythos_moda
from moddepth_jax.hparams import from_config
from moddepth_jax.model.transformer import Transformer
from moddepth_jax.training.train_step import (
    StepCounts,
    TrainState,
    loss_and_metrics,
    model_variables,
)
from tests.model import experts_oracle
from tests.model.depth_oracle import Shape
from tests.model.experts_oracle import Experts, Met, directional

_LN3 = math.log(3)


@pytest.mark.parametrize(
    'changes, weight',
    [
        ({'top_k': 2}, 9 / 13),
        ({'top_k': 3}, 9 / 13 + 10 / 13),
        ({'top_k': 2, 'scoring': 'sigmoid'}, 3 / 5),
        ({'top_k': 3, 'scoring': 'sigmoid', 'route_scale': 6.0}, 3 + 10),
        ({'top_k': 1, 'choice': 'expert', 'thresholds': [0.7, 0.05, 0.1]}, 10 / 13),
    ],
)
def test_mixture_by_hand(changes, weight):
    """An expert that returns silu(ln 3) = 3/4 ln 3, one ten times that, and one that does nothing.

    Their scores are 9/13, 1/13 and 3/13 by softmax, 3/4, 1/4 and 1/2 by sigmoid. The second token
    is padding.
    """
    matrices = {'w1': [_LN3, _LN3], 'w3': [1, 1], 'w2': [1, 10]}
    weights = {name: {'kernel': np.reshape(x, (2, 1, 1))} for name, x in matrices.items()}
    weights['router'] = {'kernel': np.array([[_LN3, -_LN3, 0]])}
    experts = Experts(**changes)
    y_TD = experts_oracle.mixture(
        weights, np.ones((2, 1)), [1, 0], experts=experts, thresholds_Z=experts.thresholds
    )
    np.testing.assert_allclose(y_TD, [[weight * 3 / 4 * _LN3], [0]], rtol=1e-14)


@pytest.mark.parametrize(
    'choice, top_k, grid',
    [('token', 1, ['100', '010', '001', '000']), ('expert', 2, ['110', '111', '001', '000'])],
)
def test_who_chooses_whom(choice, top_k, grid):
    """Ties go to the lower number; padding, which scores highest, is in no pair."""
    scores_TZ = np.array([[2, 2, 1], [1, 2, 2], [1, 0, 3], [9, 9, 9]])
    real_T = np.array([True, True, True, False])
    chosen_TZ = experts_oracle.choose(scores_TZ, real_T, 3, Experts(top_k, choice))
    assert [''.join(row) for row in np.where(chosen_TZ, '1', '0')] == grid


@pytest.mark.parametrize('chosen_nZ, loss', [([[1, 0], [0, 1]], 1), ([[1, 0], [1, 0]], 5 / 4)])
def test_balance_loss_by_hand(chosen_nZ, loss):
    """Mean scores 5/8 and 3/8: an even load costs 1, all on the first 2 x 5/8."""
    met = Met(scores=[[3 / 4, 1 / 4], [1 / 2, 1 / 2]], chosen=chosen_nZ)
    assert experts_oracle.balance_loss({0: met}, top_k=1) == pytest.approx(loss, rel=1e-14)


def test_routed_block_by_hand():
    """The two real tokens of the highest scores are doubled by a block, its delta times 3 or 2."""
    shape = Shape(num_heads=1, num_kv_heads=1, head_dim=2, windows=(None,))
    seen = []

    def doubled(x_TD, visible, segments_T, positions_T, window, shape):
        seen.extend(positions_T)
        return 2 * x_TD, []

    x_TD = np.array([[3.0, 1], [1, 1], [2, 1], [9, 9]])
    segments_T, positions_T = np.array([1, 1, 1, 0]), np.arange(4)
    y_TD, _ = experts_oracle.routed_block(
        np.array([1.0, 0]), doubled, 0.5, x_TD, [], segments_T, positions_T, None, shape
    )
    np.testing.assert_array_equal(y_TD, [[12, 4], [1, 1], [6, 3], [9, 9]])
    assert seen == [0, 2]


def test_directional_is_exact():
    """d/dx of x^3 exp(y) along (2, -1) at (3, 0): 2 * 27 - 27."""
    params = {'x': np.array(3.0), 'rest': [{'y': np.array(0.0)}, {'z': np.array(1.0)}]}
    direction = {'x': 2.0, 'rest': [{'y': -1.0}, None]}

    def loss(params):
        return params['x'] ** 3 * np.exp(params['rest'][0]['y']) * params['rest'][1]['z']

    assert directional(loss, params, direction) == pytest.approx(27, rel=1e-15)


# The parameters of the tiny OpenMythos model: their names there, in the oracle, and their shapes in
# letters of docs: heads N, key/value heads K of width H; routed experts E of width F, the shared
# ones S wide. The model's `stack/run_i/layer_j/NAME` has an axis of repeats before these; repeat r
# of it is the oracle's `layers/L/NAME`, L = layers of earlier runs + r x layers of this one + j.
OPENMYTHOS = {
    'embedding': ('embedding', 'VD'),
    'final_norm/scale': ('final_norm/scale', 'D'),
    'attention/query/kernel': ('attention/query/kernel', 'DNH'),
    'attention/key/kernel': ('attention/key/kernel', 'DKH'),
    'attention/value/kernel': ('attention/value/kernel', 'DKH'),
    'attention/out/kernel': ('attention/out/kernel', 'NHD'),
    'attention_norm/scale': ('attention_norm/scale', 'D'),
    'mlp_norm/scale': ('mlp_norm/scale', 'D'),
    'mlp/router/kernel': ('mlp/router/kernel', 'DE'),
    'mlp/w1/kernel': ('mlp/w1/kernel', 'EDF'),
    'mlp/w3/kernel': ('mlp/w3/kernel', 'EDF'),
    'mlp/w2/kernel': ('mlp/w2/kernel', 'EFD'),
    'mlp/shared/w1/kernel': ('mlp/shared/w1/kernel', 'DS'),
    'mlp/shared/w3/kernel': ('mlp/shared/w3/kernel', 'DS'),
    'mlp/shared/w2/kernel': ('mlp/shared/w2/kernel', 'SD'),
    'stream/block_slot/key/kernel': ('block_slot/key/kernel', 'DKH'),
    'stream/block_slot/value/kernel': ('block_slot/value/kernel', 'DKH'),
}
# And what other models have beside them; their routed blocks have `block/` before most names.
NAMES = {name: theirs for name, (theirs, _) in OPENMYTHOS.items()} | {
    'head/kernel': 'head',
    'attention/query_norm/scale': 'attention/query_norm/scale',
    'attention/key_norm/scale': 'attention/key_norm/scale',
    'stream/ffn_slot/key/kernel': 'ffn_slot/key/kernel',
    'stream/ffn_slot/value/kernel': 'ffn_slot/value/kernel',
    'router/w': 'router/kernel',
}


class Leaf(NamedTuple):
    """A parameter of the model: its NAME in the tables and, of each repeat, the layer (or None)."""

    name: str
    layers: tuple


def _leaves(params):
    """{path: Leaf} of a model's parameters."""
    arrays, start, found = flatten_dict(params), 0, {}
    for path in arrays:
        if path[0] != 'stack':
            found[path] = Leaf('/'.join(path), (None,))
    for i in range(len(params['stack'])):
        mine = {path: array for path, array in arrays.items() if path[:2] == ('stack', f'run_{i}')}
        repeats, period = len(next(iter(mine.values()))), len(params['stack'][f'run_{i}'])
        for path in mine:
            first = start + int(path[2].removeprefix('layer_'))
            name = '/'.join(path[3:]).removeprefix('block/')
            found[path] = Leaf(name, tuple(range(first, first + repeats * period, period)))
        start += repeats * period
    return found


def _as_in_the_oracle(arrays, leaves):
    """Arrays {path: array}, some or all of the model's, in the oracle's dict; none twice."""
    num_layers = 1 + max(layer for leaf in leaves.values() for layer in leaf.layers if layer)
    named = {'layers': [{} for _ in range(num_layers)]}
    for path, array in arrays.items():
        *groups, last = NAMES[leaves[path].name].split('/')
        for repeat, layer in enumerate(leaves[path].layers):
            into = named if layer is None else named['layers'][layer]
            for group in groups:
                into = into.setdefault(group, {})
            assert last not in into, path
            into[last] = np.asarray(array if layer is None else array[repeat])
    return named


TOKENS = np.random.default_rng(1).integers(0, 257, (2, 8))
LABELS = np.where(TOKENS % 5 == 0, -100, TOKENS[:, ::-1])
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 0, 0], [1, 1, 1, 1, 1, 3, 3, 3]])  # 0: padding
BATCH = {'tokens_BT': TOKENS, 'labels_BT': LABELS, 'segment_ids_BT': SEGMENTS}
REAL = SEGMENTS > 0
FAST = {'xla_backend_optimization_level': 0, 'xla_cpu_use_fusion_emitters': False}


def _random_variables(model):
    """Float64 weights of a size that makes every part matter, norm scales about 1, thresholds."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        noise = rng.standard_normal(leaf.shape)
        if path[0].key == 'averages':
            return np.float32(0.125 + 0.05 * noise)
        return 1 + noise / 2 if path[-1].key == 'scale' else 0.2 * noise

    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
    return jax.tree_util.tree_map_with_path(draw, shapes)


def _found(hparams, variables, routing):
    """logits_BTV, loss and gradients of the model in float64."""
    params, averages = variables['params'], variables.get('averages', {})
    state = TrainState(0, params, averages, (), 0, 0, hparams, 1)
    counts = StepCounts(float(np.sum(REAL & (LABELS != -100))), float(np.sum(REAL)))

    def run(params):
        given = model_variables(params, averages), TOKENS, SEGMENTS, routing
        logits_BTV, _ = Transformer(hparams).apply(*given)
        differentiate = jax.value_and_grad(loss_and_metrics, has_aux=True)
        (loss, _), gradients = differentiate(params, state, hparams, routing, BATCH, counts)
        return logits_BTV, loss, gradients

    return jax.device_get(jax.jit(run, compiler_options=FAST)(params))


def _oracle_of(hparams, variables, routing):
    """forward(params) and loss(params) of the oracle, for the model's knobs."""
    model, experts = hparams.model, hparams.model.experts
    shape = Shape(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        windows=(None,) * model.num_layers,
        norm_placement=model.norm_placement,
        norm_eps=model.norm_eps,
        qk_norm=model.qk_norm,
        rope_theta=model.rope_theta,
        tie_embeddings=model.tie_embeddings,
        stream=model.depth.stream,
        slots=model.depth.slots,
    )
    thresholds = None
    if routing == 'threshold':
        thresholds_XE = variables['averages']['expert_thresholds_XE']
        thresholds = dict(zip(model.expert_layers, thresholds_XE, strict=True))
    told = Experts(
        top_k=experts.top_k,
        choice=experts.choice,
        scoring=experts.scores,
        route_scale=experts.route_scale,
        thresholds=thresholds,
        capacity=model.routing.capacity,
    )

    def forward(params):
        return experts_oracle.forward(params, TOKENS, SEGMENTS, shape, told)

    def loss(params):
        logits_BTV, met = forward(params)
        total = experts_oracle.cross_entropy(logits_BTV, LABELS, SEGMENTS)
        if experts.choice == 'token':
            total += experts.balance_weight * experts_oracle.balance_loss(met, experts.top_k)
        return total + experts.z_loss * experts_oracle.z_loss(met)

    return forward, loss


def _compare(config, routing='top_c'):
    """Asserts equal logits, loss and gradients; returns the model's leaves, and what routers met.

    The gradient of every leaf goes along one random direction.
    """
    config.optimizer.z_loss = 0.0
    config.model.dtype = 'float64'
    with jax.enable_x64(True):
        hparams = from_config(config)
        variables = _random_variables(Transformer(hparams))
        logits_BTV, loss, gradients = _found(hparams, variables, routing)
    assert logits_BTV.dtype == loss.dtype == np.float64
    arrays, leaves = flatten_dict(variables['params']), _leaves(variables['params'])
    params = _as_in_the_oracle(arrays, leaves)
    forward, oracle_loss = _oracle_of(hparams, variables, routing)
    expected_BTV, met = forward(params)
    np.testing.assert_allclose(logits_BTV[REAL], expected_BTV[REAL], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(loss, oracle_loss(params), rtol=1e-10)
    rng = np.random.default_rng(2)
    for path, gradient in flatten_dict(gradients).items():
        along = rng.standard_normal(gradient.shape)
        expected = directional(oracle_loss, params, _as_in_the_oracle({path: along}, leaves))
        np.testing.assert_allclose(np.sum(gradient * along), expected, rtol=1e-9, err_msg=path)
    return hparams, leaves, met


def test_openmythos():
    """The tiny model, whose parameters are those of the table, each used once, of its shapes."""
    hparams, leaves, met = _compare(openmythos_moda.get_config('size=tiny'))
    model, experts = hparams.model, hparams.model.experts
    sizes = {'V': model.vocab_size, 'D': model.d_model, 'N': model.num_heads}
    sizes |= {'K': model.num_kv_heads, 'H': model.head_dim, 'E': experts.num_routed}
    sizes |= {'F': experts.d_ff, 'S': experts.num_shared * experts.d_ff}
    assert {leaf.name for leaf in leaves.values()} == OPENMYTHOS.keys()
    for leaf, shape in leaves.items():
        pass


PRE, POST, REORDERED = ({'norm_placement': place} for place in ('pre', 'post', 'reordered'))
SLOTS = {'depth.stream': 'moda', 'depth.slots': 'attention+ffn'}
TOKEN = {'experts.choice': 'token', 'experts.z_loss': 0.02, 'experts.balance_weight': 0.1}
NOOP = TOKEN | {'experts.scores': 'sigmoid', 'experts.route_scale': 2.5, 'experts.num_noop': 3}
EXPERT = {'experts.choice': 'expert', 'experts.z_loss': 0.02}
ROUTED = {'routing.router': 'learned', 'routing.capacity': 0.5, 'routing.causal_rule': 'threshold'}
CASES = {
    'no-op experts': (NOOP | SLOTS | PRE | {'experts.top_k': 3}, 'top_c'),
    'no-op experts alone': (NOOP | POST | {'experts.num_shared': 0, 'qk_norm': 'head'}, 'top_c'),
    'some layers': (TOKEN | REORDERED | {'experts.layers': '0,2', 'qk_norm': 'full'}, 'dense'),
    'expert choice': (EXPERT | SLOTS | REORDERED, 'top_c'),
    'expert choice, sigmoid': (EXPERT | PRE | {'experts.scores': 'sigmoid'}, 'top_c'),
    'thresholds': (EXPERT | SLOTS | POST | {'experts.layers': '0,2'}, 'threshold'),
    'staged': (TOKEN | ROUTED | PRE, 'top_c'),
    'staged, post': (TOKEN | ROUTED | POST | {'experts.num_noop': 2}, 'top_c'),
    'staged, expert choice': (EXPERT | ROUTED | REORDERED, 'top_c'),
}
FEW = {'no-op experts'}


@pytest.mark.parametrize(
    'case', [case if case in FEW else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_model_equals_the_oracle(tiny_config, case):
    """Logits, loss and gradients; and the case is not trivial: every router met both answers."""
    sizes = {'num_layers': 3, 'd_model': 24, 'd_ff': 20, 'num_heads': 6, 'head_dim': 4}
    sizes |= {'experts.d_ff': 12, 'experts.num_routed': 5, 'norm_eps': 1e-3, 'rope_theta': 50.0}
    knobs, routing = CASES[case]
    config = tiny_config(**{f'model.{name}': value for name, value in (sizes | knobs).items()})
    hparams, _, met = _compare(config, routing)
    assert tuple(met) == hparams.model.expert_layers
    for layer in met.values():
        chosen_nZ = np.array(layer.chosen)
        assert chosen_nZ.any() and not chosen_nZ.all(axis=0).any()
