"""A stack of layers: runs of equal layers, their parameters, and the unrolled form."""

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
    """A group of layer kinds that is repeated `repeats` times."""

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
    """Where the parameters of a layer that runs are: row `visit.row` of params[run][layer]."""

    run: str
    layer: str
    visit: Visit


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
    def stored_kinds(self) -> list[LayerKind]:
        """The kinds of the stored layers, which have their own parameters."""
        kinds = self.hparams.depth.stream_class.layer_kinds(self.hparams)
        return kinds if self.layers is None else [kinds[i] for i in self.layers]

    @property
    def kinds(self) -> list[LayerKind]:
        """The kinds of the layers that run, in order."""
        return layer_kinds(self.hparams) if self.looped else self.stored_kinds

    @property
    def stored_runs(self) -> tuple[Run, ...]:
        """The stored layers in groups. Each leaf of their parameters has an axis of repeats."""
        return find_runs(self.stored_kinds)

    def section(self, params, layers: range):
        """Return the Stack of stored layers that cover complete runs, and its parameters."""
        part, first = self._replace(layers=layers), 0
        while sum(len(run.group) * run.repeats for run in self.stored_runs[:first]) < layers.start:
            first += 1
        names = {f'run_{first + i}': f'run_{i}' for i in range(len(part.stored_runs))}
        return part, {new: params[old] for old, new in names.items() if old in params}

    @property
    def places(self) -> list[Place]:
        """Where the parameters of each layer that runs are stored."""
        stored = [
            Place(f'run_{i}', f'layer_{j}', Visit(row))
            for i, run in enumerate(self.stored_runs)
            for row in range(run.repeats)
            for j in range(len(run.group))
        ]
        if not self.looped:
            return stored
        places, visits = [], dict.fromkeys(range(len(stored)), 0)
        blocks = iter(self.hparams.block_order)
        for layer in layer_order(self.hparams):
            loop, place = visits[layer], stored[layer]
            block = next(blocks) if self.stored_kinds[layer].part == 'block' else None
            starts = block in self.hparams.blocks_that_start_loops
            visit = place.visit._replace(loop=loop, embedding=loop if starts else -1)
            places.append(place._replace(visit=visit))
            visits[layer] += 1
        return places

    @property
    def runs(self) -> tuple[Run, ...]:
        """The layers that run, in groups. The repeats of a layer differ in their Visit."""
        if not self.looped:
            return self.stored_runs
        of_one_leaf = [
            (kind, place.run, place.layer)
            for kind, place in zip(self.kinds, self.places, strict=True)
        ]
        runs = find_runs(of_one_leaf)
        return tuple(Run(tuple(kind for kind, *_ in run.group), run.repeats) for run in runs)

    def places_of(self, i: int) -> list[list[Place]]:
        """Return, for each layer in the group of run i, the Place of each repeat."""
        sizes = [len(run.group) * run.repeats for run in self.runs[: i + 1]]
        places = self.places[sum(sizes[:-1]) : sum(sizes)]
        group = len(self.runs[i].group)
        return [places[j::group] for j in range(group)]

    def counts(self, runs, i: int):
        """Return the number of slots written before each repeat of runs[i], int32 [repeats]."""
        *earlier, run = runs[: i + 1]
        first = sum(kind.slots * run.repeats for run in earlier for kind in run.group)
        return first + sum(kind.slots for kind in run.group) * jnp.arange(run.repeats)

    @property
    def layer_numbers(self) -> list[np.ndarray]:
        """The block numbers of each stored run, int32 [repeats, layers]; entry: -1, exit: -2."""
        kinds, runs = self.stored_kinds, self.stored_runs
        blocks = np.cumsum([kind.part == 'block' for kind in kinds]) - 1
        ends = [{'entry': -1, 'exit': -2}.get(kind.part) for kind in kinds]
        numbers = [end or block for end, block in zip(ends, blocks, strict=True)]
        sizes = [run.repeats * len(run.group) for run in runs]
        parts = np.split(np.array(numbers, np.int32), np.cumsum(sizes)[:-1])
        return [part.reshape(run.repeats, -1) for part, run in zip(parts, runs, strict=True)]

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
    for kind, place in zip(stack.kinds, stack.places, strict=True):
        layer, row = visit_params(params, place, place.visit, kind), place.visit.embedding
        if EMBEDDINGS in params and row >= 0:
            layer |= {EMBEDDING: params[EMBEDDINGS][row]}
        yield kind, layer


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

    def widen(side):
        return side.astype(jnp.promote_types(side.dtype, jnp.float32))

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
