"""Measures how much the held-out loss rises if a block, its attention or its mlp is skipped."""

import dataclasses
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
    """Raise ValueError for a model in which adding 0 does not skip a block."""
    if model.norm_placement == 'post':
        right = 'must be pre or reordered: post-norm would still run after a skipped part'
        raise ValueError(f'model.norm_placement={model.norm_placement!r}: {right}')


@functools.partial(jax.jit, static_argnames='model')
def skip_parts(params: dict, kept_L2, *, model: ModelHparams) -> dict:
    """Return the parameters with the output projections of skipped parts set to 0.

    Everything else is computed as before, so one compiled program serves all cases. A skipped block
    still writes its depth slots and the values that later layers read.

    Args:
      params: parameters of the Transformer.
      kept_L2: bool, whether the attention and the mlp of each block with parameters are kept.
      model: of the parameters.
    """
    numbers = Stack(model, 'top_c').layer_numbers

    def skip(path, leaf):
        run, layer, *names = (key.key for key in path if key.key != ADAPTER)
        parts = names[-3:-1] == ['attention', 'out'], 'mlp' in names and names[-2] == 'w2'
        if not any(parts):
            return leaf
        kept = kept_L2[numbers[run, layer], parts.index(True)].reshape(-1, *(1,) * (leaf.ndim - 1))
        return jnp.where(kept, leaf, 0)

    return params | {'stack': jax.tree_util.tree_map_with_path(skip, params['stack'])}


def block_importance(
    variables, hparams: Hparams, dataset, mesh, num_batches, routing, on_batch=lambda: None
) -> dict:
    """Measure the loss on the first `num_batches` held-out batches, skipping one block at a time.

    Arguments and errors are those of `evaluate`. `on_batch` is called after each of the
    `num_passes` evaluations. A looped block is skipped in all its loops, and no token exits early.

    Returns:
      `loss` (nats per target), `bits_per_byte` and `targets` of the full model; `ranking`, block
      numbers by the cost of skipping the block, the cheapest first; and `blocks`, a dict for each
      block with parameters: its number `layer`, `routed`, and for each of PARTS the `loss` and
      `bits_per_byte` without it, and their increases `cost` and `cost_bits`.
    """
    check_importance(hparams.model)
    # A skipped part changes which tokens would leave the loops, which is not a cost of the part.
    model = dataclasses.replace(hparams.model, loop_exit_threshold=0.0)
    hparams = dataclasses.replace(hparams, model=model)

    def measure(kept_L2):
        params = skip_parts(variables['params'], kept_L2, model=model)
        result = evaluate(
            variables | {'params': params}, hparams, dataset, mesh, num_batches, routing
        )
        on_batch()
        return {name: result[name] for name in ('loss', 'bits_per_byte', 'targets')}

    every_L2 = np.ones((model.num_layers, 2), bool)
    base, blocks = measure(every_L2), []
    places = zip(model.block_order, model.router_of_block, strict=True)
    routed = {block for block, router in places if router is not None}
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
    """Return the number of evaluations of `block_importance`."""
    return 1 + len(PARTS) * model.num_layers
