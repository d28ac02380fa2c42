"""Where a model's parameters are, as a table for the user."""

import re
from typing import NamedTuple

import jax

_OF_LAYER = re.compile(r'stack/(run_\d+/layer_\d+)/(?:block/)?(.*)')


class Part(NamedTuple):
    """Parameters of one part of the model, in all its layers.

    Attributes:
      name: embedding, attention, mlp, norms, router, predictor, stream (depth slots), head.
      layers: how many layers have it; 0: it belongs to none.
      parameters: their number, over all layers.
      arrays: names of its arrays or groups of them, such as `query`; `scale` alone is not told.
    """

    name: str
    layers: int
    parameters: int
    arrays: tuple[str, ...]


def parts(params) -> list[Part]:
    """The parts of a Transformer's parameters, the largest first.

    Args:
      params: of a Transformer, arrays or jax.ShapeDtypeStruct.
    """
    layers, sizes, arrays = {}, {}, {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        text = jax.tree_util.keystr(path, simple=True, separator='/')
        match = _OF_LAYER.fullmatch(text)
        name, *inner = (match[2] if match else text).split('/')
        if name.endswith('_norm'):
            name, inner = 'norms', []
        if match:  # a leaf holds one row for each repeat of its layer
            layers.setdefault(name, {})[match[1]] = leaf.shape[0]
        sizes[name] = sizes.get(name, 0) + leaf.size
        arrays.setdefault(name, {}).update(dict.fromkeys(inner[:1]))
    found = [
        Part(name, sum(layers.get(name, {}).values()), sizes[name], tuple(arrays[name]))
        for name in sizes
    ]
    return sorted(found, key=lambda part: (-part.parameters, part.name))


def parameter_lines(params) -> list[str]:
    """`parts` as lines of text under a header, and their sum."""
    rows = parts(params)
    total = sum(part.parameters for part in rows)
    size = max(13, len(f'{total:,}'))
    lines = [f'{"parameters":12}{"layers":>6}  {"all":>{size}}   share  arrays']
    for part in rows:
        numbers = (
            f'{part.layers or "":>6}  {part.parameters:>{size},}  {part.parameters / total:6.1%}'
        )
        lines.append(f'  {part.name:10}{numbers}  {" ".join(part.arrays)}'.rstrip())
    return [*lines, f'  {"sum":10}{"":6}  {total:>{size},}']
