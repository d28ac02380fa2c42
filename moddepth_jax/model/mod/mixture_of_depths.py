"""A routed block: the tokens that its router selects pass through, the others stay as they are."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moddepth_jax.hparams import ModelHparams
from moddepth_jax.model.attention import DepthSlots, KeysValues, KVView, TokenInfo
from moddepth_jax.model.block import Block, BlockAux, SlotInputs
from moddepth_jax.model.kv_cache import CacheUpdate, cache_from_prefill, visible_mask
from moddepth_jax.model.mod.routers import GATES, ROUTERS, Predictor
from moddepth_jax.model.moe.experts import ExpertState
from moddepth_jax.model.routing import (
    CHOICE,
    RoutingRecord,
    apply_capacity,
    batch_buckets,
    gather_tokens,
    indices_to_mask,
    mask_to_indices,
    scatter_add_tokens,
    scatter_tokens,
    segment_top_c,
    select_top_c,
)


class RoutingArgs(NamedTuple):
    """What one routed block is told beside its parameters; traced, so that blocks share a scan.

    Attributes:
      number: int32, its place among the routed blocks, from 0.
      threshold: float32, the score above which the `threshold` rule lets a token enter.
      causal: bool, whether this block obeys a causal rule, where the others do (else: top-C).
      limits: of its experts.
    """

    number: jax.Array
    threshold: jax.Array
    causal: jax.Array
    limits: ExpertState = ExpertState()


class MixtureOfDepths(nn.Module):
    """x'_t = x_t + gate(r_t) f(X_selected)_t for selected t, x'_t = x_t for the others.

    f(X) = block(X) - X sees the selected tokens alone, at their original positions (Raposo et al.
    2024, equation 1). `routing` names who is selected: `top_c` the C highest scores of each row,
    which looks at the whole row; `predictor`, `aux_loss`, `threshold`, `dense` a causal rule, under
    which the first tokens that it lets in do enter, as many as the largest of `sizes`; the block
    runs in the least of these static sizes that holds every row. Padding (segment 0) never enters
    and never takes a place from a real token.
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
        if routing.causal_rule == 'predictor':
            self.predictor = Predictor(self.hparams)
        self.block = Block(
            self.hparams,
            self.window,
            self.writes_slots,
            gathered=True,
            experts=self.experts,
            ahead=self.routing == 'top_c',
        )

    def __call__(
        self, x_BTD, tokens: TokenInfo, layer: RoutingArgs, depth: DepthSlots | None = None
    ) -> tuple[jax.Array, BlockAux, jax.Array | None, RoutingRecord]:
        """Returns x'_BTD, what the block leaves, of which tokens, and the RoutingRecord.

        Its sources are those of all tokens (None) where skipped ones have slots too, else those of
        the rows [B, C] that are given; its keys are of no use.
        """
        real_BT = tokens.segment_ids_BT > 0
        scores_BT, rule_logits_BT, gates_BT = self.decide(x_BTD, tokens, layer)
        eligible_BT = jnp.where(real_BT, scores_BT, -jnp.inf)
        num_selected = self.hparams.routing.num_selected(x_BTD.shape[1])
        if self.hparams.routing.select_per == 'segment':
            top_c_BT = segment_top_c(eligible_BT, tokens.segment_ids_BT, num_selected)
            indices_BC = mask_to_indices(top_c_BT, num_selected)
        else:
            indices_BC = select_top_c(eligible_BT, num_selected)
        indices_BC = checkpoint_name(indices_BC, CHOICE)
        top_c_BT = indices_to_mask(indices_BC, x_BTD.shape[1]) & real_BT
        if self.routing == 'top_c':
            wanted_BT = selected_BT = top_c_BT
            given = (gates_BT, indices_BC, depth, layer.limits)
            y_BTD, left = self.gathered(x_BTD, tokens, *given)
        else:
            wanted_BT = real_BT & (rule_logits_BT > 0)
            wanted_BT = jnp.where(layer.causal, wanted_BT, top_c_BT)
            selected_BT = jnp.where(
                layer.causal, apply_capacity(wanted_BT, self.sizes[-1]), top_c_BT
            )
            selected_BT = checkpoint_name(selected_BT, CHOICE)
            given = (gates_BT, selected_BT, depth, layer.limits)
            y_BTD, left = self.causal(x_BTD, tokens, *given)
            if self.writes_slots:
                indices_BC = mask_to_indices(selected_BT, self.sizes[-1])
        dropped_BT = wanted_BT & ~selected_BT
        record = RoutingRecord(
            scores_BT, rule_logits_BT, top_c_BT, selected_BT, dropped_BT, gates_BT
        )
        return y_BTD, *self._for_slots(x_BTD, tokens, left, indices_BC), record

    def _for_slots(self, x_BTD, tokens, left, indices_BC):
        """Left, with the sources of skipped tokens where these have slots, and its rows."""
        if not self.writes_slots:
            return left, None
        if self.hparams.depth.skipped_slots == 'masked':
            return left, indices_BC
        skipped = self.block.skipped_sources(x_BTD, tokens)
        sources = jax.tree.map(
            lambda all_BTX, some_BCX: scatter_tokens(all_BTX, indices_BC, some_BCX),
            skipped,
            left.sources,
        )
        return left._replace(sources=sources), None

    def prefill(
        self,
        x_BTD,
        tokens: TokenInfo,
        layer: RoutingArgs,
        slots: int | None,
        depth: DepthSlots | None,
    ):
        """The causal pass over whole prompts: x', Left and its rows, LayerCache, dropped_B.

        `slots` of the cache; None: as many as there may be entries.
        """
        _, rule_logits_BT, gates_BT = self.decide(x_BTD, tokens, layer)
        wanted_BT = (tokens.segment_ids_BT > 0) & (rule_logits_BT > 0)
        selected_BT = apply_capacity(wanted_BT, self.sizes[-1])
        given = (gates_BT, selected_BT, depth, layer.limits)
        y_BTD, left = self.causal(x_BTD, tokens, *given)
        indices_BC = mask_to_indices(selected_BT, self.sizes[-1])
        positions_BC = gather_tokens(tokens.positions_BT, indices_BC)
        cache = cache_from_prefill(left.keys, slots, positions_BC, jnp.sum(selected_BT, axis=1))
        dropped_B = jnp.sum(wanted_BT & ~selected_BT, axis=1)
        return y_BTD, *self._for_slots(x_BTD, tokens, left, indices_BC), cache, dropped_B

    def decode(
        self, x_B1D, tokens: TokenInfo, layer: RoutingArgs, cache, documents_B, active_B, depth
    ):
        """One new token of each row: x', Sources of all rows, the Entry that it leaves, dropped_B.

        Rows that enter are gathered into the least static bucket that holds them, so that a step
        costs what it lets in; at batch 1 that is a conditional.

        Args:
          x_B1D, tokens: of the new tokens.
          layer: as in a full pass.
          cache: LayerCache of this block.
          documents_B: int32 [B], where their documents begin.
          active_B: bool [B]; other rows never enter.
          depth: Depth of the new tokens, or None.
        """
        _, rule_logits_B1, gates_B1 = self.decide(x_B1D, tokens, layer)
        wanted_B = active_B & (rule_logits_B1[:, 0] > 0)
        selected_B = wanted_B & (cache.lengths_B < cache.slots)
        rows_B = mask_to_indices(selected_B[None], x_B1D.shape[0])[0]
        skipped = self.block.skipped_sources(x_B1D, tokens) if self.writes_slots else SlotInputs()
        if self.hparams.depth.skipped_slots == 'masked':
            skipped = jax.tree.map(jnp.zeros_like, skipped)

        def through(size):
            def bucket(module, x_B1D):
                given = (gates_B1, cache, documents_B, rows_B[:size], depth, skipped)
                return module._decode_bucket(x_B1D, tokens, *given, layer.limits)

            return bucket

        sizes = batch_buckets(x_B1D.shape[0])
        which = jnp.sum(jnp.sum(selected_B) > jnp.array(sizes[:-1]))
        branches = [through(size) for size in sizes]
        y_B1D, keys, sources = nn.switch(which, branches, self, x_B1D)
        return y_B1D, sources, CacheUpdate(keys, selected_B), wanted_B & ~selected_B

    def _decode_bucket(
        self, x_B1D, tokens, gates_B1, cache, documents_B, rows_C, depth, skipped, limits
    ):
        """The block on the rows `rows_C`, B and above naming none; other rows are untouched.

        Their Sources are `skipped`.
        """
        batch, size = x_B1D.shape[0], rows_C.shape[0]
        kv_heads, width = cache.k_BKHS.shape[1:3]
        nothing = KeysValues(*[jnp.zeros((batch, 1, kv_heads, width), x_B1D.dtype)] * 2)
        if not size:
            return x_B1D, nothing, skipped
        whole = size == batch

        def pick(side):
            return side if whole else side.at[rows_C].get(mode='clip')

        # Keys and values are not gathered: attention reads each row's where they are.
        small = jax.tree.map(pick, cache._replace(k_BKHS=None, v_BKHS=None))
        positions_C = pick(tokens.positions_BT)[:, 0]
        seen_CS = visible_mask(small, positions_C, pick(documents_B), self.window, cache.slots)
        mine = KVView(cache.k_BKHS, cache.v_BKHS, seen_CS, None if whole else rows_C)
        if depth is not None and not whole:
            depth = jax.tree.map(lambda side: side.at[:, rows_C].get(mode='clip'), depth)
        picked = jax.tree.map(pick, tokens)
        # Experts compute nothing for a row that does not enter.
        enters_C = indices_to_mask(rows_C[None], batch)[0] if whole else rows_C < batch
        segment_ids_C1 = jnp.where(enters_C[:, None], picked.segment_ids_BT, 0)
        picked = picked._replace(segment_ids_BT=segment_ids_C1)
        delta_C1D, left = self.block.delta(pick(x_B1D), picked, mine, depth, limits)
        update_C1D = (pick(gates_B1)[..., None] * delta_C1D).astype(x_B1D.dtype)
        if whole:

            def choose(new_B, old_B):
                return jnp.where(enters_C.reshape(-1, *[1] * (new_B.ndim - 1)), new_B, old_B)

            sources = jax.tree.map(choose, left.sources, skipped)
            return choose(x_B1D + update_C1D, x_B1D), left.keys, sources

        def put(side_B, side_C):
            return side_B.at[rows_C].set(side_C, mode='drop')

        keys, sources = jax.tree.map(put, (nothing, skipped), (left.keys, left.sources))
        return x_B1D.at[rows_C].add(update_C1D, mode='drop'), keys, sources

    def decide(self, x_BTD, tokens: TokenInfo, layer: RoutingArgs):
        """scores_BT, rule_logits_BT and gates_BT, as in RoutingRecord, of any tokens."""
        scores_BT = self.router(x_BTD, tokens, layer.number)
        gates_BT = GATES[self.hparams.routing.gate](scores_BT)
        gates_BT = jnp.where(tokens.segment_ids_BT > 0, gates_BT, 0.0)
        own = self.hparams.routing.causal_rule
        rule = own if self.routing == 'top_c' else self.routing
        if own == 'predictor':  # also where another rule is asked for: its parameters must exist
            predicted_BT = self.predictor(x_BTD)
        logits_BT = {
            'predictor': lambda: predicted_BT,
            'aux_loss': lambda: scores_BT,
            'threshold': lambda: scores_BT - layer.threshold,
            'dense': lambda: jnp.ones_like(scores_BT),
        }[rule]()
        return scores_BT, logits_BT, gates_BT

    def gathered(
        self, x_BTD, tokens: TokenInfo, gates_BT, indices_BC, depth: DepthSlots | None, limits
    ):
        """The block on the named tokens alone: x', and what it leaves of these C tokens a row."""
        selected = jax.tree.map(lambda side_BT: gather_tokens(side_BT, indices_BC), tokens)
        if depth is not None:
            depth = depth._replace(rows_BC=indices_BC)
        x_BCD = gather_tokens(x_BTD, indices_BC)
        delta_BCD, left = self.block.delta(x_BCD, selected, None, depth, limits)
        if depth is not None:
            left = left._replace(depth=left.depth._replace(rows_BC=None))
        update_BCD = gather_tokens(gates_BT, indices_BC)[..., None] * delta_BCD
        return scatter_add_tokens(x_BTD, indices_BC, update_BCD.astype(x_BTD.dtype)), left

    def causal(
        self, x_BTD, tokens: TokenInfo, gates_BT, selected_BT, depth: DepthSlots | None, limits
    ):
        """The block on any set of tokens, no row of it larger than the largest of `sizes`.

        Returns x', and what the block leaves of sizes[-1] tokens a row: the entering ones in order,
        then anything.
        """
        if len(self.sizes) == 1:
            indices_BC = mask_to_indices(selected_BT, self.sizes[0])
            return self.gathered(x_BTD, tokens, gates_BT, indices_BC, depth, limits)

        def pass_through(size):
            def branch(module, x_BTD):
                indices_BC = mask_to_indices(selected_BT, size)
                given = (gates_BT, indices_BC, depth, limits)
                y_BTD, left = module.gathered(x_BTD, tokens, *given)

                def fill(side):
                    room = ((0, 0), (0, self.sizes[-1] - size), *[(0, 0)] * (side.ndim - 2))
                    return jnp.pad(side, room)

                some = left._replace(depth=None, experts=None, limits=ExpertState())
                return y_BTD, jax.tree.map(fill, some)._replace(experts=left.experts)

            return branch

        fullest = jnp.max(jnp.sum(selected_BT, axis=1))
        which = jnp.sum(fullest > jnp.array(self.sizes[:-1], fullest.dtype))
        branches = [pass_through(size) for size in self.sizes]
        y_BTD, left = nn.switch(which, branches, self, x_BTD)
        # The slots go past the branches, which would copy them.
        return y_BTD, left._replace(depth=depth)
