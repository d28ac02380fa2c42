"""A routed block: the selected tokens pass through it, the others stay as they are."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from moddepth_jax.hparams import ModelHparams
from moddepth_jax.hparams.registry import CAUSAL_RULES, ROUTERS
from moddepth_jax.model.attention import DepthSlots, KeysValues, KVView
from moddepth_jax.model.block import Block, BlockAux, SlotInputs
from moddepth_jax.model.kv_cache import CacheUpdate, cache_from_prefill, visible_mask
from moddepth_jax.model.mod.routers import GATES
from moddepth_jax.model.moe.experts import ExpertState
from moddepth_jax.model.routing import (
    RoutingRecord,
    Selection,
    TokenInfo,
    batch_buckets,
    gather_tokens,
    indices_to_mask,
    mask_to_indices,
    scatter_tokens,
    select_first,
    select_highest,
    update_tokens,
)


class RoutingArgs(NamedTuple):
    """Arguments of one routed block, traced so that blocks share a scan.

    Attributes:
      number: int32, its number among the routed blocks, from 0.
      threshold: float32, the score above which the `threshold` rule selects a token.
      causal: bool, whether this block obeys the causal rule of the pass; otherwise top-C.
      expert_state: the ExpertState of its experts.
    """

    number: jax.Array
    threshold: jax.Array
    causal: jax.Array
    expert_state: ExpertState = ExpertState()


class MixtureOfDepths(nn.Module):
    """x'_t = x_t + gate(r_t) f(X_selected)_t for selected t, x'_t = x_t for the others.

    f(X) = block(X) - X computes the selected tokens alone, at their original positions (Raposo et
    al. 2024, equation 1). Padding (segment 0) is never selected and takes no place from a real
    token.

    Attributes:
      hparams: of the model.
      window: of the block's attention.
      routing: `top_c` selects the C highest scores of each row, which looks at later tokens;
        otherwise the name of a causal rule: of the tokens that it wants, the first sizes[-1] of
        each row are selected.
      sizes: ascending static sizes under a causal rule. The block runs at the least of them that
        holds every row.
      writes_slots: whether depth slots are made from the block.
      experts: whether experts are its mlp.
    """

    hparams: ModelHparams
    window: int
    routing: str
    sizes: tuple[int, ...] = ()
    writes_slots: bool = False
    experts: bool = False

    def setup(self):
        routing = self.hparams.routing
        self.router = ROUTERS[routing.router](routing)
        own = routing.causal_rule
        self.own_rule = CAUSAL_RULES[own](self.hparams, name=own)
        if self.routing not in ('top_c', own):
            self.rule = CAUSAL_RULES[self.routing](self.hparams, name=self.routing)
        self.block = Block(
            self.hparams,
            self.window,
            self.writes_slots,
            gathered=True,
            experts=self.experts,
            ahead=self.routing == 'top_c',
        )

    def __call__(
        self, x_BTD, tokens: TokenInfo, args: RoutingArgs, depth: DepthSlots | None = None
    ) -> tuple[jax.Array, BlockAux, jax.Array | None, RoutingRecord]:
        """Process the selected tokens of whole rows.

        Returns:
          x'_BTD; the BlockAux; the indices [B, C] of the tokens that its slot inputs belong to, or
          None for all tokens; and the RoutingRecord. For a cache of the keys call `prefill`.
        """
        scores_BT, rule_logits_BT, gates_BT = self.decide(x_BTD, tokens, args)
        routing = self.hparams.routing
        num_selected = routing.num_selected(x_BTD.shape[1])
        per_segment = routing.select_per == 'segment'
        top_c = select_highest(scores_BT, tokens.segment_ids_BT, num_selected, per_segment)
        if self.routing == 'top_c':
            selection = top_c
            y_BTD, aux = self.gathered(
                x_BTD, tokens, gates_BT, top_c.indices_BC, depth, args.expert_state
            )
        else:
            wanted_BT = (tokens.segment_ids_BT > 0) & (rule_logits_BT > 0)
            wanted_BT = jnp.where(args.causal, wanted_BT, top_c.selected_BT)
            selection = select_first(wanted_BT, self.sizes[-1])
            y_BTD, aux = self._causal(x_BTD, tokens, gates_BT, selection, depth, args.expert_state)
        record = RoutingRecord(
            scores_BT,
            rule_logits_BT,
            top_c.selected_BT,
            selection.selected_BT,
            selection.dropped_BT,
            gates_BT,
        )
        return y_BTD, *self._for_slots(x_BTD, tokens, aux, selection.indices_BC), record

    def prefill(
        self, x_BTD, tokens: TokenInfo, args: RoutingArgs, capacity: int | None, depth: DepthSlots
    ):
        """The causal pass over whole prompts, which returns a cache.

        Returns:
          x'_BTD, BlockAux and indices as `__call__`; the LayerCache of `capacity` tokens (None: of
          sizes[-1]); dropped_B, tokens of each row that were beyond the capacity.
        """
        _, rule_logits_BT, gates_BT = self.decide(x_BTD, tokens, args)
        wanted_BT = (tokens.segment_ids_BT > 0) & (rule_logits_BT > 0)
        selection = select_first(wanted_BT, self.sizes[-1])
        y_BTD, aux = self._causal(x_BTD, tokens, gates_BT, selection, depth, args.expert_state)
        positions_BC = gather_tokens(tokens.positions_BT, selection.indices_BC)
        lengths_B = jnp.sum(selection.selected_BT, axis=1)
        cache = cache_from_prefill(aux.keys, capacity, positions_BC, lengths_B)
        dropped_B = jnp.sum(selection.dropped_BT, axis=1)
        return y_BTD, *self._for_slots(x_BTD, tokens, aux, selection.indices_BC), cache, dropped_B

    def decide(self, x_BTD, tokens: TokenInfo, args: RoutingArgs):
        """scores_BT, rule_logits_BT and gates_BT, as in RoutingRecord, of any tokens."""
        scores_BT = self.router(x_BTD, tokens, args.number)
        gates_BT = GATES[self.hparams.routing.gate](scores_BT)
        gates_BT = jnp.where(tokens.segment_ids_BT > 0, gates_BT, 0.0)
        # Called even if another rule is asked for: its parameters must be created.
        logits_BT = self.own_rule(x_BTD, scores_BT, args.threshold)
        if self.routing not in ('top_c', self.hparams.routing.causal_rule):
            logits_BT = self.rule(x_BTD, scores_BT, args.threshold)
        return scores_BT, logits_BT, gates_BT

    def gathered(self, x_BTD, tokens, gates_BT, indices_BC, depth, expert_state):
        """The block on the tokens of the indices alone: x', and the BlockAux of these C tokens."""
        if depth is not None:
            depth = depth._replace(indices_BC=indices_BC)

        def block_fn(x_BCD, tokens):
            return self.block.delta(x_BCD, tokens, None, depth, expert_state)

        y_BTD, aux = update_tokens(block_fn, x_BTD, tokens, gates_BT, indices_BC)
        if depth is not None:
            aux = aux._replace(depth=aux.depth._replace(indices_BC=None))
        return y_BTD, aux

    def _causal(self, x_BTD, tokens, gates_BT, selection: Selection, depth, expert_state):
        """The block at the least of `sizes` that holds the selection.

        Returns x', and the BlockAux of sizes[-1] tokens a row: the selected in order, then others.
        """
        if len(self.sizes) == 1:
            indices_BC = selection.indices_BC
            return self.gathered(x_BTD, tokens, gates_BT, indices_BC, depth, expert_state)

        def run_at(size):
            def branch(module, x_BTD):
                indices_BC = mask_to_indices(selection.selected_BT, size)
                y_BTD, aux = module.gathered(
                    x_BTD, tokens, gates_BT, indices_BC, depth, expert_state
                )

                def pad(side):
                    widths = ((0, 0), (0, self.sizes[-1] - size), *[(0, 0)] * (side.ndim - 2))
                    return jnp.pad(side, widths)

                some = aux._replace(depth=None, experts=None, expert_state=ExpertState())
                return y_BTD, jax.tree.map(pad, some)._replace(experts=aux.experts)

            return branch

        largest = jnp.max(jnp.sum(selection.selected_BT, axis=1))
        which = jnp.sum(largest > jnp.array(self.sizes[:-1], largest.dtype))
        branches = [run_at(size) for size in self.sizes]
        y_BTD, aux = nn.switch(which, branches, self, x_BTD)
        # The depth slots are not returned through the branches: `switch` would copy them.
        return y_BTD, aux._replace(depth=depth)

    def _for_slots(self, x_BTD, tokens, aux, indices_BC):
        """The BlockAux, and the indices of the tokens that its slot inputs belong to.

        None stands for all tokens; under `masked` they belong to the selected ones.
        """
        if not self.writes_slots:
            return aux, None
        if self.hparams.depth.skipped_slots == 'masked':
            return aux, indices_BC
        skipped = self.block.skipped_slot_inputs(x_BTD, tokens)
        slot_inputs = jax.tree.map(
            lambda all_BTX, some_BCX: scatter_tokens(all_BTX, indices_BC, some_BCX),
            skipped,
            aux.slot_inputs,
        )
        return aux._replace(slot_inputs=slot_inputs), None

    def decode(
        self, x_B1D, tokens: TokenInfo, args: RoutingArgs, cache, documents_B, active_B, depth
    ):
        """One new token of each row.

        The selected rows are gathered into the least static bucket that holds them, so that the
        cost of a step follows their number; at batch 1 the block either runs or does not.

        Args:
          x_B1D, tokens: of the new tokens.
          args: as in a full pass.
          cache: LayerCache of this block.
          documents_B: int32 [B], where their documents begin.
          active_B: bool [B]; other rows are never selected.
          depth: DepthSlots of the new tokens, or None.

        Returns:
          x'_B1D, SlotInputs of all rows, the CacheUpdate, and dropped_B.
        """
        _, rule_logits_B1, gates_B1 = self.decide(x_B1D, tokens, args)
        wanted_B = active_B & (rule_logits_B1[:, 0] > 0)
        selected_B = wanted_B & (cache.lengths_B < cache.capacity)
        indices_B = mask_to_indices(selected_B[None], x_B1D.shape[0])[0]
        skipped = SlotInputs()
        if self.writes_slots:
            skipped = self.block.skipped_slot_inputs(x_B1D, tokens)
        if self.hparams.depth.skipped_slots == 'masked':
            skipped = jax.tree.map(jnp.zeros_like, skipped)

        def run_at(size):
            def bucket(module, x_B1D):
                return module._decode_bucket(
                    x_B1D,
                    tokens,
                    gates_B1,
                    cache,
                    documents_B,
                    indices_B[:size],
                    depth,
                    skipped,
                    args.expert_state,
                )

            return bucket

        sizes = batch_buckets(x_B1D.shape[0])
        which = jnp.sum(jnp.sum(selected_B) > jnp.array(sizes[:-1]))
        branches = [run_at(size) for size in sizes]
        y_B1D, keys, slot_inputs = nn.switch(which, branches, self, x_B1D)
        return y_B1D, slot_inputs, CacheUpdate(keys, selected_B), wanted_B & ~selected_B

    def _decode_bucket(
        self,
        x_B1D,
        tokens,
        gates_B1,
        cache,
        documents_B,
        rows_C,
        depth,
        skipped: SlotInputs,
        expert_state,
    ):
        """The block on `rows_C` of the batch (B and above: none); the others are unchanged.

        Returns x', KeysValues and SlotInputs of all rows; other rows get the SlotInputs `skipped`.
        """
        batch, size = x_B1D.shape[0], rows_C.shape[0]
        kv_heads, width = cache.k_BKHS.shape[1:3]
        nothing = KeysValues(*[jnp.zeros((batch, 1, kv_heads, width), x_B1D.dtype)] * 2)
        if not size:
            return x_B1D, nothing, skipped
        all_rows = size == batch

        def pick(side):
            return side if all_rows else side.at[rows_C].get(mode='clip')

        # Keys and values are not gathered: attention reads each row's where they are.
        small = jax.tree.map(pick, cache._replace(k_BKHS=None, v_BKHS=None))
        positions_C = pick(tokens.positions_BT)[:, 0]
        visible_CS = visible_mask(
            small, positions_C, pick(documents_B), self.window, cache.capacity
        )
        view = KVView(cache.k_BKHS, cache.v_BKHS, visible_CS, None if all_rows else rows_C)
        if depth is not None and not all_rows:
            depth = jax.tree.map(lambda side: side.at[:, rows_C].get(mode='clip'), depth)
        picked = jax.tree.map(pick, tokens)
        # Experts compute nothing for a row that is not selected.
        selected_C = indices_to_mask(rows_C[None], batch)[0] if all_rows else rows_C < batch
        segment_ids_C1 = jnp.where(selected_C[:, None], picked.segment_ids_BT, 0)
        picked = picked._replace(segment_ids_BT=segment_ids_C1)
        delta_C1D, aux = self.block.delta(pick(x_B1D), picked, view, depth, expert_state)
        update_C1D = (pick(gates_B1)[..., None] * delta_C1D).astype(x_B1D.dtype)
        if all_rows:

            def choose(new_B, old_B):
                return jnp.where(selected_C.reshape(-1, *[1] * (new_B.ndim - 1)), new_B, old_B)

            slot_inputs = jax.tree.map(choose, aux.slot_inputs, skipped)
            return choose(x_B1D + update_C1D, x_B1D), aux.keys, slot_inputs

        def put(side_B, side_C):
            return side_B.at[rows_C].set(side_C, mode='drop')

        keys, slot_inputs = jax.tree.map(put, (nothing, skipped), (aux.keys, aux.slot_inputs))
        return x_B1D.at[rows_C].add(update_C1D, mode='drop'), keys, slot_inputs
