"""Whole models with depth streams equal the public code of their authors and others.

golden/ has logits and gradients of that code; make_golden.py made them. For Depth-Attention it has
only the mixed values of five layers, because that code rotates keys before their norm.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.model.attention import DepthSlots, KeysValues
from moddepth_jax.model.stack import Stack
from moddepth_jax.model.streams import layer_kinds
from moddepth_jax.model.streams.value_attention import MixValues
from moddepth_jax.model.transformer import Transformer
from tests.model.cases import MIXED, RECENT, parameters, small_hparams

GOLDEN = pathlib.Path(__file__).parent / 'golden'
LAYERS = 3
BLOCKS = {  # our name: (that of Llama, that of MUDDFormer)
    'attention/query': ('self_attn.q_proj', 'attention.wq'),
    'attention/key': ('self_attn.k_proj', 'attention.wk'),
    'attention/value': ('self_attn.v_proj', 'attention.wv'),
    'attention/out': ('self_attn.o_proj', 'attention.wo'),
    'attention_norm': ('input_layernorm', 'attention_norm'),
    'mlp/w1': ('mlp.gate_proj', 'feed_forward.w1'),
    'mlp/w2': ('mlp.down_proj', 'feed_forward.w2'),
    'mlp/w3': ('mlp.up_proj', 'feed_forward.w3'),
    'mlp_norm': ('post_attention_layernorm', 'ffn_norm'),
}
ENDS = {
    'embedding': ('embed_tokens', 'tok_embeddings'),
    'final_norm': ('norm', 'norm'),
    'head': ('lm_head', 'output'),
}


def hyper(leaves, layer, part, name, shape):
    """Hyper-connections. The scale of a public norm belongs to the matrix that it multiplies."""
    number = 2 * layer + part.startswith('mlp')
    side, _, what = name.removeprefix('projections_').partition('_')

    def leaf(name):
        return leaves[f'connections.{number}.{name}']

    if what == 'scale':
        return leaf('dynamic_beta_scale' if side == 'add' else 'dynamic_alpha_scale')
    kernel = not what
    if side == 'add':
        found = leaf('dynamic_beta_fn')[:, None] if kernel else leaf('static_beta')
    else:
        both = leaf('dynamic_alpha_fn' if kernel else 'static_alpha')
        found = both[:, 1:] if side == 'mix' else both[:, :1]
        found = found if kernel or side == 'mix' else found[:, 0]
    return (1 + leaf('norm.gamma'))[:, None] * found if kernel else found


def constrained(leaves, layer, part, name, shape):
    """mHC: one matrix, one bias and three scales for the read, add and mix weights."""
    number = 2 * layer + part.startswith('mlp')
    side, _, what = name.removeprefix('projections_').partition('_')
    place = ('read', 'add', 'mix').index(side)
    if what == 'scale':
        return leaves[f'alpha.{number}'][place]
    columns = slice(4 * place, 4 * place + (16 if side == 'mix' else 4))
    if what == 'bias':
        return leaves[f'b.{number}'][columns].reshape(shape)
    return leaves[f'phi.{number}'][:, columns]


def attention_residual(leaves, layer, part, name, shape):
    """Attention residuals: a query and a scale for each sublayer and the last read."""
    return leaves[f'{name}.{2 * layer + part.startswith("mlp")}']


def average(leaves, layer, part, name, shape):
    """DenseFormer, which has no sum before the first block."""
    if not layer:
        return jnp.ones(shape)
    return leaves[f'averages.alphas.{layer - 1}.weight'][0]


def mudd(leaves, layer, part, name, shape):
    """MUDD connections by age, padded with zeros. The public first block reads the embedding."""
    if not layer:
        return jnp.zeros(shape).at[:, 0].set(1) if name == 'bias' else jnp.zeros(shape)
    if name == 'inner':
        found = leaves[f'dynamic_dense.{layer - 1}.w1.weight'].T
    elif name == 'outer':
        found = leaves[f'dynamic_dense.{layer - 1}.w2.weight'].T
        found = found.reshape(len(found), shape[1], -1)
    else:
        found = leaves[f'dense_bs.{layer - 1}']
    if name != 'inner':
        found = jnp.flip(found, axis=-1)  # the public code has the oldest first
    return jnp.pad(found, [(0, full - size) for full, size in zip(shape, found.shape, strict=True)])


def nanochat(leaves, layer, part, name, shape):
    """nanochat. The scales of its query and key norms are a constant."""
    return {
        'scale': lambda: jnp.full(shape, 1.2),
        'gate': lambda: leaves[f'layers.{layer}.self_attn.ve_gate.weight'].T,
        'embedding': lambda: leaves[f'value_embeds.{layer}.weight'].reshape(shape),
        'residual_scale': lambda: leaves['resid_lambdas'][layer],
        'embedding_scale': lambda: leaves['x0_lambdas'][layer],
    }[name]()


def modded_nanogpt(leaves, layer, part, name, shape):
    """modded-nanogpt. One weight is the share of the first layer's values."""
    first = leaves[f'layers.{layer}.self_attn.lamb']
    scales = leaves[f'layers.{layer}.lambdas']
    return {
        'scale': jnp.ones(shape),
        'weights': jnp.stack([first, 1 - first]),
        'residual_scale': scales[0],
        'embedding_scale': scales[1],
    }[name]


