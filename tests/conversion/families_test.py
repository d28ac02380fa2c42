"""A config.json of a family becomes our knobs and back; unsupported fields are refused by name."""

import json
import pathlib

import pytest

from moddepth_jax.conversion.families import FAMILIES, config_of, family_of, knobs_of, read_config
from moddepth_jax.hparams import from_config
from tests.data.prepared_text import refusal

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
LLAMA3 = {
    'rope_type': 'llama3',
    'factor': 32.0,
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
    'original_max_position_embeddings': 8192,
}
YARN = {'rope_type': 'yarn', 'factor': 8.0, 'original_max_position_embeddings': 8192}
SLIDING = ['sliding_attention'] * 3
QWEN2, QWEN3 = LLAMA | {'model_type': 'qwen2'}, LLAMA | {'model_type': 'qwen3'}
MISTRAL, OLMO3 = LLAMA | {'model_type': 'mistral'}, LLAMA | {'model_type': 'olmo3'}
WINDOWED = {'use_sliding_window': True, 'sliding_window': 7, 'max_window_layers': 2}


def model_of(tiny_config, knobs, **changes):
    changes = {f'model.{name}': value for name, value in (knobs | changes).items()}
    return from_config(tiny_config(**changes)).model


@pytest.mark.parametrize(
    ('config', 'eps', 'placement', 'qk_norm'),
    [(LLAMA, 1e-6, 'pre', 'none'), (OLMO2, 1e-5, 'reordered', 'full')],
)
def test_what_a_config_leaves_out_is_as_transformers_has_it(config, eps, placement, qk_norm):
    """One key/value head per query head, heads that fill the width, no biases, theta 10000."""
    knobs = knobs_of(config, 'config.json')
    assert knobs == {
        **dict(vocab_size=300, num_layers=3, d_model=32, d_ff=64),
        **dict(num_heads=4, num_kv_heads=4, head_dim=8, windows=(0,)),
        **dict(norm_placement=placement, qk_norm=qk_norm, norm_eps=eps, rope_theta=10000.0),
        **dict(use_bias=False, tie_embeddings=False, attention_bias='none', rope_scaling='none'),
    }


@pytest.mark.parametrize(
    ('config', 'knobs'),
    [
        (MISTRAL, {'windows': (4096,), 'num_kv_heads': 8, 'norm_eps': 1e-6}),
        (MISTRAL | {'sliding_window': None, 'num_key_value_heads': 2}, {'windows': (0,)}),
        (MISTRAL | {'layer_types': SLIDING}, {'windows': (4096,)}),
        (QWEN2, {'attention_bias': 'qkv', 'windows': (0,), 'num_kv_heads': 32, 'qk_norm': 'none'}),
        (QWEN2 | {'sliding_window': 7, 'max_window_layers': 1}, {'windows': (0,)}),
        (QWEN2 | WINDOWED, {'windows': (0, 0, 7)}),
        (QWEN2 | WINDOWED | {'sliding_window': None}, {'windows': (0,)}),
        (QWEN2 | WINDOWED | {'layer_types': SLIDING}, {'windows': (7,)}),
        (QWEN3, {'attention_bias': 'none', 'qk_norm': 'head', 'head_dim': 128}),
        (QWEN3 | {'attention_bias': True, 'head_dim': None}, {'attention_bias': 'qkvo'}),
        (OLMO3, {'windows': (4096,), 'rope_theta': 5e5, 'qk_norm': 'full'}),
        (OLMO3 | {'num_hidden_layers': 8, 'sliding_window': 5}, {'windows': (5, 5, 5, 0)}),
        (OLMO3 | {'rope_theta': 1e4, 'layer_types': None}, {'rope_theta': 1e4}),
        (LLAMA | {'attention_bias': True}, {'use_bias': False, 'attention_bias': 'qkvo'}),
        (LLAMA | dict.fromkeys(('attention_bias', 'mlp_bias'), True), {'use_bias': True}),
        (OLMO2 | {'attention_bias': True}, {'use_bias': False, 'attention_bias': 'qkvo'}),
    ],
    ids=lambda value: str(value)[-60:],
)
def test_families_differ_where_transformers_does(config, knobs):
    """They differ in biases, windows, and the fields that a config.json may leave out."""
    found = knobs_of(config, 'config.json')
    assert {name: found[name] for name in knobs} == knobs


