"""Whole models equal an independent NumPy decoder in float64: logits, loss and gradients."""

import flax.linen as nn
import jax
import numpy as np
import pytest

from configs import openmythos_moda
from moddepth_jax.hparams import from_config
from moddepth_jax.model.layers import lm_head
from moddepth_jax.model.stack import Stack, unstack_layers
from moddepth_jax.model.transformer import Transformer
from moddepth_jax.training import train_step
from tests.model import oracle
from tests.model.cases import parameters, random_like

TOKENS = np.random.default_rng(1).integers(0, 257, (2, 8))
LABELS = np.where(TOKENS % 5 == 0, -100, TOKENS[:, ::-1])
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 0, 0], [1, 1, 1, 1, 1, 3, 3, 3]])  # 0: padding
REAL = SEGMENTS > 0

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
VALUES = {'depth.stream': 'value_residual'}
SHARED, SPARSE, FIXED = (VALUES | {'depth.value_mix': mix} for mix in ('shared', 'sparse', 'fixed'))
MIXED = {'depth.stream': 'value_attention'}
RECENT = MIXED | {'depth.value_stride': 3, 'depth.recent_layers': 1}
EMBEDDED = {'embedding_residual': 'learned'}
LOOKED_UP, ALL_LOOKED_UP = ({'value_embeddings': some} for some in ('alternate', 'all'))
SOURCES = {'depth.stream': 'attention_residual'}
HYPER = {'depth.stream': 'hyper_connections'}
STATIC, CONSTRAINED = (HYPER | {'depth.hyper_form': form} for form in ('static', 'constrained'))
MUDD = {'depth.stream': 'mudd'}
ONE_WAY, OF_VALUES, OF_TWO = (MUDD | {'depth.mudd_ways': way} for way in ('one', 'v', 'kr'))
STATIC_WAYS = MUDD | {'depth.mudd_weights': 'static'}
SOURCES_OF_2, SOURCES_OF_3, ONE_SOURCE = (
    SOURCES | {'depth.sublayers_per_source': size} for size in (2, 3, 6)
)
PRE, POST, REORDERED = ({'norm_placement': place} for place in ('pre', 'post', 'reordered'))
HEAD, FULL = {'qk_norm': 'head'}, {'qk_norm': 'full'}
BIAS, TIED = {'use_bias': True}, {'tie_embeddings': True}
WIDE, ONE_EACH = {'head_dim': 6}, {'num_kv_heads': 6}
QKV, QKVO = ({'attention_bias': of} for of in ('qkv', 'qkvo'))
SCALED = {'rope_scaling': 'llama3:8:1:4:32'} | WIDE  # one kept, one in between, one divided
WINDOWS = {'windows': (2, 0, 3)}
TOKEN = {'experts.choice': 'token', 'experts.z_loss': 0.02, 'experts.balance_weight': 0.1}
NOOP = TOKEN | {'experts.scores': 'sigmoid', 'experts.route_scale': 2.5, 'experts.num_noop': 3}
EXPERT = {'experts.choice': 'expert', 'experts.z_loss': 0.02}
ROUTED = {'routing.router': 'learned', 'routing.capacity': 0.5, 'routing.causal_rule': 'threshold'}


# Blocks 1 and 2 of four, three times.
LOOPED = {'num_layers': 4, 'looped_layers': 'middle:1:1', 'loops': 3}
OF_LOOPS = {'loop_embeddings': 'learned'}


def routed(router='learned', gate='auto', rule='auto', capacity=0.5, **more):
    """Return knobs of two routed layers."""
    knobs = {'router': router, 'gate': gate, 'causal_rule': rule, 'capacity': capacity}
    knobs |= {'layers': 'every:1'} | more
    return {'num_layers': 2} | {f'routing.{name}': value for name, value in knobs.items()}


def recursions(gate, **more):
    """Return knobs of three routed loops of two blocks; the last one takes half of the tokens."""
    knobs = routed(gate=gate, layers='loops', **more)
    return knobs | {'num_layers': 4, 'looped_layers': 'middle:1:1', 'loops': 3}


