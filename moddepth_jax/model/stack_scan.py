"""A stack of layers as a list of runs, scanned: one buffer of depth slots, one reverse scan.

Layer l sees only slots that layers before it wrote. So the buffer that the last layer leaves serves
the backward pass of every layer: earlier versions of it are never needed, and each slot is stored
once. The backward pass is one scan from the last layer to the first, which carries the cotangent
of the buffer; each layer adds its part in place, and finds there that of the slots it wrote.
"""

import functools

import jax
import jax.numpy as jnp

from kernels_pallas import order_before_writes
from moddepth_jax.hparams import ModelHparams
from moddepth_jax.model.attention import SLOTS, DepthSlots, KeysValues, TokenInfo
from moddepth_jax.model.layer import LayerArgs, NewSlots
from moddepth_jax.model.moe.experts import NO_EXPERT_STATE
from moddepth_jax.model.sharding import constrain
from moddepth_jax.model.stack import Stack, merge_records, run_unrolled, with_remat
from moddepth_jax.model.streams import layer_kinds


def run_stack(stack: Stack, params, tokens: TokenInfo, told: LayerArgs, x_BTD):
    """x_BTD through all layers.

    Args:
      stack: what is static.
      params: of the stack.
      tokens: of the rows.
      told: leaves with an axis of the layers that they are for.
      x_BTD: the embedded tokens.

    Returns:
      The last stream, and Records with an axis of layers; None where no layer decides anything.
    """
    if stack.hparams.layer_loop == 'unrolled':
        return run_unrolled(stack, params, tokens, told, x_BTD)
    x_BTD, records = _scanned(stack, params, _by_run(stack, told), tokens, x_BTD)

    def in_order(*leaves):
        together = jnp.stack(leaves, axis=1)
        return together.reshape(-1, *together.shape[2:])

    runs = [merge_records(run, in_order) for run in records]
    runs = [run for run in runs if run is not None]
    return x_BTD, merge_records(runs, lambda *leaves: jnp.concatenate(leaves)) if runs else None


def _by_run(stack, told):
    """Of each run a list over the layers of its group: Told [repeats]."""
    runs, dealt = [], {'routed': 0, 'experts': 0}

    def deal(side, having, run):
        """What is of the layers of one run, by place in its group; a slice for all repeats."""
        places = [j for j, kind in enumerate(run.group) if getattr(kind, having)]
        first = dealt[having]
        dealt[having] = last = first + run.repeats * len(places)

        def pick(leaf, i):
            return leaf[first:last].reshape(run.repeats, len(places), *leaf.shape[1:])[:, i]

        return {
            j: jax.tree.map(lambda leaf, i=i: pick(leaf, i), side) for i, j in enumerate(places)
        }

    for run in stack.runs:
        routed, limits = deal(told.routed, 'routed', run), deal(told.limits, 'experts', run)
        each = range(len(run.group))
        runs.append([LayerArgs(routed.get(j), limits.get(j, NO_EXPERT_STATE)) for j in each])
    return runs


