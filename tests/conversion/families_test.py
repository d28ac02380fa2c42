"""A config.json of a family is a model of ours and back; what is not is refused by its field."""

import json
import pathlib

import pytest

from moddepth_jax.conversion.families import config_of, family_of, knobs_of, read_config
from moddepth_jax.hparams import from_config

GOLDEN = pathlib.Path(__file__).parent / 'golden'
LLAMA = {  # as transformers 4 wrote it, with nothing that may be left out
    'model_type': 'llama',
    'vocab_size': 300,
    'hidden_size': 32,
    'intermediate_size': 64,
    'num_hidden_layers': 3,
    'num_attention_heads': 4,
}
OLMO2 = LLAMA | {'model_type': 'olmo2'}
OLMO2_KNOBS = {'model.norm_placement': 'reordered', 'model.qk_norm': 'full'}


def model_of(tiny_config, knobs, **changes):
    changes = {f'model.{name}': value for name, value in (knobs | changes).items()}
    return from_config(tiny_config(**changes)).model


@pytest.mark.parametrize(
    ('config', 'eps', 'placement', 'qk_norm'),
    [(LLAMA, 1e-6, 'pre', 'none'), (OLMO2, 1e-5, 'reordered', 'full')],
)
def test_what_a_config_leaves_out_is_as_transformers_has_it(config, eps, placement, qk_norm):
    """One key/value head a query head, heads that fill the width, no biases, theta 10000."""
    knobs = knobs_of(config, 'config.json')
    assert knobs == {
        **dict(vocab_size=300, num_layers=3, d_model=32, d_ff=64),
        **dict(num_heads=4, num_kv_heads=4, head_dim=8, windows=(0,)),
        **dict(norm_placement=placement, qk_norm=qk_norm, norm_eps=eps, rope_theta=10000.0),
        **dict(use_bias=False, tie_embeddings=False),
    }


def test_both_forms_of_the_rotary_base_are_read():
    """rope_theta of transformers 4; rope_parameters of 5, which has precedence."""
    newer = {'rope_theta': 1.0, 'rope_parameters': {'rope_type': 'default', 'rope_theta': 5e5}}
    for rope in (newer, {'rope_theta': 500000, 'rope_scaling': {'type': 'default'}}):
        assert knobs_of(LLAMA | rope, 'config.json')['rope_theta'] == 5e5


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        ({'model_type': 'mistral'}, ["model_type='mistral'", 'llama or olmo2']),
        ({'architectures': ['LlamaForSequenceClassification']}, ['architectures=', 'LlamaForC']),
        ({'rope_scaling': {'rope_type': 'llama3', 'factor': 8.0}}, ['rope_scaling=', 'llama3']),
        ({'rope_parameters': {'rope_theta': 'x'}}, ['rope_parameters=', 'rope_theta', 'number']),
        ({'sliding_window': 4096}, ['sliding_window=4096', 'None']),
        ({'layer_types': ['full_attention', 'sliding_attention']}, ['layer_types=']),
        ({'layer_types': [['full_attention']]}, ["layer_types=[['full", 'must be full_attention']),
        ({'layer_types': 7}, ['layer_types=7', 'must be full_attention']),
        ({'model_type': ['llama']}, ["model_type=['llama']", 'llama or olmo2']),
        ({'rope_scaling': {'rope_type': ['default']}}, ['rope_scaling=', "rope_type 'default'"]),
        ({'rope_parameters': 3}, ['rope_parameters=3', "rope_type 'default'"]),
        ({'rope_theta': 10**400}, ['rope_theta=1000', 'number above 0']),
        ({'hidden_act': [['silu']]}, ['hidden_act=', "'silu'"]),
        ({'tie_word_embeddings': 'no'}, ["tie_word_embeddings='no'", 'true or false']),
        ({'attention_bias': True}, ['attention_bias=True', 'mlp_bias=False']),
        ({'model_type': 'olmo2', 'attention_bias': True}, ['attention_bias=True', 'olmo2']),
        ({'hidden_act': 'gelu'}, ["hidden_act='gelu'", "'silu'"]),
        ({'partial_rotary_factor': 0.5}, ['partial_rotary_factor=0.5']),
        ({'quantization_config': {'bits': 4}}, ['quantization_config=']),
        ({'hidden_size': None}, ['hidden_size=None', 'integer']),
        ({'rms_norm_eps': 'small'}, ["rms_norm_eps='small'", 'number']),
        ({'num_hidden_layers': 0}, ['num_hidden_layers=0', 'integer from 1 on']),
        ({'num_attention_heads': 5}, ['num_attention_heads=5', 'hidden_size=32', 'head_dim']),
    ],
    ids=lambda value: str(value)[:50],
)
def test_fields_without_a_knob_are_refused(changes, words):
    with pytest.raises(ValueError) as caught:
        knobs_of(LLAMA | changes, 'folder/config.json')
    message = str(caught.value)
    assert message.startswith('folder/config.json: ') and '\n' not in message
    assert all(word in message for word in words), message


