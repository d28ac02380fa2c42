"""One transformer block: attention and mlp, or experts, with their residuals and norms."""

from typing import NamedTuple

import flax.linen as nn
import jax

from moddepth_jax.hparams import ModelHparams
from moddepth_jax.model.attention import DepthSlots, KeysValues, KVView, SelfAttention, TokenInfo
from moddepth_jax.model.layers import RMSNorm, SwiGLU
from moddepth_jax.model.moe.experts import NO_EXPERT_STATE, Experts, ExpertsRecord, ExpertState


class SlotInputs(NamedTuple):
    """What depth slots are made of, as far as the model's slots need it; else None.

    Attributes:
      attention_slot: the KeysValues of attention as a slot stores them.
      attention_input_BTD, mlp_input_BTD: what the two sub-layers read.
    """

    attention_slot: KeysValues | None = None
    attention_input_BTD: jax.Array | None = None
    mlp_input_BTD: jax.Array | None = None


class BlockAux(NamedTuple):
    """What a block leaves beside its output.

    Attributes:
      keys: KeysValues of its tokens, for later tokens.
      sources: for the depth slots of its tokens.
      depth: the Depth it was given; see SelfAttention.
      experts: the ExpertsRecord of a block that has experts, else None.
      limits: of its experts, for later tokens; else as given.
    """

    keys: KeysValues
    sources: SlotInputs
    depth: DepthSlots | None
    experts: ExpertsRecord | None
    limits: ExpertState


class Block(nn.Module):
    """block(x), in one of three norm placements.

    `pre` (Llama): x + f(norm(x)); `post` (post-LN): norm(x + f(x)); `reordered` (OLMo2):
    x + norm(f(x)); each for f = attention, then the mlp, or `experts`, which may look `ahead`. A
    block that `writes_slots` leaves what they are made of. One whose tokens are `gathered` does not
    see whole rows.
    """

    hparams: ModelHparams
    window: int
    writes_slots: bool = False
    gathered: bool = False
    experts: bool = False
    ahead: bool = True

    def setup(self):
        hparams = self.hparams
        self.attention = SelfAttention(hparams, self.window, self.gathered)
        self.mlp = Experts(hparams, self.ahead) if self.experts else SwiGLU(hparams, hparams.d_ff)
        self.attention_norm = RMSNorm(self.hparams.norm_eps)
        self.mlp_norm = RMSNorm(self.hparams.norm_eps)

    def __call__(
        self,
        x_BTD,
        tokens: TokenInfo,
        past: KVView | None = None,
        depth: DepthSlots | None = None,
        limits: ExpertState = NO_EXPERT_STATE,
    ) -> tuple[jax.Array, BlockAux]:
        """The block's output [B, T, D], and what it leaves.

        Arguments are as SelfAttention and Experts take them.
        """
        given = (past, depth, limits)
        _, middle_BTD, transformed_BTD, left = self._run(x_BTD, tokens, *given)
        y_BTD = middle_BTD + transformed_BTD
        return self.mlp_norm(y_BTD) if self.hparams.norm_placement == 'post' else y_BTD, left

    def delta(self, x_BTD, tokens: TokenInfo, *given):
        """block(x) - x, and Left, without the cancellation where the placement allows it.

        All arguments are as in a call.
        """
        if self.hparams.norm_placement == 'post':
            y_BTD, left = self(x_BTD, tokens, *given)
            return y_BTD - x_BTD, left
        attended_BTD, _, transformed_BTD, left = self._run(x_BTD, tokens, *given)
        return attended_BTD + transformed_BTD, left

    def skipped_sources(self, x_BTD, tokens: TokenInfo) -> SlotInputs:
        """Sources of tokens that pass the block by, as if attention and mlp added nothing.

        Under `post` both sub-layers are taken to read the stream after the first norm, under
        `reordered` the stream as it is.
        """
        placement = self.hparams.norm_placement
        input_BTD = x_BTD if placement == 'reordered' else self.attention_norm(x_BTD)
        mlp_input_BTD = self.mlp_norm(x_BTD) if placement == 'pre' else input_BTD
        slot = self.attention.slot(input_BTD, tokens) if self._attention_makes_slot else None
        return self._sources(slot, input_BTD, mlp_input_BTD)

    def _run(self, x_BTD, tokens, past, depth, limits):
        """What attention adds, the stream after it, what the mlp adds to that, and Left."""
        placement = self.hparams.norm_placement
        input_BTD = self.attention_norm(x_BTD) if placement == 'pre' else x_BTD
        attended_BTD, keys, slot, depth = self.attention(input_BTD, tokens, past, depth)
        if placement == 'reordered':
            attended_BTD = self.attention_norm(attended_BTD)
        middle_BTD = x_BTD + attended_BTD
        if placement == 'post':
            middle_BTD = self.attention_norm(middle_BTD)
        mlp_input_BTD = self.mlp_norm(middle_BTD) if placement == 'pre' else middle_BTD
        if self.experts:
            real_BT = tokens.segment_ids_BT > 0
            transformed_BTD, record, limits = self.mlp(mlp_input_BTD, real_BT, limits)
        else:
            transformed_BTD, record = self.mlp(mlp_input_BTD), None
        if placement == 'reordered':
            transformed_BTD = self.mlp_norm(transformed_BTD)
        sources = self._sources(slot, input_BTD, mlp_input_BTD)
        left = BlockAux(keys, sources, depth, record, limits)
        return attended_BTD, middle_BTD, transformed_BTD, left

    def _sources(self, slot, attention_input_BTD, mlp_input_BTD):
        depth = self.hparams.depth
        if not self.writes_slots:
            return SlotInputs()
        return SlotInputs(
            slot if self._attention_makes_slot else None,
            attention_input_BTD if depth.attention_slot_projection else None,
            mlp_input_BTD if depth.slots == 'attention+ffn' else None,
        )

    @property
    def _attention_makes_slot(self):
        depth = self.hparams.depth
        return depth.slots in ('attention', 'attention+ffn') and not depth.attention_slot_projection
