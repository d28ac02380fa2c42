"""A stack of layers: runs of equal layers, their parameters, and the unrolled form."""

import collections
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels_pallas.joint_softmax import ATTENDED
from moddepth_jax.hparams import ModelHparams
from moddepth_jax.model.adapters import merge_adapters
from moddepth_jax.model.attention import DepthSlots
from moddepth_jax.model.embedding_residual import embedded_input
from moddepth_jax.model.layer import Layer, LayerArgs, LayerOutput, NewSlots, Records
from moddepth_jax.model.layers import widen
from moddepth_jax.model.loop_exit import apply_exits, has_exits
from moddepth_jax.model.loop_params import (
    EMBEDDING,
    EMBEDDINGS,
    Visit,
    visit_params,
)
from moddepth_jax.model.moe.grouped_matmul import PRODUCT
from moddepth_jax.model.routing import CHOICE, TokenInfo
from moddepth_jax.model.sharding import constrain, unshard_params
from moddepth_jax.model.streams import LayerKind, layer_kinds, layer_order


class Run(NamedTuple):
    """A group of layer kinds, or of Places, that is repeated `repeats` times."""

    group: tuple
    repeats: int


def find_runs(kinds) -> tuple[Run, ...]:
    """Return a run-length encoding of layer kinds by groups: d r d r d -> (d r) x 2, (d) x 1."""
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


class Place(NamedTuple):
    """A stored layer: its kind, and where its parameters are: params[run][layer]."""

    kind: LayerKind
    run: str
    layer: str


