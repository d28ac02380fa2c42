"""Auxiliary losses of routing and experts, and the counts that metrics are made of."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from moddepth_jax.data.windows import IGNORED_LABEL as IGNORED
from moddepth_jax.hparams import Hparams

HISTOGRAM_BINS = 20  # of sigmoid(r); an even number, so that 0.5 is an edge


def masked_labels(batch):
    """Return the labels of a batch (NumPy or JAX) with -100 at all padding."""
    where = np.where if isinstance(batch['labels_BT'], np.ndarray) else jnp.where
    return where(batch['segment_ids_BT'] > 0, batch['labels_BT'], IGNORED)


def causal_rule_loss(hparams: Hparams, record, segment_ids_BT, num_real, ends_N=None):
    """Return the weighted loss that trains the causal rule.

    It is the binary cross-entropy of the rule against membership in the top C, the mean over routed
    layers and `num_real` tokens. It is 0 if the rule has no loss. Routers that assign depths have
    `depth_loss` instead, with `ends_N`. `record` is a RoutingRecord with leaves [routed layers, B,
    T], or None.
    """
    if record is not None and hparams.model.routing.router_class.assigns_depth:
        return depth_loss(hparams, record, segment_ids_BT, num_real, ends_N)
    weight = hparams.model.routing.rule_loss_weight
    if record is None or not weight:
        return jnp.zeros(())
    targets_LBT = jax.lax.stop_gradient(record.top_c_BT).astype(jnp.float32)
    losses_LBT = optax.sigmoid_binary_cross_entropy(record.rule_logits_BT, targets_LBT)
    total = jnp.sum(jnp.where(segment_ids_BT[None] > 0, losses_LBT, 0.0))
    return weight * (total / (losses_LBT.shape[0] * num_real))


def count_ends(record, segment_ids_BT):
    """Return how many real tokens have each loop as their last, [loops] in the scores' dtype."""
    scores_NBT = record.scores_BT
    last_NBT = jax.nn.one_hot(jnp.argmax(scores_NBT, axis=0), len(scores_NBT), axis=0)
    return jnp.sum(jnp.where(segment_ids_BT > 0, last_NBT, 0), axis=(1, 2), dtype=scores_NBT.dtype)


def depth_loss(hparams: Hparams, record, segment_ids_BT, num_real, ends_N=None):
    """Return the weighted balance loss and z-loss of token choice, over real tokens.

    The balance loss is N sum_n f_n P_n, where f_n is the fraction of the step's tokens whose last
    loop is n, and P_n the mean of softmax(r)_n. The z-loss is the mean of squared log-partitions
    (Bae et al. 2025, arXiv 2507.10524, section 2.2.1; weights 0.1 and 1e-5). `num_real` and
    `ends_N`, of `count_ends`, are those of all micro-batches of the step; None: there is only one.
    """
    knobs, real_BT = hparams.model.routing, segment_ids_BT > 0
    scores_NBT = record.scores_BT
    shares_NBT = jnp.where(real_BT[None], jax.nn.softmax(scores_NBT, axis=0), 0)
    f_N = (count_ends(record, segment_ids_BT) if ends_N is None else ends_N) / num_real
    balance = len(scores_NBT) * jnp.sum(f_N * jnp.sum(shares_NBT, axis=(1, 2))) / num_real
    log_z_BT = jax.nn.logsumexp(scores_NBT, axis=0)
    z = jnp.sum(jnp.where(real_BT, log_z_BT, 0) ** 2) / num_real
    return knobs.balance_weight * balance + knobs.z_loss * z


def routing_counts(record, segment_ids_BT, of_loops: bool):
    """Count what `routing_ratios` makes ratios of; counts of several batches may be added.

    `record` is a RoutingRecord with leaves [routed layers, B, T]. The counts are float32 [routed
    layers], mostly numbers of real tokens. `histogram` [routed layers, HISTOGRAM_BINS] is that of
    sigmoid(r). `gate` is summed over the top C, `lowest` is the lowest score in the top C summed
    over the `rows` with a real token. `dead` [1] counts real tokens that no routed layer selects;
    with `of_loops`, those that no loop after the first selects.
    """
    real_LBT = jnp.broadcast_to(segment_ids_BT > 0, record.selected_BT.shape)
    rule_LBT = (record.rule_logits_BT > 0) & real_LBT
    lowest_LB = jnp.min(jnp.where(record.top_c_BT, record.scores_BT, jnp.inf), axis=2)
    bins_LBT = jnp.clip(jax.nn.sigmoid(record.scores_BT) * HISTOGRAM_BINS, 0, HISTOGRAM_BINS - 1)
    in_bin_LBTX = bins_LBT.astype(int)[..., None] == jnp.arange(HISTOGRAM_BINS)[None, None, None]
    counted = {
        'real': real_LBT,
        'selected': record.selected_BT,
        'dead': real_LBT[:1] & ~jnp.any(record.selected_BT[of_loops:], axis=0, keepdims=True),
        'top_c': record.top_c_BT,
        'rule': rule_LBT,
        'both': rule_LBT & record.top_c_BT,
        'dropped': record.dropped_BT,
        'gate': jnp.where(record.top_c_BT, record.gates_BT, 0.0),
        'above_half': real_LBT & (record.scores_BT > 0),
        'rows': jnp.isfinite(lowest_LB)[..., None],
        'lowest': jnp.where(jnp.isfinite(lowest_LB), lowest_LB, 0.0)[..., None],
        'histogram': in_bin_LBTX & real_LBT[..., None],
    }
    return jax.tree.map(lambda x: jnp.sum(x, axis=(1, 2), dtype=jnp.float32), counted)