def as_llama(leaves):
    """Return the leaves of nanochat or modded-nanogpt by the names of a Llama.

    Their norms have no scales, the embedded tokens are normed as well, and heads are rotated
    backwards, as if the halves of each head were exchanged.
    """
    names = {'transformer.h.': 'layers.', '.attn.': '.self_attn.'}
    names |= {f'c_{public}.': f'{ours}_proj.' for public, ours in zip('qkv', 'qkv', strict=True)}
    names |= {'self_attn.c_proj': 'self_attn.o_proj', 'transformer.wte': 'embed_tokens'}
    found = {}
    for key, leaf in leaves.items():
        for public, ours in names.items():
            key = key.replace(public, ours)
        if 'q_proj' in key or 'k_proj' in key:
            leaf = leaf.reshape(-1, 2, 2, leaf.shape[1])[:, ::-1].reshape(leaf.shape)
        if key == 'embed_tokens.weight':
            leaf /= jnp.sqrt(jnp.mean(leaf**2, axis=1, keepdims=True))
        found[key] = leaf
    ones = jnp.ones(found['embed_tokens.weight'].shape[1])
    norms = [
        f'layers.{i}.{BLOCKS[name][0]}' for i in range(LAYERS) for name in BLOCKS if 'norm' in name
    ]
    return found | {f'{name}.weight': ones for name in (*norms, 'norm')}


# name: (knobs of the model, leaves that Llama does not have)
RESIDUAL, NORMED = {'embedding_residual': 'learned'}, {'qk_norm': 'head'}
MODELS = {
    'value_residual': ({'depth.stream': 'value_residual', 'depth.value_mix': 'fixed'}, None),
    'value_shared': ({'depth.stream': 'value_residual', 'depth.value_mix': 'shared'}, None),
    'attention_residual': ({'depth.stream': 'attention_residual'}, attention_residual),
    'attention_residual_blocks': (
        {'depth.stream': 'attention_residual', 'depth.sublayers_per_source': 5},
        attention_residual,
    ),
    'average': ({'depth.stream': 'average', 'layer_loop': 'unrolled'}, average),
    'hyper_connections': ({'depth.stream': 'hyper_connections'}, hyper),
    'hyper_static': ({'depth.stream': 'hyper_connections', 'depth.hyper_form': 'static'}, hyper),
    'mhc': ({'depth.stream': 'hyper_connections', 'depth.hyper_form': 'constrained'}, constrained),
    'mudd': ({'depth.stream': 'mudd', 'num_kv_heads': 4}, mudd),
    'nanochat': (
        RESIDUAL | NORMED | {'value_embeddings': 'alternate', 'rope_theta': 1e5},
        nanochat,
    ),
    'modded_nanogpt': (
        RESIDUAL | NORMED | {'depth.stream': 'value_residual', 'num_kv_heads': 4},
        modded_nanogpt,
    ),
}


def parameters_of(hparams, name, connection, leaves):
    """Return our parameters that equal those of the public model."""
    form = int(name == 'mudd')
    leaves = as_llama(leaves) if 'nano' in name else leaves

    def plain(path, prefix, names, shape):
        path = path.removesuffix('/kernel').removesuffix('/scale')
        public = f'{prefix}{names[path][form]}.weight'
        if public not in leaves:  # its three equal norms
            public = public.replace('attention_norm', 'attention_norms.0')
        leaf = leaves[public]
        matrix = leaf.ndim == 2 and path != 'embedding'
        return (leaf.T if matrix else leaf).reshape(shape)

    def leaf_of(layer, path, shape):
        if path.rpartition('/')[0].removesuffix('/scale') in BLOCKS:
            return plain(path, f'layers.{layer}.', BLOCKS, shape)
        part, name = path.removesuffix('/kernel').replace('reader/', '').rsplit('/', 1)
        return connection(leaves, layer, part, name, shape)

    stack = Stack(hparams.model, 'top_c')
    first = layer_kinds(hparams.model)[0].part == 'entry'

    def fill(path, leaf):
        top, *keys = [key.key for key in path]
        if top != 'stack':
            return plain('/'.join([top, *keys]), '', ENDS, leaf.shape)
        run, group, *name = keys
        places = [(place.run, place.layer) for place, _ in stack.visits]
        layers = [i - first for i, place in enumerate(places) if place == (run, group)]
        return jnp.stack([leaf_of(layer, '/'.join(name), leaf.shape[1:]) for layer in layers])

    model, tokens_BT = Transformer(hparams), np.zeros((2, 7), np.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens_BT)['params']
    return jax.tree_util.tree_map_with_path(fill, shapes)