class Stack(NamedTuple):
    """The static part of a stack: the attributes of its Layers."""

    hparams: ModelHparams
    routing: str
    sizes: tuple[int, ...] = ()
    layers: range | None = None  # stored layers that run once each; None: all, with their loops

    @property
    def looped(self) -> bool:
        """Whether stored layers run several times."""
        return self.hparams.looped and self.layers is None

    @property
    def has_exits(self) -> bool:
        """Whether tokens can exit the loops early."""
        return self.looped and has_exits(self.hparams, self.routing)

    @property
    def stored(self) -> 'Stack':
        """The stored layers, which have their own parameters, each run once."""
        if self.layers is not None:
            return self
        kinds = self.hparams.depth.stream_class.layer_kinds(self.hparams)
        return self._replace(layers=range(len(kinds)))

    @property
    def kinds(self) -> list[LayerKind]:
        """The kinds of the layers that run, in order."""
        kinds = self.hparams.depth.stream_class.layer_kinds(self.hparams)
        return [kinds[i] for i in self._order]

    @property
    def _order(self):
        return layer_order(self.hparams) if self.layers is None else self.layers

    @property
    def visits(self) -> list[tuple[Place, Visit]]:
        """The Place of each layer that runs, in order, and its Visit there."""
        stored = [
            (Place(kind, f'run_{i}', f'layer_{j}'), row)
            for i, run in enumerate(find_runs(self.stored.kinds))
            for row in range(run.repeats)
            for j, kind in enumerate(run.group)
        ]
        if not self.looped:
            return [(place, Visit(row)) for place, row in stored]
        visits, loops = [], collections.Counter()
        blocks = iter(self.hparams.block_order)
        for layer in self._order:
            (place, row), loop = stored[layer], loops[layer]
            block = next(blocks) if place.kind.part == 'block' else None
            starts = block in self.hparams.blocks_that_start_loops
            visits.append((place, Visit(row, loop, loop if starts else -1)))
            loops[layer] += 1
        return visits

    @property
    def runs(self) -> tuple[Run, ...]:
        """The layers that run, in groups of Places. The repeats of a Place differ in their Visit.

        Of stored layers, each leaf of the parameters has an axis of repeats.
        """
        return find_runs([place for place, _ in self.visits])

    def visits_of(self, i: int) -> list[Visit]:
        """Return, for each layer in the group of run i, its Visits, int32 [repeats] each."""
        *earlier, run = self.runs[: i + 1]
        first, period = sum(len(run.group) * run.repeats for run in earlier), len(run.group)
        visits = [visit for _, visit in self.visits[first:][: period * run.repeats]]
        return [Visit(*np.array(visits[j::period], np.int32).T) for j in range(period)]

    def section(self, params, layers: range):
        """Return the Stack of stored layers that cover complete runs, and its parameters."""
        part, (place, _) = self._replace(layers=layers), self.stored.visits[layers.start]
        first = int(place.run.removeprefix('run_'))
        names = {f'run_{first + i}': f'run_{i}' for i in range(len(part.runs))}
        return part, {new: params[old] for old, new in names.items() if old in params}

    def counts(self, i: int):
        """Return the number of slots written before each repeat of run i, int32 [repeats]."""
        *earlier, run = self.runs[: i + 1]
        first = sum(place.kind.slots * run.repeats for run in earlier for place in run.group)
        slots = sum(place.kind.slots for place in run.group)
        return first + slots * jnp.arange(run.repeats)

    @property
    def layer_numbers(self) -> dict[tuple[str, str], np.ndarray]:
        """Block numbers of stored layers by (run, layer), int32 [repeats]; entry -1, exit -2."""
        numbers, block = collections.defaultdict(list), itertools.count()
        for place, _ in self.stored.visits:
            end = {'entry': -1, 'exit': -2}.get(place.kind.part)
            numbers[place.run, place.layer].append(end or next(block))
        return {place: np.array(each, np.int32) for place, each in numbers.items()}

    def layer(self, kind: LayerKind, **options) -> Layer:
        """Return the module of a layer of that kind; `options` are those of a Linen module."""
        return Layer(self.hparams, kind, self.routing, self.sizes, **options)

    def apply(self, kind: LayerKind, params, x_BTD, *inputs) -> LayerOutput:
        """Apply a layer of that kind. `inputs` are the arguments of Layer after x_BTD."""
        params = merge_adapters(params, self.hparams)
        params = unshard_params(params, self.hparams.dtype)
        x_BTD = constrain(x_BTD, 'batch', None, None)
        output = self.layer(kind, parent=None).apply({'params': params}, x_BTD, *inputs)
        return output._replace(x_BTD=constrain(output.x_BTD, 'batch', None, None))


def unstack_layers(stack: Stack, params):
    """Yield (kind, parameters) of each layer that runs, in order.

    If `params` come from `with_embeddings`, a layer also gets the loop embedding that it adds.
    """
    for place, visit in stack.visits:
        layer = visit_params(params, place, visit)
        if EMBEDDINGS in params and visit.embedding >= 0:
            layer |= {EMBEDDING: params[EMBEDDINGS][visit.embedding]}
        yield place.kind, layer


def stack_slots(written) -> DepthSlots | None:
    """Return the DepthSlots of a list of NewSlots, or None if these have no slots."""
    slots = [slot for one in written for slot in one.slots]
    if not slots:
        return None
    valid = [one.valid_BT for one in written for _ in one.slots if one.valid_BT is not None]
    slots = jax.tree.map(lambda *leaves: jnp.stack(leaves), *slots)
    return DepthSlots(slots, jnp.stack(valid) if valid else None)


def with_remat(function, hparams, prevent_cse):
    """Return `function`, of which the backward pass recomputes what `model.remat` says.

    The choice of tokens and the attention output are kept: for long sequences the latter is
    expensive to compute, and it is only as large as the stream. With depth slots the attention is
    recomputed too. On a GPU it orders the reads and writes of the slot buffer, which XLA would
    otherwise copy. `elementwise` also keeps the products of tokens with matrices.
    """
    if hparams.remat == 'none':
        return function
    policies, names = jax.checkpoint_policies, [CHOICE]
    if not any(kind.slots for kind in layer_kinds(hparams)):
        names.append(ATTENDED)
    if hparams.remat == 'block':
        policy = policies.save_only_these_names(*names)
    else:
        policy = policies.save_from_both_policies(
            policies.dots_with_no_batch_dims_saveable,
            policies.save_only_these_names(*names, PRODUCT),
        )
    return jax.checkpoint(function, policy=policy, prevent_cse=prevent_cse)