@pytest.mark.parametrize('key', ['rope_scaling', 'rope_parameters'])
def test_scaled_frequencies_are_read(key):
    """Those of Llama 3.2; the original context is by default that of the model."""
    config = LLAMA | {'rope_theta': 5e5, 'max_position_embeddings': 64}
    knobs = knobs_of(config | {key: LLAMA3}, 'config.json')
    assert (knobs['rope_scaling'], knobs['rope_theta']) == ('llama3:32:1:4:8192', 5e5)
    short = {name: value for name, value in LLAMA3.items() if name[:4] != 'orig'}
    short |= {'factor': 1.5, 'rope_theta': 100}
    knobs = knobs_of(config | {key: short}, 'config.json')
    assert (knobs['rope_scaling'], knobs['rope_theta']) == ('llama3:1.5:1:4:64', 100.0)


def test_smollm_is_a_llama():
    """The config.json of SmolLM2-135M is read; SmolLM3 is refused with the reason."""
    smollm = {'is_llama_config': True, 'rope_interleaved': False, 'rope_scaling': None}
    smollm |= {'tie_word_embeddings': True, 'pretraining_tp': 1, 'rope_theta': 100000}
    knobs = knobs_of(LLAMA | smollm, 'config.json')
    assert knobs['tie_embeddings'] and knobs['rope_theta'] == 1e5
    smollm3 = LLAMA | {'model_type': 'smollm3', 'no_rope_layers': [1, 1, 1, 0]}
    with pytest.raises(ValueError, match="model_type='smollm3': must be one of .* without RoPE"):
        knobs_of(smollm3, 'config.json')


