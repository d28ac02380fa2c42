"""The Hugging Face model families that can be converted: their config.json and our knobs."""

import operator
import pathlib
import sys
from collections.abc import Callable
from typing import NamedTuple

from moddepth_jax.data.directory import check_fields, read_json, short_repr
from moddepth_jax.hparams import ModelHparams, RopeScaling
from moddepth_jax.hparams.checks import MAX_INT
from moddepth_jax.hparams.model import MAX_LAYERS

CONFIG_FILE = 'config.json'
OWN_TYPE = 'moddepth'  # model_type of a folder of `torch_folder`, whose config.json has our knobs
# Knobs and groups of it that an import may change: the stored tensors are the same.
FREE_KNOBS = ('dtype', 'attention', 'layer_loop', 'remat', 'adapters', 'experts.product')
FULL, SLIDING = 'full_attention', 'sliding_attention'


class Family(NamedTuple):
    """A model_type: its class in transformers, and our knobs for the same model."""

    architecture: str
    norm_placement: str = 'pre'
    qk_norm: str = 'none'
    # model.attention_bias without and with the field attention_bias; with one value, the field is
    # ignored.
    attention_biases: tuple[str, ...] = ('none', 'qkvo')
    mlp_bias: bool = False  # whether the field mlp_bias adds biases to the mlp
    # Function (config.json, i) -> whether layer i has the window; None: no layer has one.
    slides: Callable[[dict, int], bool] | None = None
    layer_types: bool = True  # whether the field layer_types may override `slides`
    rope_by_layer_type: bool = False  # whether rope_parameters may be given for each layer type
    defaults: dict = {}  # of missing fields, where they differ from DEFAULTS


def _from_max_window_layers(config, layer):
    in_use = config.get('use_sliding_window') and config['sliding_window'] is not None
    return bool(in_use) and layer >= config['max_window_layers']


_QWEN = {'num_key_value_heads': 32, 'sliding_window': 4096, 'max_window_layers': 28}
# A model is exported as the first family that can express it.
FAMILIES = {
    'llama': Family('LlamaForCausalLM', mlp_bias=True),
    'mistral': Family(
        'MistralForCausalLM',
        attention_biases=('none',),
        slides=lambda config, layer: True,
        layer_types=False,
        defaults={'num_key_value_heads': 8, 'sliding_window': 4096},
    ),
    'qwen2': Family(
        'Qwen2ForCausalLM',
        attention_biases=('qkv',),
        slides=_from_max_window_layers,
        defaults=_QWEN,
    ),
    'qwen3': Family(
        'Qwen3ForCausalLM',
        qk_norm='head',
        slides=_from_max_window_layers,
        defaults=_QWEN | {'head_dim': 128},
    ),
    'olmo2': Family('Olmo2ForCausalLM', 'reordered', 'full', defaults={'rms_norm_eps': 1e-5}),
    'olmo3': Family(
        'Olmo3ForCausalLM',
        'reordered',
        'full',
        slides=lambda config, layer: (layer + 1) % 4 != 0,
        rope_by_layer_type=True,
        defaults={'rms_norm_eps': 1e-5, 'rope_theta': 500000.0, 'sliding_window': 4096},
    ),
}
DEFAULTS = {'rms_norm_eps': 1e-6, 'rope_theta': 10000.0}
_REASONS = {'smollm3': 'layers without RoPE (no_rope_layers) are not supported'}
_SIZES = {  # ours: theirs
    'vocab_size': 'vocab_size',
    'num_layers': 'num_hidden_layers',
    'd_model': 'hidden_size',
    'd_ff': 'intermediate_size',
    'num_heads': 'num_attention_heads',
    'num_kv_heads': 'num_key_value_heads',
    'head_dim': 'head_dim',
}
_NEUTRAL = {  # fields without a knob, and the values with which they have no effect
    'hidden_act': ('silu', 'swish'),
    'quantization_config': (None,),
    'partial_rotary_factor': (None, 1.0),
    'rope_interleaved': (None, False),
}
_SCALED = ('factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings')


def read_config(folder: pathlib.Path) -> dict:
    """Read the config.json of a folder; raises ValueError, one line, if there is none."""
    config = read_json(folder / CONFIG_FILE, 'download it again')
    if config is None:
        right = 'must be a folder with the config.json and *.safetensors of a Hugging Face model'
        raise ValueError(f'{folder}: holds no {CONFIG_FILE}; {right}')
    return config


