"""Attention, experts and routers of a model that was trained with moddepth-jax, in plain PyTorch.

Letters of names are those of modeling_moddepth.py.
"""

import fractions
import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional


class Tokens(NamedTuple):
    """Information about the tokens of a block."""

    ids_BT: torch.Tensor
    positions_BT: torch.Tensor  # among the real tokens of the row
    documents_BT: torch.Tensor  # a token sees only tokens of the same document number
    valid_BT: torch.Tensor  # bool: not padding, and selected if the block is routed

    def take(self, columns_C):
        """Returns the same for some columns."""
        return Tokens(*(side[:, columns_C] for side in self))


class Slot(NamedTuple):
    """The key and value that a block writes at each token for later blocks."""

    k_BTKH: torch.Tensor
    v_BTKH: torch.Tensor
    valid_BT: torch.Tensor  # bool: tokens that have the slot

    def take(self, columns_C):
        """Returns the same for some columns."""
        return Slot(*(side[:, columns_C] for side in self))


class BlockCache:
    """Keys, values and Tokens of one block that runs; a routed block keeps the selected tokens.

    In a batch, it has the tokens that any row selected, which are valid in those rows.
    """

    def __init__(self):
        self.sides = None
        self.taken_BE = 0  # tokens of the row that chose each expert

    def append(self, k_BTKH, v_BTKH, tokens):
        """Adds new tokens and returns k_BSKH, v_BSKH and Tokens of all."""
        new = (k_BTKH, v_BTKH, *tokens)
        if self.sides is not None:
            new = tuple(torch.cat(pair, dim=1) for pair in zip(self.sides, new, strict=True))
        self.sides = new
        return new[0], new[1], Tokens(*new[2:])

    @property
    def num_selected_B(self):
        """The number of tokens of each row in the cache."""
        return 0 if self.sides is None else self.sides[-1].sum(1)


class RMSNorm(nn.Module):
    """x rsqrt(mean(x^2) + epsilon) weight over the last axis, in float32."""

    def __init__(self, width, epsilon):
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(width)), epsilon

    def forward(self, x):
        """Returns the normalized x, with the same shape and dtype."""
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return (wide * inverse * self.weight).to(x.dtype)


class SwiGLU(nn.Module):
    """w2(silu(w1 x) * w3 x)."""

    def __init__(self, knobs, width):
        super().__init__()
        self.w1 = nn.Linear(knobs.d_model, width, bias=knobs.use_bias)
        self.w3 = nn.Linear(knobs.d_model, width, bias=knobs.use_bias)
        self.w2 = nn.Linear(width, knobs.d_model, bias=knobs.use_bias)

    def forward(self, x_BTD):
        """Returns the output of the mlp, [B, T, D]."""
        return self.w2(functional.silu(self.w1(x_BTD)) * self.w3(x_BTD))


class Experts(nn.Module):
    """shared(x) + the sum of weight * f_e(x) over the experts e of a token; each f is a SwiGLU."""

    def __init__(self, knobs):
        super().__init__()
        self.experts = experts = knobs.experts
        count, inner, width = experts.num_routed, experts.d_ff, knobs.d_model
        self.router = nn.Linear(width, count + experts.num_noop, bias=False)
        self.w1 = nn.Parameter(torch.zeros(count, width, inner))
        self.w3 = nn.Parameter(torch.zeros(count, width, inner))
        self.w2 = nn.Parameter(torch.zeros(count, inner, width))
        self.shared = SwiGLU(knobs, experts.num_shared * inner) if experts.num_shared else None

    def forward(self, x_BTD, valid_BT, thresholds_E, cache):
        """Returns the output of the mlp; padding and skipped tokens choose no expert."""
        weight_BTZ = self._weights(x_BTD, thresholds_E)
        weight_BTE = weight_BTZ[..., : self.experts.num_routed] * valid_BT[..., None]
        if self.experts.row_capacity:  # an expert computes the first tokens of a row that chose it
            chosen_BTE = weight_BTE > 0
            count_BTE = cache.taken_BE + chosen_BTE.cumsum(1).swapaxes(0, 1)  # T first
            cache.taken_BE = count_BTE[-1]
            in_time_BTE = (count_BTE <= self.experts.row_capacity).swapaxes(0, 1)
            weight_BTE = weight_BTE * in_time_BTE
        y_BTD = torch.zeros_like(x_BTD) if self.shared is None else self.shared(x_BTD)
        for e in range(self.experts.num_routed):
            rows, tokens = weight_BTE[..., e].nonzero(as_tuple=True)
            x_PD = x_BTD[rows, tokens]
            y_PD = (functional.silu(x_PD @ self.w1[e]) * (x_PD @ self.w3[e])) @ self.w2[e]
            weight_P1 = self.experts.route_scale * weight_BTE[rows, tokens, e, None]
            update_PD = (weight_P1 * y_PD).to(y_BTD.dtype)
            y_BTD = y_BTD.index_put((rows, tokens), update_PD, accumulate=True)
        return y_BTD

    def _weights(self, x_BTD, thresholds_E):
        """Returns float32 factors for the experts' outputs, 0 for experts that are not chosen."""
        logits_BTZ = functional.linear(x_BTD.float(), self.router.weight.float())
        softmax = self.experts.scores == 'softmax'
        scores_BTZ = logits_BTZ.softmax(-1) if softmax else logits_BTZ.sigmoid()
        if self.experts.choice == 'expert':
            return scores_BTZ.where(scores_BTZ > thresholds_E, 0)
        best = scores_BTZ.topk(self.experts.top_k, dim=-1)
        weight_BTZ = torch.zeros_like(scores_BTZ).scatter(-1, best.indices, best.values)
        total_BT1 = weight_BTZ.sum(-1, keepdim=True)  # 0 if all scores are too small for float32
        return weight_BTZ if softmax else weight_BTZ / total_BT1.where(total_BT1 > 0, 1)


