"""Write tests/golden/*.npz: small Hugging Face models, one input each and its logits.

The tests read the files; nothing imports this script, whose packages the project does not depend
on. Run it by hand, from the root of the repository and in a virtual environment of its own:

    pip install torch==2.13.0 transformers==5.23.0 numpy==2.4.6
    python tests/make_golden.py

The committed files come from Python 3.11.7 with just these versions (torch's CPU build).

`llama.npz` and `llama_tied.npz` are of a LlamaForCausalLM, with a head of its own and with the
embedding table for one; `olmo2.npz` is of an Olmo2ForCausalLM. Each file holds

    model.*, lm_head.*  the state dict under its own names, float32; the tied file too has
                        lm_head.weight, equal to model.embed_tokens.weight
    tokens_BT           the input, int32
    logits_BTV          what the model makes of it in eval mode, float32
    config              0-d string: the JSON of `family` and of the fields that define the model

The weights are random, and drawn so that a mistake in any of them shows: norm weights around 1
with std 0.3, matrices large enough for sharp attention and logits of order 1, and an epsilon of
1e-3 or more, since the effect of the usual 1e-6 would drown in rounding.
"""

import json
import pathlib

import numpy as np
import torch
import transformers

GOLDEN = pathlib.Path(__file__).parent / 'golden'
BATCH, LENGTH = 2, 13
SIZES = {
    'hidden_size': 32,
    'intermediate_size': 48,
    'num_hidden_layers': 3,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'head_dim': 8,
    'vocab_size': 61,
}
LLAMA = SIZES | {'family': 'llama', 'rope_theta': 1e4, 'rms_norm_eps': 1e-3}
# name of the file: (seed, what defines the model)
UNTIED = {'tie_word_embeddings': False}
OLMO = SIZES | {'family': 'olmo2', 'rope_theta': 5e5, 'rms_norm_eps': 3e-3}
MODELS = {
    'llama': (1, LLAMA | UNTIED),
    'llama_tied': (2, LLAMA | {'tie_word_embeddings': True}),
    'olmo2': (3, OLMO | UNTIED),
}
CLASSES = {
    'llama': (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    'olmo2': (transformers.Olmo2Config, transformers.Olmo2ForCausalLM),
}


def build(fields):
    """The float32 model, in eval mode and with eager attention, that `fields` defines."""
    config_class, model_class = CLASSES[fields['family']]
    fields = {name: value for name, value in fields.items() if name != 'family'}
    rope = {'rope_type': 'default', 'rope_theta': fields.pop('rope_theta')}
    tokens = dict.fromkeys(('pad_token_id', 'bos_token_id', 'eos_token_id'))
    options = {'rope_parameters': rope, 'attn_implementation': 'eager', **tokens}
    return model_class(config_class(**fields, **options)).to(torch.float32).eval()


def draw_weights(model, rng):
    """Overwrite every parameter of `model`; a tied one is listed, and drawn, once."""
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if len(shape) == 1:
            value = rng.normal(1.0, 0.3, shape)
        elif name == 'model.embed_tokens.weight':
            std = 0.25 if model.config.tie_word_embeddings else 1.0
            value = rng.normal(0.0, std, shape)
        else:
            value = rng.normal(0.0, 1.3 / shape[1] ** 0.5, shape)
        parameter.data.copy_(torch.from_numpy(value.astype(np.float32)))


def make(name):
    """Write one file of MODELS and print its size and the spread of its logits."""
    seed, fields = MODELS[name]
    rng = np.random.default_rng(seed)
    model = build(fields)
    draw_weights(model, rng)
    tokens_BT = rng.integers(fields['vocab_size'], size=(BATCH, LENGTH), dtype=np.int32)
    with torch.no_grad():
        output = model(input_ids=torch.from_numpy(tokens_BT).long(), use_cache=False)
    logits_BTV = output.logits.numpy()
    arrays = {key: value.numpy() for key, value in model.state_dict().items()}
    assert all(array.dtype == np.float32 for array in [logits_BTV, *arrays.values()])
    path = GOLDEN / f'{name}.npz'
    arrays |= {'tokens_BT': tokens_BT, 'logits_BTV': logits_BTV}
    np.savez_compressed(path, **arrays, config=np.array(json.dumps(fields, sort_keys=True)))
    print(f'{path.name}: {path.stat().st_size} bytes, std of the logits {logits_BTV.std():.3f}')


if __name__ == '__main__':
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    for name in MODELS:
        make(name)