class _Fields:
    """The fields of a config.json; missing ones have the defaults of its family."""

    def __init__(self, config: dict, family: Family, file: str):
        self.config, self.family, self.file = config, family, file
        self.values = DEFAULTS | family.defaults | config

    def get(self, key):
        return self.values.get(key)

    def refuse(self, key, right):
        raise ValueError(f'{self.file}: {key}={short_repr(self.get(key))}: {right}')

    def switch(self, key) -> bool:
        """Return a field that may be missing, null, false or true."""
        if self.get(key) not in (None, False, True):
            self.refuse(key, 'must be true or false')
        return bool(self.get(key))

    def integer(self, key, maximum=MAX_INT) -> int:
        """Return a field that must be a positive integer."""
        size = self.get(key)
        if type(size) is not int or not 0 < size <= maximum:
            right = f'must be a positive integer{f" up to {maximum}" * (maximum < MAX_INT)}'
            self.refuse(key, right if key in self.values else f'missing; it {right}')
        return size


def knobs_of(config: dict, file: str) -> dict:
    """Return the knobs that a config.json of transformers 4 or 5 determines.

    Names are those in ModelHparams, with a dot in a group, such as routing.router. Raises
    ValueError that begins with `file` for another architecture or a field without a knob.
    """
    kind = config.get('model_type')
    if kind == OWN_TYPE:
        return _own_knobs(config, file)
    if kind not in tuple(FAMILIES):
        reason = _REASONS.get(str(kind), 'others cannot be converted')
        right = f'must be one of {", ".join(FAMILIES)}; {reason}'
        raise ValueError(f'{file}: model_type={short_repr(kind)}: {right}')
    family = FAMILIES[kind]
    fields = _Fields(config, family, file)
    if config.get('architectures') not in (None, [family.architecture]):
        fields.refuse('architectures', f'must be [{family.architecture!r}], a language model')
    for key, neutral in _NEUTRAL.items():
        if key in config and config[key] not in neutral:
            fields.refuse(key, f'must be {neutral[0]!r}, the only value supported')
    use_bias, attention_bias = _biases(fields)
    tied, sizes = fields.switch('tie_word_embeddings'), _sizes(fields)
    if not _is_positive(norm_eps := fields.get('rms_norm_eps')):
        fields.refuse('rms_norm_eps', 'must be a number above 0')
    rope_theta, rope_scaling = _rope(fields)
    return {
        **sizes,
        'norm_placement': family.norm_placement,
        'qk_norm': family.qk_norm,
        'norm_eps': float(norm_eps),
        'rope_theta': rope_theta,
        'rope_scaling': rope_scaling,
        'use_bias': use_bias,
        'attention_bias': attention_bias,
        'tie_embeddings': tied,
        'windows': _windows(fields, sizes['num_layers']),
    }


def _own_knobs(config, file):
    fields = {'knobs': dict, 'max_position_embeddings': int}
    check_fields(config, fields, file, 'it must be as launch.convert --to_hf wrote it')
    knobs = {}
    for name, value in config['knobs'].items():
        of_group = name in ('depth', 'experts', 'routing', 'adapters') and isinstance(value, dict)
        items = (
            {f'{name}.{knob}': one for knob, one in value.items()} if of_group else {name: value}
        )
        knobs |= {key: tuple(one) if isinstance(one, list) else one for key, one in items.items()}
    return knobs


def _biases(fields):
    """Return (model.use_bias, model.attention_bias)."""
    family = fields.family
    if len(family.attention_biases) == 1:
        return False, family.attention_biases[0]
    in_attention, in_mlp = fields.switch('attention_bias'), fields.switch('mlp_bias')
    if family.mlp_bias and in_mlp:
        if not in_attention:
            right = 'must be false if attention_bias is; biases in the mlp only are not supported'
            fields.refuse('mlp_bias', right)
        return True, 'none'
    return False, family.attention_biases[in_attention]


def _sizes(fields):
    """Return our sizes by name; sizes that depend on others are derived as in transformers."""
    values = fields.values
    heads, width = fields.get('num_attention_heads'), fields.get('hidden_size')
    if fields.get('num_key_value_heads') is None:
        values['num_key_value_heads'] = heads
    if fields.get('head_dim') is None and type(width) is type(heads) is int:
        if heads < 1 or width % heads:
            right = f'must divide hidden_size={width}; or give head_dim'
            fields.refuse('num_attention_heads', right)
        values['head_dim'] = width // heads
    limits = {'num_hidden_layers': MAX_LAYERS}  # `_windows` visits each layer
    return {ours: fields.integer(key, limits.get(key, MAX_INT)) for ours, key in _SIZES.items()}


