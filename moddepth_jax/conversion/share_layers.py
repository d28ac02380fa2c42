"""Makes the parameters of a looped model from those of a dense one with a block for each place."""

import dataclasses

import jax
import numpy as np

from moddepth_jax.hparams import Hparams, ModelHparams
from moddepth_jax.model.stack import Stack, unstack_layers
from moddepth_jax.model.streams import layer_kinds

HOW = ('average', 'first', 'last')


def shared_layers(source: ModelHparams, target: ModelHparams, how: str) -> list[tuple[int, ...]]:
    """The layers of `source` whose mean each stored block of the looped `target` becomes.

    Args:
      source: without loops, as many blocks as the target runs; any number for a list of layers.
      target: its `block_order` says which block stands for each of these layers.
      how: average of all layers that a block stands for, or the first or the last of them (Bae et
        al. 2024, arXiv 2410.20672, section 2.2); or one layer for each block, such as 0,3,5,11.

    Raises:
      ValueError: one line, for a word or list that does not fit the two models.
    """
    if source.routed_layers or source.depth.stream != 'residual':
        _refuse(how, 'the run that is converted must be dense, of the stream residual')
    if source.looped or not target.looped:
        right = 'makes a looped model of one without loops; set model.looped_layers and model.loops'
        _refuse(how, right)
    if how not in HOW:
        layers = how.split(',')
        known = all(layer.isdecimal() and int(layer) < source.num_layers for layer in layers)
        if not known or len(layers) != target.num_layers:
            right = f'must be {", ".join(HOW)}, or {target.num_layers} layers (model.num_layers) '
            _refuse(how, right + f'from 0 to {source.num_layers - 1}')
        return [(int(layer),) for layer in layers]
    if source.num_layers != target.num_blocks:
        right = f'needs a run of {target.num_blocks} layers, as many as run in the new model, and '
        right += f'has one of {source.num_layers}; or name a layer for each block'
        _refuse(how, right)
    order = np.array(target.block_order)
    places = [np.flatnonzero(order == block).tolist() for block in range(target.num_layers)]
    chosen = {'average': slice(None), 'first': slice(1), 'last': slice(-1, None)}[how]
    return [tuple(of_block[chosen]) for of_block in places]


def share_layers(source: Hparams, params: dict, target: Hparams, how: str) -> tuple[Hparams, dict]:
    """The source as a looped model with the blocks and loops of the target, and its parameters.

    A block of one layer has its bits; of several, their mean in float64. Equal layers become the
    same function. All else of the model is the source's. Raises ValueError, one line, also for
    layers of one block that differ in kind, and for a mean of experts.
    """
    layers_of_block = shared_layers(source.model, target.model, how)
    names = ('num_layers', 'looped_layers', 'loops', 'loop_order', 'windows')
    loops = {name: getattr(target.model, name) for name in names}
    shared = dataclasses.replace(source, model=dataclasses.replace(source.model, **loops))
    _check_kinds(source.model, shared.model, layers_of_block, how)
    on_host = jax.tree.map(np.asarray, params['stack'])
    layers = [layer for _, layer in unstack_layers(Stack(source.model, 'top_c'), on_host)]
    blocks = [jax.tree.map(_mean, *(layers[n] for n in some)) for some in layers_of_block]
    stack = {}
    for i, numbers in enumerate(Stack(shared.model, 'top_c').layer_numbers):
        of_run = [[blocks[n] for n in of_place] for of_place in numbers.T]
        stack[f'run_{i}'] = {
            f'layer_{j}': jax.tree.map(lambda *leaves: np.stack(leaves), *repeats)
            for j, repeats in enumerate(of_run)
        }
    return shared, params | {'stack': jax.tree.map(jax.numpy.asarray, stack)}


def _refuse(how, why):
    raise ValueError(f'--share_layers={how}: {why}')


def _mean(*leaves):
    if len(leaves) == 1:
        return leaves[0]
    return np.mean(np.stack(leaves), axis=0, dtype=np.float64).astype(leaves[0].dtype)


def _check_kinds(source, shared, layers_of_block, how):
    if source.experts.choice == 'expert':
        _refuse(how, 'the run has experts that choose, whose thresholds are those of each layer')
    if source.experts.choice != 'none' and how == 'average':
        right = 'must be a pick of layers: experts of several layers have no common order'
        _refuse(how, right)
    given, wanted = layer_kinds(source), Stack(shared, 'top_c').stored_kinds
    for block, layers in enumerate(layers_of_block):
        for layer in layers:
            differ = [
                field
                for field, one, other in zip(
                    wanted[block]._fields, wanted[block], given[layer], strict=True
                )
                if one != other
            ]
            if differ:
                right = f'block {block} cannot be layer {layer} of the run: they differ in '
                _refuse(how, right + ', '.join(differ))


def explain_sharing(layers_of_block: list[tuple[int, ...]]) -> str:
    """Which layers the blocks are, in words."""
    blocks = [
        f'block {block} is layer {layers[0]}'
        if len(layers) == 1
        else f'block {block} the mean of layers {", ".join(map(str, layers))}'
        for block, layers in enumerate(layers_of_block)
    ]
    return ', '.join(blocks) + ' of the run'
