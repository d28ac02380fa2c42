"""A model that was trained with moddepth-jax, in plain PyTorch, for transformers.

It has Mixture-of-Depths (Raposo et al. 2024, arXiv 2404.02258) with the causal rule of the run,
MoDA (Zhu et al. 2026, arXiv 2603.15619), value streams, mixtures of experts and looped blocks.

Letters in names: B batch rows, T new tokens, C tokens that a routed block computes, S cached and
new tokens, L depth slots, D width, N query heads, K key/value heads, H head size, E experts, Z
experts and no-op experts, V ids.
"""

from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_moddepth import ModDepthConfig
from .layers_moddepth import (
    Attention,
    BlockCache,
    Experts,
    Predictor,
    RMSNorm,
    Router,
    Slot,
    SlotProjection,
    SwiGLU,
    Tokens,
)


class Attended(NamedTuple):
    """The inputs of attention and mlp in a block, and the keys and values of attention."""

    attention_input_BTD: torch.Tensor
    mlp_input_BTD: torch.Tensor
    k_BTKH: torch.Tensor
    v_BTKH: torch.Tensor


class ModDepthCache:
    """The state of decoding after earlier tokens: a BlockCache for each block that runs."""

    def __init__(self, num_blocks):
        self.blocks = [BlockCache() for _ in range(num_blocks)]
        self.num_columns = 0  # tokens and padding so far
        self.lengths_B = self.documents_B = 0  # tokens of each row, and their last document

    def get_seq_length(self, layer_idx=0):
        """Returns the number of tokens so far, with padding."""
        return self.num_columns

    def reorder_cache(self, beam_idx):
        """Selects the rows `beam_idx`, for beam search."""
        self.lengths_B, self.documents_B = self.lengths_B[beam_idx], self.documents_B[beam_idx]
        for block in self.blocks:
            if block.sides is not None:
                block.sides = tuple(side[beam_idx] for side in block.sides)
            if torch.is_tensor(block.taken_BE):
                block.taken_BE = block.taken_BE[beam_idx]


