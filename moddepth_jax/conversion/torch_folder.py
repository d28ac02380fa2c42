"""Hugging Face folders with their own modelling file, for models without a class in transformers.

A folder gets a copy of the files of `torch_model/`, which
`AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` runs. They do not run here.
"""

import dataclasses
import json
import operator
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp

from moddepth_jax.conversion.families import CONFIG_FILE, OWN_TYPE, family_of
from moddepth_jax.conversion.hugging_face import (
    Tensor,
    all_tensors,
    check_merged,
    check_tensors,
    common_dtype,
    read_leaves,
    write_leaves,
)
from moddepth_jax.conversion.tensor_files import TensorFiles
from moddepth_jax.conversion.transfer_params import abstract_params, with_new_adapters
from moddepth_jax.hparams import Hparams, ModelHparams
from moddepth_jax.hparams.rules import causal_routing
from moddepth_jax.model.transformer import average_shapes, layer_args

SOURCE = pathlib.Path(__file__).parent / 'torch_model'
MODULES = ('configuration_moddepth.py', 'layers_moddepth.py', 'modeling_moddepth.py')
# The choices of each knob that the modelling file implements.
CHOICES = {
    'depth.stream': ('residual', 'moda', 'value_residual', 'value_attention'),
    'routing.router': ('learned', 'straight_through', 'norm', 'position', 'none'),
    'routing.part': ('block',),
    'routing.gate': ('raw', 'sigmoid', 'tanh', 'none', 'straight_through'),
    'routing.causal_rule': ('predictor', 'aux_loss', 'threshold', 'positive', 'dense'),
    'experts.choice': ('none', 'token', 'expert'),
}
_KIND_FIELDS = ('window', 'routed', 'experts', 'slots', 'mixes', 'embeds')  # of LayerKind


def kind_of(model: ModelHparams) -> tuple[str, str]:
    """Return the model_type to export a model as, and why no family fits; '' if one does.

    Raises ValueError like `check_expressible`.
    """
    try:
        return family_of(model), ''
    except ValueError as error:
        check_expressible(model)
        return OWN_TYPE, str(error)


def check_expressible(model: ModelHparams):
    """Raise ValueError, one line, for a model that the modelling file cannot express."""
    file = MODULES[-1]
    for knob, known in CHOICES.items():
        if (value := operator.attrgetter(knob)(model)) not in known:
            name = knob.partition('.')[2].replace('_', ' ')
            right = f'{file} has no such {name}; it has {", ".join(known)}'
            raise ValueError(f'model.{knob}={value!r}: {right}')
    for knob, plain in (
        ('loop_norms', 'shared'),
        ('loop_embeddings', 'none'),
        ('loop_exit_threshold', 0.0),
    ):
        if (value := getattr(model, knob)) != plain:
            right = f'{file} has only {plain}: its loops are equal and take all tokens'
            raise ValueError(f'model.{knob}={value!r}: {right}')
    if model.routing.routes_loops:
        right = f'{file} has no routed loops; it has routed blocks and loops that take all tokens'
        raise ValueError(f"model.routing.layers='loops': {right}")


def tensors_of(model: ModelHparams, params: dict, averages) -> list[Tensor]:
    """List the tensors of a model and of these averages; paths are those of its variables.

    Averages are thresholds of float32 scores, so they keep their dtype in every export.
    """
    tensors = [one._replace(path=('params', *one.path)) for one in all_tensors(model, params, {})]
    shapes, fixed = average_shapes(model), {'dtype': 'float32'}
    return tensors + [Tensor(name, shapes[name], ('averages', name), **fixed) for name in averages]


def config_of(hparams: Hparams, averages, dtype: str, ids: dict) -> dict:
    """Make the config.json of a model; `averages` are the names of its averages.

    `hparams` are those of the last stage of training. `ids` has bos_token_id, which begins
    documents, and eos_token_id.
    """
    check_expressible(hparams.model)
    model, context, rule = hparams.model, hparams.data.sequence_length, causal_routing(hparams)
    kinds = model.depth.stream_class.layer_kinds(model)
    shapes = average_shapes(model)
    most = model.routing.max_selected(context, rule) if model.routed_layers else 0
    return {
        'architectures': ['ModDepthForCausalLM'],
        'auto_map': {
            'AutoConfig': 'configuration_moddepth.ModDepthConfig',
            'AutoModelForCausalLM': 'modeling_moddepth.ModDepthForCausalLM',
        },
        'model_type': OWN_TYPE,
        'vocab_size': model.vocab_size,
        'hidden_size': model.d_model,
        'num_hidden_layers': model.num_blocks,
        'num_attention_heads': model.num_heads,
        'num_key_value_heads': model.num_kv_heads,
        'head_dim': model.head_dim,
        'max_position_embeddings': context,
        'initializer_range': model.init_std,
        'tie_word_embeddings': model.tie_embeddings,
        'torch_dtype': dtype,
        **ids,
        'knobs': dataclasses.asdict(model),
        'blocks': [{name: getattr(kind, name) for name in _KIND_FIELDS} for kind in kinds],
        'block_order': list(model.block_order),
        'causal_rule': rule,
        'max_selected': most,
        'averages': {name: list(shapes[name]) for name in averages},
        'document_separator': None if model.across_documents else ids['bos_token_id'],
    }


def export_model(
    folder: pathlib.Path, hparams: Hparams, variables: dict, dtype: str, ids: dict
) -> None:
    """Write config.json, *.safetensors and the modelling file; arguments as in `config_of`.

    Raises ValueError like that, for adapters that are not merged, or if `variables` lack averages
    that the causal rule needs.
    """
    check_merged(hparams.model)
    averages = variables.get('averages', {})
    config = config_of(hparams, averages, dtype, ids)
    layer_args(hparams.model, averages, causal_routing(hparams))  # raises if one is missing
    tensors = tensors_of(hparams.model, variables['params'], averages)
    write_leaves(folder, tensors, variables, dtype)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + '\n', encoding='utf-8')
    for name in MODULES:
        shutil.copyfile(SOURCE / name, folder / name)


def import_model(folder: str | os.PathLike, hparams: Hparams) -> tuple[dict, dict, str]:
    """Read float32 parameters and averages of such a folder, and the dtype that is exact.

    Averages that it lacks and does not need are 0, as in a new run. New adapters of `hparams` add
    0. Raises ValueError like `check_tensors`, TensorFiles and `layer_args`.
    """
    folder, model = pathlib.Path(folder), hparams.model
    check_expressible(model)
    shapes = average_shapes(model)
    with TensorFiles(folder) as files:
        there = [name for name in shapes if name in files.shapes]
        abstract = {name: jax.ShapeDtypeStruct(shapes[name], 'float32') for name in there}
        wanted = {'params': abstract_params(hparams.without_adapters), 'averages': abstract}
        tensors = tensors_of(model, wanted['params'], there)
        check_tensors(folder, tensors, files)
        variables = read_leaves(files, tensors, wanted)
        # Raises if one is missing.
        layer_args(model, variables['averages'], causal_routing(hparams))
        new = {name: jnp.zeros(shape) for name, shape in shapes.items()}
        params = with_new_adapters(variables['params'], hparams)
        return params, new | variables['averages'], common_dtype(files, tensors)
