"""Makes tests/conversion/golden/: tiny random models as `transformers` saves them, and its logits.

python -m venv /tmp/hugging_face && /tmp/hugging_face/bin/pip install torch==2.13.0 transformers
/tmp/hugging_face/bin/python tests/conversion/make_golden.py

Written with torch 2.13.0 and transformers 5.23.0 on a CPU, in float32. Every parameter is random,
norms and biases too, so that none of them can be left out or mistaken for another unseen. Each
folder holds a model as `save_pretrained` writes it and golden.npz: `tokens`, int32 [2, 7], and
`logits`, float32 [2, 7, V], of the model with its parameters taken to float32.
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
Llama, Olmo2 = transformers.LlamaConfig, transformers.Olmo2Config
CONFIGS = {
    # Heads wider than hidden_size / heads, biases everywhere, a base and an epsilon of its own.
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
}
DTYPES = {'llama_tied': torch.bfloat16}
SHARDS = {'llama_tied': '12KB'}


def _model(name):
    torch.manual_seed(sorted(CONFIGS).index(name))
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            middle = 1.0 if parameter.ndim == 1 else 0.0
            parameter.normal_(middle, 0.3)
    return model.to(DTYPES.get(name, torch.float32))


def _load(folder):
    # Not model.float(): rotary frequencies that were rounded with the rest would stay so.
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _logits(model, tokens):
    with torch.no_grad():
        return model.eval()(torch.tensor(tokens, dtype=torch.long)).logits.numpy()


def make():
    tokens = np.random.default_rng(0).integers(0, SIZES['vocab_size'], (2, 7)).astype(np.int32)
    for name in CONFIGS:
        folder = GOLDEN / name
        _model(name).save_pretrained(folder, max_shard_size=SHARDS.get(name, '1GB'))
        np.savez(folder / 'golden.npz', tokens=tokens, logits=_logits(_load(folder), tokens))


if __name__ == '__main__':
    make()