def routing_ratios(counts):
    """Return ratios per routed layer from `routing_counts`; NaN if the denominator is 0.

    Fractions, `sigmoid_above_half` and `sigmoid_histogram` [routed layers, HISTOGRAM_BINS] are
    fractions of the real tokens. Precision and recall compare the causal rule with the top C.
    `selected_gate` is a mean over the top C, `lowest_selected_score` a mean over rows.
    """
    return {
        'selected_fraction': counts['selected'] / counts['real'],
        'rule_fraction': counts['rule'] / counts['real'],
        'precision': counts['both'] / counts['rule'],
        'recall': counts['both'] / counts['top_c'],
        'refused_fraction': counts['dropped'] / counts['real'],
        'selected_gate': counts['gate'] / counts['top_c'],
        'lowest_selected_score': counts['lowest'] / counts['rows'],
        'sigmoid_above_half': counts['above_half'] / counts['real'],
        'sigmoid_histogram': counts['histogram'] / counts['real'][:, None],
    }


def dead_tokens(counts):
    """Return the fraction of real tokens that are dead; `counts` are of `routing_counts`."""
    return counts['dead'][0] / counts['real'][0]


def expert_counts(record):
    """Count what `expert_ratios` makes ratios of; counts of several batches may be added.

    They are the fields of an ExpertsRecord with leaves [X, ...], as float32 without gradients, for
    X expert layers of Z = E + num_noop choices each.
    """
    counts = {
        'tokens_X': record.tokens,
        'pairs_XZ': record.pairs_Z,
        'dropped_X': record.dropped,
        'scores_XZ': record.scores_Z,
        'log_z_X': record.log_z,
    }
    if record.lowest_E is not None:
        counts |= {'rows_X': record.rows, 'lowest_XE': record.lowest_E}
    return jax.tree.map(lambda x: jax.lax.stop_gradient(jnp.asarray(x, jnp.float32)), counts)


def expert_ratios(counts, top_k: int, num_routed: int):
    """Return ratios per expert layer from `expert_counts`; NaN if the denominator is 0.

    Returns:
      `load` [X, Z]: fraction of all pairs that fall on each choice; the choices after the first
      `num_routed` do nothing. `largest_load` [X]: pairs of the fullest routed expert over the mean.
      `noop_fraction` and `dropped_fraction` [X]: fractions of all pairs. `computed_fraction` [X]:
      computed pairs over `top_k` pairs per token. `unused` [X]: routed experts without a token.
      `lowest_taken` [X, E], if experts choose by top-C: C-th largest score, mean over rows.
    """
    pairs_XZ = counts['pairs_XZ']
    pairs_X, routed_XE = pairs_XZ.sum(1), pairs_XZ[:, :num_routed]
    routed_X, dropped_X = routed_XE.sum(1), counts['dropped_X']
    ratios = {
        'load': pairs_XZ / pairs_X[:, None],
        'largest_load': routed_XE.max(1) * num_routed / routed_X,
        'noop_fraction': (pairs_X - routed_X) / pairs_X,
        'dropped_fraction': dropped_X / pairs_X,
        'computed_fraction': (routed_X - dropped_X) / (top_k * counts['tokens_X']),
        'unused': (routed_XE == 0).sum(1),
    }
    if 'lowest_XE' in counts:
        ratios['lowest_taken'] = counts['lowest_XE'] / counts['rows_X'][:, None]
    return ratios


def expert_loss(hparams: Hparams, record, counts=None):
    """Return the weighted balance loss and router z-loss, each a mean over expert layers.

    The balance loss is sum_i f_i P_i with f_i = Z pairs_i / (k n) and P_i = scores_i / n
    (DeepSeekMoE, arXiv 2401.06066, section 3.3); it is 0 if experts choose their tokens. The z-loss
    is the mean of squared log-partitions (ST-MoE, Zoph et al. 2022, arXiv 2202.08906). For the
    ExpertsRecord of a micro-batch, `counts` is the sum of `expert_counts` over the step.
    """
    experts = hparams.model.experts
    counts = expert_counts(record) if counts is None else counts
    tokens_X = jnp.maximum(counts['tokens_X'], 1)
    z = experts.z_loss * jnp.mean(record.log_z / tokens_X)
    if experts.choice == 'expert':
        return jnp.zeros(()), z
    pairs_XZ = counts['pairs_XZ'].astype(record.scores_Z.dtype)
    loads_XZ = pairs_XZ * (experts.num_choices / experts.top_k) / tokens_X[:, None]
    balance_X = jnp.sum(loads_XZ * record.scores_Z, axis=1) / tokens_X
    return experts.balance_weight * jnp.mean(balance_X), z
