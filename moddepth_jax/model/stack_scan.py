"""A stack of layers as scans over runs: one buffer of depth slots, one reverse scan.

Layer l sees only the slots that earlier layers wrote, so the backward pass of every layer can read
the buffer as it is after the last layer. The backward pass carries the cotangent of the buffer, to
which each layer adds. If all layers read the embedded tokens, it carries their cotangent as well.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.xla.depth import order_before_writes
from moddepth_jax.hparams import ModelHparams
from moddepth_jax.model.attention import SLOTS, DepthSlots, FirstKeys, KeysValues
from moddepth_jax.model.embedding_residual import embedded_input
from moddepth_jax.model.layer import LayerArgs, NewSlots
from moddepth_jax.model.layers import wide_dtype
from moddepth_jax.model.loop_params import (
    EMBEDDINGS,
    add_gradient,
    visit_embedding,
    visit_params,
)
from moddepth_jax.model.routing import TokenInfo
from moddepth_jax.model.sharding import constrain
from moddepth_jax.model.stack import Stack, merge_records, pick_args, run_unrolled, with_remat
from moddepth_jax.model.streams import layer_kinds

_take = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)  # one row by its index


def run_stack(stack: Stack, params, tokens: TokenInfo, args: LayerArgs, x_BTD):
    """Run the embedded tokens through all layers.

    Returns x_BTD, and the Records of all layers (None: no records).
    """
    if stack.hparams.layer_loop == 'unrolled' or stack.has_exits:
        return run_unrolled(stack, params, tokens, args, x_BTD)
    kinds, by_run, first = stack.kinds, [], 0
    for run in stack.runs:  # LayerArgs of each place in its group, with an axis of repeats
        layers = first + np.arange(run.repeats * len(run.group)).reshape(run.repeats, -1)
        by_run.append([pick_args(kinds, args, of_place) for of_place in layers.T])
        first += layers.size
    embedded_BTD = embedded_input(stack.hparams, x_BTD)
    x_BTD, records = _run_scans(stack, params, by_run, tokens, x_BTD, embedded_BTD)

    def in_order(*leaves):
        together = jnp.stack(leaves, axis=1)
        return together.reshape(-1, *together.shape[2:])

    runs = [merge_records(run, in_order) for run in records]
    runs = [run for run in runs if run is not None]
    return x_BTD, merge_records(runs, lambda *leaves: jnp.concatenate(leaves)) if runs else None


def run_with_keys(stack: Stack, params, tokens: TokenInfo, x_BTD, first):
    """Run a section of layers of the residual stream, and make or read keys.

    Later sections read the keys, so JAX differentiates these scans.

    Args:
      stack: the section.
      params: its parameters.
      tokens: positions and documents.
      x_BTD: the stream before the section.
      first: the second result of an earlier call, whose keys the layers read; None: they make keys.

    Returns:
      x_BTD after the section, and (keys, tokens), or None if the layers read keys. The keys are a
      list for each run: KeysValues of each layer in its group, with an axis of repeats.
    """
    made = []
    for i, run in enumerate(stack.runs):

        def body(x_BTD, inputs, run=run):
            of_repeat, reads = inputs
            keys = []
            for j, (kind, *_) in enumerate(run.group):

                def call(params, x_BTD, read, tokens, kind=kind):
                    read = None if first is None else FirstKeys(read, first[1])
                    output = stack.apply(kind, params, x_BTD, None, tokens, LayerArgs(), None, read)
                    return output.x_BTD, output.aux.keys

                call = with_remat(call, stack.hparams, prevent_cse=run.repeats == 1)
                read = None if first is None else reads[j]
                x_BTD, new = call(of_repeat[f'layer_{j}'], x_BTD, read, tokens)
                keys.append(new)
            return x_BTD, keys if first is None else None

        unroll = run.repeats if stack.hparams.layer_loop == 'unrolled' else 1
        inputs = params[f'run_{i}'], None if first is None else first[0][i]
        x_BTD, keys = jax.lax.scan(body, x_BTD, inputs, unroll=unroll)
        made.append(keys)
    return x_BTD, (made, tokens) if first is None else None


def slot_buffer_size(slots: int) -> int:
    """Return the size of a slot buffer: on a GPU, a multiple of the 8 slots that kernels read."""
    return -(-slots // 8) * 8 if jax.default_backend() == 'gpu' else slots


def empty_slots(hparams: ModelHparams, x_BTD) -> tuple[KeysValues | None, jax.Array | None]:
    """Return empty buffers for the slots of all layers and their validity; None without slots."""
    total = sum(kind.slots for kind in layer_kinds(hparams))
    if not total:
        return None, None
    stream, (batch, length) = hparams.depth.stream_class, x_BTD.shape[:2]
    if stream.attends:
        total = slot_buffer_size(total)

    def empty(slot):
        return _shard_slots(jnp.zeros((total, batch, length, *slot.shape), slot.dtype))

    valid_LBT = None
    if hparams.masks_slots:
        valid_LBT = constrain(jnp.zeros((total, batch, length), bool), None, 'batch', None)
    return jax.tree.map(empty, stream.slot_shape(hparams)), valid_LBT


def _shard_slots(buffer):
    return constrain(buffer, *(SLOTS if buffer.ndim == 5 else (None, 'batch', None, None)))


def empty_sums(hparams: ModelHparams, slots: KeysValues | None) -> KeysValues | None:
    """Return `DepthSlots.sums` for the slots; None if gradients have the dtype of the slots."""
    if slots is None or hparams.depth.gradient_dtype in ('model', 'none'):
        return None
    slot_dtype = jax.tree.leaves(slots)[0].dtype
    dtype = wide_dtype(slot_dtype)
    if dtype == slot_dtype:
        return None
    return jax.tree.map(lambda buffer: jnp.zeros(buffer.shape, dtype), slots)


def put_slots(slots, valid_LBT, written: NewSlots, first):
    """Return the buffers with the NewSlots of a layer written from slot `first` on."""

    def put(buffer, new, at):
        return jax.lax.dynamic_update_index_in_dim(buffer, new.astype(buffer.dtype), at, 0)

    for i, slot in enumerate(written.slots):
        slots = jax.tree.map(lambda old, new, at=first + i: put(old, new, at), slots, slot)
        if valid_LBT is not None:
            valid_LBT = put(valid_LBT, written.valid_BT, first + i)
    return slots, valid_LBT


def _select_leaves(tree, floating: bool):
    """Return the tree with None in place of all leaves that are not (or that are) floating."""

    def keep(leaf):
        return leaf if jnp.issubdtype(leaf.dtype, jnp.floating) == floating else None

    return jax.tree.map(keep, tree)


def _merge_leaves(one, other):
    """Return the tree with the leaves of `one`, or those of `other` where these are None."""
    is_none = {'is_leaf': lambda leaf: leaf is None}
    return jax.tree.map(lambda a, b: b if a is None else a, one, other, **is_none)


def _layer_function(stack, kind, repeats):
    """Return a layer as call(x, other inputs) -> (differentiated outputs, other outputs)."""

    def call(x_BTD, rest):
        params, slots, valid_LBT, count, args, tokens, embedded_BTD = rest
        slots, sums = slots
        depth = None if slots is None else DepthSlots(slots, valid_LBT, count, sums=sums)
        output = stack.apply(kind, params, x_BTD, depth, tokens, args, embedded_BTD)
        slots, sums = (None, None) if slots is None else (output.depth.slots, output.depth.sums)
        written, threaded = output.written, slots if sums is None else sums
        records = output.records
        others = written.valid_BT, _select_leaves(records, False), None if sums is None else slots
        return (output.x_BTD, written.slots, threaded, _select_leaves(records, True)), others

    # In a loop with several iterations, XLA cannot merge the recomputation with the forward pass.
    return with_remat(call, stack.hparams, prevent_cse=repeats == 1)


def _params_of_run(stack, params, i):
    """Return the scanned input of run i, and pick(input of one repeat, j) -> parameters of layer j.

    A model without loops scans over the parameters. A looped model scans over Visits and picks from
    all parameters: a copy for every loop would be as large as a model without loops.
    """
    if not stack.looped:
        return params.get(f'run_{i}', {}), lambda of_repeat, j: of_repeat.get(f'layer_{j}', {})
    places, visits = stack.runs[i].group, stack.visits_of(i)

    def pick(of_repeat, j):
        layer = visit_params(params, places[j], of_repeat[j], _take)
        if EMBEDDINGS in params and any(visits[j].embedding >= 0):
            layer |= visit_embedding(params, of_repeat[j])
        return layer

    return visits, pick


def _run_layers(stack, params, args, tokens, x_BTD, embedded_BTD, call):
    """Run all layers, in a scan over the repeats of each run.

    `call(layer function, x_BTD, other inputs)` returns the outputs of the layer and what to save
    for the backward pass. Returns the last carry, the records and what was saved.
    """
    carry = (x_BTD, *empty_slots(stack.hparams, x_BTD))
    records, saved, runs = [], [], stack.runs
    for i, run in enumerate(runs):
        own, pick = _params_of_run(stack, params, i)

        def body(carry, inputs, run=run, pick=pick):
            x_BTD, slots, valid_LBT = carry
            own, args, count = inputs
            outputs = []
            for j, (kind, *_) in enumerate(run.group):
                layer_params = pick(own, j)
                buffers = (slots, empty_sums(stack.hparams, slots))
                rest = (layer_params, buffers, valid_LBT, count, args[j], tokens, embedded_BTD)
                function = _layer_function(stack, kind, run.repeats)
                results, others, residuals = call(function, x_BTD, rest)
                x_BTD, new, threaded, record = results
                slots = threaded if others[2] is None else others[2]
                slots, valid_LBT = put_slots(slots, valid_LBT, NewSlots(new, others[0]), count)
                outputs.append((_merge_leaves(record, others[1]), residuals))
                count += kind.slots
            return (x_BTD, slots, valid_LBT), outputs

        inputs = (own, args[i], stack.counts(i))
        carry, outputs = jax.lax.scan(body, carry, inputs)
        records.append([record for record, _ in outputs])
        saved.append([residuals for _, residuals in outputs])
    return carry, records, saved


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_scans(stack, params, args, tokens, x_BTD, embedded_BTD):
    def call(function, x_BTD, rest):
        return *function(x_BTD, rest), None

    carry, records, _ = _run_layers(stack, params, args, tokens, x_BTD, embedded_BTD, call)
    return carry[0], records


def _forward(stack, params, args, tokens, x_BTD, embedded_BTD):
    def call(function, x_BTD, rest):
        leaves, structure = jax.tree.flatten(rest)
        results, vjp, others = jax.vjp(
            lambda x_BTD, leaves: function(x_BTD, structure.unflatten(leaves)),
            x_BTD,
            leaves,
            has_aux=True,
        )
        # The backward pass has the parameters, slots and tokens, so x is the only argument to save.
        # All other residuals belong to one layer, and none is as large as the buffer.
        x_res, leaves_res = vjp.args_res
        dropped = [None if isinstance(res, jax.Array) else res for res in leaves_res]
        vjp.args_res = [x_res, dropped]
        return results, others, vjp

    carry, records, vjps = _run_layers(stack, params, args, tokens, x_BTD, embedded_BTD, call)
    x_BTD, slots, valid_LBT = carry
    return (x_BTD, records), (params, args, tokens, embedded_BTD, slots, valid_LBT, vjps)


def _backward(stack, residuals, cotangents):
    params, args, tokens, embedded_BTD, slots, valid_LBT, vjps = residuals
    dx_BTD, drecords = cotangents
    sums = empty_sums(stack.hparams, slots)
    dslots = jax.tree.map(jnp.zeros_like, slots if sums is None else sums)
    dslots = jax.tree.map(_shard_slots, dslots)
    runs, looped = stack.runs, stack.looped
    # The gradients of all parameters of a looped model, to which each loop adds.
    sums_of_loops = jax.tree.map(jnp.zeros_like, params) if looped else {}
    dembedded_BTD = jax.tree.map(jnp.zeros_like, embedded_BTD)
    carry, dparams = (dx_BTD, dslots, sums_of_loops, dembedded_BTD), {}
    for i, run in reversed(list(enumerate(runs))):
        own, pick = _params_of_run(stack, params, i)

        def body(carry, inputs, run=run, pick=pick):
            dx_BTD, dslots, sums_of_loops, dembedded_BTD = carry
            own, args, count, vjps, drecords = inputs
            dparams = {}
            for j, place in reversed(list(enumerate(run.group))):
                kind = place.kind
                before = count + sum(before.kind.slots for before in run.group[:j])
                buffers = (slots, sums)
                rest = (pick(own, j), buffers, valid_LBT, before, args[j], tokens, embedded_BTD)
                leaves, structure = jax.tree.flatten(rest)
                vjp, (x_res, dropped) = vjps[j], vjps[j].args_res
                found = zip(dropped, leaves, strict=True)
                vjp.args_res = [x_res, [leaf if res is None else res for res, leaf in found]]
                at = [before + k for k in range(kind.slots)]
                dwritten = tuple(jax.tree.map(lambda d, i=i: _take(d, i), dslots) for i in at)
                if dwritten:
                    dwritten, dslots = order_before_writes((dwritten, dslots), before)
                    like = (slots,) * kind.slots
                    dwritten = jax.tree.map(lambda d, s: d.astype(s.dtype), dwritten, like)
                dx_BTD, dleaves = vjp((dx_BTD, dwritten, dslots, drecords[j]))
                dlayer, (dslots, dsums), *_, of_layer_BTD = structure.unflatten(dleaves)
                dembedded_BTD = jax.tree.map(jnp.add, dembedded_BTD, of_layer_BTD)
                dslots = dslots if dsums is None else dsums
                if looped:
                    sums_of_loops = add_gradient(sums_of_loops, place, own[j], dlayer)
                else:
                    dparams[f'layer_{j}'] = dlayer
            return (dx_BTD, dslots, sums_of_loops, dembedded_BTD), dparams

        drecords_of_run = [_select_leaves(record, True) for record in drecords[i]]
        inputs = (own, args[i], stack.counts(i), vjps[i], drecords_of_run)
        carry, dparams[f'run_{i}'] = jax.lax.scan(body, carry, inputs, reverse=True)
    # A layer without parameters has no entry in `params`, so it gets none here.
    if looped:
        dparams = carry[2]
    else:
        dparams = {run: {n: dparams[run][n] for n in layers} for run, layers in params.items()}
    return dparams, None, None, carry[0], carry[3]


_run_scans.defvjp(_forward, _backward)
