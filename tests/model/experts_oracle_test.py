"""The oracle of experts agrees with hand-worked cases, and models with experts with the oracle."""

import dataclasses
import math
from typing import NamedTuple

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from configs import openmythos_moda
from moddepth_jax.hparams import from_config
from moddepth_jax.model.transformer import Transformer
from moddepth_jax.training import train_step
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


# The parameters of the tiny OpenMythos model: names there, in the oracle, and shapes. In these V is
# 257 tokens, D the width, N heads and K key/value heads of width H, E experts of width F, S the
# width of the shared ones. The model's `stack/run_i/layer_j/NAME` has an axis R of repeats before;
# repeat r is the oracle's `layers/L/NAME`, L = layers of earlier runs + r x layers of this one + j.
OPENMYTHOS = {
    'embedding': ('embedding', 'VD'),
    'final_norm/scale': ('final_norm/scale', 'D'),
    'attention/query/kernel': ('attention/query/kernel', 'RDNH'),
    'attention/key/kernel': ('attention/key/kernel', 'RDKH'),
    'attention/value/kernel': ('attention/value/kernel', 'RDKH'),
    'attention/out/kernel': ('attention/out/kernel', 'RNHD'),
    'attention_norm/scale': ('attention_norm/scale', 'RD'),
    'mlp_norm/scale': ('mlp_norm/scale', 'RD'),
    'mlp/router/kernel': ('mlp/router/kernel', 'RDE'),
    'mlp/w1/kernel': ('mlp/w1/kernel', 'REDF'),
    'mlp/w3/kernel': ('mlp/w3/kernel', 'REDF'),
    'mlp/w2/kernel': ('mlp/w2/kernel', 'REFD'),
    'mlp/shared/w1/kernel': ('mlp/shared/w1/kernel', 'RDS'),
    'mlp/shared/w3/kernel': ('mlp/shared/w3/kernel', 'RDS'),
    'mlp/shared/w2/kernel': ('mlp/shared/w2/kernel', 'RSD'),
    'stream/block_slot/key/kernel': ('block_slot/key/kernel', 'RDKH'),
    'stream/block_slot/value/kernel': ('block_slot/value/kernel', 'RDKH'),
}
# And those of other models that the oracle has under another name.
NAMES = {name: theirs for name, (theirs, _) in OPENMYTHOS.items()} | {
    'head/kernel': 'head',
    'router/w': 'router/kernel',
    'stream/ffn_slot/key/kernel': 'ffn_slot/key/kernel',
    'stream/ffn_slot/value/kernel': 'ffn_slot/value/kernel',
}


class Leaf(NamedTuple):
    """A parameter: its NAME in the tables, its shape, and the layer of each repeat."""

    name: str
    shape: tuple
    layers: tuple = (None,)


def _leaves(params):
    """{path: Leaf} of a model's parameters."""
    flat, start = flatten_dict(params), 0
    found = {path: Leaf('/'.join(path), x.shape) for path, x in flat.items() if path[0] != 'stack'}
    for i in range(len(params['stack'])):
        run = params['stack'][f'run_{i}']
        for j in range(len(run)):
            for path, x in flatten_dict(run[f'layer_{j}']).items():
                layers = range(start + j, start + j + len(x) * len(run), len(run))
                name = '/'.join(path).removeprefix('block/')  # as a routed block has it
                found['stack', f'run_{i}', f'layer_{j}', *path] = Leaf(name, x.shape, tuple(layers))
        start += len(x) * len(run)
    assert found.keys() == flat.keys()
    return found


