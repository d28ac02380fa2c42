"""The routed block as its equation, over all tokens with explicit masks: the oracle of its tests.

Written from parameters alone; it shares no code with the library. Run it in float64.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from moddepth_jax.hparams import from_config
from moddepth_jax.model.attention import TokenInfo
from moddepth_jax.model.mod.mixture_of_depths import MixtureOfDepths, RoutingArgs

LENGTH, WIDTH, CAPACITY = 16, 32, 0.375
SHAPE = {
    'model.routing.router': 'learned',
    'model.routing.layers': 'every:1',
    'model.norm_eps': 1e-3,
    'model.rope_theta': 50.0,
}
# One row each: a document, packed documents, padding at the end, fewer real tokens than C, none.
SEGMENTS = np.array(
    [[1] * 16, [1] * 5 + [2] * 7 + [3] * 4, [1] * 10 + [0] * 6, [1] * 2 + [0] * 14, [0] * 16]
)
POSITIONS = np.tile(np.arange(LENGTH), (5, 1))
SEEDS = np.arange(5 * LENGTH, dtype=np.uint32).reshape(5, LENGTH)


def slope_of_sigmoid(r):
    """sigmoid'(r), as a constant: what the straight-through gate of value 1 passes on."""
    r = jax.lax.stop_gradient(r)
    return jnp.exp(-r) / (1 + jnp.exp(-r)) ** 2


GATES = {
    'raw': lambda r: r,
    'sigmoid': lambda r: 1 / (1 + jnp.exp(-r)),
    'tanh': lambda r: (jnp.exp(2 * r) - 1) / (jnp.exp(2 * r) + 1),
    'none': jnp.ones_like,
    'straight_through': lambda r: 1 + slope_of_sigmoid(r) * (r - jax.lax.stop_gradient(r)),
}


def make_model(tiny_config, placement, gate, capacity, **knobs):
    routing = {'model.routing.gate': gate, 'model.routing.capacity': capacity}
    placed = {'model.norm_placement': placement, 'data.sequence_length': LENGTH}
    return from_config(tiny_config(**SHAPE | placed | routing | knobs)).model