TOKEN_CHOICE = recursions('auto', router='token_choice', z_loss=0.01, gate_scale=1.5)
CASES = {
    'residual': PRE | WINDOWS | WIDE,
    'looped, own norms': LOOPED | {'loop_norms': 'own'} | OF_LOOPS | PRE | HEAD,
    'looped, loop embeddings': LOOPED | OF_LOOPS | EMBEDDED | TIED | POST,
    'looped in sequence': LOOPED
    | OF_LOOPS
    | {'loop_norms': 'own', 'loop_order': 'sequence'}
    | BOTH
    | REORDERED
    | FULL,
    'scaled rope': SCALED | QKV | PRE | HEAD,
    'scaled rope, both slots': SCALED | QKVO | BOTH | POST,
    'block slots': BLOCK | POST,
    'block slots, normed keys': BLOCK | POST | HEAD | BIAS | UNROLLED,
    'both slots': BOTH | REORDERED | FULL | BIAS,
    'both slots, one key head each': BOTH | POST | HEAD | ONE_EACH | WIDE,
    'attention slots': OWN | PRE | WINDOWS | TIED,
    'unrotated': BOTH | UNROTATED | PRE | HEAD,
    'unrotated, full norm': BOTH | UNROTATED | REORDERED | FULL | BIAS | WINDOWS | NEWEST,
    'attention slot projection': BOTH | PROJECTED | PRE | HEAD | BIAS,
    'newest slots': BOTH | NEWEST | PRE | UNROLLED,
    'attention stream': ATTENTION | PRE | HEAD,
    'attention stream, newest slots': ATTENTION | {'depth.slot_window': 2} | POST | BIAS | UNROLLED,
    'dense stream': DENSE | PRE | HEAD | WINDOWS,
    'dense stream, bias': DENSE | REORDERED | BIAS | TIED,
    'average stream': AVERAGE | POST | FULL,
    'average stream, bias': AVERAGE | PRE | BIAS | TIED | WINDOWS,
    'value residual': VALUES | PRE | HEAD | BIAS,
    'value residual, fixed': FIXED | POST | UNROLLED | WINDOWS,
    'value residual, sparse': SPARSE | REORDERED | {'depth.sparse_layers': 1},
    'shared values': SHARED | PRE | FULL | BIAS | ONE_EACH,
    'value attention': MIXED | PRE | HEAD | BIAS,
    'value attention, stride': MIXED | POST | ONE_EACH | {'depth.value_stride': 2} | UNROLLED,
    'value attention, recent': RECENT | REORDERED | FULL | WINDOWS | {'num_layers': 4},
    'embedding residual': EMBEDDED | PRE | HEAD | TIED,
    'embedding residual, both slots': EMBEDDED | BOTH | POST | WINDOWS,
    'embedding residual, experts': EMBEDDED | VALUES | REORDERED | TOKEN,
    'value embeddings': LOOKED_UP | PRE | HEAD | BIAS | TIED | {'num_layers': 4},
    'value embeddings, value residual': LOOKED_UP | VALUES | POST | WINDOWS,
    'value embeddings, experts': ALL_LOOKED_UP | MIXED | REORDERED | TOKEN,
    'value embeddings, attention residual': ALL_LOOKED_UP | SOURCES | PRE,
    'value embeddings, hyper-connections': LOOKED_UP | HYPER | PRE,
    'value embeddings, mudd': ALL_LOOKED_UP | MUDD | PRE,
    'value embeddings, dense stream': LOOKED_UP | DENSE | PRE,
    'value embeddings, attention stream': LOOKED_UP | ATTENTION | PRE,
    'attention residual': SOURCES | PRE | HEAD | BIAS | WINDOWS,
    'hyper-connections': HYPER | PRE | HEAD | WINDOWS,
    'hyper-connections, static': STATIC | REORDERED | {'depth.num_streams': 3},
    'hyper-connections, constrained': CONSTRAINED | PRE | UNROLLED,
    'looped hyper-connections': LOOPED | HYPER | PRE | {'depth.num_streams': 2},
    'attention residual, reordered': SOURCES | REORDERED | UNROLLED | TIED,
    'attention residual, blocks of 2': SOURCES_OF_2 | PRE | FULL,
    'attention residual, blocks of 3': SOURCES_OF_3 | PRE | TOKEN,
    'attention residual, one block': ONE_SOURCE | PRE | UNROLLED,
    'mudd': MUDD | PRE | HEAD | WINDOWS,
    'mudd, post': MUDD | POST | BIAS | UNROLLED,
    'mudd, one way': ONE_WAY | REORDERED | FULL,
    'mudd, values apart': OF_VALUES | PRE | TIED | UNROLLED,
    'mudd, two apart': OF_TWO | PRE,
    'mudd, experts': MUDD | PRE | HEAD | TOKEN,
    'mudd, static': STATIC_WAYS | PRE | FULL,
    'no-op experts': NOOP | BOTH | PRE | {'experts.top_k': 3},
    'experts of some layers': TOKEN | REORDERED | FULL | {'experts.layers': '0,2'},
    'expert choice': EXPERT | BOTH | REORDERED,
    'thresholds': EXPERT | BOTH | POST | {'experts.layers': '0,2'},
    'staged': TOKEN | ROUTED | PRE,
    'staged, post': TOKEN | ROUTED | POST | {'experts.num_noop': 2},
    'staged, expert choice': EXPERT | ROUTED | REORDERED,
}
SLOTS = routed(rule='threshold', layers='1') | {'num_layers': 3}
MASKED = {'depth.skipped_slots': 'masked'}
# name: (knobs, the routing of the pass)
ROUTED_CASES = {
    'exits from loops': (LOOPED | {'loop_exit_threshold': 0.6} | PRE | HEAD | WINDOWS, 'dense'),
    'more places than tokens': (routed(capacity=0.875) | PRE, 'top_c'),
    'tanh, all tokens': (routed(gate='tanh', capacity=1.0) | PRE | HEAD | BIAS | WINDOWS, 'top_c'),
    'sigmoid': (routed(gate='sigmoid', capacity=0.4) | POST | WINDOWS, 'top_c'),
    'one token': (routed(gate='none', capacity=0.125) | POST, 'top_c'),
    'windows': (routed(capacity=0.4) | REORDERED | FULL | WINDOWS, 'top_c'),
    'scaled rope': (routed(capacity=0.4) | SCALED | QKV | PRE, 'top_c'),
    'segments': (routed(select_per='segment', capacity=0.4) | PRE, 'top_c'),
    'dense': (routed(gate='none', rule='dense') | PRE | WINDOWS, 'dense'),
    'threshold': (routed(rule='threshold', capacity=0.25) | PRE | HEAD | BIAS, 'threshold'),
    'predictor': (routed(gate='sigmoid', rule='predictor') | POST | WINDOWS, 'predictor'),
    'linear predictor': (
        routed('straight_through', rule='predictor', predictor_width=0) | REORDERED,
        'predictor',
    ),
    'aux_loss': (
        routed(gate='tanh', rule='aux_loss', capacity=0.25) | REORDERED | FULL | WINDOWS,
        'aux_loss',
    ),
    'straight through': (
        routed('straight_through', rule='threshold', overflow='grow') | PRE | {'num_layers': 1},
        'threshold',
    ),
    'moda': (SLOTS | BOTH | POST | {'routing.gate': 'sigmoid'}, 'top_c'),
    'moda, pre': (SLOTS | BOTH | PRE | PROJECTED | WINDOWS, 'threshold'),
    'moda, reordered': (SLOTS | OWN | REORDERED | HEAD, 'top_c'),
    'moda, block slots': (SLOTS | BLOCK | PRE | UNROTATED | HEAD, 'top_c'),
    'masked': (SLOTS | MASKED | BOTH | UNROTATED | REORDERED | FULL | BIAS, 'threshold'),
    'masked, block slots': (SLOTS | MASKED | BLOCK | POST | NEWEST, 'top_c'),
    'dense stream': (SLOTS | DENSE | PRE, 'top_c'),
    'attention stream': (SLOTS | ATTENTION | POST, 'threshold'),
    'value residual': (SLOTS | VALUES | PRE, 'top_c'),
    'value residual, post': (SLOTS | VALUES | POST | HEAD | WINDOWS, 'threshold'),
    'value attention': (SLOTS | MIXED | PRE | HEAD, 'top_c'),
    'value attention, recent': (SLOTS | RECENT | POST | WINDOWS, 'threshold'),
    'embedding residual': (SLOTS | EMBEDDED | PRE | HEAD, 'top_c'),
    'embedding residual, moda': (SLOTS | EMBEDDED | BOTH | POST, 'threshold'),
    'value embeddings': (SLOTS | ALL_LOOKED_UP | PRE | HEAD, 'top_c'),
    'value embeddings, moda': (SLOTS | ALL_LOOKED_UP | OWN | POST | BIAS, 'threshold'),
    'attention residual': (SLOTS | SOURCES | PRE, 'top_c'),
    'hyper-connections': (SLOTS | HYPER | PRE, 'threshold'),
    'hyper-connections, constrained': (SLOTS | CONSTRAINED | PRE, 'top_c'),
    'attention residual, threshold': (SLOTS | SOURCES_OF_2 | REORDERED | HEAD, 'threshold'),
    'attention residual, every block': (
        routed(rule='predictor') | SOURCES_OF_3 | PRE | {'num_layers': 3},
        'predictor',
    ),
    'attention routed': (routed(part='attention') | PRE | HEAD | WINDOWS, 'top_c'),
    'attention routed, post': (
        routed(part='attention', gate='sigmoid', rule='threshold') | POST | BIAS,
        'threshold',
    ),
    'attention routed, reordered': (
        routed(part='attention', rule='aux_loss', capacity=0.625) | REORDERED | FULL,
        'aux_loss',
    ),
    'attention routed, embeddings': (
        routed(part='attention', layers='1', capacity=0.4) | EMBEDDED | ALL_LOOKED_UP | PRE,
        'top_c',
    ),
    'mlp routed': (routed(part='mlp', capacity=0.4) | POST | HEAD | WINDOWS, 'top_c'),
    'mlp routed, segments': (
        routed(part='mlp', select_per='segment', gate='tanh', capacity=0.4) | PRE | FULL,
        'top_c',
    ),
    'mlp routed, predictor': (
        routed('straight_through', part='mlp', rule='predictor') | PRE | BIAS | WINDOWS,
        'predictor',
    ),
    'mlp routed, threshold': (
        routed(part='mlp', rule='threshold', capacity=0.25) | REORDERED | EMBEDDED | ALL_LOOKED_UP,
        'threshold',
    ),
    'straight through, aux_loss': (
        routed('straight_through', rule='aux_loss') | POST | BIAS,
        'aux_loss',
    ),
    'token choice': (TOKEN_CHOICE | PRE | HEAD | WINDOWS, 'assigned'),
    'token choice, gated exit': (
        TOKEN_CHOICE | POST | {'routing.loop_update': 'gated_exit', 'routing.gate_scale': 0.5},
        'assigned',
    ),
    'token choice, first keys': (
        TOKEN_CHOICE | PRE | WINDOWS | {'routing.loop_keys': 'first'},
        'assigned',
    ),
    'recursions, first keys': (
        recursions('sigmoid', gate_scale=0.5, loop_keys='first', overflow='grow') | PRE | HEAD,
        'top_c',
    ),
    'recursions, predictor, first keys': (
        recursions('tanh', rule='predictor', loop_keys='first', overflow='grow') | POST | WINDOWS,
        'predictor',
    ),
    'recursions': (recursions('sigmoid', gate_scale=0.5) | PRE | HEAD, 'top_c'),
    'recursions, aux_loss': (recursions('sigmoid', rule='aux_loss') | POST | WINDOWS, 'aux_loss'),
    'recursions, threshold': (
        recursions('raw', rule='threshold', overflow='grow', loop_update='change') | REORDERED,
        'threshold',
    ),
    'recursions, predictor': (
        recursions('tanh', rule='predictor', loop_update='change')
        | {'looped_layers': 'middle:0:1'},
        'predictor',
    ),
}


