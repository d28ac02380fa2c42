"""Wasted compute: how much a block changes the tokens that it processes, and whether routers know.

A block whose delta is small beside its input did little for the token. No paper has this measure;
it is this project's own.
"""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@jax.jit
def delta_ratios(inputs_LBTD, deltas_LBTD):
    """[L, B, T], float32 or wider: |delta| / |input| of each token in each block, Euclidean norms.

    Args:
      inputs_LBTD, deltas_LBTD: as LayerDeltas has them.
    """

    def norm(x_LBTD):
        wide = jnp.promote_types(x_LBTD.dtype, jnp.float32)
        return jnp.sqrt(jnp.sum(x_LBTD.astype(wide) ** 2, axis=-1))

    return norm(deltas_LBTD) / norm(inputs_LBTD)


def spread(values_N) -> dict | None:
    """{'mean', 'quantiles': {'0.05': ..}} of some numbers, at QUANTILES; None of none."""
    if not len(values_N):
        return None
    quantiles = np.quantile(values_N, QUANTILES)
    by_name = {str(q): float(value) for q, value in zip(QUANTILES, quantiles, strict=True)}
    return {'mean': float(np.mean(values_N, dtype=np.float64)), 'quantiles': by_name}


def rank_correlation(a_N, b_N) -> float | None:
    """Spearman's rank correlation where both are finite, ties at their mean rank.

    None of fewer than three pairs, or where one side does not vary.
    """
    both_N = np.isfinite(a_N) & np.isfinite(b_N)
    a_N, b_N = (np.asarray(side, float)[both_N] for side in (a_N, b_N))
    if len(a_N) < 3 or np.ptp(a_N) == 0 or np.ptp(b_N) == 0:
        return None
    return float(scipy.stats.spearmanr(a_N, b_N).statistic)
