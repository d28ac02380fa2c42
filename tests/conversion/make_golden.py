"""Makes tests/conversion/golden/: tiny random models as `transformers` saves them, and its logits.

python -m venv /tmp/hugging_face && /tmp/hugging_face/bin/pip install torch==2.13.0 transformers
/tmp/hugging_face/bin/python tests/conversion/make_golden.py

Written with torch 2.13.0 and transformers 5.23.0 on a CPU, in float32. Every parameter is random,
norms and biases too, so that none of them can be left out or mistaken for another unseen. Each
folder holds a model as `save_pretrained` writes it and golden.npz: `tokens`, int32 [2, T], and
`logits`, float32 [2, T, V], of the model with its parameters taken to float32. T is 7, or 24 where
that is beyond a window or the context before scaling.
"""

import pathlib

import numpy as np
import torch
import transformers

GOLDEN = pathlib.Path(__file__).parent / 'golden'
SIZES = {
    'vocab_size': 270,
    'hidden_size': 16,
    'intermediate_size': 24,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'max_position_embeddings': 64,
    'bos_token_id': 256,
    'eos_token_id': 257,
    'pad_token_id': None,
}
# Grouped heads that do not fill the width, and more tokens than a window of 5 sees.
LONGER = SIZES | {'vocab_size': 64, 'num_hidden_layers': 3, 'hidden_size': 24}
LONGER |= {'bos_token_id': 0, 'eos_token_id': 1, 'rms_norm_eps': 1e-3}
Llama, Olmo2 = transformers.LlamaConfig, transformers.Olmo2Config
CONFIGS = {  # a new one comes last: its place is its seed
    # Heads wider than hidden_size / heads, biases everywhere, another base and epsilon.
    'llama': Llama(
        **SIZES,
        head_dim=6,
        attention_bias=True,
        mlp_bias=True,
        rms_norm_eps=1e-3,
        rope_parameters={'rope_type': 'default', 'rope_theta': 500.0},
    ),
    'llama_tied': Llama(**SIZES, tie_word_embeddings=True),
    'olmo2': Olmo2(**SIZES, rope_parameters={'rope_type': 'default', 'rope_theta': 500000.0}),
    # One of 6 frequencies is kept, three are divided by 8, and two are in between.
    'llama3': Llama(
        **LONGER,
        head_dim=12,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters={
            'rope_type': 'llama3',
            'rope_theta': 100.0,
            'factor': 8.0,
            'low_freq_factor': 0.5,
            'high_freq_factor': 2.0,
            'original_max_position_embeddings': 16,
        },
    ),
    'mistral': transformers.MistralConfig(
        **LONGER,
        head_dim=8,
        sliding_window=5,
        rope_parameters={'rope_type': 'default', 'rope_theta': 100.0},
    ),
    'qwen2': transformers.Qwen2Config(
        **LONGER,
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=1,
        rope_parameters={'rope_type': 'default', 'rope_theta': 100.0},
    ),
    'qwen3': transformers.Qwen3Config(
        **LONGER,
        head_dim=8,
        attention_bias=True,
        rope_parameters={'rope_type': 'default', 'rope_theta': 100.0},
    ),
    'olmo3': transformers.Olmo3Config(**LONGER | {'num_hidden_layers': 5}, sliding_window=5),
}
DTYPES = {'llama_tied': torch.bfloat16, 'qwen2': torch.bfloat16}
SHARDS = {'llama_tied': '12KB', 'qwen2': '12KB'}


def _model(name):
    torch.manual_seed(list(CONFIGS).index(name))
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            middle = 1.0 if parameter.ndim == 1 else 0.0
            parameter.normal_(middle, 0.3 if CONFIGS[name].num_hidden_layers == 2 else 0.2)
    return model.to(DTYPES.get(name, torch.float32))


def _load(folder):
    # Not model.float(), which would keep rounded rotary frequencies.
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _logits(model, tokens):
    with torch.no_grad():
        return model.eval()(torch.tensor(tokens, dtype=torch.long)).logits.numpy()


def make():
    for name, config in CONFIGS.items():
        shape = (2, 7) if config.vocab_size == SIZES['vocab_size'] else (2, 24)
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, shape).astype(np.int32)
        folder = GOLDEN / name
        _model(name).save_pretrained(folder, max_shard_size=SHARDS.get(name, '1GB'))
        np.savez(folder / 'golden.npz', tokens=tokens, logits=_logits(_load(folder), tokens))


if __name__ == '__main__':
    make()
