"""The table of models for which each property is tested, and how they are built and run.

Each property has its own file: decoding_test, causality_test, scan_test, flops_test, oracle_test. A
property names the models that it tests in `make test`; `make test-all` runs all models.
"""

import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest

from moddepth_jax.hparams import Hparams, from_config
from moddepth_jax.model.stack import Stack, unstack_layers
from moddepth_jax.model.transformer import Transformer

# Dicts of knobs, which are merged with |.
MODA = {'model.depth.stream': 'moda'}
ATTENTION = {'model.depth.stream': 'attention'}
VALUES = {'model.depth.stream': 'value_residual'}
SHARED, SPARSE, FIXED = (
    VALUES | {'model.depth.value_mix': mix} for mix in ('shared', 'sparse', 'fixed')
)
MIXED = {'model.depth.stream': 'value_attention'}
RECENT = MIXED | {'model.depth.value_stride': 3, 'model.depth.recent_layers': 1}
SOURCES = {'model.depth.stream': 'attention_residual'}
HYPER = {'model.depth.stream': 'hyper_connections'}
STATIC, CONSTRAINED = (
    HYPER | {'model.depth.hyper_form': form} for form in ('static', 'constrained')
)
MUDD = {'model.depth.stream': 'mudd'}
STATIC_WAYS = MUDD | {'model.depth.mudd_weights': 'static'}
SOURCES_OF_2, SOURCES_OF_3 = (
    SOURCES | {'model.depth.sublayers_per_source': size} for size in (2, 3)
)
EMBEDDED = {'model.embedding_residual': 'learned'}
LOOKED_UP, ALL_LOOKED_UP = ({'model.value_embeddings': some} for some in ('alternate', 'all'))
UNROLLED = {'model.layer_loop': 'unrolled'}
DENSE = UNROLLED | {'model.depth.stream': 'dense'}
AVERAGE = UNROLLED | {'model.depth.stream': 'average'}
MASKED = {'model.depth.skipped_slots': 'masked'}
OWN_SLOT = {'model.depth.attention_slot_projection': True}
BLOCK_SLOT, ATTENTION_SLOT = ({'model.depth.slots': slots} for slots in ('block', 'attention'))
UNROTATED = {'model.depth.slot_keys': 'unrotated'}
NEWEST = {'model.depth.slot_window': 2}
POST, REORDERED = ({'model.norm_placement': place} for place in ('post', 'reordered'))
HEAD_NORM, FULL_NORM = ({'model.qk_norm': norm} for norm in ('head', 'full'))
WINDOWS = {'model.windows': (3, 0)}
SCALED = {'model.rope_scaling': 'llama3:8:0.5:4:16'}
QKV_BIAS, QKVO_BIAS = ({'model.attention_bias': of} for of in ('qkv', 'qkvo'))
TIED = {'model.tie_embeddings': True}
ROUTED = {'model.routing.router': 'learned', 'model.routing.capacity': 0.25}
HALF_ROUTED = ROUTED | {'model.routing.capacity': 0.5, 'model.routing.causal_rule': 'aux_loss'}
GROWS = {'model.routing.overflow': 'grow'}
ROOMY = {'model.routing.cache_capacity': 2.0}  # no token is dropped
LOOPED = {'model.looped_layers': 'middle:1:1', 'model.loops': 3}
ALL_LOOPED = {'model.looped_layers': 'all', 'model.loops': 2, 'model.loop_order': 'sequence'}
OWN_NORMS, OF_LOOPS = {'model.loop_norms': 'own'}, {'model.loop_embeddings': 'learned'}
TWO, LAST = ({'model.routing.layers': layers} for layers in ('1,2', '2'))
OF_ATTENTION, OF_MLP = ({'model.routing.part': part} for part in ('attention', 'mlp'))
ADAPTERS = {'model.adapters.rank': 3, 'model.adapters.alpha': 2.0}
RECURSIONS = LOOPED | {
    **{'model.routing.router': 'learned', 'model.routing.layers': 'loops'},
    **{'model.routing.gate': 'sigmoid', 'model.routing.capacity': 0.25},
}
FIRST_KEYS = {'model.routing.loop_keys': 'first'}
TOKEN_CHOICE = LOOPED | {
    **{'model.routing.router': 'token_choice', 'model.routing.layers': 'loops'},
    **{'model.routing.gate_scale': 2.0},
}


def routed_by(router, rule, **more):
    """Return the knobs of a router and its causal rule."""
    return ROUTED | {'model.routing.router': router, 'model.routing.causal_rule': rule} | more