def test_both_forms_of_the_rotary_base_are_read():
    """rope_theta of transformers 4; rope_parameters of 5, which has precedence."""
    newer = {'rope_theta': 1.0, 'rope_parameters': {'rope_type': 'default', 'rope_theta': 5e5}}
    for rope in (
        newer,
        newer | {'rope_theta': None},
        {'rope_theta': 500000, 'rope_scaling': {'type': 'default'}},
    ):
        assert knobs_of(LLAMA | rope, 'config.json')['rope_theta'] == 5e5


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        ({'model_type': 'gemma2'}, ["model_type='gemma2'", 'one of llama, mistral, qwen2, q']),
        ({'architectures': ['LlamaForSequenceClassification']}, ['architectures=', 'LlamaForC']),
        ({'rope_scaling': {'rope_type': 'llama3', 'factor': 8.0}}, ['rope_scaling=', 'low_freq']),
        (
            {'rope_scaling': YARN},
            ["'rope_type': 'yarn'", "must have rope_type 'default' or 'llama"],
        ),
        ({'rope_parameters': {'type': 'dynamic', 'factor': 2.0}}, ["'dynamic'", "'default' or"]),
        ({'rope_scaling': LLAMA3 | {'factor': 0.5}}, ['rope_scaling=', 'factor must be 1 or more']),
        ({'rope_scaling': LLAMA3 | {'low_freq_factor': 4}}, ['below high_freq_factor']),
        ({'rope_scaling': LLAMA3 | {'attention_factor': 2}}, ['llama3 must have', 'exactly']),
        ({'rope_scaling': LLAMA3, 'rope_parameters': {'rope_type': 'default'}}, ['the same for']),
        (OLMO3 | {'rope_scaling': LLAMA3}, ['rope_scaling=', 'some layers']),
        (
            OLMO3 | {'rope_parameters': {'full_attention': {}, 'sliding_attention': LLAMA3}},
            ['rope_parameters=', 'the same for all layers'],
        ),
        (MISTRAL | {'sliding_window': 0}, ['sliding_window=0', 'positive integer']),
        (MISTRAL | {'layer_types': ['full_attention'] * 3}, ['layer_types=', 'everywhere']),
        (
            QWEN2 | WINDOWED | {'sliding_window': None, 'layer_types': SLIDING},
            ['sliding_window=None', 'integer'],
        ),
        (QWEN2 | WINDOWED | {'max_window_layers': 'x'}, ["max_window_layers='x'", 'integer']),
        (QWEN2 | {'layer_types': SLIDING}, ['use_sliding_window=None', 'must be true']),
        (QWEN3 | WINDOWED | {'layer_types': SLIDING[:2]}, ['each of num_hidden_layers=3']),
        (OLMO3 | {'layer_types': ['chunked_attention'] * 3}, ["layer_types=['chunked", 'for each']),
        ({'num_hidden_layers': 10**6}, ['num_hidden_layers=1000000', 'integer up to 10000']),
        ({'rope_parameters': {'rope_theta': 'x'}}, ['rope_parameters=', 'rope_theta', 'number']),
        ({'sliding_window': 4096}, ['sliding_window=4096', 'None']),
        ({'layer_types': ['full_attention', 'sliding_attention']}, ['layer_types=']),
        ({'layer_types': [['full_attention']]}, ["layer_types=[['full", 'must be full_attention']),
        ({'model_type': ['llama']}, ["model_type=['llama']", 'must be one of llama, ']),
        ({'rope_scaling': {'rope_type': ['default']}}, ['rope_scaling=', "rope_type 'default'"]),
        ({'rope_parameters': 3}, ['rope_parameters=3', "rope_type 'default'"]),
        ({'rope_theta': 10**400}, ['rope_theta=1000', 'number above 0']),
        ({'hidden_act': [['silu']]}, ['hidden_act=', "'silu'"]),
        ({'tie_word_embeddings': 'no'}, ["tie_word_embeddings='no'", 'true or false']),
        ({'mlp_bias': True}, ['mlp_bias=True', 'must be false', 'attention_bias']),
        ({'hidden_act': 'gelu'}, ["hidden_act='gelu'", "'silu'"]),
        ({'partial_rotary_factor': 0.5}, ['partial_rotary_factor=0.5']),
        ({'quantization_config': {'bits': 4}}, ['quantization_config=']),
        ({'hidden_size': None}, ['hidden_size=None', 'integer']),
        ({'rms_norm_eps': 'small'}, ["rms_norm_eps='small'", 'number']),
        ({'num_hidden_layers': 0}, ['num_hidden_layers=0', 'positive integer']),
        ({'num_attention_heads': 5}, ['num_attention_heads=5', 'hidden_size=32', 'head_dim']),
    ],
    ids=lambda value: str(value)[:50],
)
def test_fields_without_a_knob_are_refused(changes, words):
    message = refusal(knobs_of, LLAMA | changes, 'folder/config.json')
    assert message.startswith('folder/config.json: ')
    assert all(word in message for word in words), message


def test_a_missing_size_is_named():
    for key in LLAMA.keys() - {'model_type'}:
        with pytest.raises(ValueError, match=f'{key}=None: missing'):
            knobs_of({name: LLAMA[name] for name in LLAMA if name != key}, 'config.json')


@pytest.mark.parametrize('name', [path.name for path in sorted(GOLDEN.iterdir())])
def test_a_config_comes_back(name, tiny_config):
    """The knobs survive a round trip; an original that still applies is kept except the dtype."""
    original = read_config(GOLDEN / name)
    knobs = knobs_of(original, name)
    model = model_of(tiny_config, knobs)
    ids = {'bos_token_id': 256, 'eos_token_id': [256]}
    assert knobs_of(config_of(model, 'float32', 64, ids), name) == knobs
    assert family_of(model, original['model_type']) == original['model_type']
    kept = config_of(model, 'bfloat16', 64, {}, original)
    assert kept == original | {'dtype': 'bfloat16'}
    # Regression: ids and a longer context of the run were ignored.
    context = {'max_position_embeddings': 65}
    assert config_of(model, 'bfloat16', 65, ids, original) == kept | ids | context
    longer = model_of(tiny_config, knobs, num_layers=7)
    config = config_of(longer, 'float32', 64, ids, original)
    assert (config['num_hidden_layers'], config['model_type']) == (7, original['model_type'])
    assert model_of(tiny_config, knobs_of(config, name)) == longer
    assert json.loads(json.dumps(kept)) == kept