class ValueEmbedding(nn.Module):
    """v + 3 sigmoid(x[:12] gate) embedding[id], with a gate for each head."""

    def __init__(self, knobs):
        super().__init__()
        heads, channels = knobs.num_kv_heads, min(12, knobs.d_model)
        self.embedding = nn.Parameter(torch.zeros(knobs.vocab_size, heads, knobs.head_dim))
        self.gate = nn.Parameter(torch.zeros(channels, heads))

    def forward(self, v_BTKH, x_BTD, ids_BT):
        """Adds to the values of tokens, given the input of their projection and the ids."""
        gates_BTK = 3 * (x_BTD[..., : len(self.gate)].float() @ self.gate.float()).sigmoid()
        return (v_BTKH + gates_BTK[..., None] * self.embedding[ids_BT]).to(v_BTKH.dtype)


class FirstValues(nn.Module):
    """Adds the values of the first block to those of a later block, or replaces these."""

    def __init__(self, knobs):
        super().__init__()
        self.mix = knobs.depth.value_mix
        if self.mix == 'learned':
            self.weights = nn.Parameter(torch.full((2,), 0.5))

    def forward(self, v_BTKH, slots):
        """Returns values [B, T, K, H] from the first block's slot and the tokens' own values."""
        first_BTKH = slots[0].v_BTKH
        if self.mix == 'shared':
            return first_BTKH
        weights = {'fixed': (0.5, 0.5), 'sparse': (5, 1)}.get(self.mix)
        first, own = self.weights if weights is None else weights
        return (first * first_BTKH + own * v_BTKH).to(v_BTKH.dtype)


