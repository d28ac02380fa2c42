"""Runs a forward pass layer by layer, without the scan, to observe what each layer does."""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from moddepth_jax.hparams import Hparams
from moddepth_jax.hparams.checks import refuse
from moddepth_jax.hparams.rules import check_routing
from moddepth_jax.model import ahead
from moddepth_jax.model.attention import AttentionInputs, DepthSlots
from moddepth_jax.model.block import Block
from moddepth_jax.model.decoding import layers_of, unroll
from moddepth_jax.model.embedding_residual import embedded_input
from moddepth_jax.model.layer import Records
from moddepth_jax.model.layers import embed, lm_head, rms_norm, wide_dtype, widen
from moddepth_jax.model.mod.mixture_of_depths import MixtureOfDepths
from moddepth_jax.model.mod.mixture_of_recursions import Recursions, causal_sizes
from moddepth_jax.model.routing import TokenInfo, scatter_tokens
from moddepth_jax.model.stack import Stack, merge_records
from moddepth_jax.model.stack_scan import empty_slots, put_slots
from moddepth_jax.model.streams import LayerKind, layer_kinds
from moddepth_jax.model.transformer import token_info


class ObservedLayer(NamedTuple):
    """What can be observed of one layer."""

    kind: LayerKind
    tokens: TokenInfo
    records: Records
    caught: dict  # what the `catch` of `walk` put there
    sown: dict  # Flax intermediates


def walk(variables, hparams: Hparams, tokens_BT, segment_ids_BT, routing: str, observe, catch=None):
    """Run the layers one by one over complete rows.

    Args:
      variables: of the Transformer. If they are abstract, this only compiles, and the results are
        abstract.
      hparams: of the model.
      tokens_BT: int32 ids.
      segment_ids_BT: documents of the tokens; 0 is padding.
      routing: the routing rule.
      observe: traceable function of ObservedLayer.
      catch: called after each method of each module of a layer as catch(caught, module, name of the
        method, its arguments, its result); it puts arrays for `observe` into the dict `caught`.

    Returns:
      A list of (LayerKind, observe(ObservedLayer)), and x_BTD as the final norm reads it.

    Raises:
      ValueError: the model cannot run this routing, or has routed loops.
    """
    check_routing(hparams, routing)
    if hparams.model.routing.routes_loops:
        right = 'must not be loops here: layers are walked one by one over complete rows'
        refuse('model.routing.layers', hparams.model.routing.layers, right)
    layers, layer_args, tokens, carry, embedded_BTD = ahead.call(
        _begin, variables, tokens_BT, segment_ids_BT, hparams=hparams, routing=routing
    )
    # Only the largest size: several sizes make the layer a switch, which hides intermediates.
    sizes = causal_sizes(hparams, tokens_BT.shape[1], routing)[-1:]
    stack, found, count = Stack(hparams.model, routing, sizes), [], 0
    for kind, params, args in zip(layer_kinds(hparams.model), layers, layer_args, strict=True):
        static = {'stack': stack, 'kind': kind, 'observe': observe, 'catch': catch}
        carry, observed = ahead.call(
            _visit, params, carry, np.int32(count), tokens, args, embedded_BTD, **static
        )
        count += kind.slots
        found.append((kind, observed))
    return found, hparams.model.depth.stream_class.leave(hparams.model, carry[0])


@functools.partial(jax.jit, static_argnames=('hparams', 'routing'))
def _begin(variables, tokens_BT, segment_ids_BT, *, hparams, routing):
    """Parameters and LayerArgs of each layer, TokenInfo, the first layer's carry, and x_0."""
    unrolled = unroll(variables, hparams, routing)
    x_BTD = embed(unrolled['embedding'], tokens_BT, hparams.model.dtype)
    tokens = token_info(hparams, tokens_BT, segment_ids_BT)
    x_BTD = hparams.model.depth.stream_class.enter(hparams.model, x_BTD)
    carry = (x_BTD, *empty_slots(hparams.model, x_BTD))
    embedded_BTD = embedded_input(hparams.model, x_BTD)
    return unrolled['layers'], unrolled['layer_args'], tokens, carry, embedded_BTD