def test_a_longer_context_does_not_change_the_scaling_of_rope(tiny_config):
    """The original context of a scaled RoPE is by default the declared one."""
    short = {name: value for name, value in LLAMA3.items() if name[:4] != 'orig'}
    original = LLAMA | {'rope_scaling': short, 'max_position_embeddings': 64}
    knobs = knobs_of(original, 'config.json')
    for context in (64, 128):
        config = config_of(model_of(tiny_config, knobs), 'float32', context, {}, original)
        assert config['max_position_embeddings'] == context
        assert knobs_of(config, 'config.json') == knobs


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        ({'model.routing.router': 'learned'}, "router='learned': no family has routed"),
        ({'model.depth.stream': 'moda'}, "stream='moda': no family has depth stream"),
        ({'model.experts.choice': 'token'}, "choice='token': no family has such experts"),
        ({'model.value_embeddings': 'all'}, "value_embeddings='all': no family has tables of"),
        ({'model.looped_layers': 'all'}, "looped_layers='all': no family has looped blocks"),
        ({'model.embedding_residual': 'learned'}, "'learned': no family has embedding resid"),
        (
            {'model.windows': (4, 8)},
            'model.windows=(4, 8): no family has it; the nearest, llama, has windows=(0,)',
        ),
        (
            {'model.norm_placement': 'post'},
            "norm_placement='post': no family has it; the nearest, llama, has norm_placement='pre'",
        ),
        ({'model.qk_norm': 'full'}, "qk_norm='full': no family has it; the nearest, llama, has qk"),
        (OLMO2_KNOBS | {'model.use_bias': True}, 'model.use_bias=True, model.attention_bias='),
        (
            OLMO2_KNOBS | {'model.rope_scaling': 'llama3:8:1:4:64', 'model.windows': (5,)},
            '(5,): no',
        ),
    ],
    ids=str,
)
def test_a_model_without_a_place_in_the_format_is_refused(changes, words, tiny_config):
    assert words in refusal(family_of, from_config(tiny_config(**changes)).model)


@pytest.mark.parametrize(
    ('changes', 'kind'),
    [
        ({}, 'llama'),
        ({'model.rope_scaling': 'llama3:8.0:1.0:4:64', 'model.use_bias': True}, 'llama'),
        ({'model.windows': (8, 8)}, 'mistral'),
        ({'model.windows': (8, 0)}, 'qwen2 has biases'),
        ({'model.windows': (0, 8), 'model.attention_bias': 'qkv'}, 'qwen2'),
        ({'model.windows': (8, 0), 'model.qk_norm': 'head'}, 'qwen3'),
        (OLMO2_KNOBS, 'olmo2'),
        (OLMO2_KNOBS | {'model.windows': (0, 8), 'model.attention_bias': 'qkvo'}, 'olmo3'),
    ],
    ids=str,
)
def test_a_model_is_exported_as_the_first_family_that_has_it(changes, kind, tiny_config):
    model = from_config(tiny_config(**changes)).model
    if kind not in FAMILIES:
        with pytest.raises(ValueError, match='windows=.8, 0.: no family has it'):
            family_of(model)
    else:
        assert family_of(model) == kind


def test_a_folder_without_a_config_is_refused(tmp_path):
    for text, words in (
        (None, 'holds no config.json'),
        ('{"model_type": "lla', 'config.json: cannot be read .*; download it again'),
        ('[]', 'config.json: cannot be read .not a JSON object.; download'),
        ('{"a": [{"b": 1, "b": 1}]}', "config.json: cannot be read .holds 'b' twice.; download"),
    ):
        if text is not None:
            (tmp_path / 'config.json').write_text(text)
        with pytest.raises(ValueError, match=words):
            read_config(tmp_path)
