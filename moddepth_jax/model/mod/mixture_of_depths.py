"""A routed block: selected tokens pass through the block or a part of it, the others skip it."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from moddepth_jax.hparams import ModelHparams
from moddepth_jax.hparams.checks import refuse
from moddepth_jax.hparams.registry import CAUSAL_RULES, GATES, ROUTERS
from moddepth_jax.model.attention import DepthSlots, KeysValues
from moddepth_jax.model.block import Block, LayerKind, SlotInputs
from moddepth_jax.model.kv_cache import CacheUpdate, select_into_cache, view_of
from moddepth_jax.model.layers import wide_dtype
from moddepth_jax.model.moe.experts import NO_EXPERT_STATE, ExpertState
from moddepth_jax.model.routing import (
    RoutingRecord,
    Selection,
    TokenInfo,
    batch_buckets,
    gather_tokens,
    mask_to_indices,
    mask_tokens,
    pad_tokens,
    scatter_tokens,
    select_first,
    select_highest,
    smallest_size,
    update_tokens,
)


class RoutingArgs(NamedTuple):
    """Arguments of one routed block. They are traced, so that blocks share a scan."""

    number: jax.Array  # int32, its number among the routed blocks, from 0
    threshold: jax.Array  # float32; the `threshold` rule selects tokens with a higher score
    causal: jax.Array | None  # bool, whether it uses the causal rule, not top-C; None: it does


class Chooser(nn.Module):
    """A router, and the causal rules that replace its top C."""

    hparams: ModelHparams
    routing: str  # top_c or the name of a causal rule

    def setup(self):
        routing = self.hparams.routing
        self.router = ROUTERS[routing.router](routing)
        # The model's own rule comes first, even if another one runs: it may have parameters.
        names = dict.fromkeys((routing.causal_rule, self.routing))
        names.pop('top_c', None)
        self.rules = [CAUSAL_RULES[name](self.hparams, name=name) for name in names]

    def score(self, x_BTD, tokens: TokenInfo, args: RoutingArgs):
        """Return scores_BT and gates_BT, as in RoutingRecord."""
        routing = self.hparams.routing
        scores_BT = self.router(x_BTD, tokens, args.number)
        if jnp.shape(scores_BT) != x_BTD.shape[:2]:
            found = f'returned scores of shape {jnp.shape(scores_BT)} for x of {x_BTD.shape}'
            refuse('model.routing.router', routing.router, f'{found}; must be [B, T]')
        narrow = scores_BT.dtype != wide_dtype(scores_BT.dtype)
        if narrow and jnp.issubdtype(scores_BT.dtype, jnp.floating):
            found = f'returned {scores_BT.dtype} scores, in which many tie'
            refuse('model.routing.router', routing.router, f'{found}; must be float32 or wider')
        gates_BT = GATES[routing.gate](scores_BT)
        if routing.gate_scale != 1:
            gates_BT *= routing.gate_scale
        return scores_BT, jnp.where(tokens.segment_ids_BT > 0, gates_BT, 0.0)

    def decide(self, x_BTD, tokens: TokenInfo, args: RoutingArgs):
        """Return scores_BT, rule_logits_BT and gates_BT, as in RoutingRecord."""
        scores_BT, gates_BT = self.score(x_BTD, tokens, args)
        logits_BT = [rule(x_BTD, scores_BT, args.threshold) for rule in self.rules][-1]
        return scores_BT, logits_BT, gates_BT


class MixtureOfDepths(Chooser):
    """x'_t = x_t + gate(r_t) f(X_selected)_t for selected tokens, x'_t = x_t for the others.

    f(X) = block(X) - X runs on the selected tokens only, at their original positions (Raposo et al.
    2024, equation 1). `top_c` selects the C highest scores of each row. A causal rule selects the
    first sizes[-1] of the tokens that it wants. Padding (segment 0) is never selected.

    If `model.routing.part` is a sublayer, f is the output of that sublayer, and the other sublayer
    runs on all tokens: attention before f, the mlp after it.
    """

    kind: LayerKind
    sizes: tuple[int, ...] = ()  # ascending; a causal rule runs at the smallest that holds all rows

    def setup(self):
        super().setup()
        self.part = self.hparams.routing.part
        kind = self.kind._replace(gathered=self.part != 'mlp')  # the tokens of its attention
        self.block = Block(self.hparams, kind, self.routing == 'top_c', self.part)

    def __call__(
        self,
        x_BTD,
        tokens: TokenInfo,
        args: RoutingArgs,
        depth: DepthSlots | None = None,
        expert_state: ExpertState = NO_EXPERT_STATE,
    ):
        """Process whole rows.

        Returns x'_BTD, the BlockAux, the indices [B, C] of its slot inputs (None: all tokens), and
        the RoutingRecord.
        """
        x_BTD, keys = self._before(x_BTD, tokens)
        read_BTD, depth = self.block.read(x_BTD, depth)
        scores_BT, rule_logits_BT, gates_BT = self.decide(read_BTD, tokens, args)
        routing = self.hparams.routing
        num_selected = routing.num_selected(read_BTD.shape[1])
        per_segment = routing.select_per == 'segment'
        top_c = select_highest(scores_BT, tokens.segment_ids_BT, num_selected, per_segment)
        if self.routing == 'top_c':
            selection = top_c
            y_BTD, aux = self.gathered(
                x_BTD, tokens, gates_BT, top_c.indices_BC, depth, expert_state
            )
        else:
            wanted_BT = (tokens.segment_ids_BT > 0) & (rule_logits_BT > 0)
            if args.causal is not None:
                wanted_BT = jnp.where(args.causal, wanted_BT, top_c.selected_BT)
            selection = select_first(wanted_BT, self.sizes[-1])
            y_BTD, aux = self._causal(x_BTD, tokens, gates_BT, selection, depth, expert_state)
        y_BTD = self._after(y_BTD, tokens)
        aux = aux if keys is None else aux._replace(keys=keys)
        aux, indices_BC = self._for_slots(x_BTD, tokens, aux, selection.indices_BC)
        _, selected_BT, dropped_BT = selection
        record = RoutingRecord(
            scores_BT, rule_logits_BT, top_c.selected_BT, selected_BT, dropped_BT, gates_BT
        )
        return y_BTD, aux, indices_BC, record

    def _before(self, x_BTD, tokens, view=None):
        """Return x before the routed part, and KeysValues if attention ran on all tokens."""
        if self.part != 'mlp':
            return x_BTD, None
        x_BTD, _, keys = self.block.sublayer('attention', x_BTD, tokens, view)
        return x_BTD, keys

    def _after(self, y_BTD, tokens):
        """Return x after the block, given x after its routed part."""
        return self.block.sublayer('mlp', y_BTD, tokens)[0] if self.part == 'attention' else y_BTD

    def gathered(self, x_BTD, tokens, gates_BT, indices_BC, depth, expert_state):
        """Run the routed part on the tokens at the indices. Returns x' and their BlockAux."""
        if depth is not None:
            depth = depth._replace(indices_BC=indices_BC)

        def block_fn(x_BCD, tokens):
            return self.block.delta(x_BCD, tokens, None, depth, expert_state)

        if self.hparams.depth.stream_class.connection is None:
            y_BTD, aux = update_tokens(block_fn, x_BTD, tokens, gates_BT, indices_BC)
        else:
            x_BCD, gates_BC, tokens_BC = jax.tree.map(
                lambda side: gather_tokens(side, indices_BC), (x_BTD, gates_BT, tokens)
            )
            y_BCD, aux = self.block.gated(x_BCD, gates_BC, tokens_BC, None, depth, expert_state)
            y_BTD = jax.tree.map(
                lambda old_BTD, new_BCD: scatter_tokens(old_BTD, indices_BC, new_BCD),
                self.block.skip(x_BTD),
                y_BCD,
            )
        if depth is not None:
            aux = aux._replace(depth=aux.depth._replace(indices_BC=None))
        return y_BTD, aux

    def _causal(self, x_BTD, tokens, gates_BT, selection: Selection, depth, expert_state):
        """Run `gathered` at the smallest of `sizes` that is enough, and pad to sizes[-1]."""
        if len(self.sizes) == 1:
            indices_BC = selection.indices_BC
            return self.gathered(x_BTD, tokens, gates_BT, indices_BC, depth, expert_state)

        def run_at(size):
            def branch(module, x_BTD):
                indices_BC = mask_to_indices(selection.selected_BT, size)
                y_BTD, aux = module.gathered(
                    x_BTD, tokens, gates_BT, indices_BC, depth, expert_state
                )
                some = aux._replace(depth=None, experts=None, expert_state=ExpertState())
                return y_BTD, pad_tokens(some, self.sizes[-1])._replace(experts=aux.experts)

            return branch

        which = smallest_size(jnp.max(jnp.sum(selection.selected_BT, axis=1)), self.sizes)
        branches = [run_at(size) for size in self.sizes]
        y_BTD, aux = nn.switch(which, branches, self, x_BTD)
        # `switch` would copy the depth slots, so the branches do not return them.
        return y_BTD, aux._replace(depth=depth)

    def _for_slots(self, x_BTD, tokens, aux, indices_BC):
        """Return the BlockAux with slot inputs of all tokens, and None.

        Under `masked` only selected tokens have slots: return the BlockAux unchanged and indices.
        """
        if not self.kind.slots:
            return aux, None
        if self.hparams.masks_slots:
            return aux, indices_BC
        slot_inputs = jax.tree.map(
            lambda all_BTX, some_BCX: scatter_tokens(all_BTX, indices_BC, some_BCX),
            self.block.skipped_slot_inputs(x_BTD, tokens),
            aux.slot_inputs,
        )
        return aux._replace(slot_inputs=slot_inputs), None

    def extend(
        self,
        x_BTD,
        tokens: TokenInfo,
        args: RoutingArgs,
        cache,
        documents_BT,
        depth: DepthSlots | None,
        expert_state: ExpertState = NO_EXPERT_STATE,
    ):
        """Process new tokens of each row. Returns x', SlotInputs, the CacheUpdate and dropped_BT.

        With one token per row, the block runs on the smallest bucket of rows that holds the
        selected ones. With several, it runs on the smallest bucket of tokens of each row.
        """
        batch, length = tokens.positions_BT.shape
        attends = self.part != 'mlp'  # attention is routed, and its cache has selected tokens only
        view = None if attends else view_of(cache, tokens, documents_BT, self.kind.window)
        x_BTD, all_keys = self._before(x_BTD, tokens, view)
        read_BTD, _ = self.block.read(x_BTD, depth)
        _, rule_logits_BT, gates_BT = self.decide(read_BTD, tokens, args)
        wanted_BT = (tokens.segment_ids_BT > 0) & (rule_logits_BT > 0)
        most = None if attends else self.sizes[-1]
        selected_BT = select_into_cache(cache, wanted_BT, tokens.segment_ids_BT, most)
        tokens = mask_tokens(tokens, selected_BT)  # attention and experts see only these
        skipped = SlotInputs()
        if self.kind.slots:
            skipped = self.block.skipped_slot_inputs(x_BTD, tokens)
        if self.hparams.masks_slots:
            skipped = jax.tree.map(jnp.zeros_like, skipped)
        no_keys = None
        if attends:
            nothing_BTKH = jnp.zeros((batch, length, *cache.k_BKHS.shape[1:3]), read_BTD.dtype)
            no_keys = KeysValues(nothing_BTKH, nothing_BTKH)
        sizes = batch_buckets(batch if length == 1 else length)

        def run_at(size):
            def bucket(module, x_BTD):
                old = module.block.skip(x_BTD), no_keys, skipped
                by_token = x_BTD, gates_BT, tokens, documents_BT
                if not size:
                    return old
                if size == sizes[-1]:
                    new = module._extend_tokens(by_token, cache, depth, expert_state)
                    return jax.tree.map(put_all, old, new)
                rows_C, pick, put = _some_rows_or_tokens(selected_BT, size)
                picked, slots = jax.tree.map(pick, by_token), jax.tree.map(jax.vmap(pick), depth)
                new = module._extend_tokens(picked, cache, slots, expert_state, rows_C)
                return jax.tree.map(put, old, new)

            def put_all(old_BT, new_BT):
                places = *selected_BT.shape, *[1] * (old_BT.ndim - 2)
                return jnp.where(selected_BT.reshape(places), new_BT, old_BT)

            return bucket

        which = smallest_size(jnp.max(jnp.sum(selected_BT, axis=0 if length == 1 else 1)), sizes)
        branches = [run_at(size) for size in sizes]
        y_BTD, keys, slot_inputs = nn.switch(which, branches, self, x_BTD)
        y_BTD, keys = self._after(y_BTD, tokens), keys if all_keys is None else all_keys
        return y_BTD, slot_inputs, CacheUpdate(keys, selected_BT), wanted_BT & ~selected_BT

    def _extend_tokens(self, by_token, cache, depth, expert_state, rows_C=None):
        """Return x', KeysValues and SlotInputs of tokens; those of segment id 0 do not exist."""
        x_CTD, gates_CT, tokens_CT, documents_CT = by_token
        view = None
        if self.part != 'mlp':
            view = view_of(cache, tokens_CT, documents_CT, self.kind.window, rows_C)
        y_CTD, aux = self.block.gated(x_CTD, gates_CT, tokens_CT, view, depth, expert_state)
        return y_CTD, aux.keys, aux.slot_inputs


def _some_rows_or_tokens(selected_BT, size):
    """Return the rows of the cache to read (None: all), and functions that pick and put back.

    `pick(array)` returns `size` rows of one token each, or `size` tokens of every row. Among these,
    tokens that are not selected have segment id 0. `put(array, picked)` is the inverse.
    """
    batch, length = selected_BT.shape
    if length > 1:
        indices_BC = mask_to_indices(selected_BT, size)
        return (
            None,
            lambda side_BT: gather_tokens(side_BT, indices_BC),
            lambda side_BT, new_BC: scatter_tokens(side_BT, indices_BC, new_BC),
        )
    rows_C = mask_to_indices(selected_BT.T, size)[0]
    return (
        rows_C,
        lambda side_BT: side_BT.at[rows_C].get(mode='fill', fill_value=0),
        lambda side_BT, new_CT: side_BT.at[rows_C].set(new_CT, mode='drop'),
    )
