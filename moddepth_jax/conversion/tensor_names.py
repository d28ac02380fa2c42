"""Where each tensor of a Hugging Face checkpoint lies among our parameters."""

from typing import NamedTuple

import numpy as np

from moddepth_jax.hparams import ModelHparams
from moddepth_jax.model.stack import Stack


class Tensor(NamedTuple):
    """A tensor, and the leaf of ours that it is, or a part of.

    Attributes:
      name, shape: as in the checkpoint, where matrices are [out, in].
      path: of the leaf in our parameters.
      repeat: its place on the leaf's leading axis of repeats; None for a leaf without one.
      turned: whether ours is its transpose; the axes of ours may be cut into heads.
    """

    name: str
    shape: tuple[int, ...]
    path: tuple[str, ...]
    repeat: int | None = None
    turned: bool = False

    def to_ours(self, array, shape):
        """The array of the checkpoint as ours, of `shape`."""
        return (array.T if self.turned else array).reshape(shape)

    def to_theirs(self, array):
        """Ours as the checkpoint has it, in memory of its own order."""
        if self.turned:
            array = array.reshape(self.shape[::-1]).T
        return np.ascontiguousarray(array.reshape(self.shape))


def tensors_of(model: ModelHparams) -> list[Tensor]:
    """All tensors of a dense model of a family, in the order of its layers.

    Args:
      model: as `families.family_of` takes it.
    """
    width, table = model.d_model, (model.vocab_size, model.d_model)
    tensors = [Tensor('model.embed_tokens.weight', table, ('embedding',))]
    layer = 0
    for i, run in enumerate(Stack(model, 'top_c').runs):
        for repeat in range(run.repeats):
            for j in range(len(run.group)):
                place = ('stack', f'run_{i}', f'layer_{j}')
                for suffix, shape, path, turned in _of_a_layer(model):
                    name = f'model.layers.{layer}.{suffix}'
                    tensors.append(Tensor(name, shape, (*place, *path), repeat, turned))
                layer += 1
    tensors.append(Tensor('model.norm.weight', (width,), ('final_norm', 'scale')))
    if not model.tie_embeddings:
        tensors.append(Tensor('lm_head.weight', table, ('head', 'kernel'), None, True))
    return tensors


def _of_a_layer(model):
    """(suffix of its name, shape, path of ours, turned) of each tensor of a layer."""
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
