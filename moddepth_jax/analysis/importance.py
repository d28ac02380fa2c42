"""What skipping each block, its attention or its mlp costs on held-out text."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from moddepth_jax.hparams import Hparams, ModelHparams
from moddepth_jax.model.adapters import ADAPTER
from moddepth_jax.model.stack import Stack
from moddepth_jax.training.evaluate import evaluate

PARTS = {'block': (True, True), 'attention': (True, False), 'mlp': (False, True)}  # what is skipped


def check_importance(model: ModelHparams):
    """Raises ValueError, one line, for a model in which a block cannot be skipped by adding 0."""
    if model.norm_placement == 'post':
        right = 'must be pre or reordered: after a skipped part a norm would still run'
        raise ValueError(f'model.norm_placement={model.norm_placement!r}: {right}')


@functools.partial(jax.jit, static_argnames='model')
def skip_parts(params: dict, kept_L2, *, model: ModelHparams) -> dict:
    """Parameters of a model whose skipped parts add nothing to the stream.

    Their output projections are 0; all else is computed as before, so that one program serves for
    all `kept_L2`, bool: attention and mlp of each of the L blocks with parameters of their own. The
    depth slots of a skipped block stay, and so do the values that it gives to later layers.
    """
    numbers = Stack(model, 'top_c').layer_numbers

    def skip(path, leaf):
        run, layer, *names = (key.key for key in path if key.key != ADAPTER)
        parts = names[-3:-1] == ['attention', 'out'], 'mlp' in names and names[-2] == 'w2'
        if not any(parts):
            return leaf
        layers = numbers[int(run.removeprefix('run_'))][:, int(layer.removeprefix('layer_'))]
        kept = kept_L2[layers, parts.index(True)].reshape(-1, *(1,) * (leaf.ndim - 1))
        return jnp.where(kept, leaf, 0)

    return params | {'stack': jax.tree_util.tree_map_with_path(skip, params['stack'])}


def block_importance(
    variables, hparams: Hparams, dataset, mesh, num_batches, routing, on_batch=lambda: None
) -> dict:
    """Losses with each block skipped, one at a time, on the first `num_batches` held-out batches.

    Arguments as of `evaluate`, whose errors these are too; `on_batch` is called after each of
    `num_passes` evaluations. A looped block is skipped in all its loops.

    Returns:
      dict: `loss` (nats a target), `bits_per_byte` and `targets` of the model; `blocks`, for each
      block with parameters of its own its number `layer`, `routed`, and for each of PARTS its
      `loss` and `bits_per_byte` without it, and `cost` and `cost_bits`: how much more these are;
      and `ranking`, the numbers of the blocks by the cost of the block, the cheapest first.
    """
    model = hparams.model
    check_importance(model)

    def measure(kept_L2):
        params = skip_parts(variables['params'], kept_L2, model=model)
        result = evaluate(
            variables | {'params': params}, hparams, dataset, mesh, num_batches, routing
        )
        on_batch()
        return {name: result[name] for name in ('loss', 'bits_per_byte', 'targets')}

    every_L2 = np.ones((model.num_layers, 2), bool)
    base, blocks = measure(every_L2), []
    routed = {
        block for place, block in enumerate(model.block_order) if place in model.routed_layers
    }
    for layer in range(model.num_layers):
        row = {'layer': layer, 'routed': layer in routed}
        for part, skipped in PARTS.items():
            kept_L2 = every_L2.copy()
            kept_L2[layer] = np.logical_not(skipped)
            found = measure(kept_L2)
            row[part] = {
                'cost': found['loss'] - base['loss'],
                'cost_bits': found['bits_per_byte'] - base['bits_per_byte'],
                'loss': found['loss'],
                'bits_per_byte': found['bits_per_byte'],
            }
        blocks.append(row)
    ranking = sorted(range(len(blocks)), key=lambda layer: blocks[layer]['block']['cost'])
    return base | {'blocks': blocks, 'ranking': ranking}


def num_passes(model: ModelHparams) -> int:
    """Evaluations of `block_importance`."""
    return 1 + len(PARTS) * model.num_layers
