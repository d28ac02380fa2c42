"""The families of Hugging Face models that are converted: their config.json and our knobs."""

import pathlib
import sys
from typing import NamedTuple

from moddepth_jax.data.directory import read_json, short_repr
from moddepth_jax.hparams import ModelHparams

CONFIG_FILE = 'config.json'


class Family(NamedTuple):
    """What a model_type stands for: the class in transformers, and our knobs for the same model."""

    architecture: str
    norm_placement: str
    qk_norm: str
    norm_eps: float  # of a config that does not say
    mlp_bias: bool  # whether its mlp may have biases


FAMILIES = {
    'llama': Family('LlamaForCausalLM', 'pre', 'none', 1e-6, True),
    'olmo2': Family('Olmo2ForCausalLM', 'reordered', 'full', 1e-5, False),
}
_SIZES = {  # ours: theirs
    'vocab_size': 'vocab_size',
    'num_layers': 'num_hidden_layers',
    'd_model': 'hidden_size',
    'd_ff': 'intermediate_size',
    'num_heads': 'num_attention_heads',
    'num_kv_heads': 'num_key_value_heads',
    'head_dim': 'head_dim',
}
_NEUTRAL = {  # fields without a knob here, and the values under which they have no effect
    'hidden_act': ('silu', 'swish'),
    'sliding_window': (None,),
    'quantization_config': (None,),
    'partial_rotary_factor': (None, 1.0),
    'rope_interleaved': (None, False),
}


def read_config(folder: pathlib.Path) -> dict:
    """The config.json of a folder. Raises ValueError, one line, if there is none."""
    config = read_json(folder / CONFIG_FILE, 'download it again')
    if config is None:
        right = 'must be a folder with the config.json and *.safetensors of a Hugging Face model'
        raise ValueError(f'{folder}: holds no {CONFIG_FILE}; {right}')
    return config


def knobs_of(config: dict, file: str) -> dict:
    """The knobs that a config.json of transformers 4 or 5 decides, by their names in ModelHparams.

    Raises ValueError, beginning with `file`, for another architecture or a field without a knob.
    """

    def refuse(key, right):
        raise ValueError(f'{file}: {key}={short_repr(config.get(key))}: {right}')

    kind = config.get('model_type')
    if kind not in tuple(FAMILIES):
        refuse('model_type', f'must be {" or ".join(FAMILIES)}; no other model is converted')
    family = FAMILIES[kind]
    if config.get('architectures') not in (None, [family.architecture]):
        refuse('architectures', f'must be [{family.architecture!r}], a language model')
    for key, neutral in _NEUTRAL.items():
        if key in config and config[key] not in neutral:
            refuse(key, f'must be {neutral[0]!r}, the only one supported')
    layers = config.get('layer_types') or []
    if not isinstance(layers, list) or layers != ['full_attention'] * len(layers):
        refuse('layer_types', 'must be full_attention everywhere, the only one supported')
    switches = ('attention_bias', 'mlp_bias', 'tie_word_embeddings')
    for key in switches:
        if config.get(key) not in (None, False, True):
            refuse(key, 'must be true or false')
    *biases, tied = (bool(config.get(key)) for key in switches)
    if biases[0] != (biases[1] and family.mlp_bias):
        other = f'mlp_bias={biases[1]}' if family.mlp_bias else f'an mlp of {kind}, without biases'
        right = f'differs from {other}; all projections have biases here, or none'
        raise ValueError(f'{file}: attention_bias={biases[0]}: {right}')
    given = dict(config)
    heads, width = given.get('num_attention_heads'), given.get('hidden_size')
    if given.get('num_key_value_heads') is None:
        given['num_key_value_heads'] = heads
    if given.get('head_dim') is None and type(width) is type(heads) is int:
        if heads < 1 or width % heads:
            refuse('num_attention_heads', f'must divide hidden_size={width}; or give head_dim')
        given['head_dim'] = width // heads
    for key in _SIZES.values():
        if type(size := given.get(key)) is not int or not 0 < size < 1 << 31:
            right = 'must be an integer from 1 on'
            refuse(key, right if key in config else f'missing; it {right}')
    norm_eps = config.get('rms_norm_eps', family.norm_eps)
    if not _is_positive(norm_eps):
        refuse('rms_norm_eps', 'must be a number above 0')
    return {
        **{ours: given[theirs] for ours, theirs in _SIZES.items()},
        'norm_placement': family.norm_placement,
        'qk_norm': family.qk_norm,
        'norm_eps': float(norm_eps),
        'rope_theta': _theta(config, refuse),
        'use_bias': biases[0],
        'tie_embeddings': tied,
        'windows': (0,),
    }


