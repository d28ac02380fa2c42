"""A stack of layers: which of them are alike, their parameters, and its plain unrolled form."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moddepth_jax.hparams import ModelHparams
from moddepth_jax.model.attention import DepthSlots, TokenInfo
from moddepth_jax.model.layer import Layer, LayerArgs, LayerOutput, Records
from moddepth_jax.model.moe.experts import NO_EXPERT_STATE
from moddepth_jax.model.routing import CHOICE
from moddepth_jax.model.sharding import constrain, unshard_params
from moddepth_jax.model.streams import LayerKind, layer_kinds


class Run(NamedTuple):
    """`group` layer kinds in a row, `repeats` times."""

    group: tuple
    repeats: int


def find_runs(kinds) -> tuple[Run, ...]:
    """Run-length encoding of a layer pattern, by groups: d r d r d -> (d r) x 2, (d) x 1.

    At each place the group that covers most layers by two repeats or more is taken, the shortest
    of equals; failing that, one layer by itself.
    """
    runs, start = [], 0
    while start < len(kinds):
        best = Run(tuple(kinds[start : start + 1]), 1)
        for period in range(1, (len(kinds) - start) // 2 + 1):
            group = tuple(kinds[start : start + period])
            repeats = 1
            while tuple(kinds[start + repeats * period :][:period]) == group:
                repeats += 1
            if repeats > 1 and repeats * period > len(best.group) * best.repeats:
                best = Run(group, repeats)
        runs.append(best)
        start += len(best.group) * best.repeats
    return tuple(runs)


class Stack(NamedTuple):
    """What is static of a stack of layers; the arguments of Layer.

    Its parameters are a dict run_i / layer_j of pytrees with a leading axis of repeats, the same
    whether the stack is scanned or unrolled.
    """

    hparams: ModelHparams
    routing: str
    sizes: tuple[int, ...] = ()

    @property
    def runs(self) -> tuple[Run, ...]:
        """Groups of layers, each with how often it repeats."""
        return find_runs(layer_kinds(self.hparams))

    def counts(self, i: int):
        """int32 [repeats], the slots that are written before each repeat of run i."""
        per_repeat = [sum(kind.slots for kind in run.group) for run in self.runs]
        earlier = zip(per_repeat[:i], self.runs[:i], strict=True)
        first = sum(slots * run.repeats for slots, run in earlier)
        return first + per_repeat[i] * jnp.arange(self.runs[i].repeats)

    def layer(self, kind: LayerKind, **options) -> Layer:
        """The module of a layer of that kind, with the options of a Linen module."""
        return Layer(self.hparams, kind, self.routing, self.sizes, **options)

    def apply(self, kind: LayerKind, params, x_BTD, *inputs) -> LayerOutput:
        """A layer of that kind with its parameters; inputs as Layer takes them."""
        params = unshard_params(params, self.hparams.dtype)
        x_BTD = constrain(x_BTD, 'rows', None, None)
        output = self.layer(kind, parent=None).apply({'params': params}, x_BTD, *inputs)
        return output._replace(x_BTD=constrain(output.x_BTD, 'rows', None, None))


def unstack_layers(stack: Stack, params):
    """(kind, parameters) of each layer, from the first to the last."""
    for i, run in enumerate(stack.runs):
        for repeat in range(run.repeats):
            one = jax.tree.map(lambda leaf, at=repeat: leaf[at], params.get(f'run_{i}', {}))
            for j, kind in enumerate(run.group):
                yield kind, one.get(f'layer_{j}', {})


def stack_slots(written) -> DepthSlots | None:
    """Depth of a list of Written, None where they hold no slot."""
    slots = [slot for one in written for slot in one.slots]
    if not slots:
        return None
    valid = [one.valid_BT for one in written for _ in one.slots if one.valid_BT is not None]
    slots = jax.tree.map(lambda *leaves: jnp.stack(leaves), *slots)
    return DepthSlots(slots, jnp.stack(valid) if valid else None)


def with_remat(function, hparams, prevent_cse):
    """`function`, recomputed in the backward pass from its arguments where the knob says so.

    The choice of tokens and of experts is kept: recomputed, it could fall otherwise on a near-tie.
    """
    if hparams.remat == 'none':
        return function
    policy = jax.checkpoint_policies.save_only_these_names(CHOICE)
    return jax.checkpoint(function, policy=policy, prevent_cse=prevent_cse)


def per_layer_args(kinds, told: LayerArgs) -> list[LayerArgs]:
    """What each of these layers is told, of leaves with an axis of the layers they are for."""

    def pick(side, places):
        return {j: jax.tree.map(lambda leaf, i=i: leaf[i], side) for i, j in enumerate(places)}

    routed = pick(told.routed, [j for j, kind in enumerate(kinds) if kind.routed])
    limits = pick(told.limits, [j for j, kind in enumerate(kinds) if kind.experts])
    return [LayerArgs(routed.get(j), limits.get(j, NO_EXPERT_STATE)) for j in range(len(kinds))]


def run_unrolled(stack: Stack, params, tokens: TokenInfo, told: LayerArgs, x_BTD):
    """The plain form of `run_stack`: a list of slots, ordinary differentiation."""
    written, records = [], []
    told = per_layer_args(layer_kinds(stack.hparams), told)
    for (kind, mine), mine_told in zip(unstack_layers(stack, params), told, strict=True):

        def call(params, x_BTD, written, told, kind=kind):
            depth = stack_slots(written)
            return stack.apply(kind, params, x_BTD, depth, tokens, told)

        call = with_remat(call, stack.hparams, prevent_cse=True)
        output = call(mine, x_BTD, written, mine_told)
        x_BTD, written = output.x_BTD, [*written, output.written]
        records.append(output.records)
    return x_BTD, merge_records(records, lambda *leaves: jnp.stack(leaves))


def merge_records(records: list[Records], join) -> Records | None:
    """Records of several layers, or of several runs, as one: leaves put together by `join`.

    None where no layer decides anything.
    """
    parts = []
    for part in zip(*records, strict=True):
        found = [record for record in part if record is not None]
        parts.append(jax.tree.map(join, *found) if found else None)
    return None if parts == [None, None] else Records(*parts)