def experts(**knobs):
    """Return knobs of model.experts: 5 experts of width 8, top-2 token choice, and `knobs`."""
    knobs = {'choice': 'token', 'num_routed': 5, 'top_k': 2, 'd_ff': 8} | knobs
    return {f'model.experts.{name}': value for name, value in knobs.items()}


SMALL = {
    'model.num_layers': 4,
    'model.vocab_size': 32,
    'model.d_model': 16,
    'model.d_ff': 16,
    'model.head_dim': 4,
    'model.routing.predictor_width': 4,
}
BATCH, LENGTH = 3, 16
# Three layers. If any is routed, it is the middle one, which reads slots and whose slots are read.
SIZES = {
    'model.num_layers': 3,
    'model.vocab_size': 2 * BATCH * LENGTH,
    'model.routing.layers': '1',
    'data.sequence_length': LENGTH,
}
# Every place of every row has a different token, so each embedding is the input of one place.
TOKENS_BT = np.random.default_rng(1).permutation(BATCH * LENGTH).reshape(BATCH, LENGTH)
OTHER_BT = TOKENS_BT + BATCH * LENGTH
# Two documents, and padding.
SMALL_BT = np.random.default_rng(1).integers(0, 32, (2, 12)).astype(np.int32)
SMALL_SEGMENTS_BT = np.array([[1] * 7 + [2] * 5, [1] * 10 + [0] * 2], np.int32)

