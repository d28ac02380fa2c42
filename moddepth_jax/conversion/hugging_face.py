"""Parameters from the tensors of a Hugging Face checkpoint, and back."""

import os
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moddepth_jax.conversion.families import family_of
from moddepth_jax.conversion.tensor_files import TensorFiles, write_tensors
from moddepth_jax.hparams import Hparams, ModelHparams
from moddepth_jax.model.stack import Stack
from moddepth_jax.model.transformer import Transformer

HEAD, TABLE = 'lm_head.weight', 'model.embed_tokens.weight'
_BUFFER = '.rotary_emb.inv_freq'  # of old checkpoints: computed, not learned


class Tensor(NamedTuple):
    """A tensor of a checkpoint, and the leaf of our parameters that holds it.

    Attributes:
      name, shape: in the checkpoint, where matrices are [out, in].
      path: of the leaf in our parameters.
      repeat: its index on the leaf's leading axis of repeats; None for a leaf without one.
      transposed: whether ours is its transpose; axes of ours may be split into heads.
    """

    name: str
    shape: tuple[int, ...]
    path: tuple[str, ...]
    repeat: int | None = None
    transposed: bool = False

    def to_ours(self, array, shape):
        """The array of the checkpoint as ours, of `shape`."""
        return (array.T if self.transposed else array).reshape(shape)

    def to_theirs(self, array):
        """Our array as the checkpoint has it, contiguous."""
        if self.transposed:
            array = array.reshape(self.shape[::-1]).T
        return np.ascontiguousarray(array.reshape(self.shape))


def tensors_of(model: ModelHparams) -> list[Tensor]:
    """All tensors of a dense model of one of the families, in the order of its layers."""
    width, table = model.d_model, (model.vocab_size, model.d_model)
    tensors = [Tensor('model.embed_tokens.weight', table, ('embedding',))]
    layer = 0
    for i, run in enumerate(Stack(model, 'top_c').runs):
        for repeat in range(run.repeats):
            for j in range(len(run.group)):
                place = ('stack', f'run_{i}', f'layer_{j}')
                for suffix, shape, path, transposed in _layer_tensors(model):
                    name = f'model.layers.{layer}.{suffix}'
                    tensors.append(Tensor(name, shape, (*place, *path), repeat, transposed))
                layer += 1
    tensors.append(Tensor('model.norm.weight', (width,), ('final_norm', 'scale')))
    if not model.tie_embeddings:
        tensors.append(Tensor('lm_head.weight', table, ('head', 'kernel'), None, True))
    return tensors


def _layer_tensors(model):
    """(suffix of its name, shape, path of ours, transposed) of each tensor of a layer."""
    width, queries = model.d_model, model.num_heads * model.head_dim
    keys = model.num_kv_heads * model.head_dim
    matrices = [
        ('self_attn.q_proj', ('attention', 'query'), (queries, width)),
        ('self_attn.k_proj', ('attention', 'key'), (keys, width)),
        ('self_attn.v_proj', ('attention', 'value'), (keys, width)),
        ('self_attn.o_proj', ('attention', 'out'), (width, queries)),
        ('mlp.gate_proj', ('mlp', 'w1'), (model.d_ff, width)),
        ('mlp.up_proj', ('mlp', 'w3'), (model.d_ff, width)),
        ('mlp.down_proj', ('mlp', 'w2'), (width, model.d_ff)),
    ]
    scales = [
        ('input_layernorm', ('attention_norm',), width),
        ('post_attention_layernorm', ('mlp_norm',), width),
    ]
    if model.norm_placement == 'reordered':
        scales = [
            ('post_attention_layernorm', ('attention_norm',), width),
            ('post_feedforward_layernorm', ('mlp_norm',), width),
        ]
    if model.qk_norm == 'full':
        scales.append(('self_attn.q_norm', ('attention', 'query_norm'), queries))
        scales.append(('self_attn.k_norm', ('attention', 'key_norm'), keys))
    found = []
    for name, path, shape in matrices:
        found.append((f'{name}.weight', shape, (*path, 'kernel'), True))
        if model.use_bias:
            found.append((f'{name}.bias', shape[:1], (*path, 'bias'), False))
    for name, path, size in scales:
        found.append((f'{name}.weight', (size,), (*path, 'scale'), False))
    return found


