"""Whole models equal an independent NumPy decoder in float64: logits, loss and gradients."""

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from configs import openmythos_moda
from moddepth_jax.hparams import from_config
from moddepth_jax.model.stack import Stack, unstack_layers
from moddepth_jax.model.transformer import Transformer
from moddepth_jax.training import train_step
from tests.model import oracle
from tests.model.cases import parameters, random_like

TOKENS = np.random.default_rng(1).integers(0, 257, (2, 8))
LABELS = np.where(TOKENS % 5 == 0, -100, TOKENS[:, ::-1])
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 0, 0], [1, 1, 1, 1, 1, 3, 3, 3]])  # 0: padding
REAL = SEGMENTS > 0
COMPLEX_STEP = 1e-20

SIZES = {'num_layers': 3, 'd_model': 24, 'd_ff': 20, 'num_heads': 6, 'num_kv_heads': 2}
SIZES |= {'head_dim': 4, 'norm_eps': 1e-3, 'rope_theta': 50.0}
SIZES |= {'experts.d_ff': 12, 'experts.num_routed': 5}
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
TOKEN = {'experts.choice': 'token', 'experts.z_loss': 0.02, 'experts.balance_weight': 0.1}
NOOP = TOKEN | {'experts.scores': 'sigmoid', 'experts.route_scale': 2.5, 'experts.num_noop': 3}
EXPERT = {'experts.choice': 'expert', 'experts.z_loss': 0.02}
ROUTED = {'routing.router': 'learned', 'routing.capacity': 0.5, 'routing.causal_rule': 'threshold'}
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
    'no-op experts': NOOP | BOTH | PRE | {'experts.top_k': 3},
    'no-op experts alone': NOOP | POST | HEAD | {'experts.num_shared': 0},
    'experts of some layers': TOKEN | REORDERED | FULL | {'experts.layers': '0,2'},
    'expert choice': EXPERT | BOTH | REORDERED,
    'expert choice, sigmoid': EXPERT | PRE | {'experts.scores': 'sigmoid'},
    'thresholds': EXPERT | BOTH | POST | {'experts.layers': '0,2'},
    'staged': TOKEN | ROUTED | PRE,
    'staged, post': TOKEN | ROUTED | POST | {'experts.num_noop': 2},
    'staged, expert choice': EXPERT | ROUTED | REORDERED,
}


def random_variables(model):
    """Float64 weights of a size that makes every part matter, and thresholds of experts."""
    variables = random_like(jax.eval_shape(model.init, jax.random.key(0), TOKENS), dtype=np.float64)
    averages = variables.get('averages', {})
    if 'expert_thresholds_XE' in averages:
        averages['expert_thresholds_XE'] = np.float32(averages['expert_thresholds_XE'] - 0.07)
    return variables


def logits_loss_and_gradients(hparams, variables, routing, gradients):
    """Of the library's model, in float64; no gradients unless they are asked for."""
    params, averages = variables['params'], variables.get('averages', {})
    state = train_step.TrainState(0, params, averages, (), 0, 0, hparams, 1)
    batch = {'tokens_BT': TOKENS, 'labels_BT': LABELS, 'segment_ids_BT': SEGMENTS}
    counts = train_step.StepCounts(float(np.sum(REAL & (LABELS != -100))), float(np.sum(REAL)))

    def run(params):
        given = train_step.model_variables(params, averages)
        logits_BTV, _ = Transformer(hparams).apply(given, TOKENS, SEGMENTS, routing)
        if not gradients:
            loss, _ = train_step.loss_and_metrics(params, state, hparams, routing, batch, counts)
            return logits_BTV, loss, {}
        differentiate = jax.value_and_grad(train_step.loss_and_metrics, has_aux=True)
        (loss, _), slopes = differentiate(params, state, hparams, routing, batch, counts)
        return logits_BTV, loss, slopes

    return jax.device_get(jax.jit(run)(params))


def by_layer(params, model):
    """The parameters as the oracle takes them: a list of layers instead of stacked runs."""
    layers = [layer for _, layer in unstack_layers(Stack(model, 'top_c'), params['stack'])]
    return {name: params[name] for name in params if name != 'stack'} | {'layers': layers}