@functools.partial(jax.jit, static_argnames=('stack', 'kind', 'observe', 'catch'))
def _visit(params, carry, count, tokens, layer_args, embedded_BTD, *, stack, kind, observe, catch):
    """Run one layer; returns the next carry and what is observed."""
    caught = {}

    def intercept(call, args, kwargs, context):
        result = call(*args, **kwargs)
        if catch:
            catch(caught, context.module, context.method_name, args, result)
        return result

    x_BTD, slots, valid_LBT = carry
    depth = None if slots is None else DepthSlots(slots, valid_LBT, count)
    with nn.intercept_methods(intercept):
        output, sown = stack.layer(kind).apply(
            {'params': params},
            x_BTD,
            depth,
            tokens,
            layer_args,
            embedded_BTD,
            mutable=['intermediates'],
        )
    carry = (output.x_BTD, *put_slots(slots, valid_LBT, output.written, count))
    sown = sown.get('intermediates', {})
    return carry, observe(ObservedLayer(kind, tokens, output.records, caught, sown))


class LayerDeltas(NamedTuple):
    """The input and delta of each of L blocks on a batch, in order.

    If `model.routing.part` routes only one sublayer of a block, they are those of the routed
    sublayer. Arrays are float32 or wider; inputs and the final stream have the model's dtype.
    """

    inputs_LBTD: jax.Array  # the stream as the block or its router reads it
    deltas_LBTD: jax.Array  # what the block adds, without the gate; 0 if it skipped the token
    selected_LBT: jax.Array  # bool: the block processed the token; False for padding
    final_BTD: jax.Array  # the stream that the final norm reads
    logits_BTV: jax.Array  # logits of the Transformer
    records: Records | None  # records of the Transformer


def layer_deltas(
    variables, hparams: Hparams, tokens_BT, segment_ids_BT, routing: str
) -> LayerDeltas:
    """Run a batch and keep what the blocks read and add, 2 L B T D numbers.

    Raises ValueError if the model cannot run this routing.
    """
    if hparams.model.routing.routes_loops:
        check_routing(hparams, routing)
        arrays, records, final_BTD = ahead.call(
            _recursion_arrays,
            variables,
            tokens_BT,
            segment_ids_BT,
            hparams=hparams,
            routing=routing,
        )
    else:
        found, final_BTD = walk(
            variables, hparams, tokens_BT, segment_ids_BT, routing, _block_arrays, _catch_block
        )
        blocks = [observed for _, observed in found if observed]
        arrays, records = zip(*blocks, strict=True)
        arrays = map(jnp.stack, zip(*arrays, strict=True))
        records = merge_records(list(records), lambda *leaves: jnp.stack(leaves))
    logits_BTV = _logits(variables['params'], final_BTD, hparams=hparams)
    return LayerDeltas(*arrays, final_BTD, logits_BTV, records)


def _catch_block(caught, module, method, args, result):
    """Catch the input of a block, and its output or what it adds."""
    if isinstance(module, MixtureOfDepths) and method == 'gathered':
        caught['indices_BC'] = args[3]
    elif isinstance(module, Block) and method == 'read':  # the router reads all tokens first
        several = isinstance(result[0], AttentionInputs)  # then args hold the residual
        caught.setdefault('inputs_BTD', args[0].residual_BTD if several else result[0])
    elif isinstance(module, MixtureOfDepths) and method == 'decide':
        caught['inputs_BTD'] = args[0]
    elif isinstance(module, Block) and method == 'delta':
        caught['delta_BCD'] = result[0]
    elif isinstance(module, Block) and not module.kind.gathered and method == '__call__':
        caught['outputs_BTD'] = result[0]
    elif isinstance(module, Block) and method == '_run' and module.attention_connection:
        attended, fed = result  # the output is not input + delta here
        caught['added'] = attended.output_BTD + fed.output_BTD


