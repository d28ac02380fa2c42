"""Losses besides cross-entropy, and the counts of routing and experts that metrics report."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from moddepth_jax.data.windows import IGNORED_LABEL as IGNORED
from moddepth_jax.hparams import Hparams

HISTOGRAM_BINS = 20  # of sigmoid(r), even in number: 0.5 is an edge


def masked_labels(batch):
    """The labels of a batch (NumPy or JAX), with -100 for padding, whatever its label is."""
    where = np.where if isinstance(batch['labels_BT'], np.ndarray) else jnp.where
    return where(batch['segment_ids_BT'] > 0, batch['labels_BT'], IGNORED)


def rule_loss(logits_LBT, targets_LBT, real_BT, num_real=None):
    """Binary cross-entropy of a causal rule against top-C membership, mean over layers and tokens.

    The targets of a row are the choices made in that same row; padding does not count.

    Args:
      logits_LBT: float32 [routed layers, B, T].
      targets_LBT: bool [routed layers, B, T].
      real_BT: bool [B, T], False for padding.
      num_real: tokens to divide by; None: the real tokens here.
    """
    num_real = jnp.sum(real_BT) if num_real is None else num_real
    targets_LBT = jax.lax.stop_gradient(targets_LBT).astype(jnp.float32)
    losses_LBT = optax.sigmoid_binary_cross_entropy(logits_LBT, targets_LBT)
    total = jnp.sum(jnp.where(real_BT[None], losses_LBT, 0.0))
    return total / (losses_LBT.shape[0] * num_real)


def causal_rule_loss(hparams: Hparams, records, segment_ids_BT, num_real=None):
    """Weighted loss that trains the model's causal rule; 0 if the rule has no loss."""
    routing = hparams.model.routing
    if records is None or not routing.rule_loss_weight:
        return jnp.zeros(())
    weight = routing.rule_loss_weight
    real_BT = segment_ids_BT > 0
    return weight * rule_loss(records.rule_logits_BT, records.top_c_BT, real_BT, num_real)


def routing_counts(records, segment_ids_BT):
    """Counts from which `routing_ratios` makes ratios; counts of several batches may be added.

    Args:
      records: RoutingRecord with leaves [routed layers, B, T].
      segment_ids_BT: int [B, T], 0 for padding.

    Returns:
      dict of float32 [routed layers]:
        real: real tokens.
        selected: tokens that the block processed.
        top_c: tokens of the top C.
        rule: tokens that the causal rule wants.
        both: tokens of the top C that the causal rule wants.
        dropped: tokens that the rule wants and the capacity does not hold.
        above_half: real tokens with sigmoid(r) > 0.5.
        gate: sum of the gates over the top C.
        rows: rows with a real token.
        lowest: sum over these rows of the lowest score of the top C.
        histogram: real tokens by sigmoid(r), [routed layers, HISTOGRAM_BINS].
    """
    real_LBT = jnp.broadcast_to(segment_ids_BT > 0, records.selected_BT.shape)
    rule_LBT = (records.rule_logits_BT > 0) & real_LBT
    gates_LBT = jnp.where(records.top_c_BT, records.gates_BT, 0.0)
    lowest_LB = jnp.min(jnp.where(records.top_c_BT, records.scores_BT, jnp.inf), axis=2)
    bins_LBT = jnp.clip(jax.nn.sigmoid(records.scores_BT) * HISTOGRAM_BINS, 0, HISTOGRAM_BINS - 1)
    in_bin_LBTX = bins_LBT.astype(int)[..., None] == jnp.arange(HISTOGRAM_BINS)[None, None, None]
    counted = {
        'real': real_LBT,
        'selected': records.selected_BT,
        'top_c': records.top_c_BT,
        'rule': rule_LBT,
        'both': rule_LBT & records.top_c_BT,
        'dropped': records.dropped_BT,
        'gate': gates_LBT,
        'above_half': real_LBT & (records.scores_BT > 0),
        'rows': jnp.isfinite(lowest_LB)[..., None],
        'lowest': jnp.where(jnp.isfinite(lowest_LB), lowest_LB, 0.0)[..., None],
        'histogram': in_bin_LBTX & real_LBT[..., None],
    }
    return jax.tree.map(lambda x: jnp.sum(x, axis=(1, 2), dtype=jnp.float32), counted)


def routing_ratios(counts):
    """`routing_counts` as ratios per routed layer, NaN if the denominator is 0.

    Returns:
      dict of:
        selected_fraction, rule_fraction, refused_fraction: shares of the real tokens that the block
          processed, that the causal rule wants, and that the rule wants and the capacity drops.
        sigmoid_above_half: share of the real tokens with sigmoid(r) > 0.5.
        sigmoid_histogram: shares by equal bins of sigmoid(r), [routed layers, HISTOGRAM_BINS].
        precision, recall: of the causal rule against membership in the top C.
        selected_gate: mean gate of the top C.
        lowest_selected_score: the C-th largest score, mean over rows.
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


def expert_counts(record):
    """Counts from which `expert_ratios` makes ratios; counts of several batches may be added.

    Args:
      record: ExpertsRecord with leaves [X, ...], X expert layers of Z = E + num_noop choices each.

    Returns:
      dict of float32, without gradients: the numbers of tokens `tokens_X`, of pairs of token and
      expert `pairs_XZ`, and of dropped pairs `dropped_X`; sums over tokens of scores `scores_XZ`
      and of squared log-partitions `log_z_X`. If experts choose by top-C, also the number of rows
      with a real token `rows_X`, and the sum over these of the lowest score taken, `lowest_XE`.
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
    return {
        name: jax.lax.stop_gradient(jnp.asarray(count, jnp.float32))
        for name, count in counts.items()
    }


def expert_ratios(counts, top_k: int, num_routed: int):
    """`expert_counts` as ratios per expert layer, NaN if the denominator is 0.

    Args:
      counts: NumPy or JAX arrays; the sum of any number of `expert_counts`.
      top_k: experts of a token, on average if experts choose.
      num_routed: E; later choices do nothing.

    Returns:
      dict: `load` [X, Z], the share of all pairs that falls on each choice; [X] each,
      `largest_load`, the pairs of the fullest routed expert over the mean of the routed ones;
      `noop_fraction` and `dropped_fraction`, shares of all pairs; `computed_fraction`, the computed
      pairs over top_k a token; `unused`, routed experts without a token; and if experts chose by
      top-C `lowest_taken` [X, E], the C-th largest score, mean over rows.
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
    """Balance loss and router z-loss, weighted.

    sum_i f_i P_i with f_i = Z pairs_i / (k n) and P_i = scores_i / n, and the mean of squared
    log-partitions, each the mean over expert layers (DeepSeekMoE, arXiv 2401.06066, section 3.3;
    the z-loss: ST-MoE, Zoph et al. 2022, arXiv 2202.08906). Experts that do nothing count among the
    Z. Pairs pass no gradient. If experts choose, loads are even and the balance loss is 0.

    Args:
      hparams: of the model.
      record: ExpertsRecord with leaves [X, ...].
      counts: the sum of `expert_counts` over the step if the record is of a micro-batch, so that
        the losses of the micro-batches sum to that of the step. None: those of the record.

    Returns:
      balance, z: scalars.
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