def compare(config, routing, gradients):
    """Asserts equal logits and loss, and gradients along one random direction of every parameter.

    Returns the model's parameters, and what the oracle's routers saw.
    """
    config.optimizer.z_loss, config.model.dtype = 0.0, 'float64'
    with jax.enable_x64(True), jax.numpy_rank_promotion('allow'):
        hparams = from_config(config)
        variables = random_variables(Transformer(hparams))
        logits_BTV, loss, slopes = logits_loss_and_gradients(hparams, variables, routing, gradients)
    assert logits_BTV.dtype == loss.dtype == np.float64
    model, experts, params = hparams.model, hparams.model.experts, variables['params']
    thresholds = {}
    if routing == 'threshold':
        thresholds_XE = variables['averages']['expert_thresholds_XE']
        thresholds = dict(zip(model.expert_layers, thresholds_XE, strict=True))

    def oracle_loss(params):
        found_BTV, seen = oracle.forward(
            by_layer(params, model), TOKENS, SEGMENTS, model, thresholds
        )
        total = oracle.cross_entropy(found_BTV, LABELS, SEGMENTS)
        if experts.choice == 'token':
            total += experts.balance_weight * oracle.balance_loss(seen, experts.top_k)
        if seen:
            total += experts.z_loss * oracle.z_loss(seen)
        return total, found_BTV, seen

    expected, expected_BTV, seen = oracle_loss(params)
    np.testing.assert_allclose(logits_BTV[REAL], expected_BTV[REAL], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(loss, expected, rtol=1e-10)
    rng = np.random.default_rng(2)
    for path, slope in jax.tree_util.tree_leaves_with_path(slopes):
        along = rng.standard_normal(slope.shape)

        def step(at, leaf, path=path, along=along):
            return leaf + 1j * COMPLEX_STEP * along if at == path else leaf + 0j

        moved, _, _ = oracle_loss(jax.tree_util.tree_map_with_path(step, params))
        expected, where = moved.imag / COMPLEX_STEP, jax.tree_util.keystr(path)
        assert expected != 0 or path[-1].key == 'b', where
        np.testing.assert_allclose(np.sum(slope * along), expected, rtol=1e-9, err_msg=where)
    return params, seen


FAST = ('block slots', 'both slots', 'unrotated', 'attention slot projection', 'newest slots')
FAST += ('attention stream', 'dense stream, bias', 'average stream, bias')


@pytest.mark.parametrize('case', parameters(FAST, CASES))
def test_model_equals_the_oracle(tiny_config, case):
    """With random parameters and packed segments; experts are neither all in use nor all idle.

    Gradients are compared where there are experts.
    """
    knobs = {f'model.{name}': value for name, value in (SIZES | CASES[case]).items()}
    config = tiny_config(**knobs)
    routing = 'threshold' if case == 'thresholds' else 'top_c'
    _, seen = compare(config, routing, gradients='experts.choice' in CASES[case])
    for layer in seen.values():
        share_Z = np.mean(layer.chosen, axis=0)
        assert share_Z.max() < 1 and np.mean(share_Z > 0) > 0.7, share_Z


# The parameters of the tiny OpenMythos model. V is 257 tokens, D the width, N heads and K key/value
# heads of width H, E experts of width F, S the width of the shared ones, R the repeats of a run.
OPENMYTHOS = {
    'embedding': 'VD',
    'final_norm/scale': 'D',
    'attention/query/kernel': 'RDNH',
    'attention/key/kernel': 'RDKH',
    'attention/value/kernel': 'RDKH',
    'attention/out/kernel': 'RNHD',
    'attention_norm/scale': 'RD',
    'mlp_norm/scale': 'RD',
    'mlp/router/kernel': 'RDE',
    'mlp/w1/kernel': 'REDF',
    'mlp/w3/kernel': 'REDF',
    'mlp/w2/kernel': 'REFD',
    'mlp/shared/w1/kernel': 'RDS',
    'mlp/shared/w3/kernel': 'RDS',
    'mlp/shared/w2/kernel': 'RSD',
    'stream/block_slot/key/kernel': 'RDKH',
    'stream/block_slot/value/kernel': 'RDKH',
}


def test_openmythos():
    """The tiny model. Each row of the table is one parameter of each of four layers, none other."""
    params, _ = compare(openmythos_moda.get_config('size=tiny'), 'top_c', gradients=True)
    sizes = {'V': 257, 'D': 64, 'N': 4, 'K': 2, 'H': 16, 'E': 8, 'F': 32, 'S': 2 * 32}
    repeats = dict.fromkeys(OPENMYTHOS, 0)
    for path, leaf in flatten_dict(params).items():
        name = '/'.join(path[3:] if path[0] == 'stack' else path)
        letters = OPENMYTHOS[name]
        assert leaf.shape == tuple((sizes | {'R': len(leaf)})[x] for x in letters), name
        repeats[name] += len(leaf) if path[0] == 'stack' else 1
    for name, count in repeats.items():
        last = 3 if name.startswith('stream') else 4  # nothing reads a slot of the last layer
        assert count == (1 if name in ('embedding', 'final_norm/scale') else last)