class Layer(nn.Module):
    """One block, with its router and its part of the depth stream, if it has them."""

    def __init__(self, config, knobs, kind):
        super().__init__()
        self.config, self.knobs, self.kind = config, knobs, kind
        self.attention = Attention(knobs, kind)
        self.mlp = Experts(knobs) if kind.experts else SwiGLU(knobs, knobs.d_ff)
        self.attention_norm = RMSNorm(knobs.d_model, knobs.norm_eps)
        self.mlp_norm = RMSNorm(knobs.d_model, knobs.norm_eps)
        if knobs.embedding_residual != 'none':
            names = ('residual_scale', 'embedding_scale')
            self.blend = nn.ParameterDict({name: torch.zeros(()) for name in names})
        if kind.routed:
            self.router = Router(knobs)
            self.predictor = Predictor(knobs) if config.causal_rule == 'predictor' else None
        if kind.slots and knobs.depth.stream == 'moda':
            names = {'block': ['block_slot'], 'attention': []}.get(knobs.depth.slots, ['ffn_slot'])
            names += ['attention_slot'] * knobs.depth.attention_slot_projection
            self.stream = nn.ModuleDict({name: SlotProjection(knobs) for name in names})

    def forward(self, x_BTD, embedded_BTD, tokens, slots, cache, threshold, thresholds_E):
        """Returns x after the block, and the Slots that it writes."""
        if self.knobs.embedding_residual != 'none':
            blended_BTD = self.blend['residual_scale'] * x_BTD
            x_BTD = (blended_BTD + self.blend['embedding_scale'] * embedded_BTD).to(x_BTD.dtype)
        if not self.kind.routed:
            y_BTD, attended = self._block(x_BTD, tokens, slots, cache, thresholds_E)
            return y_BTD, self._written(y_BTD, attended, tokens, torch.ones_like(tokens.valid_BT))
        selected_BT, gates_BT = self._decide(x_BTD, tokens, cache, threshold)
        columns_C = selected_BT.any(0).nonzero()[:, 0]
        x_BCD = x_BTD[:, columns_C]
        some = tokens.take(columns_C)._replace(valid_BT=selected_BT[:, columns_C])
        of_some = [slot.take(columns_C) for slot in slots]
        y_BCD, attended = self._block(x_BCD, some, of_some, cache, thresholds_E)
        change_BCD = (gates_BT[:, columns_C, None] * (y_BCD - x_BCD)).to(x_BTD.dtype)
        change_BCD = change_BCD.where(some.valid_BT[..., None], 0)
        y_BTD = x_BTD.index_add(1, columns_C, change_BCD)
        if not self.kind.slots:
            return y_BTD, []
        attended = Attended(*map(_put(columns_C, some.valid_BT), self._skipped(x_BTD), attended))
        masked = self.knobs.depth.stream != 'moda' or self.knobs.depth.skipped_slots == 'masked'
        valid_BT = selected_BT if masked else torch.ones_like(selected_BT)
        return y_BTD, self._written(y_BTD, attended, tokens, valid_BT)

    def _block(self, x_BTD, tokens, slots, cache, thresholds_E):
        """Applies attention, then the mlp: x + f(norm(x)), norm(x + f(x)) or x + norm(f(x))."""
        place = self.knobs.norm_placement
        attention_input_BTD = self.attention_norm(x_BTD) if place == 'pre' else x_BTD
        y_BTD, k_BTKH, v_BTKH = self.attention(attention_input_BTD, tokens, slots, cache)
        x_BTD = x_BTD + (self.attention_norm(y_BTD) if place == 'reordered' else y_BTD)
        x_BTD = self.attention_norm(x_BTD) if place == 'post' else x_BTD
        mlp_input_BTD = self.mlp_norm(x_BTD) if place == 'pre' else x_BTD
        if self.kind.experts:
            y_BTD = self.mlp(mlp_input_BTD, tokens.valid_BT, thresholds_E, cache)
        else:
            y_BTD = self.mlp(mlp_input_BTD)
        x_BTD = x_BTD + (self.mlp_norm(y_BTD) if place == 'reordered' else y_BTD)
        x_BTD = self.mlp_norm(x_BTD) if place == 'post' else x_BTD
        return x_BTD, Attended(attention_input_BTD, mlp_input_BTD, k_BTKH, v_BTKH)

    def _decide(self, x_BTD, tokens, cache, threshold):
        """Returns selected_BT by the causal rule, at most `max_selected` a row; and gates_BT."""
        rule, gate = self.config.causal_rule, self.knobs.routing.gate
        scores_BT = self.router(x_BTD, tokens)
        wanted_BT = scores_BT > (threshold if rule == 'threshold' else 0)
        if rule == 'predictor':
            wanted_BT = self.predictor(x_BTD) > 0
        if rule == 'dense':
            wanted_BT = torch.ones_like(wanted_BT)
        wanted_BT = wanted_BT & tokens.valid_BT
        count_TB = cache.num_selected_B + wanted_BT.cumsum(1).T
        selected_BT = wanted_BT & (count_TB.T <= self.config.max_selected)
        sigmoid_BT = scores_BT.sigmoid()
        gates = {'raw': scores_BT, 'sigmoid': sigmoid_BT, 'tanh': scores_BT.tanh()}
        gates['straight_through'] = 1 + (sigmoid_BT - sigmoid_BT.detach())
        gates_BT = gates.get(gate, torch.ones_like(scores_BT))
        return selected_BT, self.knobs.routing.gate_scale * gates_BT

    def _skipped(self, x_BTD):
        """Returns Attended for skipped tokens, as if attention and mlp added nothing."""
        place, knobs = self.knobs.norm_placement, self.knobs
        attention_input_BTD = x_BTD if place == 'reordered' else self.attention_norm(x_BTD)
        mlp_input_BTD = self.mlp_norm(x_BTD) if place == 'pre' else attention_input_BTD
        zeros_BTKH = x_BTD.new_zeros(*x_BTD.shape[:2], knobs.num_kv_heads, knobs.head_dim)
        return Attended(attention_input_BTD, mlp_input_BTD, zeros_BTKH, zeros_BTKH)

    def _written(self, y_BTD, attended, tokens, valid_BT):
        """Returns the Slots of all tokens, those of attention first."""
        depth = self.knobs.depth
        if not self.kind.slots:
            return []
        if depth.stream != 'moda':
            return [Slot(attended.k_BTKH, attended.v_BTKH, valid_BT)]
        if depth.slots == 'block':
            return [self.attention.slot(self.stream['block_slot'], y_BTD, tokens, valid_BT)]
        own = self.stream['attention_slot'] if depth.attention_slot_projection else self.attention
        slots = [self.attention.slot(own, attended.attention_input_BTD, tokens, valid_BT)]
        if depth.slots == 'attention+ffn':
            read_BTD, projection = attended.mlp_input_BTD, self.stream['ffn_slot']
            slots.append(self.attention.slot(projection, read_BTD, tokens, valid_BT))
        return slots


def _put(columns_C, valid_BC):
    """Returns a function that writes valid tokens of some columns into an array of all columns."""

    def put(all_BTX, some_BCX):
        valid = valid_BC.reshape(*valid_BC.shape, *[1] * (all_BTX.ndim - 2))
        return all_BTX.index_copy(1, columns_C, some_BCX.where(valid, all_BTX[:, columns_C]))

    return put


def _namespace(knobs):
    """Turns nested dicts into attributes."""
    groups = {name: _namespace(value) for name, value in knobs.items() if isinstance(value, dict)}
    return SimpleNamespace(**{**knobs, **groups})


class ModDepthForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal language model; in `generate`, routed blocks cache only the selected tokens."""

    config_class = ModDepthConfig
    _is_stateful = True  # a cache cannot be cut back, as assisted generation would have to
    _no_split_modules = ['Layer']
    accepts_loss_kwargs = False
    # Thresholds of float32 scores.
    _keep_in_fp32_modules_strict = {'thresholds_R', 'expert_thresholds_XE'}

    def __init__(self, config):
        super().__init__(config)
        knobs = _namespace(config.knobs)
        kinds = [SimpleNamespace(**kind) for kind in config.blocks]
        self.embed_tokens = nn.Embedding(knobs.vocab_size, knobs.d_model)
        self.layers = nn.ModuleList([Layer(config, knobs, kind) for kind in kinds])
        self.norm = RMSNorm(knobs.d_model, knobs.norm_eps)
        self.lm_head = None
        if not knobs.tie_embeddings:
            self.lm_head = nn.Linear(knobs.d_model, knobs.vocab_size, bias=False)
        for name, shape in config.averages.items():  # of the run: what thresholds are
            self.register_buffer(name, torch.zeros(shape))
        self.post_init()

    def forward(
        self,
        input_ids,
        attention_mask=None,
        past_key_values=None,
        use_cache=None,
        labels=None,
        logits_to_keep=0,
        return_dict=True,
        cache=None,
        **others,
    ):
        """Returns float32 logits of new tokens.

        Args:
          input_ids: int64 [B, T], tokens that follow those in the cache.
          attention_mask: [B, T] or [B, S], 0 for padding, at either end; None: no padding.
          past_key_values: ModDepthCache of earlier tokens; None: there are none.
          use_cache: whether to return it.
          labels: int64 [B, T]; position t predicts label t + 1; labels of -100 are ignored.
          logits_to_keep: number of last tokens with logits; 0: all.
          return_dict: False for a tuple.
          cache: another name of past_key_values, from transformers 5.24 on.
          others: must be empty, None or False.
        """
        for name, value in others.items():
            if value is not None and value is not False:
                raise ValueError(f'{name}: not supported by {type(self).__name__}; leave it out')
        cache = past_key_values if cache is None else cache
        if cache is None:
            cache = ModDepthCache(len(self.config.block_order))
        tokens = self._tokens(input_ids, attention_mask, cache)
        x_BTD = embedded_BTD = self.embed_tokens(input_ids)
        slots, thresholds = [], iter(getattr(self, 'thresholds_R', ()))
        of_experts = iter(getattr(self, 'expert_thresholds_XE', ()))
        for i, of_block in zip(self.config.block_order, cache.blocks, strict=True):
            layer = self.layers[i]
            threshold = next(thresholds, 0) if layer.kind.routed else None
            thresholds_E = next(of_experts, None) if layer.kind.experts else None
            x_BTD, written = layer(
                x_BTD, embedded_BTD, tokens, slots, of_block, threshold, thresholds_E
            )
            slots = [*slots, *written]
        x_BTD = self.norm(x_BTD[:, -logits_to_keep:])
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        logits_BTV = functional.linear(x_BTD, head.weight).float()
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(
                logits_BTV[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            )
        output = CausalLMOutputWithPast(loss, logits_BTV, cache if use_cache else None)
        return output if return_dict else output.to_tuple()

    def _tokens(self, ids_BT, mask_BS, cache):
        """Returns Tokens of new ids, counted in the cache; ValueError if rows are too long."""
        valid_BT = torch.ones_like(ids_BT, dtype=torch.bool)
        if mask_BS is not None:
            lengths = (ids_BT.shape[1], cache.num_columns + ids_BT.shape[1])
            if mask_BS.ndim != 2 or mask_BS.shape[1] not in lengths:
                right = f'must be [rows, {lengths[1]}], 0 for padding'
                raise ValueError(f'attention_mask of shape {list(mask_BS.shape)}: {right}')
            valid_BT = mask_BS[:, -ids_BT.shape[1] :].bool()
        counts_TB = cache.lengths_B + valid_BT.cumsum(1).T
        longest, most = int(counts_TB.max()), self.config.max_position_embeddings
        if longest > most:
            raise ValueError(f'a row of {longest} tokens: must be at most {most}, as in training')
        begins_BT = torch.zeros_like(valid_BT)
        if self.config.document_separator is not None:
            begins_BT = valid_BT & (ids_BT == self.config.document_separator)
        documents_TB = cache.documents_B + begins_BT.cumsum(1).T
        cache.lengths_B, cache.documents_B = counts_TB[-1], documents_TB[-1]
        cache.num_columns += ids_BT.shape[1]
        return Tokens(ids_BT, (counts_TB.T - 1).clamp(min=0), documents_TB.T, valid_BT)

    def prepare_inputs_for_generation(
        self,
        input_ids,
        past_key_values=None,
        attention_mask=None,
        use_cache=True,
        cache=None,
        **others,
    ):
        """Returns the ids that are not in the cache; called by `transformers.GenerationMixin`."""
        cache = past_key_values if cache is None else cache
        if cache is not None:
            input_ids = input_ids[:, cache.num_columns :]
        inputs = {'input_ids': input_ids, 'attention_mask': attention_mask}
        inputs |= {'past_key_values': cache, 'use_cache': use_cache}
        return inputs | {'logits_to_keep': 1}

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False  # `forward` makes its own

    def get_input_embeddings(self):
        """Returns the embedding."""
        return self.embed_tokens

    def get_output_embeddings(self):
        """Returns the matrix of the logits; None if it is the embedding."""
        return self.lm_head