def _as_in_the_oracle(arrays, leaves):
    """Some or all of the model's arrays, {path: array}, in the oracle's dict; none twice."""
    num_layers = 1 + max(layer for leaf in leaves.values() for layer in leaf.layers if layer)
    named = {'layers': [{} for _ in range(num_layers)]}
    for path, array in arrays.items():
        name = leaves[path].name
        *groups, last = NAMES.get(name, name).split('/')
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
REAL = SEGMENTS > 0
FAST = {'xla_backend_optimization_level': 0}
if jax.__version_info__ < (0, 11):  # halves the time to compile; later versions have no such option
    FAST['xla_cpu_use_fusion_emitters'] = False


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
    state = train_step.TrainState(0, params, averages, (), 0, 0, hparams, 1)
    batch = {'tokens_BT': TOKENS, 'labels_BT': LABELS, 'segment_ids_BT': SEGMENTS}
    counts = train_step.StepCounts(float(np.sum(REAL & (LABELS != -100))), float(np.sum(REAL)))

    def run(params):
        given = train_step.model_variables(params, averages)
        logits_BTV, _ = Transformer(hparams).apply(given, TOKENS, SEGMENTS, routing)
        differentiate = jax.value_and_grad(train_step.loss_and_metrics, has_aux=True)
        (loss, _), gradients = differentiate(params, state, hparams, routing, batch, counts)
        return logits_BTV, loss, gradients

    return jax.device_get(jax.jit(run, compiler_options=FAST)(params))


def _oracle_of(hparams, variables, routing):
    """forward(params) and loss(params) of the oracle, for the model's knobs."""
    model, experts = hparams.model, hparams.model.experts
    knobs = {**vars(model), **vars(model.depth), 'windows': (None,) * model.num_layers}
    if model.depth.stream == 'residual':
        del knobs['slots'], knobs['slot_keys']
    names = {field.name for field in dataclasses.fields(Shape)}
    shape = Shape(**{name: knobs[name] for name in names & knobs.keys()})
    thresholds_XE = variables['averages']['expert_thresholds_XE'] if routing == 'threshold' else ()
    thresholds = dict(zip(model.expert_layers, thresholds_XE, strict=False))
    told = (experts.top_k, experts.choice, experts.scores, experts.route_scale, thresholds)
    told = Experts(*told, capacity=model.routing.capacity)

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
    """Asserts equal logits, loss and gradients, these along one random direction of every leaf.

    Returns the model's hparams and leaves, and what the oracle's routers met.
    """
    config.optimizer.z_loss, config.model.dtype = 0.0, 'float64'
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
        assert expected != 0, path
        np.testing.assert_allclose(np.sum(gradient * along), expected, rtol=1e-9, err_msg=path)
    return hparams, leaves, met


def test_openmythos():
    """The tiny model. Each row of the table is one parameter of each of four layers, none other."""
    _, leaves, _ = _compare(openmythos_moda.get_config('size=tiny'))
    sizes = {'V': 257, 'D': 64, 'N': 4, 'K': 2, 'H': 16, 'E': 8, 'F': 32, 'S': 2 * 32}
    for leaf in leaves.values():
        _, letters = OPENMYTHOS[leaf.name]
        assert leaf.shape == tuple((sizes | {'R': len(leaf.layers)})[x] for x in letters), leaf
    found = [(leaf.name, layer) for leaf in leaves.values() for layer in leaf.layers]
    expected = [('embedding', None), ('final_norm/scale', None)]
    for name in OPENMYTHOS.keys() - {'embedding', 'final_norm/scale'}:
        last = 3 if name.startswith('stream') else 4  # nothing reads a slot of the last layer
        expected += [(name, layer) for layer in range(last)]
    assert sorted(found, key=str) == sorted(expected, key=str)


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


@pytest.mark.slow
@pytest.mark.parametrize('case', CASES)
def test_model_equals_the_oracle(tiny_config, case):
    """Logits, loss and gradients; and nobody takes all, and few experts nothing."""
    sizes = {'num_layers': 3, 'd_model': 24, 'd_ff': 20, 'num_heads': 6, 'head_dim': 4}
    sizes |= {'experts.d_ff': 12, 'experts.num_routed': 5, 'norm_eps': 1e-3, 'rope_theta': 50.0}
    knobs, routing = CASES[case]
    config = tiny_config(**{f'model.{name}': value for name, value in (sizes | knobs).items()})
    hparams, _, met = _compare(config, routing)
    assert tuple(met) == hparams.model.expert_layers
    for layer in met.values():
        share_Z = np.mean(layer.chosen, axis=0)
        assert share_Z.max() < 1 and np.mean(share_Z > 0) > 0.7, share_Z