def slot_buffer_size(slots: int) -> int:
    """Slots that a buffer holds. The Hopper kernels read eight at once where 8 divides them."""
    return -(-slots // 8) * 8 if jax.default_backend() == 'gpu' else slots


def empty_slots(hparams: ModelHparams, x_BTD) -> tuple[KeysValues | None, jax.Array | None]:
    """Room for the slots of all layers, and for which tokens have them; None where none do."""
    total = sum(kind.slots for kind in layer_kinds(hparams))
    if not total:
        return None, None
    batch, length = x_BTD.shape[:2]
    if hparams.depth.reads_outputs:
        x_LBTD = jnp.zeros((total, *x_BTD.shape), x_BTD.dtype)
        return _split_slots(x_LBTD), None
    total = slot_buffer_size(total)
    room = jnp.zeros((total, batch, length, hparams.num_kv_heads, hparams.head_dim), hparams.dtype)
    room = _split_slots(room)
    valid = jnp.zeros((total, batch, length), bool) if hparams.masks_slots else None
    return KeysValues(room, room), None if valid is None else constrain(valid, None, 'rows', None)


def _split_slots(buffer):
    """A buffer of slots [L, B, T, ...], or of their gradients, split over a mesh."""
    return constrain(buffer, *(SLOTS if buffer.ndim == 5 else (None, 'rows', None, None)))


def empty_sums(hparams: ModelHparams, slots: KeysValues | None) -> KeysValues | None:
    """What stands for the sums of the slots' gradients; None: they have the slots' dtype.

    Never stored: nothing reads its values.
    """
    if slots is None or hparams.depth.gradient_dtype == 'model':
        return None
    dtype = jnp.promote_types(slots.k_BTKH.dtype, jnp.float32)
    if dtype == slots.k_BTKH.dtype:
        return None
    return jax.tree.map(lambda buffer: jnp.zeros(buffer.shape, dtype), slots)


def put_slots(slots, valid_LBT, written: NewSlots, first):
    """The buffers with what a layer wrote from slot `first` on."""

    def put(buffer, new, at):
        return jax.lax.dynamic_update_index_in_dim(buffer, new.astype(buffer.dtype), at, 0)

    for i, slot in enumerate(written.slots):
        slots = jax.tree.map(lambda old, new, at=first + i: put(old, new, at), slots, slot)
        if valid_LBT is not None:
            valid_LBT = put(valid_LBT, written.valid_BT, first + i)
    return slots, valid_LBT


def _differentiable(tree):
    """Its floating leaves, the others None; and the reverse."""
    floating = jax.tree.map(lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating), tree)
    return (
        jax.tree.map(lambda leaf, mine: leaf if mine else None, tree, floating),
        jax.tree.map(lambda leaf, mine: None if mine else leaf, tree, floating),
    )


def _joined(floating, others):
    def choose(one, other):
        return other if one is None else one

    return jax.tree.map(choose, floating, others, is_leaf=lambda leaf: leaf is None)


def _function(stack, kind, repeats):
    """A layer as (x, everything else) -> (what is differentiated, what is not)."""

    def call(x_BTD, rest):
        params, slots, valid_LBT, count, told, tokens = rest
        slots, sums = slots
        depth = None if slots is None else DepthSlots(slots, valid_LBT, count, sums=sums)
        output = stack.apply(kind, params, x_BTD, depth, tokens, told)
        slots, sums = (None, None) if slots is None else (output.depth.slots, output.depth.sums)
        record, choices = _differentiable(output.records)
        written = output.written
        threaded = slots if sums is None else sums
        others = (written.valid_BT, choices, None if sums is None else slots)
        return (output.x_BTD, written.slots, threaded, record), others

    # A loop of several trips cannot merge the recomputation with the first one; others could.
    return with_remat(call, stack.hparams, prevent_cse=repeats == 1)


def _walk(stack, params, told, tokens, x_BTD, call):
    """All layers in scans over the repeats of each run.

    `call(function, x, rest)` returns the function's two results and what is to be kept.

    Returns the last stream, the buffers, and of each run, by layer of its group, with a leading
    axis of repeats: the records, and what was kept.
    """
    carry = (x_BTD, *empty_slots(stack.hparams, x_BTD))
    records, kept = [], []
    for i, run in enumerate(stack.runs):

        def body(carry, inputs, run=run):
            x_BTD, slots, valid_LBT = carry
            params, told, count = inputs
            left = []
            for j, kind in enumerate(run.group):
                mine = params.get(f'layer_{j}', {})
                sums = empty_sums(stack.hparams, slots)
                rest = (mine, (slots, sums), valid_LBT, count, told[j], tokens)
                function = _function(stack, kind, run.repeats)
                results, others, saved = call(function, x_BTD, rest)
                x_BTD, new, threaded, record = results
                slots = threaded if others[2] is None else others[2]
                slots, valid_LBT = put_slots(slots, valid_LBT, NewSlots(new, others[0]), count)
                left.append((_joined(record, others[1]), saved))
                count += kind.slots
            return (x_BTD, slots, valid_LBT), left

        inputs = (params.get(f'run_{i}', {}), told[i], stack.counts(i))
        carry, left = jax.lax.scan(body, carry, inputs)
        records.append([record for record, _ in left])
        kept.append([saved for _, saved in left])
    return carry, records, kept


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scanned(stack, params, told, tokens, x_BTD):
    def call(function, x_BTD, rest):
        return *function(x_BTD, rest), None

    (x_BTD, _, _), records, _ = _walk(stack, params, told, tokens, x_BTD, call)
    return x_BTD, records