def pick_args(kinds, args: LayerArgs, layers) -> LayerArgs:
    """Pick the LayerArgs of one layer, or of an array of layers of equal kind."""

    def pick(side, has_it):
        number = np.cumsum(has_it) - 1  # a leaf has one entry for each layer that has it
        return jax.tree.map(lambda leaf: leaf[number[layers]], side)

    kind = kinds[np.ravel(layers)[0]]
    routing = pick(args.routing, [kind.routed for kind in kinds]) if kind.routed else None
    if not kind.experts:
        return LayerArgs(routing)
    return LayerArgs(routing, pick(args.expert_state, [kind.experts for kind in kinds]))


def per_layer_args(kinds, args: LayerArgs) -> list[LayerArgs]:
    """Split LayerArgs with an axis of layers into those of each layer."""
    return [pick_args(kinds, args, layer) for layer in range(len(kinds))]


def _widened(written: NewSlots) -> NewSlots:
    """Return slots in float32, or wider."""
    return written._replace(slots=jax.tree.map(widen, written.slots))


def _as_written(written: NewSlots, dtypes) -> NewSlots:
    """Invert `_widened`."""
    return written._replace(slots=jax.tree.map(lax.convert_element_type, written.slots, dtypes))


def run_unrolled(stack: Stack, params, tokens: TokenInfo, args: LayerArgs, x_BTD):
    """Run the stack as a plain Python loop, with a list of slots and ordinary differentiation.

    That sums the gradients of a slot in its dtype. For float32 sums the list holds float32, and a
    layer reads the slots in the dtype in which they were written.
    """
    written, dtypes, records = [], [], []
    widens = stack.hparams.depth.gradient_dtype == 'float32'
    args_of_layers, exits = per_layer_args(stack.kinds, args), None
    layers = unstack_layers(stack, params)
    embedded_BTD = embedded_input(stack.hparams, x_BTD)
    each = enumerate(zip(layers, args_of_layers, strict=True))
    for place, ((kind, layer_params), layer_args) in each:

        def call(params, x_BTD, written, args, embedded_BTD, kind=kind, dtypes=tuple(dtypes)):
            depth = stack_slots([_as_written(*one) for one in zip(written, dtypes, strict=True)])
            output = stack.apply(kind, params, x_BTD, depth, tokens, args, embedded_BTD)
            return output._replace(aux=None)

        call = with_remat(call, stack.hparams, prevent_cse=True)
        output = call(layer_params, x_BTD, written, layer_args, embedded_BTD)
        before_BTD, x_BTD = x_BTD, output.x_BTD
        dtypes.append(jax.tree.map(lambda side: side.dtype, output.written.slots))
        written = [*written, _widened(output.written) if widens else output.written]
        if stack.has_exits:
            x_BTD, exits = apply_exits(stack.hparams, place, exits, before_BTD, x_BTD)
        records.append(output.records)
    merged = merge_records(records, lambda *leaves: jnp.stack(leaves))
    if exits is None:
        return x_BTD, merged
    return x_BTD, (merged or Records())._replace(loops_BT=exits.loops_BT)


def merge_records(records: list[Records], join) -> Records | None:
    """Merge the Records of several layers or runs by `join(*leaves)`; None if all are empty."""
    parts = []
    for part in zip(*records, strict=True):
        found = [record for record in part if record is not None]
        parts.append(jax.tree.map(join, *found) if found else None)
    return None if parts == [None] * len(parts) else Records(*parts)
