"""The decoder-only language model: embedding, a stack of dense and routed blocks, head."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from moddepth_jax.hparams import Hparams, ModelHparams
from moddepth_jax.hparams.registry import CAUSAL_RULES
from moddepth_jax.hparams.rules import check_routing
from moddepth_jax.model.adapters import add_adapters
from moddepth_jax.model.attention import DepthSlots, model_segment_ids
from moddepth_jax.model.embedding_residual import embedded_input, first_scales
from moddepth_jax.model.layer import LayerArgs, Records
from moddepth_jax.model.layers import RMSNorm, embed, initializer, lm_head
from moddepth_jax.model.loop_params import EMBEDDINGS, repeat_norms
from moddepth_jax.model.mod.mixture_of_depths import RoutingArgs
from moddepth_jax.model.mod.mixture_of_recursions import (
    causal_sizes,
    init_loop_routers,
    run_recursions,
)
from moddepth_jax.model.mod.routers import fixed_threshold, token_seeds
from moddepth_jax.model.moe.experts import ExpertState
from moddepth_jax.model.routing import TokenInfo
from moddepth_jax.model.stack import Stack
from moddepth_jax.model.stack_scan import empty_slots, put_slots, run_stack
from moddepth_jax.model.streams import LayerKind

MAX_INIT_LENGTH = 2048  # most tokens of the random row on which parameters are initialized


class Head(nn.Module):
    """The matrix from hidden states to logits. `lm_head` applies it."""

    hparams: ModelHparams

    @nn.compact
    def __call__(self):
        shape = (self.hparams.d_model, self.hparams.vocab_size)
        self.param('kernel', initializer(self.hparams.init_std), shape)


class Transformer(nn.Module):
    """Token ids to next-token logits.

    The collection `params` has `embedding` [V, D], `stack` (run_i / layer_j, where each leaf has a
    leading axis of repeats, scanned or not), `final_norm`, `head` [D, V] unless the embedding is
    tied, and `loop_embeddings` [loops, D] and `loop_routers` if the model has them. The collection
    `averages`, which training updates, has the arrays of `average_shapes`.
    """

    hparams: Hparams

    def __call__(self, tokens_BT, segment_ids_BT=None, routing='top_c', causal_layers_R=None):
        """Return float32 logits_BTV and Records. `hidden_states` describes the arguments."""
        x_BTD, records = self.hidden_states(tokens_BT, segment_ids_BT, routing, causal_layers_R)
        return lm_head(x_BTD, self.variables['params']), records

    @nn.compact
    def hidden_states(self, tokens_BT, segment_ids_BT=None, routing='top_c', causal_layers_R=None):
        """Return x_BTD after the final norm, and the Records of all layers (None: no records).

        The `random` router draws from the PRNG stream `routing` if there is one, otherwise from the
        knob `seed`. No layer runs while the model is initialized: its parameters do not depend on
        tokens, and the result has no meaning.

        Args:
          tokens_BT: int, ids from 0 to model.vocab_size - 1, which is not checked. T may be longer
            than data.sequence_length.
          segment_ids_BT: int, the document of each token, 0 for padding; None: one document. With
            model.across_documents padding must come last.
          routing: top_c (for training; it looks at later tokens) or a causal rule that
            `check_routing` accepts.
          causal_layers_R: bool [R], one for each routed layer: whether it uses the causal rule and
            not top-C; None: all do.

        Raises:
          ValueError: `hparams` do not come from `from_config`, or do not fit the routing.
        """
        if not isinstance(self.hparams, Hparams):
            found = f'hparams of type {type(self.hparams).__name__}'
            raise ValueError(f'{found}: must be Hparams, as from_config returns them')
        model = self.hparams.model
        check_routing(self.hparams, routing)
        check_dtype(model)
        key = self.make_rng('routing') if self.has_rng('routing') else None
        tokens = token_info(self.hparams, tokens_BT, segment_ids_BT, key=key)

        shape = (model.vocab_size, model.d_model)
        embedding_VD = self.param('embedding', initializer(model.embedding_init_std), shape)
        x_BTD = embed(embedding_VD, tokens_BT, model.dtype)
        length = min(self.hparams.data.sequence_length, MAX_INIT_LENGTH)
        params = self._stored('stack', init_stack, model, length)
        args = self._layer_args(routing, causal_layers_R)
        if model.loop_embeddings == 'learned':
            shape = model.loops, model.d_model
            params = params | {EMBEDDINGS: self._stored(EMBEDDINGS, nn.initializers.zeros, shape)}
        stream = model.depth.stream_class
        x_BTD = stream.enter(model, x_BTD)
        if model.routing.routes_loops:
            routers = self._stored('loop_routers', init_loop_routers, model, length)
        if self.is_initializing():  # all parameters of the layers exist, and need no tokens
            records = None
        elif model.routing.routes_loops:
            params = {'stack': params, 'loop_routers': routers}
            x_BTD, record = run_recursions(
                self.hparams, routing, params, tokens, args.routing, x_BTD
            )
            records = Records(record)
        else:
            sizes = causal_sizes(self.hparams, tokens_BT.shape[1], routing)
            x_BTD, records = run_stack(Stack(model, routing, sizes), params, tokens, args, x_BTD)
        x_BTD = stream.leave(model, x_BTD)
        x_BTD = RMSNorm(model.norm_eps, name='final_norm')(x_BTD)
        if not model.tie_embeddings:
            Head(model, name='head')()
        return x_BTD, records

    def _layer_args(self, routing, causal_layers_R):
        if self.is_initializing():
            for name, shape in average_shapes(self.hparams.model).items():
                self.variable('averages', name, jnp.zeros, shape)
        averages = self.variables.get('averages')
        return layer_args(self.hparams.model, averages, routing, causal_layers_R)

    def _stored(self, name, initializer, *arguments):
        """Return a parameter, which is initialized if it does not exist.

        `self.param` alone would retrace the initializer on every call, and refuse `loop_embeddings`
        of another number of loops.
        """
        if self.has_variable('params', name):
            return self.get_variable('params', name)
        return self.param(name, initializer, *arguments)


def abstract_variables(hparams: Hparams) -> dict:
    """Return the shapes and dtypes of a Transformer's variables without compiling anything."""
    key = jax.eval_shape(jax.random.key, 0)
    tokens_BT = jax.ShapeDtypeStruct((1, hparams.data.sequence_length), 'int32')
    return jax.eval_shape(Transformer(hparams).init, key, tokens_BT)


