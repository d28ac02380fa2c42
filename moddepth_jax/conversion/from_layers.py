"""Makes the blocks of a model from layers of a dense one, for fewer layers or for looped blocks."""

import dataclasses

import jax
import numpy as np

from moddepth_jax.hparams import Hparams, ModelHparams
from moddepth_jax.model.loop_params import EMBEDDINGS, has_loops
from moddepth_jax.model.stack import Stack, unstack_layers
from moddepth_jax.model.streams import layer_kinds

HOW = ('average', 'first', 'last')


def with_layers(
    source: Hparams, target: Hparams, how: str
) -> tuple[Hparams, list[tuple[int, ...]]]:
    """Return the source with the blocks and loops of the target, and the layers of each block.

    Args:
      source: dense model without loops. Unless `how` is a list, it has as many layers as run in the
        target.
      target: its `block_order` says which block replaces which of these layers.
      how: 'average', 'first' or 'last' of the layers that a looped block replaces (Bae et al. 2024,
        arXiv 2410.20672, section 2.2); or one layer for each block, such as 0,3,5,11.

    Raises:
      ValueError: one line, if `how` does not fit the two models, if layers differ in kind from
        their block, or for a mean of experts.
    """
    layers_of_block = _layers_of_blocks(source.model, target.model, how)
    names = 'num_layers', 'looped_layers', 'loops', 'loop_order', 'loop_norms', 'loop_embeddings'
    names += ('windows',)
    blocks = {name: getattr(target.model, name) for name in names}
    layers = target.model.experts.layers
    blocks['experts'] = dataclasses.replace(source.model.experts, layers=layers)
    result = dataclasses.replace(source, model=dataclasses.replace(source.model, **blocks))
    _check_kinds(source.model, result.model, layers_of_block, how)
    return result, layers_of_block


def take_layers(source: Hparams, params: dict, target: Hparams, how: str) -> dict:
    """Make the parameters of `with_layers` from those of the source.

    A block of one layer has the bits of that layer; a block of several layers has their mean,
    computed in float64. The norms of a loop are those of the layer that it replaces, or of the
    layer in the list. Embeddings of loops are 0. If the layers of the source are equal, the new
    model is the same function.
    """
    result, layers_of_block = with_layers(source, target, how)
    on_host = jax.tree.map(np.asarray, params['stack'])
    layers = [layer for _, layer in unstack_layers(Stack(source.model, 'top_c'), on_host)]
    stack, blocks, runs = Stack(result.model, 'top_c'), [], {}
    each = zip(layers_of_block, _places(result.model), stack.stored.kinds, strict=True)
    for some, places, kind in each:
        block = jax.tree.map(_mean, *(layers[n] for n in some))
        visits = places if how in HOW else some * len(places)
        blocks.append(_with_norms(block, kind, [layers[n] for n in visits]))
    for (run, layer), numbers in stack.layer_numbers.items():
        repeats = [blocks[n] for n in numbers]
        runs.setdefault(run, {})[layer] = jax.tree.map(lambda *x: np.stack(x), *repeats)
    params = params | {'stack': runs}
    if result.model.loop_embeddings != 'none':
        shape = (result.model.loops, result.model.d_model)
        params[EMBEDDINGS] = np.zeros(shape, params['embedding'].dtype)
    return jax.tree.map(jax.numpy.asarray, params)


def _with_norms(block, kind, layers):
    """Return a block whose norms are those of a layer for each loop, if each loop has norms."""

    def leaf(path, mean, *of_layers):
        return np.stack(of_layers) if has_loops(path, kind) else mean

    return jax.tree_util.tree_map_with_path(leaf, block, *layers)


def _places(model: ModelHparams) -> list[tuple[int, ...]]:
    """Return the places in `block_order` at which each block runs."""
    order = np.array(model.block_order)
    return [tuple(np.flatnonzero(order == n).tolist()) for n in range(model.num_layers)]


def _refuse(how, why):
    raise ValueError(f'--from_layers={how}: {why}')


def _layers_of_blocks(source: ModelHparams, target: ModelHparams, how):
    if source.routed_layers or source.depth.stream != 'residual':
        _refuse(how, 'the run that is converted must be dense, with depth.stream=residual')
    if source.looped:
        _refuse(how, 'the run that is converted must be without loops')
    if how not in HOW:
        layers = how.split(',')
        known = all(layer.isdecimal() and int(layer) < source.num_layers for layer in layers)
        if not known or len(layers) != target.num_layers:
            right = f'must be {", ".join(HOW)}, or {target.num_layers} layers (model.num_layers) '
            _refuse(how, right + f'from 0 to {source.num_layers - 1}')
        return [(int(layer),) for layer in layers]
    if not target.looped:
        right = 'needs looped blocks: set model.looped_layers and model.loops, or name a layer for '
        _refuse(how, right + 'each block')
    if source.num_layers != target.num_blocks:
        right = f'the run that is converted has {source.num_layers} layers; it must have '
        right += f'{target.num_blocks}, as many as run in the new model; or name a layer for each'
        _refuse(how, right)
    chosen = {'average': slice(None), 'first': slice(1), 'last': slice(-1, None)}[how]
    return [places[chosen] for places in _places(target)]


def _mean(*leaves):
    if len(leaves) == 1:
        return leaves[0]
    return np.mean(np.stack(leaves), axis=0, dtype=np.float64).astype(leaves[0].dtype)


def _check_kinds(source, result, layers_of_block, how):
    if source.experts.choice == 'expert':
        _refuse(how, 'the run has experts that choose, whose thresholds belong to their layer')
    if source.experts.choice != 'none' and how == 'average':
        right = 'must pick layers: experts of different layers cannot be averaged'
        _refuse(how, right)
    given, wanted = layer_kinds(source), Stack(result, 'top_c').stored.kinds
    for block, layers in enumerate(layers_of_block):
        for layer in layers:
            pairs = zip(wanted[block]._asdict().items(), given[layer], strict=True)
            differ = [f for (f, one), other in pairs if one != other and f != 'own_norms']
            if differ:
                right = f'block {block} cannot be layer {layer} of the run: they differ in '
                _refuse(how, right + ', '.join(differ))


def explain_layers(layers_of_block: list[tuple[int, ...]]) -> str:
    """Describe which layers the blocks are made of."""
    blocks = [
        f'block {block} is layer {layers[0]}'
        if len(layers) == 1
        else f'block {block} the mean of layers {", ".join(map(str, layers))}'
        for block, layers in enumerate(layers_of_block)
    ]
    return ', '.join(blocks) + ' of the run'
