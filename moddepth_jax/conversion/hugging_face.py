"""Converts the tensors of a Hugging Face checkpoint to parameters, and back."""

import os
import pathlib
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from moddepth_jax.conversion.families import family_of
from moddepth_jax.conversion.tensor_files import TensorFiles, write_tensors
from moddepth_jax.conversion.transfer_params import (
    abstract_params,
    in_layer,
    with_new_adapters,
)
from moddepth_jax.data.directory import short_repr
from moddepth_jax.hparams import Hparams, ModelHparams
from moddepth_jax.model.stack import Stack

HEAD, TABLE = 'lm_head.weight', 'model.embed_tokens.weight'
_TOP = {  # leaves outside of the layers
    ('embedding',): 'embed_tokens.weight',
    ('final_norm', 'scale'): 'norm.weight',
    ('head', 'kernel'): HEAD,
}
_MODULES = {  # ours: theirs
    'attention.query': 'self_attn.q_proj',
    'attention.key': 'self_attn.k_proj',
    'attention.value': 'self_attn.v_proj',
    'attention.out': 'self_attn.o_proj',
    'attention.query_norm': 'self_attn.q_norm',
    'attention.key_norm': 'self_attn.k_norm',
    'mlp.w1': 'mlp.gate_proj',
    'mlp.w3': 'mlp.up_proj',
    'mlp.w2': 'mlp.down_proj',
}
_BUFFER = '.rotary_emb.inv_freq'  # in old checkpoints; computed, not learned


class Tensor(NamedTuple):
    """A tensor of a checkpoint, and our leaf for it.

    Matrices are [out, in] in a checkpoint. Ours are [in, out], with axes that may be split into
    heads.
    """

    name: str
    shape: tuple[int, ...]
    path: tuple[str, ...]
    repeat: int | types.EllipsisType = ...  # index on the leaf's leading axis, if it has one
    transposed: bool = False  # for a matrix that is not an embedding
    dtype: str | None = None  # in every export; None: the dtype that is exported


def all_tensors(model: ModelHparams, params: dict, modules: dict[str, str]) -> list[Tensor]:
    """List the tensors of a model's parameters, such as layers.3.mlp.w1.weight.

    `params` may be abstract. `modules` is {our name of a module in a layer, such as mlp.w1: the
    name in the checkpoint} where they differ.
    """
    numbers, tensors = Stack(model, 'top_c').layer_numbers, []
    for keys, leaf in sorted(traverse_util.flatten_dict(params).items()):
        if keys[0] != 'stack':
            tensors.append(_tensor(keys, leaf.shape)._replace(name=_TOP[keys], path=keys))
            continue
        place, name = in_layer(keys)
        tensor = _tensor(name, leaf.shape[1:])
        module, dot, kind = tensor.name.rpartition('.')
        of_layer = modules.get(module, module) + dot + kind
        for repeat, number in enumerate(numbers[place]):
            name = f'layers.{number}.{of_layer}'
            tensors.append(tensor._replace(name=name, path=keys, repeat=repeat))
    return tensors


def _tensor(name, shape):
    """Return the Tensor of a leaf by its name in its layer.

    Kernels are [out, in] in a checkpoint, except those of experts, which keep our shape.
    """
    of_experts = name[0] == 'mlp' and len(shape) == 3
    if name[-1] == 'kernel' and of_experts:
        return Tensor('.'.join(name[:-1]), shape, name)
    if name[-1] == 'kernel':
        num_in = 2 if name[:2] == ('attention', 'out') else 1
        shape = int(np.prod(shape[num_in:])), int(np.prod(shape[:num_in]))
        return Tensor('.'.join((*name[:-1], 'weight')), shape, name, transposed=True)
    if name[-1] == 'scale':
        name = (*name[:-1], 'weight')
    return Tensor('.'.join(name), (int(np.prod(shape)),) if name[-1] == 'bias' else shape, name)


def family_tensors(model: ModelHparams, params: dict) -> list[Tensor]:
    """List the tensors of a dense model of one of the families; `params` may be abstract."""
    norms = ('input_layernorm', 'post_attention_layernorm')
    if model.norm_placement == 'reordered':
        norms = ('post_attention_layernorm', 'post_feedforward_layernorm')
    modules = _MODULES | dict(zip(('attention_norm', 'mlp_norm'), norms, strict=True))
    return [
        tensor if tensor.name == HEAD else tensor._replace(name=f'model.{tensor.name}')
        for tensor in all_tensors(model, params, modules)
    ]