def _windows(fields, num_layers):
    """Return model.windows, one for each layer, or fewer if they repeat."""
    slides, types = fields.family.slides, fields.get('layer_types')
    if slides is None:
        if types and (not isinstance(types, list) or types != [FULL] * len(types)):
            fields.refuse('layer_types', f'must be {FULL} everywhere, the only one supported')
        if fields.get('sliding_window') is not None:
            fields.refuse('sliding_window', 'must be None, the only one supported')
        return (0,)
    if 'max_window_layers' in fields.values and type(fields.get('max_window_layers')) is not int:
        fields.refuse('max_window_layers', 'must be an integer')
    if not fields.family.layer_types and fields.get('sliding_window') is None:
        return (0,)
    expected = [SLIDING if slides(fields.values, layer) else FULL for layer in range(num_layers)]
    types = expected if types is None else types
    known = isinstance(types, list) and all(kind in (FULL, SLIDING) for kind in types)
    if not known or len(types) != num_layers:
        right = f'must be {FULL} or {SLIDING} for each of num_hidden_layers={num_layers}'
        fields.refuse('layer_types', right)
    if not fields.family.layer_types and types != expected:
        fields.refuse('layer_types', f'must be {SLIDING} everywhere: sliding_window is not null')
    if SLIDING not in types:
        return (0,)
    if 'max_window_layers' in fields.values and not fields.switch('use_sliding_window'):
        fields.refuse('use_sliding_window', f'must be true: layer_types has {SLIDING}')
    window = fields.integer('sliding_window')
    return _shortest([window if kind == SLIDING else 0 for kind in types])


def _shortest(windows):
    """Return the shortest sequence of windows that repeats to these."""
    for size in range(1, len(windows)):
        if all(window == windows[i % size] for i, window in enumerate(windows)):
            return tuple(windows[:size])
    return tuple(windows)


def _rope(fields):
    """Return (model.rope_theta, model.rope_scaling) from the fields of transformers 4 or 5."""
    found = set()
    for key in ('rope_scaling', 'rope_parameters'):
        given = fields.get(key)
        if given is None:
            continue
        each = [given]
        if isinstance(given, dict) and fields.family.rope_by_layer_type:
            each = [given[kind] for kind in (FULL, SLIDING) if given.get(kind) is not None] or each
        found |= {_rope_of(fields, key, one) for one in each}
        if len(found) > 1:
            fields.refuse(key, 'must be the same for all layers')
    if not found and not _is_positive(fields.get('rope_theta')):
        fields.refuse('rope_theta', 'must be a number above 0')
    theta, scaling = found.pop() if found else (float(fields.get('rope_theta')), 'none')
    if scaling != 'none' and fields.family.rope_by_layer_type:
        right = "must have rope_type 'default': this family scales some layers only"
        fields.refuse('rope_scaling' if fields.get('rope_scaling') else 'rope_parameters', right)
    return theta, scaling


def _rope_of(fields, key, given):
    """Return the theta and the scaling of one object of `key`."""
    if not isinstance(given, dict):
        fields.refuse(key, "must be an object with rope_type 'default' or 'llama3'")
    given = dict(given)
    theta = given.pop('rope_theta', fields.get('rope_theta'))
    if not _is_positive(theta):
        fields.refuse(key, 'rope_theta must be a number above 0')
    older, newer = given.pop('type', None), given.pop('rope_type', None)
    kind = newer or older or 'default'
    if given.pop('partial_rotary_factor', 1.0) != 1.0:
        fields.refuse(key, 'partial_rotary_factor must be 1.0, the only one supported')
    if kind == 'default' and not given:
        return float(theta), 'none'
    if kind != 'llama3':
        fields.refuse(key, "must have rope_type 'default' or 'llama3'; no other is supported")
    given.setdefault(_SCALED[-1], fields.get('max_position_embeddings'))
    if given.keys() != set(_SCALED) or not all(map(_is_positive, given.values())):
        fields.refuse(key, f'llama3 must have exactly the numbers {", ".join(_SCALED)}')
    factor, low, high, length = (given[name] for name in _SCALED)
    if factor < 1 or low >= high or length != int(length) or length > MAX_INT:
        right = 'factor must be 1 or more, low_freq_factor below high_freq_factor, and '
        fields.refuse(key, f'{right}{_SCALED[-1]} an integer')
    return float(theta), _scaling_text(RopeScaling(factor, low, high, int(length)))


def _scaling_text(scaling):
    """Return model.rope_scaling for a RopeScaling."""
    return ':'.join(['llama3', *(f'{float(n)!r}'.removesuffix('.0') for n in scaling)])


def _is_positive(value):
    return type(value) in (int, float) and 0 < value <= sys.float_info.max


