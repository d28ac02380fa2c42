"""Measures signal dilution: how well a linear probe recovers a block's delta from the final stream.

The probe is a ridge regression from the final stream (before its norm) to the delta of a block.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moddepth_jax.model.layers import wide_dtype

RIDGE = 1e-5  # relative to the variance of each input, so that scales do not matter


class Moments(NamedTuple):
    """Central moments of N tokens of x_ND and y_NE, float64."""

    count: float  # N
    x_D: np.ndarray  # means
    y_E: np.ndarray
    xx_DD: np.ndarray  # sums of products of the deviations from the means
    xy_DE: np.ndarray
    yy: float  # sum of squared deviations of y over tokens and components

    def __add__(self, other: 'Moments') -> 'Moments':
        """Return the moments of both groups of tokens together (Chan, Golub and LeVeque 1983)."""
        count = self.count + other.count
        if not other.count or not self.count:
            return self if self.count else other
        x_D, y_E = other.x_D - self.x_D, other.y_E - self.y_E
        weight, share = self.count * other.count / count, other.count / count
        return Moments(
            count,
            self.x_D + share * x_D,
            self.y_E + share * y_E,
            self.xx_DD + other.xx_DD + weight * np.outer(x_D, x_D),
            self.xy_DE + other.xy_DE + weight * np.outer(x_D, y_E),
            self.yy + other.yy + weight * float(y_E @ y_E),
        )


@jax.jit
def _moments(x_BTD, y_BTE, counted_BT):
    wide = wide_dtype(x_BTD.dtype)
    x_ND, y_NE = (side.astype(wide).reshape(-1, side.shape[-1]) for side in (x_BTD, y_BTE))
    counted_N1 = counted_BT.reshape(-1, 1).astype(wide)
    count = jnp.sum(counted_N1)
    x_D, y_E = (jnp.sum(side * counted_N1, 0) / jnp.maximum(count, 1) for side in (x_ND, y_NE))
    x_ND, y_NE = (x_ND - x_D[None]) * counted_N1, (y_NE - y_E[None]) * counted_N1
    products = [jnp.einsum('nd,ne->de', x_ND, side, precision='highest') for side in (x_ND, y_NE)]
    return count, x_D, y_E, *products, jnp.sum(y_NE * y_NE)


def moments(x_BTD, y_BTE, counted_BT) -> Moments:
    """Return the Moments of the tokens in `counted_BT` (bool), from arrays of any float dtype."""
    found = jax.device_get(_moments(x_BTD, y_BTE, counted_BT))
    count, *arrays, yy = (np.asarray(part, np.float64) for part in found)
    return Moments(float(count), *arrays, float(yy))


def probe_r2(fitted: Moments, scored: Moments) -> float | None:
    """Return R^2 of the ridge regression of y on x, fitted on some tokens and scored on others.

    It is too low unless there are many more fitted tokens than components of x. None if x or y has
    no variance.
    """
    variance_D = np.diag(fitted.xx_DD)
    if not variance_D.any() or not scored.yy:
        return None
    penalty_D = np.where(variance_D > 0, RIDGE * variance_D, 1.0)
    weights_DE = np.linalg.solve(fitted.xx_DD + np.diag(penalty_D), fitted.xy_DE)
    bias_E = scored.y_E - fitted.y_E - (scored.x_D - fitted.x_D) @ weights_DE
    explained = 2 * np.sum(weights_DE * scored.xy_DE)
    explained -= np.sum(weights_DE * (scored.xx_DD @ weights_DE))
    return float((explained - scored.count * bias_E @ bias_E) / scored.yy)