def import_params(folder: str | os.PathLike, hparams: Hparams) -> tuple[dict, str]:
    """Parameters of the Transformer from the *.safetensors of a folder.

    Tensors are read one after another, so that memory holds the parameters and one tensor.

    Args:
      folder: of the checkpoint.
      hparams: with the knobs of `families.knobs_of`; dense.

    Returns:
      The parameters in float32, and the dtype that holds all tensors exactly: their own if it is
      the same for all, otherwise float32.

    Raises:
      ValueError: one line, before reading, for a tensor that is missing, of another shape or not
        of this model; as TensorFiles.
    """
    folder, model = pathlib.Path(folder), hparams.model
    tensors = tensors_of(model)
    with TensorFiles(folder) as files:
        _check(folder, tensors, files)
        if model.tie_embeddings and HEAD in files.shapes:
            if not np.array_equal(files.read(HEAD), files.read(TABLE)):
                right = 'though tie_word_embeddings is true; set it to false in config.json'
                raise ValueError(f'{folder}: {HEAD} is not {TABLE}, {right}')
        params = _fill(tensors, files, _abstract(hparams))
        dtypes = set(files.dtypes.values())
    return params, dtypes.pop() if len(dtypes) == 1 else 'float32'


def _check(folder, tensors, files):
    wanted = {tensor.name: tensor.shape for tensor in tensors}
    extra = [name for name in files.shapes if name not in wanted and not name.endswith(_BUFFER)]
    missing = [name for name in wanted if name not in files.shapes]
    if missing:
        found = f'{missing[0]} and {len(missing) - 1} more' if missing[1:] else missing[0]
        raise ValueError(f'{folder}: lacks the tensor {found}; its config.json wants them')
    if extra and not (extra == [HEAD] and HEAD not in wanted):
        right = 'config.json stands for no model that has it'
        raise ValueError(f'{folder}: has a tensor {extra[0]}; {right}')
    for name, shape in wanted.items():
        if files.shapes[name] != shape:
            found = f'{name} has shape {list(files.shapes[name])}'
            raise ValueError(f'{folder}: {found}; its config.json wants {list(shape)}')


def _abstract(hparams):
    tokens_BT = jax.ShapeDtypeStruct((1, hparams.data.sequence_length), 'int32')
    return jax.eval_shape(Transformer(hparams).init, jax.random.key(0), tokens_BT)['params']


def _fill(tensors, files, abstract):
    by_path = {}
    for tensor in tensors:
        by_path.setdefault(tensor.path, []).append(tensor)

    def leaf(keys, wanted):
        parts = by_path.pop(tuple(key.key for key in keys))
        array = np.empty(wanted.shape, np.float32)
        for part in parts:
            at = ... if part.repeat is None else part.repeat
            array[at] = part.to_ours(files.read(part.name), array[at].shape)
        return jnp.asarray(array)

    return jax.tree_util.tree_map_with_path(leaf, abstract)


def export_params(
    folder: str | os.PathLike, hparams: Hparams, params: dict, dtype: str, **shards
) -> None:
    """Writes the parameters as the *.safetensors of a folder.

    Args:
      folder: where to.
      hparams: of the model, dense and of a family.
      params: of the Transformer.
      dtype: float32, bfloat16 or float16.
      shards: as `write_tensors` takes them.

    Raises:
      ValueError: as `families.family_of` and `write_tensors`.
    """
    family_of(hparams.model)
    tensors = {tensor.name: tensor for tensor in tensors_of(hparams.model)}

    def read(name):
        tensor, leaf = tensors[name], params
        for key in tensor.path:
            leaf = leaf[key]
        leaf = leaf if tensor.repeat is None else leaf[tensor.repeat]
        return tensor.to_theirs(np.asarray(leaf))

    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    write_tensors(pathlib.Path(folder), shapes, read, dtype, **shards)
