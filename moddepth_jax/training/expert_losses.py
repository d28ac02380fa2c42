"""Losses that even the loads of experts, and what metrics say of those loads."""

import jax
import jax.numpy as jnp

from moddepth_jax.hparams import Hparams


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
