"""Low-rank adapters: W + (alpha / r) A B for chosen matrices W of the stack.

A and B are leaves next to W, and are merged into it before a layer is applied (Hu et al. 2021,
arXiv 2106.09685, section 4.1). No module knows of them.
"""

import fnmatch
import math
import string
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from moddepth_jax.hparams import ModelHparams
from moddepth_jax.model.sharding import axis_names, matrix_sides

ADAPTER = 'adapter'  # the name of a dict of `a` and `b` next to `kernel`


def add_adapters(key, stack: dict, model: ModelHparams, layer_numbers) -> dict:
    """The parameters of a stack with new adapters, which change nothing yet: B = 0.

    A is normal with variance 1 / (3 inputs), that of the authors' code; its draw depends on the
    key, the number of the layer (of `Stack.layer_numbers`) and its name. Raises ValueError, one
    line, for a pattern without a matrix.
    """
    adapters = model.adapters
    if not adapters.rank:
        return stack
    leaves = traverse_util.flatten_dict({'stack': stack}, sep='/')
    matrices = {name: leaf for name, leaf in leaves.items() if _sides(name, leaf) is not None}
    chosen = set()
    for pattern in adapters.params:
        found = fnmatch.filter(matrices, pattern)
        if not found:
            names = ', '.join(sorted({name.split('/', 3)[3] for name in matrices}))
            right = f'no matrix has such a name; after stack/run_N/layer_N/ there are {names}'
            raise ValueError(f'model.adapters.params={pattern!r}: {right}')
        chosen.update(found)
    for name in sorted(chosen):
        _, run, layer, *rest = name.split('/')
        numbers = layer_numbers[int(run.removeprefix('run_'))]
        numbers = numbers[:, int(layer.removeprefix('layer_'))]
        stem, own = name.removesuffix('kernel'), '/'.join(r for r in rest if r != 'block')
        a, b = _new(key, leaves[name], _sides(name, leaves[name]), numbers, own, adapters.rank)
        leaves |= {f'{stem}{ADAPTER}/a': a, f'{stem}{ADAPTER}/b': b}
    return traverse_util.unflatten_dict(leaves, sep='/')['stack']


def _sides(name, leaf):
    """(batch, inputs, outputs): the axes of a matrix of the stack, but for the first; else None."""
    names = axis_names(name, leaf.ndim)[1:]
    return matrix_sides(names) if name.endswith('/kernel') and 'vocab' not in names else None


def _new(key, kernel, sides, numbers, name, rank):
    batch, inputs, outputs = (tuple(kernel.shape[1:][i] for i in side) for side in sides)
    stddev = 1 / math.sqrt(3 * math.prod(inputs))
    key = jax.random.fold_in(key, zlib.crc32(name.encode()))

    def draw(number):
        shape = (*batch, *inputs, rank)
        return stddev * jax.random.normal(jax.random.fold_in(key, number), shape, kernel.dtype)

    a = jax.vmap(draw)(jnp.asarray(numbers, jnp.int32))
    return a, jnp.zeros((len(numbers), *batch, rank, *outputs), kernel.dtype)


def has_adapters(params: dict) -> bool:
    """Whether there is an adapter in nested dicts of parameters."""
    return any(ADAPTER in path for path in traverse_util.flatten_dict(params))


def merge_adapters(params: dict, model: ModelHparams) -> dict:
    """Parameters, of a layer or of many, with each adapter added to its matrix and gone."""
    if not model.adapters.rank:
        return params

    def merge(node):
        if not isinstance(node, dict):
            return node
        rest = {name: merge(part) for name, part in node.items() if name != ADAPTER}
        if ADAPTER in node:
            delta = _product(node[ADAPTER]['a'], node[ADAPTER]['b'], node['kernel'].ndim)
            # With += the arrays of NumPy that were given would change.
            rest['kernel'] = rest['kernel'] + model.adapters.scale * delta
        return rest

    return merge(params)


def _product(a, b, ndim):
    """A B over the rank: [batch, inputs, r] and [batch, r, outputs], any number of axes each."""
    letters = iter(string.ascii_lowercase.replace('r', ''))
    batch = a.ndim + b.ndim - 2 - ndim
    shared, inputs, outputs = (
        ''.join(next(letters) for _ in range(count))
        for count in (batch, a.ndim - 1 - batch, b.ndim - 1 - batch)
    )
    equation = f'{shared}{inputs}r,{shared}r{outputs}->{shared}{inputs}{outputs}'
    if isinstance(a, np.ndarray):
        return np.einsum(equation, a, b)
    return jnp.einsum(equation, a, b, precision='highest')