def random_variables(model):
    """Return float64 weights large enough that every part matters, and thresholds of experts."""
    variables = random_like(jax.eval_shape(model.init, jax.random.key(0), TOKENS), dtype=np.float64)
    averages = variables.get('averages', {})
    if 'expert_thresholds_XE' in averages:
        averages['expert_thresholds_XE'] = np.float32(averages['expert_thresholds_XE'] - 0.07)
    return variables


def logits_loss_and_gradients(hparams, variables, routing, gradients):
    """Run the library's model in float64, with gradients only if they are asked for."""
    params, averages = variables['params'], variables.get('averages', {})
    state = train_step.TrainState(0, params, averages, (), 0, 0, hparams, 1)
    batch = {'tokens_BT': TOKENS, 'labels_BT': LABELS, 'segment_ids_BT': SEGMENTS}
    counts = train_step.StepCounts(float(np.sum(REAL & (LABELS != -100))), float(np.sum(REAL)))

    def loss(params):
        seen = []

        def keep(run, args, named, context):
            output = run(*args, **named)
            if context.method_name == 'hidden_states':
                seen.append(output)
            return output

        with nn.intercept_methods(keep):
            total, _ = train_step.loss_and_metrics(params, state, hparams, routing, batch, counts)
        ((x_BTD, records),) = seen
        return total, (lm_head(x_BTD, params), records)

    def run(params):
        return jax.value_and_grad(loss, has_aux=True)(params) if gradients else (loss(params), {})

    (total, (logits_BTV, records)), slopes = jax.device_get(jax.jit(run)(params))
    return logits_BTV, records, total, slopes