def token_info(hparams: Hparams, tokens_BT, segment_ids_BT=None, positions_BT=None, key=None):
    """Return TokenInfo of a batch. By default a row is one document, and draws use `seed`."""
    if segment_ids_BT is None:
        segment_ids_BT = jnp.ones_like(tokens_BT)
    segment_ids_BT = model_segment_ids(hparams.model, segment_ids_BT)
    if positions_BT is None:
        positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    seeds_BT = None
    if hparams.model.routed_layers and hparams.model.routing.router_class.draws:
        key = jax.random.key(hparams.seed) if key is None else key
        seeds_BT = token_seeds(key, tokens_BT, positions_BT)
    ids_BT = None if hparams.model.value_embeddings == 'none' else tokens_BT
    return TokenInfo(positions_BT, segment_ids_BT, seeds_BT, ids_BT)


def random_row_info(hparams: ModelHparams, length: int) -> TokenInfo:
    """Return TokenInfo of the row, a single document, on which parameters are initialized."""
    positions_BT = jnp.arange(length)[None]
    ones_BT = jnp.ones_like(positions_BT)
    ids_BT = positions_BT % hparams.vocab_size
    return TokenInfo(positions_BT, ones_BT, ones_BT.astype(jnp.uint32), ids_BT)


def average_shapes(hparams: ModelHparams) -> dict[str, tuple[int, ...]]:
    """Return the shapes, by name, of the moving averages that the model keeps."""
    shapes = {}
    if hparams.tracks_threshold:
        shapes['thresholds_R'] = (len(hparams.routed_layers),)
    if hparams.experts.choice == 'expert':
        num_experts = hparams.experts.num_routed
        shapes['expert_thresholds_XE'] = (len(hparams.expert_layers), num_experts)
    return shapes


def layer_args(hparams: ModelHparams, averages, routing: str, causal_layers_R=None) -> LayerArgs:
    """Return the arguments of all layers, stacked.

    Raises ValueError if the routing needs averages that are missing.
    """
    averages, num_routed = averages or {}, len(hparams.routed_layers)
    missing = average_shapes(hparams).keys() - averages.keys()
    rules = {'routing': routing, 'model.routing.causal_rule': hparams.routing.causal_rule}
    needing = [
        f'{name}={rule!r}'
        for name, rule in rules.items()
        if rule != 'top_c' and CAUSAL_RULES[rule].needs_threshold and 'thresholds_R' in missing
    ]
    if routing != 'top_c' and 'expert_thresholds_XE' in missing:
        needing = [f'routing={routing!r}']
    if needing:
        raise ValueError(
            f'{needing[0]}: needs averages of scores, which are not in these variables; '
            'TrainState.variables has them, if the run kept them'
        )
    if not hparams.tracks_threshold:
        thresholds_R = jnp.full(num_routed, fixed_threshold(hparams.routing))
    else:
        thresholds_R = averages.get('thresholds_R', jnp.zeros(num_routed))
    expert_state = ExpertState()
    if hparams.experts.choice == 'expert' and routing != 'top_c':
        expert_state = ExpertState(averages['expert_thresholds_XE'])
    routing_args = RoutingArgs(jnp.arange(num_routed), thresholds_R, causal_layers_R)
    return LayerArgs(routing_args, expert_state)


