"""Low-rank adapters: W + (alpha / r) A B for chosen matrices W of the stack.

A and B are leaves next to W. They are merged into W before a layer is applied (Hu et al. 2021,
arXiv 2106.09685, section 4.1), so the modules do not know about them.
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

ADAPTER = 'adapter'  # the name of the dict with `a` and `b` next to `kernel`


def add_adapters(key, stack: dict, model: ModelHparams, layer_numbers) -> dict:
    """Return the parameters of a stack with new adapters, which change nothing yet: B = 0.

    A is normal with the variance 1 / (3 inputs) of the authors' code. Its draw depends on the key,
    the number of the layer (`Stack.layer_numbers`) and the name of the matrix. Raises a one-line
    ValueError for a pattern that matches no matrix.
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
        numbers = layer_numbers[run, layer]
        stem, in_layer = name.removesuffix('kernel'), '/'.join(r for r in rest if r != 'block')
        sides = _sides(name, leaves[name])
        a, b = _new(key, leaves[name], sides, numbers, in_layer, adapters.rank)
        leaves |= {f'{stem}{ADAPTER}/a': a, f'{stem}{ADAPTER}/b': b}
    return traverse_util.unflatten_dict(leaves, sep='/')['stack']


def _sides(name, leaf):
    """Return the (batch, input, output) axes of a matrix after its layer axis, or None."""
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
    """Return whether nested dicts of parameters contain an adapter."""
    return any(ADAPTER in path for path in traverse_util.flatten_dict(params))


def merge_adapters(params: dict, model: ModelHparams) -> dict:
    """Return the parameters of one or many layers with each adapter merged into its matrix."""
    if not model.adapters.rank:
        return params

    def merge(node):
        if not isinstance(node, dict):
            return node
        rest = {name: merge(part) for name, part in node.items() if name != ADAPTER}
        if ADAPTER in node:
            delta = _product(node[ADAPTER]['a'], node[ADAPTER]['b'], node['kernel'].ndim)
            # += would change NumPy arrays of the caller.
            rest['kernel'] = rest['kernel'] + model.adapters.scale * delta
        return rest

    return merge(params)


def _product(a, b, ndim):
    """Return A B of [batch, inputs, r] and [batch, r, outputs], where each may be many axes."""
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