class Attention(nn.Module):
    """Grouped-query attention in one softmax over the row and the token's own depth slots."""

    def __init__(self, knobs, kind):
        super().__init__()
        self.knobs, self.kind = knobs, kind
        width = knobs.d_model
        queries, keys = (n * knobs.head_dim for n in (knobs.num_heads, knobs.num_kv_heads))
        in_bias = knobs.use_bias or knobs.attention_bias != 'none'
        out_bias = knobs.use_bias or knobs.attention_bias == 'qkvo'
        self.query = nn.Linear(width, queries, bias=in_bias)
        self.key = nn.Linear(width, keys, bias=in_bias)
        if not (kind.mixes and knobs.depth.value_mix == 'shared'):
            self.value = nn.Linear(width, keys, bias=in_bias)
        self.out = nn.Linear(queries, width, bias=out_bias)
        if knobs.qk_norm != 'none':
            full = knobs.qk_norm == 'full'
            self.query_norm = RMSNorm(queries if full else knobs.head_dim, knobs.norm_eps)
            self.key_norm = RMSNorm(keys if full else knobs.head_dim, knobs.norm_eps)
        if kind.embeds:
            self.value_embedding = ValueEmbedding(knobs)
        if kind.mixes and knobs.depth.stream == 'value_residual':
            self.values = FirstValues(knobs)

    def forward(self, x_BTD, tokens, slots, cache):
        """Returns the output [B, T, D], and the keys and values of the tokens."""
        knobs = self.knobs
        q_BTNH = self.rotate(self._normed(self._heads(self.query(x_BTD)), 'query_norm'), tokens)
        k_BTKH = self.sequence_key(self._heads(self.key(x_BTD)), tokens)
        v_BTKH = self._values(x_BTD, q_BTNH, k_BTKH, tokens, slots)
        k_BSKH, v_BSKH, seen = cache.append(k_BTKH, v_BTKH, tokens)
        visible_BTS = seen.valid_BT[:, None] & (
            tokens.documents_BT[:, :, None] == seen.documents_BT[:, None]
        )
        distance_BTS = tokens.positions_BT[:, :, None] - seen.positions_BT[:, None]
        visible_BTS = visible_BTS & (distance_BTS >= 0)
        if self.kind.window:
            visible_BTS = visible_BTS & (distance_BTS < self.kind.window)
        q_BTKGH = q_BTNH.unflatten(2, (knobs.num_kv_heads, -1)) * knobs.head_dim**-0.5
        scores = torch.einsum('btkgh,bskh->bkgts', q_BTKGH, k_BSKH)
        scores = _masked(scores, visible_BTS[:, None, None])
        if knobs.depth.stream != 'moda' or not slots:
            p = scores.float().softmax(-1).to(v_BSKH.dtype)
            o_BTKGH = torch.einsum('bkgts,bskh->btkgh', p, v_BSKH)
            return self.out(o_BTKGH.flatten(2)), k_BTKH, v_BTKH
        k_LBTKH, v_LBTKH, valid_LBT = (
            torch.stack(sides) for sides in zip(*slots[-knobs.depth.slot_window :], strict=True)
        )
        if knobs.depth.slot_keys == 'unrotated':
            k_LBTKH = self._normed(k_LBTKH, 'key_norm')
        of_slots = torch.einsum('btkgh,lbtkh->bkgtl', q_BTKGH, k_LBTKH)
        of_slots = _masked(of_slots, valid_LBT.permute(1, 2, 0)[:, None, None])
        p = torch.cat([scores, of_slots], dim=-1).float().softmax(-1).to(v_BSKH.dtype)
        p, p_of_slots = p.split([scores.shape[-1], of_slots.shape[-1]], dim=-1)
        o_BTKGH = torch.einsum('bkgts,bskh->btkgh', p, v_BSKH)
        o_BTKGH = o_BTKGH + torch.einsum('bkgtl,lbtkh->btkgh', p_of_slots, v_LBTKH)
        return self.out(o_BTKGH.flatten(2)), k_BTKH, v_BTKH

    def sequence_key(self, k_BTKH, tokens):
        """Normalizes and rotates a projected key."""
        return self.rotate(self._normed(k_BTKH, 'key_norm'), tokens)

    def slot(self, projections, x_BTD, tokens, valid_BT):
        """Makes a Slot from an array, by some projections to keys and values."""
        k_BTKH = self._heads(projections.key(x_BTD))
        v_BTKH = self._heads(projections.value(x_BTD))
        if projections is self and self.kind.embeds:
            v_BTKH = self.value_embedding(v_BTKH, x_BTD, tokens.ids_BT)
        if self.knobs.depth.slot_keys == 'rotated':
            k_BTKH = self.sequence_key(k_BTKH, tokens)
        return Slot(k_BTKH, v_BTKH, valid_BT)

    def _values(self, x_BTD, q_BTNH, k_BTKH, tokens, slots):
        v_BTKH = self._heads(self.value(x_BTD)) if hasattr(self, 'value') else None
        if self.kind.embeds:
            v_BTKH = self.value_embedding(v_BTKH, x_BTD, tokens.ids_BT)
        if not self.kind.mixes:
            return v_BTKH
        if self.knobs.depth.stream == 'value_residual':
            return self.values(v_BTKH, slots)
        return self._attended_values(q_BTNH, k_BTKH, v_BTKH, tokens, slots)

    def _attended_values(self, q_BTNH, k_BTKH, v_BTKH, tokens, slots):
        """Mixes the values of earlier blocks and its own by a softmax (arXiv 2606.05014)."""
        knobs, depth = self.knobs, self.knobs.depth
        stride, recent = depth.value_stride or max(1, knobs.num_layers // 2), depth.recent_layers
        if recent:  # slots are those of all earlier blocks
            first = len(slots) - recent
            slots = [slot for i, slot in enumerate(slots) if i % stride == 0 or i >= first]
        own = Slot(k_BTKH, v_BTKH, torch.ones_like(tokens.valid_BT))
        k, v, valid_LBT = (torch.stack(sides) for sides in zip(*slots, own, strict=True))
        q_BTKH = q_BTNH.unflatten(2, (knobs.num_kv_heads, -1)).mean(3).float()
        scores_LBTK = (q_BTKH * k.float()).sum(-1) * knobs.head_dim**-0.5
        p_LBTK = _masked(scores_LBTK, valid_LBT[..., None]).softmax(0)
        return (p_LBTK[..., None] * v.float()).sum(0).to(v_BTKH.dtype)

    def _heads(self, x_BTE):
        return x_BTE.unflatten(-1, (-1, self.knobs.head_dim))

    def _normed(self, x_NH, name):
        if self.knobs.qk_norm == 'none':
            return x_NH
        norm = getattr(self, name)
        return norm(x_NH) if self.knobs.qk_norm == 'head' else norm(x_NH.flatten(-2)).view_as(x_NH)

    def rotate(self, x_BTNH, tokens):
        """Rotary position embedding, half-split form; scaled as in Llama 3.1."""
        half = self.knobs.head_dim // 2
        exponents = -torch.arange(half, device=x_BTNH.device, dtype=torch.float32) / half
        frequency_F = self.knobs.rope_theta**exponents
        if self.knobs.rope_scaling != 'none':
            factor, low, high, length = map(float, self.knobs.rope_scaling.split(':')[1:])
            turns_F = length * frequency_F / (2 * math.pi)
            kept_F = ((turns_F - low) / (high - low)).clamp(0, 1)
            frequency_F = frequency_F * (kept_F + (1 - kept_F) / factor)
        angle_BT1F = tokens.positions_BT[..., None, None] * frequency_F
        sin, cos = angle_BT1F.sin(), angle_BT1F.cos()
        first, second = x_BTNH.float().chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return turned.to(x_BTNH.dtype)


def _masked(scores, mask):
    """Scores with the lowest finite number where the mask is False: a row of it has no NaN."""
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)


