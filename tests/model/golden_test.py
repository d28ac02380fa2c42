"""Weights copied from Hugging Face models give those models' logits; see tests/make_golden.py."""

import functools
import json
import pathlib

import jax
import numpy as np
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.model.transformer import Transformer

# Unoptimised programs, of the same operations, compile in less than half the time.
jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})
GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
NORMS = {
    'llama': {
        'attention_norm': 'input_layernorm',
        'mlp_norm': 'post_attention_layernorm',
    },
    'olmo2': {
        'attention_norm': 'post_attention_layernorm',
        'mlp_norm': 'post_feedforward_layernorm',
    },
}


def read(name):
    with np.load(GOLDEN / f'{name}.npz') as file:
        arrays = dict(file)
    return json.loads(str(arrays.pop('config'))), arrays


def overrides(config):
    """The knobs that make this model a Llama or an OLMo2."""
    olmo2 = config['family'] == 'olmo2'
    return {
        'model.vocab_size': config['vocab_size'],
        'model.num_layers': config['num_hidden_layers'],
        'model.d_model': config['hidden_size'],
        'model.d_ff': config['intermediate_size'],
        'model.num_heads': config['num_attention_heads'],
        'model.num_kv_heads': config['num_key_value_heads'],
        'model.head_dim': config['head_dim'],
        'model.norm_placement': 'reordered' if olmo2 else 'pre',
        'model.qk_norm': 'full' if olmo2 else 'none',
        'model.norm_eps': config['rms_norm_eps'],
        'model.rope_theta': config['rope_theta'],
        'model.tie_embeddings': config['tie_word_embeddings'],
    }


def layer_params(config, arrays, layer):
    """Parameters of one block. Hugging Face matrices are [out, in], ours [in, heads, width]."""
    prefix = f'model.layers.{layer}.'
    width, d_model = config['head_dim'], config['hidden_size']

    def matrix(name, *shape):
        return {'kernel': arrays[f'{prefix}{name}.weight'].T.reshape(*shape)}

    def scale(name):
        return {'scale': arrays[f'{prefix}{name}.weight']}

    params = {
        'attention': {
            'query': matrix('self_attn.q_proj', d_model, -1, width),
            'key': matrix('self_attn.k_proj', d_model, -1, width),
            'value': matrix('self_attn.v_proj', d_model, -1, width),
            'out': matrix('self_attn.o_proj', -1, width, d_model),
        },
        'mlp': {
            'w1': matrix('mlp.gate_proj', d_model, -1),
            'w3': matrix('mlp.up_proj', d_model, -1),
            'w2': matrix('mlp.down_proj', -1, d_model),
        },
    }
    params |= {ours: scale(theirs) for ours, theirs in NORMS[config['family']].items()}
    if config['family'] == 'olmo2':
        params['attention']['query_norm'] = scale('self_attn.q_norm')
        params['attention']['key_norm'] = scale('self_attn.k_norm')
    return params


def converted(config, arrays):
    """The state dict as parameters of a dense Transformer, layers stacked."""
    layers = [layer_params(config, arrays, i) for i in range(config['num_hidden_layers'])]
    params = {
        'embedding': arrays['model.embed_tokens.weight'],
        'stack': {'run_0': {'layer_0': jax.tree.map(lambda *leaves: np.stack(leaves), *layers)}},
        'final_norm': {'scale': arrays['model.norm.weight']},
    }
    if not config['tie_word_embeddings']:
        params['head'] = {'kernel': arrays['lm_head.weight'].T}
    return params


@pytest.mark.parametrize('name', ['llama', 'llama_tied', 'olmo2'])
def test_logits_are_the_other_implementations(name, tiny_config):
    """Logits equal Hugging Face's to 1e-5 in float32, scanned and unrolled, every tensor used."""
    config, arrays = read(name)
    params = converted(config, arrays)
    tied = arrays['lm_head.weight'].size if config['tie_word_embeddings'] else 0
    weights = sum(array.size for key, array in arrays.items() if key.endswith('weight'))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == weights - tied
    for loop in ('scan', 'unrolled'):
        hparams = from_config(tiny_config(**overrides(config), **{'model.layer_loop': loop}))
        model = Transformer(hparams)
        with jax.default_matmul_precision('highest'):
            logits_BTV, records = jit(model.apply)({'params': params}, arrays['tokens_BT'])
        assert records is None
        np.testing.assert_allclose(logits_BTV, arrays['logits_BTV'], rtol=0, atol=1e-5)


def test_every_weight_matters(tiny_config):
    """Zeroing any one tensor of the parameters moves the logits, so none can be read wrongly."""
    config, arrays = read('olmo2')
    params = converted(config, arrays)
    hparams = from_config(tiny_config(**overrides(config)))
    apply = jit(Transformer(hparams).apply)
    leaves, tree = jax.tree.flatten(params)
    for i in range(len(leaves)):
        changed = [np.zeros_like(leaf) if i == j else leaf for j, leaf in enumerate(leaves)]
        logits_BTV, _ = apply({'params': tree.unflatten(changed)}, arrays['tokens_BT'])
        assert np.abs(logits_BTV - arrays['logits_BTV']).max() > 1e-3
