"""Labels that count, and the loss that trains the causal rules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from moddepth_jax.data.windows import IGNORED_LABEL as IGNORED
from moddepth_jax.hparams import Hparams

HISTOGRAM_BINS = 20  # of sigmoid(r), even in number: 0.5 is an edge


def masked_labels(batch):
    """The labels of a batch (NumPy or JAX), -100 for padding too, whatever its label is."""
    where = np.where if isinstance(batch['labels_BT'], np.ndarray) else jnp.where
    return where(batch['segment_ids_BT'] > 0, batch['labels_BT'], IGNORED)


def rule_loss(logits_LBT, targets_LBT, real_BT, num_real=None):
    """Binary cross-entropy of a causal rule against top-C membership, mean over layers and tokens.

    The targets of a row are the choices made in that same row; padding does not count.

    Args:
      logits_LBT: float32 [routed layers, B, T].
      targets_LBT: bool [routed layers, B, T].
      real_BT: bool [B, T], False for padding.
      num_real: tokens to divide by; None: those that are real here.
    """
    num_real = jnp.sum(real_BT) if num_real is None else num_real
    targets_LBT = jax.lax.stop_gradient(targets_LBT).astype(jnp.float32)
    losses_LBT = optax.sigmoid_binary_cross_entropy(logits_LBT, targets_LBT)
    total = jnp.sum(jnp.where(real_BT[None], losses_LBT, 0.0))
    return total / (losses_LBT.shape[0] * num_real)


def causal_rule_loss(hparams: Hparams, records, segment_ids_BT, num_real=None):
    """Weighted loss that trains the model's causal rule; 0 where there is nothing to train."""
    routing = hparams.model.routing
    if records is None or not routing.rule_loss_weight:
        return jnp.zeros(())
    weight = routing.rule_loss_weight
    real_BT = segment_ids_BT > 0
    return weight * rule_loss(records.rule_logits_BT, records.top_c_BT, real_BT, num_real)


def routing_counts(records, segment_ids_BT):
    """What `routing_ratios` divides; counts of several batches may be added up first.

    Args:
      records: RoutingRecord with leaves [routed layers, B, T].
      segment_ids_BT: int [B, T], 0 for padding.

    Returns:
      dict of float32 [routed layers]: tokens that are `real`, that `entered`, of the top C
      (`chosen`), that the causal rule would let in (`said`), `both` of these, `refused` for want
      of room, with sigmoid(r) `above_half`; over the top C the sum of the `gate`; over `rows` that
      have a real token the sum of the lowest score of the top C (`lowest`); and the `histogram` of
      sigmoid(r) over real tokens, [routed layers, HISTOGRAM_BINS].
    """
    real_LBT = jnp.broadcast_to(segment_ids_BT > 0, records.selected_BT.shape)
    said_LBT = (records.rule_logits_BT > 0) & real_LBT
    gates_LBT = jnp.where(records.top_c_BT, records.gates_BT, 0.0)
    lowest_LB = jnp.min(jnp.where(records.top_c_BT, records.scores_BT, jnp.inf), axis=2)
    bins_LBT = jnp.clip(jax.nn.sigmoid(records.scores_BT) * HISTOGRAM_BINS, 0, HISTOGRAM_BINS - 1)
    in_bin_LBTX = bins_LBT.astype(int)[..., None] == jnp.arange(HISTOGRAM_BINS)[None, None, None]
    counted = {
        'real': real_LBT,
        'entered': records.selected_BT,
        'chosen': records.top_c_BT,
        'said': said_LBT,
        'both': said_LBT & records.top_c_BT,
        'refused': records.dropped_BT,
        'gate': gates_LBT,
        'above_half': real_LBT & (records.scores_BT > 0),
        'rows': jnp.isfinite(lowest_LB)[..., None],
        'lowest': jnp.where(jnp.isfinite(lowest_LB), lowest_LB, 0.0)[..., None],
        'histogram': in_bin_LBTX & real_LBT[..., None],
    }
    return jax.tree.map(lambda x: jnp.sum(x, axis=(1, 2), dtype=jnp.float32), counted)


def routing_ratios(counts):
    """`routing_counts` as ratios per routed layer, NaN where there is nothing to divide by.

    Returns:
      dict: of the real tokens, `selected_fraction` entered, `rule_fraction` the causal rule would
      let in, `refused_fraction` did not enter for want of room; `precision` and `recall` of the
      causal rule against top-C membership; `selected_gate`, the mean gate of the top C;
      `lowest_selected_score`, the C-th largest score, mean over rows; `sigmoid_above_half`, the
      share of real tokens with sigmoid(r) > 0.5, and `sigmoid_histogram` [routed layers,
      HISTOGRAM_BINS], their shares by equal bins of sigmoid(r).
    """
    shares = counts['histogram'] / counts['real'][:, None]
    return {
        'selected_fraction': counts['entered'] / counts['real'],
        'rule_fraction': counts['said'] / counts['real'],
        'precision': counts['both'] / counts['said'],
        'recall': counts['both'] / counts['chosen'],
        'refused_fraction': counts['refused'] / counts['real'],
        'selected_gate': counts['gate'] / counts['chosen'],
        'lowest_selected_score': counts['lowest'] / counts['rows'],
        'sigmoid_above_half': counts['above_half'] / counts['real'],
        'sigmoid_histogram': shares,
    }


def expert_counts(record):
    """What `expert_ratios` divides; counts of several batches may be added up first.

    Args:
      record: ExpertsRecord with leaves [X, ...], X expert layers of Z = E + num_noop choices each.

    Returns:
      dict of float32, without gradients: `tokens_X` and `pairs_XZ` of token and expert, `dropped_X`
      of these, over tokens the sums of scores `scores_XZ` and of squared log-partitions `log_z_X`;
      where experts choose by top-C also, over `rows_X` that have a real token, the sum of the
      lowest score taken, `lowest_XE`.
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
    """`expert_counts` as ratios per expert layer, NaN where there is nothing to divide by.

    Args:
      counts: NumPy or JAX arrays; the sum of any number of `expert_counts`.
      top_k: experts that a token passes, on average where experts choose.
      num_routed: E; choices from there on do nothing.

    Returns:
      dict: `load` [X, Z], the share of all pairs that falls on each choice; [X] each,
      `largest_load`, the pairs of the fullest routed expert over the mean of the routed ones;
      `noop_fraction` and `dropped_fraction`, shares of all pairs; `computed_fraction`, the pairs
      that an expert computed over top_k a token; `unused`, routed experts that got no token; and
      where experts chose by top-C `lowest_taken` [X, E], the C-th largest score, mean over rows.
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
    """Balance loss and router z-loss, weighted; 0 where there is nothing to train.

    sum_i f_i P_i with f_i = Z pairs_i / (k n) and P_i = scores_i / n, and the mean of squared
    log-partitions, each the mean over expert layers (DeepSeekMoE, arXiv 2401.06066, section 3.3;
    the z-loss: ST-MoE, Zoph et al. 2022, arXiv 2202.08906). Experts that do nothing count among the
    Z. No gradient passes through pairs. Experts that choose have even loads, hence no balance loss.

    Args:
      hparams: of the model.
      record: ExpertsRecord with leaves [X, ...].
      counts: the sum of `expert_counts` over the step where the record is of a micro-batch: the
        losses of the micro-batches then sum to that of the step. None: those of the record.

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