def random_params(params, seed=0):
    """Weights so large that every part of the block matters; norm scales around 1."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        spread = 0.3 if leaf.ndim < 2 else (leaf.size // leaf.shape[-1]) ** -0.5
        center = float(path[-1].key == 'scale')
        return (center + spread * rng.normal(size=leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, params)


def stream(seed=1, batch=5, ties=False):
    """A random residual stream; with ties, component 0 takes three values only."""
    x_BTD = np.random.default_rng(seed).normal(size=(batch, LENGTH, WIDTH)).astype(np.float32)
    if ties:
        x_BTD[:, :, 0] = np.random.default_rng(seed).integers(-1, 2, (batch, LENGTH))
    return x_BTD


def expert_choice(scores_BT, capacity, segments_BT):
    """bool [B, T]: the C best real tokens of each row, the earlier of equals, found one by one."""
    chosen_BT = np.zeros(scores_BT.shape, bool)
    num_selected = max(1, int(capacity * scores_BT.shape[1] + 1e-6))
    for row, scores_T in enumerate(scores_BT):
        real = [t for t in range(len(scores_T)) if segments_BT[row, t] > 0]
        best = sorted(real, key=lambda t: (-scores_T[t], t))[:num_selected]
        chosen_BT[row, best] = True
    return chosen_BT


def dealt_places(segments_T, num_selected):
    """{(start, end): places} of the runs of equal ids: the C places fall evenly along the row."""
    length = len(segments_T)
    edges = [t for t in range(1, length) if segments_T[t] != segments_T[t - 1]]
    bounds = [0, *edges, length]
    return {
        (s, e): num_selected * e // length - num_selected * s // length
        for s, e in zip(bounds, bounds[1:], strict=False)
    }


def best_of_segments(scores_T, segments_T, num_selected):
    """bool [T]: the best of each document, the earlier of equals, found one by one."""
    chosen_T = np.zeros(len(scores_T), bool)
    for (start, end), places in dealt_places(segments_T, num_selected).items():
        if segments_T[start] > 0:
            order = sorted(range(start, end), key=lambda t: (-scores_T[t], t))
            chosen_T[order[:places]] = True
    return chosen_T


def visible_pairs(selected_BT, segments_BT, window):
    """bool [B, T, T]: pairs that see each other in the block, drawn one by one."""
    grid_BTS = np.zeros((*selected_BT.shape, selected_BT.shape[1]), bool)
    for row, query, key in np.ndindex(grid_BTS.shape):
        near = 0 <= query - key and (window == 0 or query - key < window)
        same = segments_BT[row, query] == segments_BT[row, key]
        both = selected_BT[row, query] and selected_BT[row, key]
        grid_BTS[row, query, key] = near and same and both
    return grid_BTS


def scores(params, x_BTD, model):
    """r of the routers that have one; zeros for the controls, which no gate reads."""
    if model.routing.router == 'norm':
        return (x_BTD**2).sum(-1) ** 0.5
    if model.routing.router in ('random', 'position'):
        return x_BTD[..., 0] * 0
    return x_BTD @ params['router']['w'] + params['router'].get('b', 0)


def equation(params, x_BTD, selected_BT, grid_BTS, model):
    """x + gate(r) (block(x) - x) where a token is selected, x elsewhere."""
    block, attention = params['block'], params['block']['attention']

    def norm(x, scale):
        return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + model.norm_eps) * scale

    def project(equation, x, part):
        return jnp.einsum(equation, x, part['kernel']) + part.get('bias', 0)

    def queries_or_keys(x, name):
        y = project('btd,dnh->btnh', x, attention[name])
        if model.qk_norm != 'none':
            shape = y.shape
            y = y.reshape(*shape[:2], -1) if model.qk_norm == 'full' else y
            y = norm(y, attention[f'{name}_norm']['scale']).reshape(shape)
        half = model.head_dim // 2
        angle = np.arange(LENGTH)[:, None] / model.rope_theta ** (np.arange(half) / half)
        sin, cos = np.sin(angle)[:, None], np.cos(angle)[:, None]
        first, second = y[..., :half], y[..., half:]
        return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)

    def attend(x):
        group = model.num_heads // model.num_kv_heads
        query = queries_or_keys(x, 'query')
        key = jnp.repeat(queries_or_keys(x, 'key'), group, axis=2)
        value = jnp.repeat(project('btd,dnh->btnh', x, attention['value']), group, axis=2)
        scores = jnp.einsum('btnh,bsnh->bnts', query, key) / np.sqrt(model.head_dim)
        terms = jnp.where(grid_BTS[:, None], jnp.exp(scores), 0)
        weights = terms / jnp.maximum(terms.sum(-1, keepdims=True), 1e-300)
        o = jnp.einsum('bnts,bsnh->btnh', weights, value)
        return project('btnh,nhd->btd', o, attention['out'])

    def transform(x):
        gate, value = (project('btd,df->btf', x, block['mlp'][name]) for name in ('w1', 'w3'))
        return project('btf,fd->btd', gate / (1 + jnp.exp(-gate)) * value, block['mlp']['w2'])

    x = x_BTD
    for part, name in ((attend, 'attention_norm'), (transform, 'mlp_norm')):
        scale = block[name]['scale']
        if model.norm_placement == 'pre':
            x = x + part(norm(x, scale))
        elif model.norm_placement == 'post':
            x = norm(x + part(x), scale)
        else:
            x = x + norm(part(x), scale)
    gate_BT = GATES[model.routing.gate](scores(params, x_BTD, model))
    return jnp.where(selected_BT[..., None], x_BTD + gate_BT[..., None] * (x - x_BTD), x_BTD)


def value_and_gradients(function, params, x_BTD, weights_BTD):
    """function(params, x) and the gradients of its inner product with `weights`, under one jit."""

    def loss(params, x_BTD):
        y_BTD, record = function(params, x_BTD)
        return jnp.vdot(y_BTD, weights_BTD), (y_BTD, record)

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, (y_BTD, record)), gradients = run(params, x_BTD)
    return jax.tree.map(np.asarray, (y_BTD, gradients)), record


def assert_close(got, exact, tolerance):
    """Every leaf within `tolerance` of its largest element, or of 1% of the largest of all."""
    assert jax.tree.structure(got) == jax.tree.structure(exact)
    size = max(np.abs(leaf).max() for leaf in jax.tree.leaves(exact))
    for one, right in zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True):
        atol = tolerance * max(np.abs(right).max(), 0.01 * size)
        np.testing.assert_allclose(one, right, rtol=0, atol=atol)


def routed(model, window=0, routing='top_c', seed=0, sizes=(LENGTH,)):
    """Random parameters, and the function (params, x, segments, ..) -> y, RoutingRecord."""

    def layer_args(threshold=0.0, causal=True):
        return RoutingArgs(jnp.int32(0), jnp.float32(threshold), jnp.asarray(causal))

    def tokens(segments_BT):
        positions_BT = POSITIONS[: len(segments_BT)]
        return TokenInfo(positions_BT, segments_BT, SEEDS[: len(segments_BT)])

    inputs = stream(), tokens(SEGMENTS), layer_args()
    by_top_c = MixtureOfDepths(model, window, 'top_c')
    shapes = jax.eval_shape(functools.partial(by_top_c.init, jax.random.key(0), *inputs))
    module = MixtureOfDepths(model, window, routing, sizes)

    def apply(params, x_BTD, segments_BT=SEGMENTS, **layer):
        y_BTD, _, _, record = module.apply(
            {'params': params}, x_BTD, tokens(segments_BT), layer_args(**layer)
        )
        return y_BTD, record

    return random_params(shapes['params'], seed), apply