# name: (knobs, the causal routing)
CASES = {
    'dense': (WINDOWS, 'dense'),
    'predictor': (routed_by('learned', 'predictor') | TWO | HEAD_NORM, 'predictor'),
    'aux_loss': (routed_by('learned', 'aux_loss') | WINDOWS | TIED, 'aux_loss'),
    'scaled rope': (routed_by('learned', 'predictor') | SCALED | QKV_BIAS, 'predictor'),
    'scaled rope, moda': (MODA | SCALED | QKVO_BIAS | HEAD_NORM, 'dense'),
    'aux_loss grows': (routed_by('learned', 'aux_loss') | GROWS, 'aux_loss'),
    'threshold': (routed_by('learned', 'threshold') | TWO | HEAD_NORM, 'threshold'),
    'dense rule': (routed_by('learned', 'dense'), 'dense'),
    'norm threshold grows': (routed_by('norm', 'threshold') | LAST | GROWS, 'threshold'),
    'norm dense': (routed_by('norm', 'dense') | POST, 'dense'),
    'norm predictor': (routed_by('norm', 'predictor'), 'predictor'),
    'random': (routed_by('random', 'threshold') | UNROLLED, 'threshold'),
    'position': (routed_by('position', 'threshold') | REORDERED, 'threshold'),
    'straight through, threshold': (
        routed_by('straight_through', 'threshold') | GROWS,
        'threshold',
    ),
    'straight through, predictor': (routed_by('straight_through', 'predictor'), 'predictor'),
    'straight through, aux_loss': (routed_by('straight_through', 'aux_loss'), 'aux_loss'),
    'straight through, positive': (routed_by('straight_through', 'positive'), 'positive'),
    'attention routed': (
        routed_by('learned', 'predictor') | OF_ATTENTION | LAST | WINDOWS | HEAD_NORM,
        'predictor',
    ),
    'attention routed, aux_loss': (
        routed_by('learned', 'aux_loss') | OF_ATTENTION | POST | WINDOWS,
        'aux_loss',
    ),
    'attention routed grows': (
        routed_by('learned', 'threshold') | OF_ATTENTION | REORDERED | GROWS | TWO,
        'threshold',
    ),
    'mlp routed': (routed_by('learned', 'aux_loss') | OF_MLP | WINDOWS | HEAD_NORM, 'aux_loss'),
    'mlp routed, threshold': (
        routed_by('learned', 'threshold') | OF_MLP | POST | TWO | WINDOWS,
        'threshold',
    ),
    'mlp routed grows': (
        routed_by('straight_through', 'predictor') | OF_MLP | REORDERED | GROWS,
        'predictor',
    ),
    'attention routed, looped': (
        LOOPED | EMBEDDED | ROUTED | OF_ATTENTION | ROOMY | HEAD_NORM,
        'predictor',
    ),
    'mlp routed, value embeddings': (
        LOOPED | ALL_LOOKED_UP | ROUTED | OF_MLP | HEAD_NORM | ADAPTERS,
        'predictor',
    ),
    'mlp routed, dense rule': (routed_by('norm', 'dense') | OF_MLP, 'dense'),
    'dense stream': (DENSE | ROUTED | ROOMY, 'predictor'),
    'average stream': (AVERAGE | ROUTED | ROOMY | WINDOWS, 'predictor'),
    'attention stream': (ATTENTION | ROUTED | ROOMY | NEWEST, 'predictor'),
    'moda': (MODA | POST | FULL_NORM | NEWEST, 'dense'),
    'moda unrotated': (MODA | UNROTATED | HEAD_NORM | WINDOWS, 'dense'),
    'moda attention slots': (MODA | ATTENTION_SLOT | REORDERED, 'dense'),
    'mod and moda': (MODA | ROUTED | ROOMY | UNROTATED | HEAD_NORM, 'predictor'),
    'mod and moda, own slots': (MODA | ROUTED | ROOMY | OWN_SLOT | POST, 'predictor'),
    'mod and moda, block slots': (MODA | ROUTED | ROOMY | BLOCK_SLOT, 'predictor'),
    'mod and moda grows': (MODA | ROUTED | GROWS, 'predictor'),
    'masked': (MODA | ROUTED | ROOMY | MASKED | OWN_SLOT | FULL_NORM | REORDERED, 'predictor'),
    'masked, block slots': (
        MODA | ROUTED | ROOMY | MASKED | BLOCK_SLOT | UNROTATED | HEAD_NORM,
        'predictor',
    ),
    'value residual': (VALUES | ROUTED | ROOMY | HEAD_NORM, 'predictor'),
    'value residual grows': (VALUES | routed_by('norm', 'predictor') | GROWS | POST, 'predictor'),
    'value residual, sparse': (SPARSE | WINDOWS | REORDERED, 'dense'),
    'shared values': (SHARED | WINDOWS | FULL_NORM, 'dense'),
    'value attention': (MIXED | ROUTED | ROOMY | HEAD_NORM, 'predictor'),
    'value attention grows': (
        RECENT | routed_by('straight_through', 'predictor') | GROWS | POST,
        'predictor',
    ),
    'value attention, recent': (RECENT | WINDOWS | FULL_NORM | REORDERED, 'dense'),
    'embedding residual': (EMBEDDED | ROUTED | ROOMY | HEAD_NORM, 'predictor'),
    'embedding residual, moda': (EMBEDDED | MODA | POST | WINDOWS, 'dense'),
    'embedding residual, values': (EMBEDDED | VALUES | ROUTED | GROWS | REORDERED, 'predictor'),
    'embedding residual, mixed values': (EMBEDDED | MIXED | ROUTED | ROOMY, 'predictor'),
    'looped embedding residual': (LOOPED | EMBEDDED, 'dense'),
    'value embeddings': (LOOKED_UP | ROUTED | ROOMY | HEAD_NORM, 'predictor'),
    'value embeddings grow': (ALL_LOOKED_UP | EMBEDDED | ROUTED | GROWS | POST, 'predictor'),
    'value embeddings, moda': (
        ALL_LOOKED_UP | MODA | ATTENTION_SLOT | ROUTED | ROOMY | REORDERED,
        'predictor',
    ),
    'value embeddings, masked': (ALL_LOOKED_UP | MODA | ROUTED | ROOMY | MASKED, 'predictor'),
    'value embeddings, value residual': (LOOKED_UP | FIXED | WINDOWS, 'dense'),
    'value embeddings, value attention': (ALL_LOOKED_UP | MIXED | ROUTED | GROWS, 'predictor'),
    'value embeddings, attention residual': (LOOKED_UP | SOURCES, 'dense'),
    'value embeddings, hyper-connections': (
        LOOKED_UP | HYPER | {'model.depth.num_streams': 2},
        'dense',
    ),
    'value embeddings, mudd': (ALL_LOOKED_UP | MUDD, 'dense'),
    'looped value embeddings': (LOOPED | LOOKED_UP | FULL_NORM, 'dense'),
    'value embeddings, experts': (
        LOOKED_UP | experts(num_routed=3, row_capacity=3) | REORDERED,
        'dense',
    ),
    'hyper-connections': (
        HYPER | ROUTED | ROOMY | HEAD_NORM | {'model.depth.num_streams': 2},
        'predictor',
    ),
    'hyper-connections, static': (
        STATIC | routed_by('random', 'threshold') | GROWS | {'model.depth.num_streams': 3},
        'threshold',
    ),
    'hyper-connections, constrained': (
        CONSTRAINED | WINDOWS | FULL_NORM | {'model.depth.num_streams': 2},
        'dense',
    ),
    'looped hyper-connections': (
        ALL_LOOPED | HYPER | HEAD_NORM | {'model.depth.num_streams': 2},
        'dense',
    ),
    'mudd': (MUDD | WINDOWS | HEAD_NORM, 'dense'),
    'mudd, static': (STATIC_WAYS | POST | {'model.depth.mudd_ways': 'kv'}, 'dense'),
    'mudd, one way': (MUDD | REORDERED | {'model.depth.mudd_ways': 'one'}, 'dense'),
    'looped mudd': (LOOPED | MUDD, 'dense'),
    'looped': (LOOPED | ROUTED | ROOMY | HEAD_NORM, 'predictor'),
    'looped threshold': (LOOPED | routed_by('learned', 'threshold') | GROWS, 'threshold'),
    'recursions': (
        RECURSIONS | ROOMY | HEAD_NORM | {'model.num_layers': 4, 'model.loops': 2},
        'predictor',
    ),
    'recursions, aux_loss': (
        RECURSIONS | TIED | {'model.routing.causal_rule': 'aux_loss'},
        'aux_loss',
    ),
    'recursions, threshold': (
        RECURSIONS | HEAD_NORM | {'model.routing.causal_rule': 'threshold'},
        'threshold',
    ),
    'token choice': (TOKEN_CHOICE | WINDOWS, 'assigned'),
    'token choice, gated exit': (
        TOKEN_CHOICE | {'model.routing.loop_update': 'gated_exit'} | HEAD_NORM | TIED,
        'assigned',
    ),
    'recursions, first keys': (
        RECURSIONS | FIRST_KEYS | GROWS | WINDOWS | HEAD_NORM | {'model.num_layers': 4},
        'predictor',
    ),
    'recursions, first keys, aux_loss': (
        RECURSIONS | FIRST_KEYS | GROWS | {'model.routing.causal_rule': 'aux_loss'},
        'aux_loss',
    ),
    'recursions, first keys, threshold': (
        RECURSIONS | FIRST_KEYS | GROWS | TIED | {'model.routing.causal_rule': 'threshold'},
        'threshold',
    ),
    'token choice, first keys': (TOKEN_CHOICE | FIRST_KEYS | WINDOWS, 'assigned'),
    'recursions grow': (
        RECURSIONS
        | WINDOWS
        | GROWS
        | {'model.looped_layers': 'all', 'model.loops': 2}
        | {'model.routing.causal_rule': 'threshold', 'model.routing.loop_update': 'change'},
        'threshold',
    ),
    'looped, own norms': (LOOPED | OWN_NORMS | HEAD_NORM | WINDOWS, 'dense'),
    'looped, own norms, routed': (
        ALL_LOOPED | OWN_NORMS | OF_LOOPS | ROUTED | ROOMY | FULL_NORM | MODA | UNROTATED,
        'predictor',
    ),
    'looped, loop embeddings': (LOOPED | OF_LOOPS | POST | EMBEDDED, 'dense'),
    'looped, exits': (
        LOOPED
        | {'model.loop_exit_threshold': 0.5}
        | OWN_NORMS
        | OF_LOOPS
        | EMBEDDED
        | HEAD_NORM
        | SCALED
        | QKV_BIAS,
        'dense',
    ),
    'looped, exits of a block with all': (
        LOOPED
        | {'model.loop_exit_threshold': 1.2, 'model.looped_layers': 'middle:0:1'}
        | OWN_NORMS
        | OF_LOOPS
        | EMBEDDED
        | ALL_LOOKED_UP
        | POST
        | FULL_NORM
        | WINDOWS,
        'dense',
    ),
    'looped moda': (ALL_LOOPED | MODA | WINDOWS, 'dense'),
    'looped values': (LOOPED | VALUES | POST, 'dense'),
    'attention residual': (SOURCES | ROUTED | ROOMY | HEAD_NORM, 'predictor'),
    'attention residual grows': (SOURCES_OF_2 | ROUTED | GROWS | FULL_NORM, 'predictor'),
    'attention residual, blocks of 2': (SOURCES_OF_2 | WINDOWS | REORDERED, 'dense'),
    'attention residual, blocks of 3': (
        SOURCES_OF_3 | routed_by('position', 'threshold') | ROOMY,
        'threshold',
    ),
    'adapters': (ROUTED | ROOMY | HEAD_NORM | ADAPTERS, 'predictor'),
    'adapters, looped moda': (ALL_LOOPED | MODA | ADAPTERS, 'dense'),
    'adapters, experts': (experts(num_routed=3) | REORDERED | ADAPTERS, 'dense'),
    'adapters, recursions': (RECURSIONS | ROOMY | ADAPTERS, 'predictor'),
    'experts': (experts(layers='every:2', product='ragged_dot'), 'dense'),
    'integrated': (experts(num_noop=3, num_shared=0, scores='sigmoid') | POST, 'dense'),
    'row capacity': (experts(num_routed=3, row_capacity=3) | REORDERED, 'dense'),
    'row capacity and moda': (experts(num_routed=3, row_capacity=3) | MODA | BLOCK_SLOT, 'dense'),
    'experts choose': (experts(choice='expert'), 'threshold'),
    'staged': (experts(num_noop=2) | HALF_ROUTED | ROOMY | MODA, 'aux_loss'),
    'staged, experts choose': (experts(choice='expert') | HALF_ROUTED | ROOMY, 'aux_loss'),
}
# One model of each family, for properties that another test states for all models.
FAMILIES = (
    *('dense', 'predictor', 'threshold', 'attention routed', 'dense stream', 'average stream'),
    *('attention stream', 'mod and moda', 'masked', 'value residual', 'value attention'),
    *('value embeddings', 'hyper-connections', 'mudd', 'attention residual', 'recursions'),
    *('token choice', 'looped, exits', 'experts choose', 'staged'),
)
EXPERTS = [name for name, (knobs, _) in CASES.items() if 'model.experts.choice' in knobs]
# Compile as for users. tests/conftest.py compiles all other programs with less optimization.
OPTIMIZED = {'xla_backend_optimization_level': 3, 'xla_llvm_disable_expensive_passes': False}
if jax.__version_info__ < (0, 11):  # later versions have no such option
    OPTIMIZED['xla_cpu_use_fusion_emitters'] = True


