"""What each block of a model reads and adds, token by token, and what the model says at its end."""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from moddepth_jax.analysis.layer_walk import after, depth_of, walk
from moddepth_jax.hparams import Hparams
from moddepth_jax.model.block import Block
from moddepth_jax.model.layer import Records
from moddepth_jax.model.layers import lm_head, rms_norm
from moddepth_jax.model.mod.mixture_of_depths import MixtureOfDepths
from moddepth_jax.model.routing import scatter_tokens
from moddepth_jax.model.stack import merge_records


class LayerDeltas(NamedTuple):
    """Every block's input and delta on a batch; L blocks, the first at the bottom.

    In the streams residual and moda the stream after block l is input + gate * delta, the input of
    block l + 1. Arrays are float32 (or wider) but for the inputs, which have the model's dtype.

    Attributes:
      inputs_LBTD: the stream as the block, or its router, reads it.
      deltas_LBTD: block(input) - input, without the gate; 0 where the token did not enter.
      gates_LBT: the factor on the delta: 1 in a dense block, 0 where the token did not enter.
      selected_LBT: bool, tokens that the block processed; padding never, though a dense block
        computes it.
      final_BTD: the stream that the final norm reads, in the model's dtype.
      logits_BTV: those of the Transformer.
      records: as the Transformer returns them.
    """

    inputs_LBTD: jax.Array
    deltas_LBTD: jax.Array
    gates_LBT: jax.Array
    selected_LBT: jax.Array
    final_BTD: jax.Array
    logits_BTV: jax.Array
    records: Records | None


def layer_deltas(
    variables, hparams: Hparams, tokens_BT, segment_ids_BT, routing: str
) -> LayerDeltas:
    """One pass over a batch that keeps what the blocks read and add: 2 L B T D numbers.

    Args:
      variables: of the Transformer.
      hparams: of the same.
      tokens_BT, segment_ids_BT: int [B, T], as `Transformer` takes them.
      routing: likewise.

    Raises:
      ValueError: a routing that the model cannot run.
    """
    found, final_BTD = walk(variables, hparams, tokens_BT, segment_ids_BT, routing, _visit)
    seen = [(arrays, record) for kind, (arrays, record) in found if kind.part == 'block']
    arrays = [jnp.stack(leaves) for leaves in zip(*[arrays for arrays, _ in seen], strict=True)]
    records = merge_records([record for _, record in seen], lambda *leaves: jnp.stack(leaves))
    logits_BTV = _read_out(variables['params'], final_BTD, hparams=hparams)
    return LayerDeltas(*arrays, final_BTD, logits_BTV, records)


@functools.partial(jax.jit, static_argnames=('stack', 'kind'))
def _visit(params, carry, count, tokens, told, *, stack, kind):
    """One layer: the carry after it, and (inputs, delta, gates, entered), Records."""
    caught = {}

    def catch(call, args, kwargs, context):
        result = call(*args, **kwargs)
        module, method = context.module, context.method_name
        if isinstance(module, MixtureOfDepths) and method == 'gathered':
            caught['inputs_BTD'], caught['indices_BC'] = args[0], args[3]
        elif isinstance(module, Block) and module.gathered and method == 'delta':
            caught['delta_BCD'] = result[0]
        elif isinstance(module, Block) and not module.gathered and method == '__call__':
            caught['inputs_BTD'], caught['outputs_BTD'] = args[0], result[0]
        return result

    with nn.intercept_methods(catch):
        output = stack.layer(kind).apply(
            {'params': params}, carry[0], depth_of(carry, count), tokens, told
        )
    seen = _arrays(caught, tokens, output.records.routing) if kind.part == 'block' else None
    return after(carry, output, count), (seen, output.records)


def _arrays(caught, tokens, record):
    inputs_BTD = caught['inputs_BTD']
    wide = jnp.promote_types(inputs_BTD.dtype, jnp.float32)
    if record is None:
        deltas_BTD = caught['outputs_BTD'].astype(wide) - inputs_BTD.astype(wide)
        selected_BT = tokens.segment_ids_BT > 0
        return inputs_BTD, deltas_BTD, jnp.ones(selected_BT.shape, wide), selected_BT
    nothing_BTD = jnp.zeros(inputs_BTD.shape, wide)
    deltas_BTD = scatter_tokens(nothing_BTD, caught['indices_BC'], caught['delta_BCD'].astype(wide))
    selected_BT = record.selected_BT
    deltas_BTD = jnp.where(selected_BT[..., None], deltas_BTD, 0.0)
    gates_BT = jnp.where(selected_BT, record.gates_BT, 0.0).astype(wide)
    return inputs_BTD, deltas_BTD, gates_BT, selected_BT


@functools.partial(jax.jit, static_argnames='hparams')
def _read_out(params, x_BTD, *, hparams):
    scale_D, epsilon = params['final_norm']['scale'], hparams.model.norm_eps
    return lm_head(rms_norm(x_BTD, scale_D, epsilon), params)


@jax.jit
def entropies(logits_BTV):
    """float32 [B, T]: the entropy of each next-token distribution, in nats."""
    log_p_BTV = jax.nn.log_softmax(logits_BTV)
    return -jnp.sum(jnp.exp(log_p_BTV) * log_p_BTV, axis=-1)