def family_of(model: ModelHparams, first: str | None = None) -> str:
    """Return the model_type to export a model as: `first` if possible, else the first that fits.

    Raises ValueError if no family fits.
    """
    if part := part_of_no_family(model):
        knob, value, name = part
        raise ValueError(f'model.{knob}={value!r}: no family has {name}')
    differences = {}
    for kind in sorted(FAMILIES, key=lambda kind: kind != first):
        differences[kind] = _differences(model, kind)
        if not differences[kind]:
            return kind

    def distance(kind):  # norms distinguish families most
        found = differences[kind]
        return 'norm_placement' in found, 'qk_norm' in found, len(found)

    nearest = min(differences, key=distance)
    found = ', '.join(f'model.{name}={getattr(model, name)!r}' for name in differences[nearest])
    knobs = ' and '.join(f'{name}={value!r}' for name, value in differences[nearest].items())
    raise ValueError(f'{found}: no family has it; the nearest, {nearest}, has {knobs}')


def part_of_no_family(model: ModelHparams) -> tuple[str, object, str] | None:
    """Return a knob that gives a model parts that no family has, its value, and their name.

    None for a dense model.
    """
    for added, knob, name in (
        (model.routed_layers, 'routing.router', 'routed blocks'),
        (model.depth.stream != 'residual', 'depth.stream', 'depth streams'),
        (model.expert_layers, 'experts.choice', 'such experts'),
        (model.looped, 'looped_layers', 'looped blocks'),
        (model.embedding_residual != 'none', 'embedding_residual', 'embedding residuals'),
        (model.value_embeddings != 'none', 'value_embeddings', 'tables of values'),
    ):
        if added:
            return knob, operator.attrgetter(knob)(model), name
    return None


def _differences(model, kind):
    """Return the knobs that change if a model is exported as `kind` and imported again."""
    knobs = knobs_of(_config(kind, model), CONFIG_FILE)
    windows = _shortest([model.window(layer) for layer in range(model.num_layers)])
    ours = {name: getattr(model, name) for name in knobs} | {'windows': windows}
    if model.scaled_rope:
        ours['rope_scaling'] = _scaling_text(model.scaled_rope)
    return {name: value for name, value in knobs.items() if value != ours[name]}


def config_of(
    model: ModelHparams, dtype: str, positions: int, ids: dict, original: dict | None = None
) -> dict:
    """Make the config.json of a dense model, for transformers 4 and 5.

    `positions` is the context length, and `ids` has bos_token_id and eos_token_id. `original` is
    the config.json of the imported model. If it describes the same model, its other fields are
    kept, and its context length unless `positions` is longer. Raises ValueError like `family_of`.
    """
    kind = family_of(model, (original or {}).get('model_type'))
    context = {'max_position_embeddings': positions}
    if original is not None:
        named = [key for key in ('dtype', 'torch_dtype') if key in original] or ['torch_dtype']
        declared = original.get('max_position_embeddings')
        longer = context if type(declared) is int and declared < positions else {}
        config = original | dict.fromkeys(named, dtype) | ids | longer
        knobs = knobs_of(config, CONFIG_FILE)
        if knobs == {name: getattr(model, name) for name in knobs}:
            return config
    return _config(kind, model) | ids | context | {'torch_dtype': dtype}


def _config(kind, model):
    """Return the config.json of this model_type that is nearest to the model."""
    family, windows = FAMILIES[kind], [model.window(layer) for layer in range(model.num_layers)]
    config = {
        'architectures': [family.architecture],
        'model_type': kind,
        **{theirs: getattr(model, ours) for ours, theirs in _SIZES.items()},
        'hidden_act': 'silu',
        'initializer_range': model.init_std,
        'rms_norm_eps': model.norm_eps,
        'tie_word_embeddings': model.tie_embeddings,
        'rope_theta': model.rope_theta,
    }
    rope = {'rope_type': 'default', 'rope_theta': model.rope_theta}
    if model.scaled_rope and not family.rope_by_layer_type:
        rope |= {'rope_type': 'llama3', **dict(zip(_SCALED, model.scaled_rope, strict=True))}
        config['rope_scaling'] = rope
    by_type = family.rope_by_layer_type
    config['rope_parameters'] = dict.fromkeys((FULL, SLIDING), rope) if by_type else rope
    if len(family.attention_biases) > 1:
        config['attention_bias'] = model.attention_out_bias
    if family.mlp_bias:
        config['mlp_bias'] = model.use_bias
    if family.slides is None:
        return config
    config['sliding_window'] = max(windows) or None
    if family.layer_types:
        config['layer_types'] = [SLIDING if window else FULL for window in windows]
    if 'max_window_layers' in family.defaults:
        full = next((i for i, window in enumerate(windows) if window), len(windows))
        config |= {'use_sliding_window': any(windows), 'max_window_layers': full}
    return config