def parameters(fast, names=CASES):
    """Return names as pytest parameters. Those that are not in `fast` are marked slow."""
    slow = pytest.mark.slow
    each = [(name, name if isinstance(name, tuple) else (name,)) for name in names]
    return [pytest.param(*of, marks=() if name in fast else slow) for name, of in each]


def at_size(knobs, sizes):
    """Merge the knobs of a case and of a size, which may route other layers but not loops."""
    loops = {name: value for name, value in knobs.items() if value == 'loops'}
    return knobs | sizes | loops


def small_hparams(make_config, *knobs):
    """Return Hparams of SMALL with the knobs of some dicts; the last dict wins."""
    merged = dict(SMALL)
    for some in knobs:
        merged |= some
    return from_config(make_config(**merged))


def random_like(shapes, seed=0, dtype=None):
    """Return random arrays of these shapes, large enough that every part matters."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name = path[-1].key
        spread = {'embedding': 1.0, 'scale': 0.2, 'kernel': 0.3, 'w': 0.3, 'outer': 0.1}.get(
            name, 0.2
        )
        values = float(name in ('scale', 'read_bias', 'residual_scale')) + spread * rng.normal(
            size=leaf.shape
        )
        if name == 'bias' and path[-2].key == 'stream':  # the newest output counts most
            values[..., 0] += 1
        if name == 'expert_thresholds_XE':  # some tokens pass them
            values = 0.2 + 0.05 * values
        return values.astype(dtype or leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def random_variables(hparams, tokens_BT, seed=0):
    """Return random variables of a Transformer in its dtype, for activations of about 1."""
    shapes = jax.eval_shape(Transformer(hparams).init, jax.random.key(0), tokens_BT)
    return random_like(shapes, seed, 'float64' if hparams.model.dtype == 'float64' else None)


@functools.cache
def initial_params(hparams, seed=0):
    """Return the initial parameters of a Transformer, compiled once per session."""
    init = jax.jit(Transformer(hparams).init)
    return jax.device_get(init(jax.random.key(seed), np.zeros((1, 8), int))['params'])


def with_leaves(params, ends):
    """Fill the leaves whose paths end like a key of `ends` with its value."""

    def fill(path, leaf):
        name = '/' + '/'.join(key.key for key in path)
        values = [value for end, value in ends.items() if name.endswith(f'/{end}')]
        return np.broadcast_to(np.float32(values[0]), leaf.shape) if values else leaf

    return jax.tree_util.tree_map_with_path(fill, params)


@functools.cache
def _value_and_slopes(hparams):
    shape = *SMALL_BT.shape, hparams.model.vocab_size
    weights_BTV = np.random.default_rng(7).normal(size=shape)

    def loss(params, rest):
        variables = rest | {'params': params}
        logits_BTV, _ = Transformer(hparams).apply(variables, SMALL_BT, SMALL_SEGMENTS_BT)
        return (logits_BTV * weights_BTV).mean(), logits_BTV

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def gradient(hparams, variables):
    """Return the logits of the small tokens, and the gradients of a loss by the parameters."""
    rest = {name: side for name, side in variables.items() if name != 'params'}
    (_, logits_BTV), slopes = _value_and_slopes(hparams)(variables['params'], rest)
    return jax.device_get((logits_BTV, slopes))


def by_name(hparams, params):
    """Return leaves by (block number, 'exit', or None outside the stack; name)."""
    layers = list(unstack_layers(Stack(hparams.model, 'top_c'), params['stack']))
    parts = [*enumerate(layer for kind, layer in layers if kind.part == 'block')]
    parts += [('exit', layer) for kind, layer in layers if kind.part == 'exit']
    parts.append((None, {name: leaf for name, leaf in params.items() if name != 'stack'}))
    return {
        (i, jax.tree_util.keystr(path)): leaf
        for i, part in parts
        for path, leaf in jax.tree_util.tree_leaves_with_path(part)
    }


class Model(NamedTuple):
    """A model of CASES with random weights, and its compiled causal forward pass."""

    hparams: Hparams
    variables: dict
    routing: str
    apply: object

    def __call__(self, tokens_BT=TOKENS_BT, segment_ids_BT=None):
        """Return logits and records in NumPy."""
        if segment_ids_BT is None:
            segment_ids_BT = np.ones_like(tokens_BT)
        return jax.device_get(self.apply(self.variables, tokens_BT, segment_ids_BT))


@functools.cache
def build(make_config, name, routing=None, options=()):
    """Return the Model of a case, compiled once per session.

    Thresholds and predictors are set to select about 40% of the tokens. `routing` replaces the
    causal one; `options` are compiler options as a tuple of items.
    """
    knobs, causal = CASES[name]
    hparams = small_hparams(make_config, SIZES, knobs)
    apply = functools.partial(Transformer(hparams).apply, routing=routing or causal)
    apply = jax.jit(apply, compiler_options=dict(options))
    model = Model(hparams, random_variables(hparams, TOKENS_BT), routing or causal, apply)
    if causal == 'threshold' and hparams.model.tracks_threshold:
        thresholds_R = model.variables['averages']['thresholds_R']
        for layer in range(len(thresholds_R)):  # each changes the stream of the next
            thresholds_R[layer] = np.quantile(model()[1].routing.scores_BT[layer], 0.61)
    if causal == 'predictor':
        excess = np.quantile(model()[1].routing.rule_logits_BT, 0.61)
        for run in model.variables['params']['stack'].values():
            for layer in run.values():
                if 'predictor' in layer:
                    layer['predictor']['out']['bias'] -= excess
        if hparams.model.routing.routes_loops:  # 60% of the tokens that the previous loop selected
            bias_R1 = model.variables['params']['loop_routers']['predictor']['out']['bias']
            for loop in range(1, hparams.model.loops):
                logits_BT = model()[1].routing.rule_logits_BT[loop]
                bias_R1[loop] -= np.quantile(logits_BT[logits_BT > -1e8], 0.4)
    return model


def filled(cache):
    """Return the arrays of a Cache in NumPy, with zeros where there is no token."""
    layers = []
    for layer in cache.layers:
        lengths_B = cache.lengths_B if layer.lengths_B is None else layer.lengths_B
        used_BS = np.arange(layer.capacity)[None] < np.asarray(lengths_B)[:, None]

        def keep(side_BXS, used_BS=used_BS):
            return np.where(used_BS if side_BXS.ndim == 2 else used_BS[:, None, None], side_BXS, 0)

        layers.append((jax.tree.map(keep, layer[:3]), layer[3:]))
    return jax.tree.leaves((layers, cache[1:]))


def equations(jaxpr):
    """Yield the equations of a jaxpr and of all jaxprs inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, 'eqns')):
            if hasattr(value, 'eqns'):
                yield from equations(getattr(value, 'jaxpr', value))