def test_a_missing_size_is_named():
    for key in LLAMA.keys() - {'model_type'}:
        with pytest.raises(ValueError, match=f'{key}=None: missing'):
            knobs_of({name: LLAMA[name] for name in LLAMA if name != key}, 'config.json')


@pytest.mark.parametrize('name', ['llama', 'llama_tied', 'olmo2'])
def test_a_config_comes_back(name, tiny_config):
    """The knobs survive a round trip; an original that still applies is kept except the dtype."""
    original = read_config(GOLDEN / name)
    knobs = knobs_of(original, name)
    model = model_of(tiny_config, knobs)
    ids = {'bos_token_id': 256, 'eos_token_id': [256]}
    assert knobs_of(config_of(model, 'float32', 64, ids), name) == knobs
    kept = config_of(model, 'bfloat16', 64, ids, original)
    assert kept == original | {'dtype': 'bfloat16'}
    longer = model_of(tiny_config, knobs, num_layers=3)
    assert config_of(longer, 'float32', 64, ids, original)['num_hidden_layers'] == 3
    assert json.loads(json.dumps(kept)) == kept


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        ({'model.routing.router': 'learned'}, "router='learned': the format has no routed"),
        ({'model.depth.stream': 'moda'}, "stream='moda': the format has no depth stream"),
        ({'model.experts.choice': 'token'}, "choice='token': the format has no such experts"),
        ({'model.windows': (0, 8)}, 'windows=(0, 8): the format has no windows'),
        (
            {'model.embedding_residual': 'learned'},
            "embedding_residual='learned': the format has no blend of the embedded tokens",
        ),
        ({'model.value_embeddings': 'all'}, "value_embeddings='all': the format has no tables of"),
        ({'model.norm_placement': 'post'}, "norm_placement='post', model.qk_norm='none': must be"),
        ({'model.qk_norm': 'head'}, "qk_norm='head': must be pre and none (llama), or reordered"),
        (OLMO2_KNOBS | {'model.use_bias': True}, 'use_bias=True: an mlp of olmo2'),
    ],
    ids=str,
)
def test_a_model_without_a_place_in_the_format_is_refused(changes, words, tiny_config):
    with pytest.raises(ValueError) as caught:
        family_of(from_config(tiny_config(**changes)).model)
    assert words in str(caught.value) and '\n' not in str(caught.value)


def test_a_folder_without_a_config_is_refused(tmp_path):
    for text, words in (
        (None, 'holds no config.json'),
        ('{"model_type": "lla', 'config.json: cannot be read .*; download it again'),
        ('[]', 'config.json: cannot be read .not a JSON object.; download'),
    ):
        if text is not None:
            (tmp_path / 'config.json').write_text(text)
        with pytest.raises(ValueError, match=words):
            read_config(tmp_path)
