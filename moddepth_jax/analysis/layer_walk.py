"""The layers of a model one by one, outside its scan, so that each can be looked into."""

import functools

import jax
import jax.numpy as jnp

from moddepth_jax.hparams import Hparams
from moddepth_jax.model.attention import DepthSlots, TokenInfo, model_segment_ids
from moddepth_jax.model.decoding import unroll
from moddepth_jax.model.mod.routers import token_seeds
from moddepth_jax.model.stack import Stack
from moddepth_jax.model.stack_scan import empty_slots, put_slots
from moddepth_jax.model.streams import layer_kinds
from moddepth_jax.model.transformer import causal_sizes, check_routing


def walk(variables, hparams: Hparams, tokens_BT, segment_ids_BT, routing: str, visit):
    """What `visit` sees of each layer, and the stream after the last.

    Args:
      variables: of the Transformer.
      hparams: of the same.
      tokens_BT, segment_ids_BT, routing: as `Transformer` takes them; all tokens of whole rows.
      visit: called as visit(params, carry, count, tokens, told, stack=, kind=), of which the last
        two are static; returns the next carry, as `after` makes it, and what it saw. Jitted, it is
        compiled once for all layers of a kind.

    Returns:
      A list of (LayerKind, what was seen), and x_BTD as the final norm reads it.

    Raises:
      ValueError: a routing that the model cannot run.
    """
    check_routing(hparams, routing)
    given = (variables, tokens_BT, segment_ids_BT)
    layers, told, tokens, carry = _begin(*given, hparams=hparams, routing=routing)
    # The largest size alone: of branches of several sizes nothing could be seen.
    sizes = causal_sizes(hparams, tokens_BT.shape[1], routing)[-1:]
    stack, found, count = Stack(hparams.model, routing, sizes), [], 0
    for kind, params, mine in zip(layer_kinds(hparams.model), layers, told, strict=True):
        given = (params, carry, jnp.int32(count), tokens, mine)
        carry, seen = visit(*given, stack=stack, kind=kind)
        count += kind.slots
        found.append((kind, seen))
    return found, carry[0]


@functools.partial(jax.jit, static_argnames=('hparams', 'routing'))
def _begin(variables, tokens_BT, segment_ids_BT, *, hparams, routing):
    """Parameters of each layer, what it is told, Tokens, and the first layer's carry."""
    unrolled = unroll(variables, hparams, routing)
    positions_BT, seeds_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape), None
    if hparams.model.routing.router_class.draws:
        seeds_BT = token_seeds(jax.random.key(hparams.seed), tokens_BT, positions_BT)
    x_BTD = jnp.take(unrolled['embedding'], tokens_BT, axis=0).astype(hparams.model.dtype)
    segment_ids_BT = model_segment_ids(hparams.model, segment_ids_BT)
    tokens = TokenInfo(positions_BT, segment_ids_BT, seeds_BT)
    carry = (x_BTD, *empty_slots(hparams.model, x_BTD))
    return unrolled['layers'], unrolled['layer_args'], tokens, carry


def depth_of(carry, count) -> DepthSlots | None:
    """What the layers before wrote, of a carry and the number of its slots that are written."""
    _, slots, valid_LBT = carry
    return None if slots is None else DepthSlots(slots, valid_LBT, count)


def after(carry, output, count):
    """The carry after a layer, of its Output and the number of slots written before it."""
    _, slots, valid_LBT = carry
    return (output.x_BTD, *put_slots(slots, valid_LBT, output.written, count))