def by_layer(params, model):
    """Return the parameters as the oracle takes them: a list of layers, not stacked runs."""
    if model.looped_layers != 'none' and 'loop_routers' not in params:
        layers = oracle.looped_layers(params, model)
    else:
        layers = [layer for _, layer in unstack_layers(Stack(model, 'top_c'), params['stack'])]
    return {name: params[name] for name in params if name != 'stack'} | {'layers': layers}


def compare(config, routing, gradients):
    """Assert equal logits, choices and loss, and the gradient of every parameter.

    Returns the gradients, and what the oracle recorded.
    """
    config.optimizer.z_loss, config.model.dtype = 0.0, 'float64'
    config.data.sequence_length = TOKENS.shape[1]
    with jax.enable_x64(True), jax.numpy_rank_promotion('allow'):
        hparams = from_config(config)
        variables = random_variables(Transformer(hparams))
        found = logits_loss_and_gradients(hparams, variables, routing, gradients)
    logits_BTV, records, loss, slopes = found
    assert logits_BTV.dtype == loss.dtype == np.float64
    model, experts, params = hparams.model, hparams.model.experts, variables['params']
    averages, of_experts = variables.get('averages', {}), {}
    if routing == 'threshold' and experts.choice == 'expert':
        of_experts = dict(zip(model.expert_layers, averages['expert_thresholds_XE'], strict=True))
    thresholds = dict(zip(model.routed_layers, averages.get('thresholds_R', ()), strict=False))

    def oracle_loss(params):
        run = oracle.Pass(routing, thresholds, of_experts)
        found_BTV = oracle.forward(by_layer(params, model), TOKENS, SEGMENTS, model, run)
        total = oracle.cross_entropy(found_BTV, LABELS, SEGMENTS)
        if experts.choice == 'token':
            total += experts.balance_weight * oracle.balance_loss(run.seen, experts.top_k)
        if run.seen:
            total += experts.z_loss * oracle.z_loss(run.seen)
        if run.choices and model.routing.rule_loss_weight:
            total += model.routing.rule_loss_weight * oracle.rule_loss(run.choices, REAL)
        if model.routing.router == 'token_choice':
            total += oracle.depth_loss(run.choices, model.routing, REAL)
        return total, found_BTV, run

    expected, expected_BTV, run = oracle_loss(params)
    np.testing.assert_allclose(logits_BTV[REAL], expected_BTV[REAL], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(loss, expected, rtol=1e-10)
    for name in run.choices and run.choices[model.routed_layers[0]][0]:
        expected_RBT = [oracle.stack(run.choices[layer], name) for layer in model.routed_layers]
        found_RBT = getattr(records.routing, name)[:, REAL]
        np.testing.assert_allclose(found_RBT, np.array(expected_RBT)[:, REAL], rtol=1e-9)
    if run.loops:
        np.testing.assert_array_equal(records.loops_BT[REAL], np.array(run.loops)[REAL])
    rng = np.random.default_rng(2)
    oracle.assert_gradients(slopes, lambda params: oracle_loss(params)[0], params, 1e-9, rng)
    return slopes, run


FAST = ('block slots', 'both slots', 'unrotated', 'attention slot projection', 'newest slots')
FAST += ('attention stream', 'dense stream, bias', 'average stream, bias')
FAST += ('value residual', 'value residual, sparse', 'shared values', 'mudd', 'scaled rope')
FAST += ('value attention, recent',)
FAST += ('value embeddings, value residual', 'looped, own norms')


@pytest.mark.parametrize('case', parameters(FAST, CASES))
def test_model_equals_the_oracle(tiny_config, case):
    """With random parameters and packed segments. Some but not all experts are in use.

    Gradients are compared for models with experts or loops.
    """
    knobs = {f'model.{name}': value for name, value in (SIZES | CASES[case]).items()}
    config = tiny_config(**knobs)
    routing = 'threshold' if case == 'thresholds' else 'top_c'
    gradients = 'experts.choice' in CASES[case] or 'looped' in case
    slopes, run = compare(config, routing, gradients)
    for path, slope in jax.tree_util.tree_leaves_with_path(slopes):
        where = jax.tree_util.keystr(path)
        # The first sublayer of attention residuals reads one source, with weight 1.
        assert np.any(slope) or "['run_0']['layer_0']['attention_connection']" in where, where
    for layer in run.seen.values():
        share_Z = np.mean(layer.chosen, axis=0)
        assert share_Z.max() < 1 and np.mean(share_Z > 0) > 0.7, share_Z


FAST = ('segments', 'threshold', 'predictor', 'value residual', 'value attention')
FAST += ('embedding residual', 'value embeddings, moda', 'exits from loops', 'attention routed')
FAST += ('recursions, first keys',)


# JAX warns about int32 and int64 indices in float64, in which no model is trained.
@pytest.mark.filterwarnings('ignore:scatter inputs have incompatible types')
@pytest.mark.parametrize('case', parameters(FAST, ROUTED_CASES))
def test_routed_blocks_equal_the_oracle(case, tiny_config):
    """Selected and dropped tokens of each rule, the block's output, and gradients.

    The block runs on the gathered tokens, at the smallest static size that holds every row.
    """
    knobs, routing = ROUTED_CASES[case]
    config = tiny_config(**{f'model.{name}': value for name, value in (SIZES | knobs).items()})
    _, run = compare(config, routing, gradients=case != 'exits from loops')  # which none trains
    choices = list(run.choices.values())
    if case == 'exits from loops':
        assert {1, 2, 3} <= {*np.ravel(run.loops)}
    looped = 'recursions' in case or 'token choice' in case
    for layer in choices[1:] if looped else choices:  # the first loop takes all tokens
        selected_BT, top_c_BT = (oracle.stack(layer, n)[REAL] for n in ('selected_BT', 'top_c_BT'))
        assert selected_BT.any() and selected_BT.all() == (routing == 'dense' or 'all' in case)
        assert (selected_BT != top_c_BT).any() == (routing not in ('top_c', 'assigned'))
        dropped = oracle.stack(layer, 'dropped_BT').any()
        assert dropped <= (config.model.routing.overflow == 'skip')
        assert dropped or case not in ('threshold', 'aux_loss')


def test_openmythos():
    """The tiny model equals the oracle, and each of its parameters matters."""
    slopes, _ = compare(openmythos_moda.get_config('size=tiny'), 'top_c', gradients=True)
    assert all(np.any(slope) for slope in jax.tree.leaves(slopes))
