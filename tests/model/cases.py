"""Small models with a depth stream for tests, drawn so that every part shows in the logits."""

import jax
import numpy as np

from moddepth_jax.hparams import from_config
from moddepth_jax.model.transformer import Transformer

MODA = {'model.depth.stream': 'moda'}
ATTENTION = {'model.depth.stream': 'attention'}
DENSE = {'model.depth.stream': 'dense', 'model.layer_loop': 'unrolled'}
AVERAGE = DENSE | {'model.depth.stream': 'average'}
ROUTED = {'model.routing.router': 'learned', 'model.routing.capacity': 0.25}
SMALL = {
    'model.num_layers': 4,
    'model.vocab_size': 32,
    'model.d_model': 16,
    'model.d_ff': 16,
    'model.head_dim': 4,
    'model.routing.predictor_width': 4,
}
# Compiles in half the time; JAX 0.12 does not know the second option.
FAST = {'xla_backend_optimization_level': 0}
if jax.__version_info__ < (0, 11):
    FAST['xla_cpu_use_fusion_emitters'] = False


def small_hparams(make_config, *knobs):
    """Hparams of SMALL with the knobs of some dicts, the last winning."""
    merged = dict(SMALL)
    for some in knobs:
        merged |= some
    return from_config(make_config(**merged))


