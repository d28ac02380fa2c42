"""The decoder-only language model: embedding, stack of dense and routed blocks, head."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from moddepth_jax.hparams import Hparams, ModelHparams
from moddepth_jax.model.attention import DepthSlots, TokenInfo, model_segment_ids
from moddepth_jax.model.layer import LayerArgs
from moddepth_jax.model.layers import RMSNorm, embed, initializer, lm_head
from moddepth_jax.model.mod.mixture_of_depths import RoutingArgs
from moddepth_jax.model.mod.routers import fixed_threshold, token_seeds
from moddepth_jax.model.moe.experts import ExpertState
from moddepth_jax.model.routing import ROUTINGS, static_sizes
from moddepth_jax.model.stack import Stack
from moddepth_jax.model.stack_scan import empty_slots, put_slots, run_stack
from moddepth_jax.model.streams import LayerKind

MAX_INIT_LENGTH = 2048  # tokens of the random stream on which routers choose their initial width


class Head(nn.Module):
    """The matrix from the last stream to the logits."""

    hparams: ModelHparams

    @nn.compact
    def __call__(self):
        shape = (self.hparams.d_model, self.hparams.vocab_size)
        return self.param('kernel', initializer(self.hparams.init_std), shape)


class Transformer(nn.Module):
    """Token ids to next-token logits.

    Parameters: `embedding` [V, D], `stack` (run_i / layer_j, each leaf with a leading axis of
    repeats, the same whether the stack is scanned or unrolled), `final_norm`, and `head` [D, V]
    unless the embedding is tied. A router that has a `threshold` rule adds the collection
    `averages`: `thresholds_R`, float32 [routed layers], which training moves; experts that choose
    add to it `expert_thresholds_XE`, float32 [layers with experts, E].
    """

    hparams: Hparams

    def __call__(
        self, tokens_BT, segment_ids_BT=None, routing: str = 'top_c', causal_layers_R=None
    ):
        """Logits and what the routed blocks decided.

        Takes the arguments of `hidden_states` and returns logits_BTV in float32 in place of its
        x_BTD. A loss does not need the logits of all tokens at once: see `cross_entropy`.
        """
        x_BTD, records = self.hidden_states(tokens_BT, segment_ids_BT, routing, causal_layers_R)
        return lm_head(x_BTD, self.variables['params']), records

    @nn.compact
    def hidden_states(
        self, tokens_BT, segment_ids_BT=None, routing: str = 'top_c', causal_layers_R=None
    ):
        """The last hidden states, and what the routed blocks decided.

        Args:
          tokens_BT: int [B, T], ids below model.vocab_size.
          segment_ids_BT: int [B, T], documents packed in a row, 0 for padding; None: one document.
          routing: top_c (training; looks ahead), or a causal rule: of `routing.rules`; without
            routed blocks threshold where experts choose, else dense.
          causal_layers_R: bool [routed layers], those that obey a causal `routing`, the others
            staying with top-C; None: all of them.

        The `random` router draws from the PRNG stream `routing`; where none is given, from `seed`.

        Returns:
          x_BTD after the final norm, and Records: of routing with leaves [routed layers, B, T],
          of experts [layers with experts, ...]; None for a model that has neither.

        Raises:
          ValueError: an unknown routing, or a causal rule that the model was not built with.
        """
        model = self.hparams.model
        check_routing(self.hparams, routing)
        check_dtype(model)
        if segment_ids_BT is None:
            segment_ids_BT = jnp.ones_like(tokens_BT)
        segment_ids_BT = model_segment_ids(model, segment_ids_BT)
        positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        tokens = TokenInfo(positions_BT, segment_ids_BT, self._seeds(tokens_BT, positions_BT))

        shape = (model.vocab_size, model.d_model)
        embedding_VD = self.param('embedding', initializer(model.embedding_init_std), shape)
        x_BTD = embed(embedding_VD, tokens_BT, model.dtype)
        stack, told = self._stack(), self._told(routing, causal_layers_R)
        sizes = causal_sizes(self.hparams, tokens_BT.shape[1], routing)
        x_BTD, records = run_stack(Stack(model, routing, sizes), stack, tokens, told, x_BTD)
        x_BTD = RMSNorm(model.norm_eps, name='final_norm')(x_BTD)
        if not model.tie_embeddings:
            Head(model, name='head')()  # declared here; `read_out` multiplies by it
        return x_BTD, records

    def _seeds(self, tokens_BT, positions_BT):
        if self.hparams.model.routing.router != 'random':
            return None
        if self.has_rng('routing'):
            return token_seeds(self.make_rng('routing'), tokens_BT, positions_BT)
        return token_seeds(jax.random.key(self.hparams.seed), tokens_BT, positions_BT)

    def _told(self, routing, causal_layers_R):
        model = self.hparams.model
        num_routed = len(model.routed_layers)
        if self.is_initializing():
            for name, shape in average_shapes(model).items():
                self.variable('averages', name, jnp.zeros, shape)
        averages = {
            name: self.get_variable('averages', name)
            for name in average_shapes(model)
            if self.has_variable('averages', name)
        }
        if causal_layers_R is None:
            causal_layers_R = jnp.ones(num_routed, bool)
        thresholds_R, limits = layer_thresholds(model, averages, routing)
        return LayerArgs(RoutingArgs(jnp.arange(num_routed), thresholds_R, causal_layers_R), limits)

    def _stack(self):
        # Fetched, not declared, once it exists: Linen would trace the initialiser at every use.
        if self.has_variable('params', 'stack'):
            return self.get_variable('params', 'stack')
        length = min(self.hparams.data.sequence_length, MAX_INIT_LENGTH)
        return self.param('stack', init_stack, self.hparams.model, length)


def average_shapes(hparams: ModelHparams) -> dict[str, tuple[int, ...]]:
    """Shapes of the averages that the model keeps beside its parameters, by name."""
    shapes = {}
    if hparams.tracks_threshold:
        shapes['thresholds_R'] = (len(hparams.routed_layers),)
    if hparams.experts.choice == 'expert':
        num_experts = hparams.experts.num_routed
        shapes['expert_thresholds_XE'] = (len(hparams.expert_layers), num_experts)
    return shapes


def layer_thresholds(hparams: ModelHparams, averages, routing: str):
    """thresholds_R of the routed blocks: known of the controls, else of the averages; and Limits.

    Args:
      hparams: of the model.
      averages: its collection of that name; empty or None where there are none.
      routing: who enters.

    Raises:
      ValueError: averages that the routing needs are not there.
    """
    missing = average_shapes(hparams).keys() - (averages or {}).keys()
    needed = 'threshold' in (routing, hparams.routing.causal_rule)
    lacks = (needed and 'thresholds_R' in missing) or (
        routing != 'top_c' and 'expert_thresholds_XE' in missing
    )
    if lacks:
        raise ValueError(
            f'routing={routing!r}: needs averages of scores, not in these variables; they come '
            'with TrainState.variables, if the run kept them'
        )
    num_routed = len(hparams.routed_layers)
    if not hparams.tracks_threshold:
        thresholds_R = jnp.full(num_routed, fixed_threshold(hparams.routing))
    elif 'thresholds_R' in missing:
        thresholds_R = jnp.zeros(num_routed)
    else:
        thresholds_R = averages['thresholds_R']
    if hparams.experts.choice != 'expert' or routing == 'top_c':
        return thresholds_R, ExpertState()
    return thresholds_R, ExpertState(averages['expert_thresholds_XE'])


def init_stack(key, hparams: ModelHparams, length: int):
    """Parameters of the stack.

    Layers are initialised in order on a random row of `length` tokens of the embedding's width, so
    that each router sees its input as large as it will be at step 0.
    """
    stream_key, key = jax.random.split(key)
    shape = (1, length, hparams.d_model)
    x_BTD = (hparams.embedding_init_std * jax.random.normal(stream_key, shape)).astype(
        hparams.dtype
    )
    ones_BT = jnp.ones(shape[:2], jnp.int32)
    tokens = TokenInfo(jnp.arange(length)[None], ones_BT, ones_BT.astype(jnp.uint32))
    stack, params = Stack(hparams, 'top_c'), {}
    carry = (x_BTD, *empty_slots(hparams, x_BTD))
    for i, run in enumerate(stack.runs):
        group = LayerGroup(stack, run.group, parent=None)

        def init_repeat(carry, inputs, group=group):
            key, count = inputs
            carry, variables = group.init_with_output(key, carry, count, tokens)
            return carry, variables.get('params', {})

        keys = jax.random.split(jax.random.fold_in(key, i), run.repeats)
        carry, params[f'run_{i}'] = jax.lax.scan(init_repeat, carry, (keys, stack.counts(i)))
    return {name: run for name, run in params.items() if run}  # an entry or exit may have none


class LayerGroup(nn.Module):
    """The layers of one repeat of a run, for their initialisation."""

    stack: Stack
    kinds: tuple[LayerKind, ...]

    @nn.compact
    def __call__(self, carry, count, tokens: TokenInfo):
        """The stream and the buffers of slots, of which `count` are written, after the layers."""
        told = LayerArgs(RoutingArgs(jnp.int32(0), jnp.float32(0), jnp.bool_(False)))
        for j, kind in enumerate(self.kinds):
            x_BTD, slots, valid_LBT = carry
            depth = None if slots is None else DepthSlots(slots, valid_LBT, count)
            layer = self.stack.layer(kind, name=f'layer_{j}')
            output = layer(x_BTD, depth, tokens, told)
            carry = output.x_BTD, *put_slots(slots, valid_LBT, output.written, count)
            count += kind.slots
        return carry


def causal_sizes(hparams: Hparams, length: int, routing: str) -> tuple[int, ...]:
    """Static sizes of a routed block on rows of `length` under a causal rule.

    One where the cache has an end, so that a row's bits depend on nothing but its past; several
    where it grows.
    """
    routing_hparams = hparams.model.routing
    most = routing_hparams.max_selected(max(hparams.data.sequence_length, length), routing)
    if routing_hparams.overflow == 'skip':
        return (min(most, length),)
    return static_sizes(length, most)


def check_dtype(hparams: ModelHparams):
    """Raises ValueError where JAX would take float32 for the float64 that is asked for."""
    if hparams.dtype == 'float64' and not jax.config.jax_enable_x64:
        raise ValueError("model.dtype='float64': needs JAX_ENABLE_X64=1 in the environment")


def check_attention(hparams: Hparams):
    """Raises ValueError where the kernel that `model.attention` names cannot do the model here."""
    name = hparams.model.attention
    if name in ('auto', 'reference', 'xla'):
        return
    tokens_BT = jax.ShapeDtypeStruct((1, hparams.data.sequence_length), 'int32')
    try:
        jax.eval_shape(Transformer(hparams).init, jax.random.key(0), tokens_BT)
    except ValueError as error:
        raise ValueError(f'model.attention={name!r}: {error}') from None


def check_routing(hparams: Hparams, routing: str):
    """Raises ValueError, by name, for a routing that the model cannot run."""
    if routing not in ROUTINGS:
        raise ValueError(f'routing={routing!r}: must be one of {", ".join(ROUTINGS)}')
    rules = hparams.model.routing.rules
    if not hparams.model.routed_layers:
        rule = causal_routing(hparams)
        if routing not in ('top_c', rule):
            why = 'no block of this model is routed; every token enters, by dense'
            if rule == 'threshold':
                why = 'its experts choose tokens of whole rows; only threshold is causal'
            raise ValueError(f'routing={routing!r}: {why}')
    elif routing not in ('top_c', *rules):
        raise ValueError(
            f'routing={routing!r}: this model ({hparams.model.routing.router} router, trained for '
            f'{rules[0]}) has no such rule; it can run top_c, {", ".join(rules)}'
        )


def check_causal(hparams: Hparams, routing: str):
    """`check_routing`, which also refuses what looks at tokens that do not exist yet."""
    check_routing(hparams, routing)
    if routing == 'top_c' and hparams.model.looks_ahead:
        raise ValueError("routing='top_c': looks at later tokens, which do not exist yet")


def causal_routing(hparams: Hparams) -> str:
    """The routing of honest evaluation and of generation."""
    if hparams.model.routed_layers:
        return hparams.model.routing.causal_rule
    return 'threshold' if hparams.model.looks_ahead else 'dense'