def _theta(config, refuse):
    """rope_theta, of its own field (transformers 4) or of rope_parameters (5)."""
    plain = {'type': 'default', 'rope_type': 'default', 'partial_rotary_factor': 1.0}
    theta = config.get('rope_theta', 10000.0)
    for key in ('rope_theta', 'rope_scaling', 'rope_parameters'):
        if key != 'rope_theta' and config.get(key) is not None:
            given = dict(config[key]) if isinstance(config[key], dict) else {'not': 'an object'}
            theta = given.pop('rope_theta', theta)
            if any(item not in plain.items() for item in given.items()):
                refuse(key, "must have rope_type 'default'; scaled frequencies are not converted")
        if not _is_positive(theta):
            refuse(key, 'rope_theta must be a number above 0')
    return float(theta)


def _is_positive(value):
    return type(value) in (int, float) and 0 < value <= sys.float_info.max


def family_of(model: ModelHparams) -> str:
    """The model_type that a model is exported as. Raises ValueError for a model of no family."""
    for wrong, what, name in (
        (model.routed_layers, f'routing.router={model.routing.router!r}', 'routed blocks'),
        (model.depth.stream != 'residual', f'depth.stream={model.depth.stream!r}', 'depth stream'),
        (model.expert_layers, f'experts.choice={model.experts.choice!r}', 'such experts'),
        (any(model.windows), f'windows={model.windows}', 'windows'),
        (
            model.embedding_residual != 'none',
            f'embedding_residual={model.embedding_residual!r}',
            'blend of the embedded tokens',
        ),
        (
            model.value_embeddings != 'none',
            f'value_embeddings={model.value_embeddings!r}',
            'tables of values',
        ),
    ):
        if wrong:
            right = 'only dense models can be exported'
            raise ValueError(f'model.{what}: the format has no {name}; {right}')
    for kind, family in FAMILIES.items():
        if (model.norm_placement, model.qk_norm) == (family.norm_placement, family.qk_norm):
            if model.use_bias and not family.mlp_bias:
                raise ValueError(f'model.use_bias=True: an mlp of {kind} has no biases')
            return kind
    pairs = (f'{f.norm_placement} and {f.qk_norm} ({kind})' for kind, f in FAMILIES.items())
    raise ValueError(
        f'model.norm_placement={model.norm_placement!r}, model.qk_norm={model.qk_norm!r}: must be '
        f'{", or ".join(pairs)}; the format has no other dense model of ours'
    )


def config_of(
    model: ModelHparams, dtype: str, positions: int, ids: dict, original: dict | None = None
) -> dict:
    """The config.json of a dense model, for transformers 4 and 5; ValueError as `family_of`.

    `positions` are tokens a row, `ids` bos_token_id and eos_token_id. `original` is that of the
    imported model, which is kept if it describes the same model.
    """
    kind = family_of(model)
    if original is not None:
        knobs = knobs_of(original, CONFIG_FILE)
        if knobs == {name: getattr(model, name) for name in knobs}:
            named = [key for key in ('dtype', 'torch_dtype') if key in original] or ['torch_dtype']
            return original | dict.fromkeys(named, dtype)
    return {
        'architectures': [FAMILIES[kind].architecture],
        'model_type': kind,
        **{theirs: getattr(model, ours) for ours, theirs in _SIZES.items()},
        'attention_bias': model.use_bias,
        **({'mlp_bias': model.use_bias} if FAMILIES[kind].mlp_bias else {}),
        **ids,
        'hidden_act': 'silu',
        'initializer_range': model.init_std,
        'max_position_embeddings': positions,
        'rms_norm_eps': model.norm_eps,
        'rope_theta': model.rope_theta,
        'rope_parameters': {'rope_type': 'default', 'rope_theta': model.rope_theta},
        'tie_word_embeddings': model.tie_embeddings,
        'torch_dtype': dtype,
    }