def random_variables(hparams, tokens_BT, seed=0):
    """Variables of a Transformer in its dtype, so large that activations are about 1."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(Transformer(hparams).init, jax.random.key(0), tokens_BT)

    def draw(path, leaf):
        name = path[-1].key
        spread = {'embedding': 1.0, 'scale': 0.2, 'kernel': 0.3, 'w': 0.3}.get(name, 0.2)
        values = float(name == 'scale') + spread * rng.normal(size=leaf.shape)
        return values.astype(leaf.dtype if hparams.model.dtype != 'float64' else np.float64)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def compiled(function, *arguments):
    """`function`, compiled quickly for such arguments."""
    return jax.jit(function).lower(*arguments).compile(compiler_options=FAST)


def experts(**knobs):
    """Knobs of model.experts: 5 experts of width 8, top-2 by token, and those that are given."""
    knobs = {'choice': 'token', 'num_routed': 5, 'top_k': 2, 'd_ff': 8} | knobs
    return {f'model.experts.{name}': value for name, value in knobs.items()}


def small_experts(make_config, *others, **knobs):
    """Hparams of a small model with these experts, and with other dicts of knobs."""
    return small_hparams(make_config, experts(**knobs), *others)


def scored(params, x_BTD, form):
    """Scores of all experts, in float64."""
    logits_BTZ = np.asarray(x_BTD, float) @ np.asarray(params['router']['kernel'], float)
    if form == 'sigmoid':
        return 1 / (1 + np.exp(-logits_BTZ))
    powers_BTZ = np.exp(logits_BTZ - logits_BTZ.max(-1, keepdims=True))
    return powers_BTZ / powers_BTZ.sum(-1, keepdims=True)


def pairs_of_tokens(scores_BTZ, real_BT, top_k, num_routed, capacity=0):
    """bool [B, T, Z]: what each token chooses, the lower number of equals; and what is computed.

    An expert computes the first `capacity` tokens of a row that chose it (0: all).
    """
    chosen_BTZ = np.zeros(scores_BTZ.shape, bool)
    computed_BTZ = np.zeros(scores_BTZ.shape, bool)
    for b in range(len(scores_BTZ)):
        met = [0] * scores_BTZ.shape[2]
        for t in np.flatnonzero(real_BT[b]):
            order = sorted(range(len(met)), key=lambda z, at=(b, t): (-scores_BTZ[at][z], z))
            for z in order[:top_k]:
                chosen_BTZ[b, t, z] = True
                computed_BTZ[b, t, z] = z < num_routed and not 0 < capacity <= met[z]
                met[z] += 1
    return chosen_BTZ, computed_BTZ


def pairs_of_experts(scores_BTE, real_BT, taken, thresholds_E=None):
    """bool [B, T, E]: the `taken` best real tokens of each row, the earlier of equals; or above."""
    if thresholds_E is not None:
        return (scores_BTE > np.asarray(thresholds_E, float)) & real_BT[..., None]
    pairs_BTE = np.zeros(scores_BTE.shape, bool)
    for b, e in np.ndindex(scores_BTE.shape[0], scores_BTE.shape[2]):
        tokens = sorted(np.flatnonzero(real_BT[b]), key=lambda t, at=b: (-scores_BTE[at, t, e], t))
        pairs_BTE[b, tokens[:taken], e] = True
    return pairs_BTE


def looped(params, x_BTD, real_BT, chosen_BTZ, computed_BTZ, hparams):
    """shared(x) + sum of weight f_e(x) over `computed`, and the sum of real tokens' scores.

    In NumPy, each expert for every token; of parameters and tokens that may be complex.
    """

    def swiglu(w1_DF, w3_DF, w2_FD):
        gate_BTF = x_BTD @ w1_DF
        return (gate_BTF / (1 + np.exp(-gate_BTF)) * (x_BTD @ w3_DF)) @ w2_FD

    logits_BTZ = x_BTD @ params['router']['kernel']
    if hparams.scores == 'softmax':
        scores_BTZ = np.exp(logits_BTZ) / np.exp(logits_BTZ).sum(-1, keepdims=True)
    else:
        scores_BTZ = 1 / (1 + np.exp(-logits_BTZ))
    weight_BTZ = scores_BTZ
    if hparams.choice == 'token' and hparams.scores == 'sigmoid':
        total_BT1 = np.where(chosen_BTZ, scores_BTZ, 0).sum(-1, keepdims=True)
        weight_BTZ = scores_BTZ / np.where(chosen_BTZ.any(-1, keepdims=True), total_BT1, 1)
    y_BTD = np.zeros_like(x_BTD @ params['w1']['kernel'][0] @ params['w2']['kernel'][0])
    for e in range(hparams.num_routed):
        weight_BT = np.where(computed_BTZ[..., e], weight_BTZ[..., e], 0) * hparams.route_scale
        matrices = (params[name]['kernel'][e] for name in ('w1', 'w3', 'w2'))
        y_BTD = y_BTD + weight_BT[..., None] * swiglu(*matrices)
    if 'shared' in params:
        matrices = (params['shared'][name]['kernel'] for name in ('w1', 'w3', 'w2'))
        y_BTD = y_BTD + swiglu(*matrices)
    return y_BTD, np.where(real_BT[..., None], scores_BTZ, 0).sum((0, 1))


def slope(function, arrays, path, along):
    """d function / d arrays[path] along a direction, exact to rounding: one complex step."""

    def step(at, leaf):
        return leaf + 1e-100j * along if at == path else leaf

    return function(*jax.tree_util.tree_map_with_path(step, arrays)).imag / 1e-100


def drawn_like(shapes, seed=0, dtype=np.float32):
    """Arrays of these shapes, so large that every part matters; scales of norms about 1."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name = path[-1].key
        spread = {'embedding': 1.0, 'scale': 0.2, 'kernel': 0.3, 'w': 0.3}.get(name, 0.2)
        return (float(name == 'scale') + spread * rng.normal(size=leaf.shape)).astype(dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def idle_router(width, num_choices, seed=4):
    """Router kernel [D, Z] by which the last four experts hold the two highest scores of all but 0.

    Beside a little noise their logits are v, -v, 2v and -2v, those of the others none.
    """
    rng = np.random.default_rng(seed)
    kernel_DZ = 0.001 * rng.normal(size=(width, num_choices))
    kernel_DZ[:, -4:] += rng.normal(size=(width, 1)) * np.array([1, -1, 2, -2])
    return kernel_DZ.astype(np.float32)


def two_layer_hparams(make_config, knobs, **more):
    """Hparams of two layers, the second routed if any is; rows of 12 tokens out of 48."""
    sizes = {'model.vocab_size': 48, 'model.num_layers': 2, 'data.sequence_length': 12}
    return small_hparams(make_config, sizes, {'model.routing.layers': '1'}, knobs, more)


# Models that are causal under a rule, and that rule; half of the tokens enter their routed blocks.
HALF_ROUTED = {
    'model.routing.router': 'learned',
    'model.routing.capacity': 0.5,
    'model.routing.causal_rule': 'aux_loss',
}
EXPERT_MODELS_MODA = {'model.depth.stream': 'moda'}
POST, REORDERED = ({'model.norm_placement': place} for place in ('post', 'reordered'))
CAUSAL = {
    'token': (experts(layers='every:2'), 'dense'),
    'integrated': (experts(num_noop=3, num_shared=0, scores='sigmoid') | POST, 'dense'),
    'row capacity': (experts(num_routed=3, row_capacity=3) | REORDERED, 'dense'),
    'thresholds': (experts(choice='expert'), 'threshold'),
    'staged': (experts(num_noop=2) | HALF_ROUTED | EXPERT_MODELS_MODA, 'aux_loss'),
    'staged thresholds': (experts(choice='expert') | HALF_ROUTED, 'aux_loss'),
    'capacity with slots': (
        experts(num_routed=3, row_capacity=3) | EXPERT_MODELS_MODA | {'model.depth.slots': 'block'},
        'dense',
    ),
}


def random_variables_with_thresholds(hparams, tokens_BT, seed=0):
    """Variables of a Transformer; some tokens pass the thresholds of its experts."""
    model = Transformer(hparams)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens_BT)
    variables = drawn_like(shapes, seed, hparams.model.dtype)
    thresholds_XE = variables.get('averages', {}).get('expert_thresholds_XE')
    if thresholds_XE is not None:
        thresholds_XE[:] = 0.2 + 0.05 * thresholds_XE
    return variables