def init_stack(key, hparams: ModelHparams, length: int):
    """Initialize the stack layer by layer on a random row that is distributed like embeddings.

    The draw of a parameter depends only on the key, the number of its layer and its name in the
    layer. So models of the same seed start with equal values where they have the same parameters. A
    looped layer runs once here.
    """
    stream_key, key = jax.random.split(key)
    shape = (1, length, hparams.d_model)
    x_BTD = hparams.embedding_init_std * jax.random.normal(stream_key, shape)
    x_BTD = hparams.depth.stream_class.enter(hparams, x_BTD.astype(hparams.dtype))
    tokens = random_row_info(hparams, length)
    embedded_BTD = embedded_input(hparams, x_BTD)
    stack, params = Stack(hparams, 'top_c').stored, {}
    carry = (x_BTD, *empty_slots(hparams, x_BTD))
    for i, run in enumerate(stack.runs):

        def init_repeat(carry, inputs, places=run.group):
            numbers, count = inputs
            made = {}
            for place, number in zip(places, numbers, strict=True):
                kind = place.kind
                key_of_layer = jax.random.fold_in(key, number)
                made[place.layer], carry = init_layer(
                    key_of_layer, number, stack, kind, carry, count, tokens, embedded_BTD
                )
                count += kind.slots
            return carry, {name: layer for name, layer in made.items() if layer}

        numbers = [stack.layer_numbers[place.run, place.layer] for place in run.group]
        carry, made = jax.lax.scan(init_repeat, carry, (numbers, stack.counts(i)))
        if made:  # entry and exit may have no parameters
            params[f'run_{i}'] = made
    return add_adapters(key, params, hparams, stack.layer_numbers)


def init_layer(
    key, number, stack: Stack, kind: LayerKind, carry, count, tokens: TokenInfo, embedded_BTD
):
    """Return the parameters of a layer, and the carry after it: x_BTD and the slots.

    The slots of the layer begin at `count`. The block and stream of a routed layer start like those
    of a layer that is not routed.
    """
    x_BTD, slots, valid_LBT = carry
    depth = None if slots is None else DepthSlots(slots, valid_LBT, count)
    args = LayerArgs(RoutingArgs(jnp.int32(0), jnp.float32(0), jnp.bool_(False)))
    inputs = (x_BTD, depth, tokens, args, embedded_BTD)
    layer = stack.layer(kind._replace(routed=False), parent=None)
    output, variables = layer.init_with_output(key, *inputs)
    start = stack.hparams.depth.stream_class.start(stack.hparams, number)
    start |= first_scales(stack.hparams, number)
    if start and kind.part == 'block':
        for name, values in start.items():
            variables['params'][name] |= values
        output = layer.apply(variables, *inputs)
    if kind.routed:
        block = variables['params']
        outside = {name: block.pop(name) for name in ('stream', 'blend') if name in block}
        variables = {'params': {'block': block, **outside}}
        layer = stack.layer(kind, parent=None)
        output, variables = layer.apply(variables, *inputs, rngs={'params': key}, mutable='params')
    carry = output.x_BTD, *put_slots(slots, valid_LBT, output.written, count)
    return repeat_norms(variables.get('params', {}), kind, stack.hparams.loops), carry


def check_dtype(hparams: ModelHparams):
    """Raise ValueError if JAX would silently replace float64 by float32."""
    if hparams.dtype == 'float64' and not jax.config.jax_enable_x64:
        raise ValueError("model.dtype='float64': needs JAX_ENABLE_X64=1 in the environment")


def check_attention(hparams: Hparams):
    """Raise ValueError if the backend in `model.attention` cannot run this model here."""
    name = hparams.model.attention
    if name in ('auto', 'reference', 'xla'):
        return
    model, tokens_BT = Transformer(hparams), jnp.zeros((1, hparams.data.sequence_length), jnp.int32)
    try:
        jax.eval_shape(model.apply, abstract_variables(hparams), tokens_BT)
    except ValueError as error:
        raise ValueError(f'model.attention={name!r}: {error}') from None