def _forward(stack, params, told, tokens, x_BTD):
    def call(function, x_BTD, rest):
        leaves, structure = jax.tree.flatten(rest)
        results, vjp, others = jax.vjp(
            lambda x_BTD, leaves: function(x_BTD, structure.unflatten(leaves)),
            x_BTD,
            leaves,
            has_aux=True,
        )
        # Parameters, slots and tokens are at hand in the backward pass: only x is kept of the
        # arguments. What else is kept is a layer's own, and never of the buffer's size.
        x_res, leaves_res = vjp.args_res
        dropped = [None if isinstance(res, jax.Array) else res for res in leaves_res]
        vjp.args_res = [x_res, dropped]
        return results, others, vjp

    (x_BTD, slots, valid_LBT), records, vjps = _walk(stack, params, told, tokens, x_BTD, call)
    return (x_BTD, records), (params, told, tokens, slots, valid_LBT, vjps)


def _backward(stack, residuals, cotangents):
    params, told, tokens, slots, valid_LBT, vjps = residuals
    dx_BTD, drecords = cotangents
    sums = empty_sums(stack.hparams, slots)
    dslots = jax.tree.map(jnp.zeros_like, slots if sums is None else sums)
    dslots = jax.tree.map(_split_slots, dslots)
    carry, dparams = (dx_BTD, dslots), {}
    for i, run in reversed(list(enumerate(stack.runs))):

        def body(carry, inputs, run=run):
            dx_BTD, dslots = carry
            params, told, count, vjps, drecords = inputs
            dparams = {}
            for j, kind in reversed(list(enumerate(run.group))):
                dwritten = ()
                before = count + sum(kind.slots for kind in run.group[:j])
                mine = params.get(f'layer_{j}', {})
                rest = (mine, (slots, sums), valid_LBT, before, told[j], tokens)
                leaves, structure = jax.tree.flatten(rest)
                vjp, (x_res, dropped) = vjps[j], vjps[j].args_res
                found = zip(dropped, leaves, strict=True)
                vjp.args_res = [x_res, [leaf if res is None else res for res, leaf in found]]
                if kind.slots:
                    dwritten = tuple(_slot(dslots, before + k) for k in range(kind.slots))
                    dwritten, dslots = order_before_writes((dwritten, dslots), before)
                    dwritten = _as_slots(dwritten, slots)
                dx_BTD, dleaves = vjp((dx_BTD, dwritten, dslots, drecords[j]))
                dparams[f'layer_{j}'], (dslots, dsums), *_ = structure.unflatten(dleaves)
                dslots = dslots if dsums is None else dsums
            return (dx_BTD, dslots), dparams

        drecords_of_run = [_differentiable(record)[0] for record in drecords[i]]
        counts = stack.counts(i)
        inputs = (params.get(f'run_{i}', {}), told[i], counts, vjps[i], drecords_of_run)
        carry, dparams[f'run_{i}'] = jax.lax.scan(body, carry, inputs, reverse=True)
    # A run without parameters has none of their cotangents either.
    dparams = {run: {n: dparams[run][n] for n in layers} for run, layers in params.items()}
    return dparams, None, None, carry[0]


def _as_slots(dwritten, slots):
    """The cotangents of written slots in the slots' dtypes."""
    return tuple(jax.tree.map(lambda d, side: d.astype(side.dtype), one, slots) for one in dwritten)


def _slot(buffers, at):
    take = functools.partial(jax.lax.dynamic_index_in_dim, axis=0, keepdims=False)
    return jax.tree.map(lambda buffer: take(buffer, at), buffers)


_scanned.defvjp(_forward, _backward)