@pytest.mark.parametrize('name', parameters(('mudd', 'hyper_connections'), MODELS))
def test_logits_and_gradients_are_those_of_public_code(name, tiny_config):
    """Both in float64: logits to 1e-6, and each gradient to 1e-6 of its largest number."""
    knobs, connection = MODELS[name]
    sizes = {'norm_eps': 1e-12, 'num_layers': LAYERS, 'num_kv_heads': 2, 'tie_embeddings': False}
    sizes = sizes | {'dtype': 'float64'} | knobs
    hparams = small_hparams(tiny_config, {f'model.{knob}': value for knob, value in sizes.items()})
    with np.load(GOLDEN / f'{name}.npz') as file:
        tokens_BT = file['tokens']
        golden = {key: file[key].astype(np.float64) for key in file if key != 'tokens'}
    weights_BTV, expected_BTV = golden.pop('weights'), golden.pop('logits')
    slopes = {key: golden.pop(f'd {key}') for key in list(golden) if not key.startswith('d ')}

    def loss(leaves):
        params = parameters_of(hparams, name, connection, leaves)
        logits_BTV, _ = Transformer(hparams).apply({'params': params}, tokens_BT)
        return jnp.mean(logits_BTV * weights_BTV), logits_BTV

    with jax.enable_x64(True), jax.numpy_rank_promotion('allow'):
        (_, logits_BTV), found = jax.jit(jax.value_and_grad(loss, has_aux=True))(golden)
        found = jax.device_get(found)
    np.testing.assert_allclose(logits_BTV, expected_BTV, rtol=0, atol=1e-6)
    assert found.keys() == slopes.keys()
    assert sum(not np.any(slope) for slope in slopes.values()) <= 2  # a read of one source
    for key, slope in slopes.items():
        error = np.abs(found[key] - slope).max()
        assert error <= 1e-6 * np.abs(slope).max(), key


@pytest.mark.parametrize('name', ['stride', 'recent'])
def test_mixed_values_and_gradients_are_those_of_public_code(name, tiny_config):
    """Depth-Attention over five layers with all slots in one buffer, to 3e-6."""
    knobs = {'stride': MIXED, 'recent': RECENT}[name]
    hparams = small_hparams(tiny_config, knobs, {'model.num_layers': 5}).model
    golden = dict(np.load(GOLDEN / 'value_attention.npz'))

    def loss(leaves):
        empty_LBTKH = jnp.zeros((sum(kind.slots for kind in layer_kinds(hparams)), 2, 3, 2, 4))
        slots, count, values = KeysValues(empty_LBTKH, empty_LBTKH), 0, []
        for kind, q_BTNH, k_BTKH, v_BTKH in zip(layer_kinds(hparams), *leaves, strict=True):
            if kind.mixes:
                depth = DepthSlots(slots, count=count)
                v_BTKH, depth = MixValues(hparams).apply(
                    {}, None, q_BTNH, k_BTKH, v_BTKH, None, depth
                )
                slots = depth.slots
            if kind.slots:
                own = KeysValues(k_BTKH, v_BTKH)
                slots = jax.tree.map(lambda side, new, i=count: side.at[i].set(new), slots, own)
                count += 1
            values.append(v_BTKH)
        return jnp.sum(jnp.stack(values) * golden['weights']), jnp.stack(values)

    leaves = [golden[key] for key in 'qkv']
    (_, values_LBTKH), slopes = jax.jit(jax.value_and_grad(loss, has_aux=True))(leaves)
    np.testing.assert_allclose(values_LBTKH, golden[f'values {name}'], rtol=0, atol=3e-6)
    for key, slope in zip('qkv', slopes, strict=True):
        np.testing.assert_allclose(slope, golden[f'd {key} {name}'], rtol=0, atol=3e-6)