class SlotProjection(nn.Module):
    """Key and value of a slot."""

    def __init__(self, knobs):
        super().__init__()
        width = knobs.num_kv_heads * knobs.head_dim
        self.key = nn.Linear(knobs.d_model, width, bias=knobs.use_bias)
        self.value = nn.Linear(knobs.d_model, width, bias=knobs.use_bias)


class Router(nn.Module):
    """The score of each token, float32: `learned`, `straight_through`, `norm` or `position`."""

    def __init__(self, knobs):
        super().__init__()
        self.routing = knobs.routing
        if self.routing.router in ('learned', 'straight_through'):
            self.w = nn.Parameter(torch.zeros(knobs.d_model))
        if self.routing.router == 'straight_through':
            self.b = nn.Parameter(torch.zeros(()))

    def forward(self, x_BTD, tokens):
        """Scores [B, T] of what the block reads."""
        if self.routing.router == 'norm':
            return x_BTD.float().square().sum(-1).sqrt()
        if self.routing.router == 'position':
            share = fractions.Fraction(self.routing.capacity).limit_denominator(10_000)
            up, down = share.numerator, share.denominator
            return torch.where((tokens.positions_BT % down) * up % down + up >= down, 1.0, -1.0)
        scores_BT = x_BTD.float() @ self.w.float()
        return (
            scores_BT + self.b.float() if self.routing.router == 'straight_through' else scores_BT
        )


class Predictor(nn.Module):
    """Logit that a token is among those of highest score, float32."""

    def __init__(self, knobs):
        super().__init__()
        width = knobs.routing.predictor_width
        self.hidden = nn.Linear(knobs.d_model, width) if width else None
        self.out = nn.Linear(width or knobs.d_model, 1)

    def forward(self, x_BTD):
        """Logits [B, T]; above 0 selects the token."""
        x_BTD = x_BTD.detach().float()
        if self.hidden is not None:
            x_BTD = functional.silu(_linear_float32(self.hidden, x_BTD))
        return _linear_float32(self.out, x_BTD)[..., 0]


def _linear_float32(layer, x):
    return functional.linear(x, layer.weight.float(), layer.bias.float())
