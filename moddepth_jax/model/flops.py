"""FLOPs of a model by formula (docs/flops.md), and of a traced program to check the formula."""

import math
from typing import NamedTuple

import jax

from moddepth_jax.hparams import ExpertsHparams, Hparams, ModelHparams, Stage
from moddepth_jax.hparams.registry import CAUSAL_RULES
from moddepth_jax.model.streams import LayerKind, layer_kinds
from moddepth_jax.model.value_embeddings import gate_flops


class _Work(NamedTuple):
    """The work of a layer on one row."""

    kind: LayerKind
    tokens: int  # tokens that its attention processes
    pairs: float  # pairs of a query and a key that it sees
    makes_keys: bool  # whether it projects keys and values
    transformed: int  # tokens that its mlp processes


def _pairs(length: int, window: int) -> float:
    """Return the pairs of causal attention: n^2 / 2, or w n - w^2 / 2 for a window of w < n."""
    if not window or window >= length:
        return length**2 / 2
    return window * length - window**2 / 2


def _layers(hparams: Hparams, length: int, routing: str):
    """Yield the _Work of each layer. Selected tokens are counted as if spread evenly."""
    model, looped = hparams.model, 0
    for kind in layer_kinds(model):
        tokens, progress, loop = length, 1.0, 0
        if kind.gathered:
            loop, looped = looped // len(model.looped_range), looped + 1
            progress = model.loop_progress[loop]
        if routing == 'top_c' and (kind.routed or kind.gathered):
            tokens = model.routing.num_selected(length, progress)
        elif kind.routed or kind.gathered:
            context = max(length, hparams.data.sequence_length)
            tokens = min(length, model.routing.max_selected(context, routing, progress))
        attended, transformed = tokens, tokens
        if kind.routed and model.routing.part != 'block':
            by_attention = model.routing.part == 'attention'
            attended, transformed = (tokens, length) if by_attention else (length, tokens)
        if loop and model.routing.loop_keys == 'first':
            seen = _pairs(length, kind.window) * tokens / length
            yield _Work(kind, tokens, seen, False, tokens)
        else:
            pairs = _pairs(attended, math.ceil(kind.window * attended / length))
            yield _Work(kind, attended, pairs, True, transformed)


def expert_pairs(experts: ExpertsHparams, tokens: int) -> float:
    """Return the pairs of a token and a routed expert, for `tokens` of a row at balanced loads."""
    if experts.choice == 'expert':
        return experts.num_routed * experts.num_taken(tokens)
    pairs = tokens * experts.top_k * experts.num_routed / experts.num_choices
    most = experts.num_routed * experts.row_capacity
    return min(pairs, most) if experts.row_capacity else pairs


def _pair_flops(model: ModelHparams) -> int:
    return 2 * 3 * model.d_model * model.experts.d_ff


def forward_breakdown(hparams: Hparams, batch: int, length: int, routing='top_c') -> dict:
    """Return the FLOPs of one forward pass over [batch, length] tokens, by part.

    A routed block counts C tokens under top_c, and the most that it can select under a causal rule.
    """
    model, experts, stream = hparams.model, hparams.model.experts, hparams.model.depth.stream_class
    width, heads, kv_heads = model.d_model, model.num_heads, model.num_kv_heads
    names = ('projections', 'attention', 'mlp', 'expert_router', 'experts', 'router', 'predictor')
    parts = dict.fromkeys((*names, 'depth_projections', 'depth_attention'), 0.0)
    written = 0
    for kind, tokens, pairs, makes_keys, transformed in _layers(hparams, length, routing):
        parts['depth_projections'] += stream.projection_flops(model, kind, length, tokens)
        parts['depth_attention'] += stream.reading_flops(model, kind, length, tokens, written)
        if kind.part != 'block':
            written += kind.slots
            continue
        values = not kind.mixes or stream.projects_values(model.depth)
        sides = (1 + values) if makes_keys else 0
        parts['projections'] += 2 * tokens * width * model.head_dim * (2 * heads + sides * kv_heads)
        parts['projections'] += tokens * (kind.embeds and makes_keys) * gate_flops(model)
        if kind.mixes:
            parts['depth_attention'] += stream.mixing_flops(model, tokens, written)
        written += kind.slots
        parts['attention'] += 4 * pairs * heads * model.head_dim
        if kind.experts:
            parts['mlp'] += tokens * experts.num_shared * _pair_flops(model)
            parts['expert_router'] += 2 * tokens * width * experts.num_choices
            parts['experts'] += expert_pairs(experts, tokens) * _pair_flops(model)
        else:
            parts['mlp'] += 2 * transformed * 3 * width * model.d_ff
    parts['depth_attention'] += sum(
        4 * tokens * seen * heads * model.head_dim
        for tokens, seen, _ in depth_readers(hparams, length, routing)
    )
    if model.routed_layers:
        routers = len(model.routed_layers)
        parts['router'] = 2 * routers * length * width * model.routing.router_class.products
        rule = CAUSAL_RULES[model.routing.causal_rule]
        choices = routers - model.routing.routes_loops  # the first loop selects all tokens
        parts['predictor'] = choices * length * rule.flops_per_token(model)
    parts['head'] = 2 * length * width * model.vocab_size
    return {part: batch * flops for part, flops in parts.items()}