def import_params(folder: str | os.PathLike, hparams: Hparams) -> tuple[dict, str]:
    """Read float32 parameters from the *.safetensors of a folder, and the dtype that is exact.

    That is the dtype of all tensors, or float32 if they differ. One tensor at a time is in memory.
    `hparams` has the knobs of `families.knobs_of`. Raises ValueError, before reading, if a tensor
    is missing, has another shape or does not belong to this model; also like TensorFiles.
    """
    folder, wanted = pathlib.Path(folder), abstract_params(hparams.without_adapters)
    tensors = family_tensors(hparams.model, wanted)
    with TensorFiles(folder) as files:
        check_tensors(folder, tensors, files, also=(HEAD,))
        if hparams.model.tie_embeddings and HEAD in files.shapes:
            if not np.array_equal(files.read(HEAD), files.read(TABLE)):
                right = 'although tie_word_embeddings is true; set it to false in config.json'
                raise ValueError(f'{folder}: {HEAD} differs from {TABLE}, {right}')
        params = read_leaves(files, tensors, wanted)
        return with_new_adapters(params, hparams), common_dtype(files, tensors)


def read_leaves(files: TensorFiles, tensors: list[Tensor], wanted):
    """Read a float32 tree with the shapes of `wanted`; `check_tensors` has accepted the tensors.

    Memory holds the tree and one tensor at a time.
    """
    by_path = {}
    for tensor in tensors:
        by_path.setdefault(tensor.path, []).append(tensor)

    def leaf(keys, wanted):
        ours = np.empty(wanted.shape, np.float32)
        for tensor in by_path[keys]:
            theirs = files.read(tensor.name)
            theirs = theirs.T if tensor.transposed else theirs
            ours[tensor.repeat] = theirs.reshape(ours[tensor.repeat].shape)
        return jnp.asarray(ours)

    return traverse_util.path_aware_map(leaf, wanted)


def common_dtype(files: TensorFiles, tensors: list[Tensor]) -> str:
    """Return the dtype of all tensors that have no fixed one, or float32 if they differ."""
    dtypes = {files.dtypes[tensor.name] for tensor in tensors if tensor.dtype is None}
    return dtypes.pop() if len(dtypes) == 1 else 'float32'


def check_tensors(folder, tensors: list[Tensor], files: TensorFiles, also: tuple[str, ...] = ()):
    """Raise ValueError if a tensor is missing, has another shape, or is not of the model."""
    wanted = {tensor.name: tensor.shape for tensor in tensors}
    missing = [name for name in wanted if name not in files.shapes]
    if missing:
        found = f'{missing[0]} and {len(missing) - 1} more' if missing[1:] else missing[0]
        raise ValueError(f'{folder}: lacks the tensor {found}; its config.json needs it')
    known = {*wanted, *also}
    extra = [name for name in files.shapes if name not in known and not name.endswith(_BUFFER)]
    if extra:
        right = 'the model of its config.json has none'
        raise ValueError(f'{folder}: has a tensor {short_repr(extra[0])}; {right}')
    for name, shape in wanted.items():
        if files.shapes[name] != shape:
            found = f'{name} has shape {list(files.shapes[name])}'
            raise ValueError(f'{folder}: {found}; its config.json needs {list(shape)}')


def export_params(
    folder: str | os.PathLike, hparams: Hparams, params: dict, dtype: str, **shards
) -> None:
    """Write the parameters of a dense model of a family as *.safetensors of a folder.

    `dtype` is float32, bfloat16 or float16. Raises ValueError like `family_of` and `write_tensors`,
    and for adapters that are not merged.
    """
    check_merged(hparams.model)
    family_of(hparams.model)
    write_leaves(folder, family_tensors(hparams.model, params), params, dtype, **shards)


def exact_dtype(tree, dtype: str) -> str:
    """Return `dtype` if it holds all numbers of a float32 tree exactly, otherwise float32."""
    leaves = map(jnp.asarray, jax.tree.leaves(tree))
    exact = all(jnp.array_equal(leaf, leaf.astype(dtype)) for leaf in leaves)
    return dtype if exact else 'float32'


def check_merged(model: ModelHparams):
    """Raise ValueError, one line, for a model with adapters, which no format can hold."""
    if model.adapters.rank:
        right = 'must be 0; merge the adapters before export'
        raise ValueError(f'model.adapters.rank={model.adapters.rank}: {right}')


def write_leaves(
    folder: str | os.PathLike, tensors: list[Tensor], tree: dict, dtype: str, **shards
) -> None:
    """Write tensors of a tree as *.safetensors of a folder; arguments as in `export_params`."""
    by_name = {tensor.name: tensor for tensor in tensors}

    def read(name):
        tensor, leaf = by_name[name], tree
        for key in tensor.path:
            leaf = leaf[key]
        array, shape = np.asarray(leaf[tensor.repeat]), tensor.shape
        array = array.reshape(shape[::-1]).T if tensor.transposed else array.reshape(shape)
        return array.copy()  # contiguous; np.ascontiguousarray would make a scalar 1-d

    shapes = {name: tensor.shape for name, tensor in by_name.items()}
    dtypes = {name: tensor.dtype or dtype for name, tensor in by_name.items()}
    write_tensors(pathlib.Path(folder), shapes, read, dtypes, **shards)