def _block_arrays(seen):
    """((input, delta, selected) of a block, its Records)."""
    if seen.kind.part != 'block':
        return None
    caught, records, record = seen.caught, seen.records, seen.records.routing
    inputs_BTD = caught['inputs_BTD']
    wide = wide_dtype(inputs_BTD.dtype)
    if record is None:
        if 'added' in caught:
            deltas_BTD = caught['added'].astype(wide)
        else:
            deltas_BTD = caught['outputs_BTD'].astype(wide) - inputs_BTD.astype(wide)
        real_BT = seen.tokens.segment_ids_BT > 0
        return (inputs_BTD, deltas_BTD, real_BT), records
    deltas_BTD, selected_BT = jnp.zeros(inputs_BTD.shape, wide), record.selected_BT
    delta_BCD = caught.get('added', caught.get('delta_BCD')).astype(wide)
    deltas_BTD = scatter_tokens(deltas_BTD, caught['indices_BC'], delta_BCD)
    deltas_BTD = jnp.where(selected_BT[..., None], deltas_BTD, 0.0)
    return (inputs_BTD, deltas_BTD, selected_BT), records


@functools.partial(jax.jit, static_argnames=('hparams', 'routing'))
def _recursion_arrays(variables, tokens_BT, segment_ids_BT, *, hparams, routing):
    """The arrays of LayerDeltas, Records and the final x_BTD for a model with routed loops."""
    unrolled = unroll(variables, hparams, routing)
    layers = list(layers_of(unrolled, hparams, routing))
    tokens, length = token_info(hparams, tokens_BT, segment_ids_BT), tokens_BT.shape[1]
    x_BTD = embed(unrolled['embedding'], tokens_BT, hparams.model.dtype)
    wide = wide_dtype(x_BTD.dtype)
    x_BTD, sections = Recursions(hparams, routing, unrolled['loops'], layers).run(
        x_BTD,
        tokens,
        lambda x_BTD, output: (x_BTD, output.x_BTD.astype(wide) - x_BTD.astype(wide)),
        lambda loop: causal_sizes(hparams, length, routing, loop.progress)[-1:],
    )
    blocks, real_BT = [], tokens.segment_ids_BT > 0
    for kept, loop, record, indices_BC, before_BTD in sections:
        for input_BTD, delta_BTD in kept:
            selected_BT = real_BT
            if loop is not None:
                selected_BT, zeros_BTD = record.selected_BT, jnp.zeros(x_BTD.shape, wide)
                input_BTD = scatter_tokens(before_BTD, indices_BC, input_BTD)
                delta_BTD = scatter_tokens(zeros_BTD, indices_BC, delta_BTD)
                delta_BTD = jnp.where(selected_BT[..., None], delta_BTD, 0.0)
            blocks.append((input_BTD, delta_BTD, selected_BT))
    records = [section.record for section in sections if section.loop is not None]
    record = jax.tree.map(lambda *leaves: jnp.stack(leaves), *records)
    return [jnp.stack(sides) for sides in zip(*blocks, strict=True)], Records(record), x_BTD


@functools.partial(jax.jit, static_argnames='hparams')
def _logits(params, x_BTD, *, hparams):
    normed_BTD = rms_norm(x_BTD, params['final_norm']['scale'], hparams.model.norm_eps)
    return lm_head(normed_BTD, params)


@jax.jit
def entropies(logits_BTV):
    """Return the entropy of each next-token distribution in nats, float32 [B, T]."""
    log_p_BTV = jax.nn.log_softmax(logits_BTV)
    return -jnp.sum(jnp.exp(log_p_BTV) * log_p_BTV, axis=-1)


def relative_change(inputs_LBTD, deltas_LBTD):
    """Return |delta| / |input| (L2 norms) by block and token, float32 or wider [L, B, T]."""
    return root_mean_square(deltas_LBTD) / root_mean_square(inputs_LBTD)


@jax.jit
def root_mean_square(x_LBTD):
    """Return the root mean square over the width, float32 or wider [L, B, T]."""
    return jnp.sqrt(jnp.mean(widen(x_LBTD) ** 2, axis=-1))
