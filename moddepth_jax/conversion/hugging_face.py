"""Parameters from the tensors of a Hugging Face checkpoint, and back."""

import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from moddepth_jax.conversion.families import family_of
from moddepth_jax.conversion.tensor_files import TensorFiles, write_tensors
from moddepth_jax.conversion.tensor_names import tensors_of
from moddepth_jax.hparams import Hparams
from moddepth_jax.model.transformer import Transformer

HEAD, TABLE = 'lm_head.weight', 'model.embed_tokens.weight'
_BUFFER = '.rotary_emb.inv_freq'  # of old checkpoints: computed, not learned


def import_params(folder: str | os.PathLike, hparams: Hparams) -> tuple[dict, str]:
    """Parameters of the Transformer from the *.safetensors of a folder.

    Tensors are read one after another; more than the parameters is held of none but one leaf.

    Args:
      folder: of the checkpoint.
      hparams: with the knobs of `families.knobs_of`; dense.

    Returns:
      The parameters in float32, and the dtype that holds all of them as they were: that of all
      tensors, or float32.

    Raises:
      ValueError: one line, nothing read, for a tensor that is missing, of another shape or not the
        model's; as TensorFiles.
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