def depth_readers(hparams: Hparams, length: int, routing: str) -> list[tuple[int, int, int]]:
    """Return (queries of a row, slots that each sees, slots written before) of layers that read."""
    depth, readers, written = hparams.model.depth, [], 0
    if not depth.stream_class.attends:
        return readers
    for kind, tokens, *_ in _layers(hparams, length, routing):
        queries = tokens if depth.stream_class.joins_attention else length
        seen = min(written, depth.slot_window or written)
        if kind.part != 'entry':
            readers.append((queries, seen, written))
        written += kind.slots
    return readers


def forward_flops(hparams: Hparams, batch: int, length: int, routing: str = 'top_c') -> float:
    """Return the FLOPs of one forward pass over [batch, length] tokens."""
    return sum(forward_breakdown(hparams, batch, length, routing).values())


def train_step_flops(hparams: Hparams, stage: Stage | None = None, loops: int = 0) -> float:
    """Return the FLOPs of a training step: three times those of its forward pass.

    By default `stage` is the last one, and `loops` that of the model.
    """
    hparams = hparams.with_loops(loops)
    stage = hparams.stages[-1] if stage is None else stage
    shape = (hparams.data.batch_size, hparams.data.sequence_length)
    return 3 * forward_flops(hparams.at(stage), *shape, stage.routing)


def dot_general_flops(jaxpr) -> int:
    """Return the FLOPs of all products in a jaxpr; a scan counts its length, a cond its maximum."""
    jaxpr = getattr(jaxpr, 'jaxpr', jaxpr)
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == 'dot_general':
            (contracted, _), _ = eqn.params['dimension_numbers']
            shape = eqn.invars[0].aval.shape
            total += 2 * eqn.outvars[0].aval.size * math.prod(shape[axis] for axis in contracted)
        elif eqn.primitive.name == 'ragged_dot_general':
            total += _ragged_dot_flops(eqn)
        elif eqn.primitive.name == 'cond':
            total += max(dot_general_flops(branch) for branch in eqn.params['branches'])
        else:
            inner = sum(dot_general_flops(sub) for sub in _sub_jaxprs(eqn.params))
            total += inner * (eqn.params['length'] if eqn.primitive.name == 'scan' else 1)
    return total


def _ragged_dot_flops(eqn):
    ragged = eqn.params['ragged_dot_dimension_numbers']
    (contracted, _), _ = ragged.dot_dimension_numbers
    shape = eqn.invars[0].aval.shape
    products = eqn.outvars[0].aval.size * math.prod(shape[axis] for axis in contracted)
    if set(ragged.lhs_ragged_dimensions) & set(contracted):
        products //= eqn.outvars[0].aval.shape[0]  # the matrix of a group sums only its own rows
    return 2 * products


def _sub_jaxprs(params):
    for leaf in jax.tree.leaves(params, is_leaf=lambda value: hasattr(value, 'eqns')):
        if hasattr(leaf, 'eqns'):
            yield leaf
