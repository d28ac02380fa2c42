"""A mixture of experts in place of an mlp: each token uses a few of many small SwiGLUs."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moddepth_jax.hparams import ExpertsHparams, ModelHparams
from moddepth_jax.model.layers import SwiGLU, initializer, residual_init, swiglu, wide_dtype
from moddepth_jax.model.moe.grouped_matmul import (
    block_rows,
    combine,
    dispatch,
    grouped_matmul,
    make_layout,
)
from moddepth_jax.model.routing import CHOICE, indices_to_mask, select_top_c
from moddepth_jax.model.sharding import map_batch_shards, sharded_routed_mlp


class ExpertsRecord(NamedTuple):
    """Statistics of the expert choice in a layer: sums over its real tokens."""

    tokens: jax.Array  # int32, real tokens that the layer processed
    pairs_Z: jax.Array  # int32, tokens of each expert before `row_capacity`; no-op experts last
    dropped: jax.Array  # int32, (token, expert) pairs beyond `row_capacity`
    scores_Z: jax.Array  # float32, sum of the scores, chosen or not
    log_z: jax.Array  # float32, sum of the squared log-partitions of the router's logits
    # float32, sum over rows of an expert's lowest selected score, if experts chose from whole rows
    lowest_E: jax.Array | None
    rows: jax.Array  # int32, rows with a real token


class ExpertState(NamedTuple):
    """What experts need to know about earlier tokens and about training."""

    thresholds_E: jax.Array | None = None  # float32; experts take tokens with a higher score
    # int32, earlier tokens of the row that chose each expert, for `row_capacity`; None: no tokens
    taken_BE: jax.Array | None = None


NO_EXPERT_STATE = ExpertState()


class ExpertChoice(NamedTuple):
    """The experts of each token."""

    expert_BTk: jax.Array  # int32, numbers of the experts; nothing is computed from num_routed on
    weight_BTk: jax.Array  # factors on the experts' outputs
    most: int  # static, the most pairs of a row that are computed
    chosen_BTZ: jax.Array  # bool, before `row_capacity`
    dropped: jax.Array  # int32, pairs beyond `row_capacity`
    lowest_E: jax.Array | None  # as in ExpertsRecord


def normalize_weights(score_BTk):
    """Divide scores by their sum, also if the square of the sum underflows; zeros stay zeros."""
    largest_BT1 = jax.lax.stop_gradient(jnp.max(score_BTk, axis=2, keepdims=True))
    some_BT1 = largest_BT1 > 0
    score_BTk = score_BTk / jnp.where(some_BT1, largest_BT1, 1)
    total_BT1 = jnp.sum(score_BTk, axis=2, keepdims=True)
    return score_BTk / jnp.where(some_BT1, total_BT1, 1)


def tokens_choose(hparams: ExpertsHparams, scores_BTZ, real_BT, taken_BE) -> ExpertChoice:
    """Let each token choose the k experts of highest score (Dai et al. 2024, section 2.2).

    Under `row_capacity` an expert takes the first tokens of a row, counted on from `taken_BE`.
    """
    num_routed, length = hparams.num_routed, scores_BTZ.shape[1]
    expert_BTk = map_batch_shards(lambda rows: jax.lax.top_k(rows, hparams.top_k)[1], scores_BTZ)
    expert_BTk = checkpoint_name(expert_BTk, CHOICE)
    weight_BTk = jnp.take_along_axis(scores_BTZ, expert_BTk, axis=2)
    if hparams.scores == 'sigmoid':
        weight_BTk = normalize_weights(weight_BTk)
    expert_BTk = jnp.where(real_BT[..., None], expert_BTk, hparams.num_choices)
    numbers_Z = jnp.arange(hparams.num_choices)
    chosen_BTZ = jnp.any(expert_BTk[..., None] == numbers_Z[None, None, None], axis=2)
    most, dropped = hparams.top_k * length, jnp.int32(0)
    if hparams.row_capacity:
        chosen_BTE = chosen_BTZ[..., :num_routed].astype(jnp.int32)
        before_BTE = jnp.cumsum(chosen_BTE, axis=1) - chosen_BTE
        if taken_BE is not None:
            before_BTE += taken_BE[:, None]
        at_BTk = jnp.minimum(expert_BTk, num_routed - 1)
        late_BTk = jnp.take_along_axis(before_BTE, at_BTk, axis=2) >= hparams.row_capacity
        late_BTk &= expert_BTk < num_routed
        expert_BTk = jnp.where(late_BTk, hparams.num_choices, expert_BTk)
        most = min(most, num_routed * hparams.row_capacity)
        dropped = jnp.sum(late_BTk, dtype=jnp.int32)
    return ExpertChoice(expert_BTk, weight_BTk, most, chosen_BTZ, dropped, None)


def experts_choose(hparams: ExpertsHparams, scores_BTE, real_BT, thresholds_E) -> ExpertChoice:
    """Let each expert take its k T / num_routed best tokens (Zhou et al. 2022).

    With thresholds it takes the tokens of higher score instead, which is causal.
    """
    batch, length, num_routed = scores_BTE.shape
    if thresholds_E is None:
        most = hparams.num_taken(length)
        eligible_BTE = jnp.where(real_BT[..., None], scores_BTE, -jnp.inf)
        eligible_BET = jnp.swapaxes(eligible_BTE, 1, 2).reshape(-1, length)
        indices_BEC = checkpoint_name(select_top_c(eligible_BET, most), CHOICE)
        taken_BET = indices_to_mask(indices_BEC, length).reshape(batch, num_routed, length)
        taken_BTE = jnp.swapaxes(taken_BET, 1, 2) & real_BT[..., None]
        lowest_BE = jnp.min(jnp.where(taken_BTE, scores_BTE, jnp.inf), axis=1)
        lowest_E = jnp.sum(jnp.where(jnp.isfinite(lowest_BE), lowest_BE, 0.0), axis=0)
        lowest_E = jax.lax.stop_gradient(lowest_E.astype(jnp.float32))
    else:
        most, lowest_E = length, None
        taken_BTE = (scores_BTE > thresholds_E[None, None]) & real_BT[..., None]
        taken_BTE = checkpoint_name(taken_BTE, CHOICE)
    numbers_E = jnp.arange(num_routed)[None, None]
    expert_BTE = jnp.where(taken_BTE, numbers_E, num_routed)
    return ExpertChoice(
        expert_BTE, scores_BTE, num_routed * most, taken_BTE, jnp.int32(0), lowest_E
    )


def routed_mlp(x_BTD, expert_BTk, weight_BTk, w1_EDF, w3_EDF, w2_EFD, product: str, most: int):
    """Return sum_k weight w2_e(silu(x w1_e) * x w3_e) over the experts e of each token.

    Args:
      x_BTD: the input of the experts.
      expert_BTk: int32; nothing is computed for a number outside [0, E).
      weight_BTk: factors on the experts' outputs.
      w1_EDF, w3_EDF, w2_EFD: the matrices of the experts.
      product: as `model.experts.product`.
      most: the most pairs of a row with an expert in [0, E).
    """
    batch, length, width = x_BTD.shape
    pairs, num_experts = batch * most, w1_EDF.shape[0]
    block = block_rows(pairs, num_experts, product)
    expert_Nk = expert_BTk.reshape(batch * length, -1)
    layout = make_layout(expert_Nk, num_experts, block, pairs)
    x_RD = dispatch(x_BTD.reshape(-1, width), layout)
    gate_RF = grouped_matmul(x_RD, w1_EDF, layout, product)
    value_RF = grouped_matmul(x_RD, w3_EDF, layout, product)
    y_RD = grouped_matmul(swiglu(gate_RF, value_RF), w2_EFD, layout, product)
    y_ND = combine(y_RD, weight_BTk.reshape(expert_Nk.shape), layout)
    return y_ND.reshape(x_BTD.shape)


class ExpertKernels(nn.Module):
    """One matrix per expert."""

    shape: tuple[int, int, int]
    init: nn.initializers.Initializer

    @nn.compact
    def __call__(self, dtype):
        def each(key, shape):
            return jax.vmap(lambda key: self.init(key, shape[1:]))(jax.random.split(key, shape[0]))

        return self.param('kernel', each, self.shape).astype(dtype)


class Experts(nn.Module):
    """shared(x) + the weighted sum of f_e(x) over the experts e of a token; all are SwiGLUs."""

    hparams: ModelHparams
    looks_ahead: bool  # whether experts choose among whole rows, or by thresholds

    @nn.compact
    def __call__(self, x_BTD, real_BT, state: ExpertState):
        """Return the output [B, T, D], the ExpertsRecord, and the ExpertState for later tokens."""
        hparams = self.hparams.experts
        wide = wide_dtype(x_BTD.dtype)
        router = nn.Dense(
            hparams.num_choices,
            use_bias=False,
            dtype=wide,
            precision='highest',  # a GPU's default would make scores tie
            kernel_init=initializer(self.hparams.init_std),
            name='router',
        )
        logits_BTZ = router(x_BTD)
        softmax = hparams.scores == 'softmax'
        scores_BTZ = jax.nn.softmax(logits_BTZ) if softmax else jax.nn.sigmoid(logits_BTZ)
        if hparams.choice == 'token':
            choice = tokens_choose(hparams, scores_BTZ, real_BT, state.taken_BE)
        else:
            thresholds_E = None if self.looks_ahead else state.thresholds_E
            choice = experts_choose(hparams, scores_BTZ, real_BT, thresholds_E)
        y_BTD = sharded_routed_mlp(
            routed_mlp,
            x_BTD,
            choice.expert_BTk,
            choice.weight_BTk * hparams.route_scale,
            *self._kernels(x_BTD.dtype),
            hparams.product,
            choice.most,
        )
        if hparams.num_shared:
            y_BTD += SwiGLU(self.hparams, hparams.num_shared * hparams.d_ff, name='shared')(x_BTD)
        if hparams.row_capacity:
            now_BE = jnp.sum(choice.chosen_BTZ[..., : hparams.num_routed], 1, jnp.int32)
            before_BE = 0 if state.taken_BE is None else state.taken_BE
            state = state._replace(taken_BE=before_BE + now_BE)
        log_z_BT = jnp.where(real_BT, jax.nn.logsumexp(logits_BTZ, axis=-1), 0.0)
        real_scores_BTZ = jnp.where(real_BT[..., None], scores_BTZ, 0.0)
        record = ExpertsRecord(
            tokens=jnp.sum(real_BT, dtype=jnp.int32),
            pairs_Z=jnp.sum(choice.chosen_BTZ, axis=(0, 1), dtype=jnp.int32),
            dropped=choice.dropped,
            scores_Z=jnp.sum(real_scores_BTZ, axis=(0, 1)),
            log_z=jnp.sum(log_z_BT**2),
            lowest_E=choice.lowest_E,
            rows=jnp.sum(jnp.any(real_BT, axis=1), dtype=jnp.int32),
        )
        return y_BTD, record, state

    def _kernels(self, dtype):
        count, inner = self.hparams.experts.num_routed, self.hparams.experts.d_ff
        width, init = self.hparams.d_model, initializer(self.hparams.init_std)
        return (
            ExpertKernels((count, width, inner), init, name='w1')(dtype),
            ExpertKernels((count, width, inner), init, name='w3')(dtype),
            ExpertKernels((count, inner, width), residual_init(self.hparams), name='w2')(dtype),
        )
