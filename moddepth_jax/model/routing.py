"""Which tokens enter a routed block: scores, expert choice, gates and causal rules."""

import statistics
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from moddepth_jax.hparams import ModelHparams, RoutingHparams
from moddepth_jax.model.layers import initializer

GATES = {
    'raw': lambda scores: scores,
    'sigmoid': jax.nn.sigmoid,
    'tanh': jnp.tanh,
    'none': jnp.ones_like,
}
ROUTINGS = ('top_c', 'predictor', 'aux_loss', 'dense')  # all but the first are causal


class RoutingRecord(NamedTuple):
    """What a routed block decided, per token.

    Attributes:
      scores_BT: float32, the router's r.
      rule_logits_BT: float32, the trained causal rule lets a token enter where this is above 0.
      top_c_BT: bool, membership of the C highest scores of the row (expert choice).
      entered_BT: bool, the tokens that did enter in this forward pass.
    """

    scores_BT: jax.Array
    rule_logits_BT: jax.Array
    top_c_BT: jax.Array
    entered_BT: jax.Array


def select_top_c(scores_BT, num_selected: int):
    """The C highest scores of each row, exactly C on ties (the lower index wins), in time order.

    Args:
      scores_BT: float [B, T]. A NaN counts as the highest score.
      num_selected: C, from 1 to T.

    Returns:
      indices_BC: int32 [B, C], ascending.

    Raises:
      ValueError: C outside [1, T].
    """
    length = scores_BT.shape[1]
    if not 1 <= num_selected <= length:
        raise ValueError(f'num_selected={num_selected} must lie in [1, {length}]')
    # top_k ranks by bits: -0.0 below 0.0, and a NaN of negative sign below all.
    scores_BT = jnp.where(scores_BT == 0, 0.0, scores_BT)
    scores_BT = jnp.where(jnp.isnan(scores_BT), jnp.nan, scores_BT)
    _, indices_BC = jax.lax.top_k(scores_BT, num_selected)
    return jnp.sort(indices_BC, axis=1).astype(jnp.int32)


def membership(indices_BC, length: int):
    """bool [B, T]: which tokens the indices name."""
    rows = jnp.zeros((indices_BC.shape[0], length), bool)
    return jax.vmap(lambda row_T, index_C: row_T.at[index_C].set(True))(rows, indices_BC)


def gather_rows(x_BTX, indices_BC):
    """[B, C, ...]: the named tokens of each row. Indices are distinct and ascending."""

    def gather(x_TX, index_C):
        at = x_TX.at[index_C]
        return at.get(indices_are_sorted=True, unique_indices=True, mode='promise_in_bounds')

    return jax.vmap(gather)(x_BTX, indices_BC)


def scatter_add_rows(x_BTD, indices_BC, update_BCD):
    """x with `update` added to the named tokens. Distinct indices make reruns bit-equal."""

    def scatter(x_TD, index_C, update_CD):
        at = x_TD.at[index_C]
        return at.add(
            update_CD, indices_are_sorted=True, unique_indices=True, mode='promise_in_bounds'
        )

    return jax.vmap(scatter)(x_BTD, indices_BC, update_BCD)


def selected_mean(capacity: float) -> float:
    """Mean of the highest fraction `capacity` of a standard normal, and 0.5 where it is less."""
    if capacity >= 1:
        return 0.5
    normal = statistics.NormalDist()
    return max(0.5, normal.pdf(normal.inv_cdf(1 - capacity)) / capacity)


class LearnedRouter(nn.Module):
    """r = w . x in float32 on the residual stream, no bias (Raposo et al. 2024, section 3.4).

    The initial w is normal, as wide as makes the selected raw gates average `initial_gate` on the
    stream that the block sees when it is initialised.
    """

    routing: RoutingHparams

    @nn.compact
    def __call__(self, x_BTD):
        x_BTD = x_BTD.astype(jnp.float32)

        def init(key, shape):
            rms = jnp.sqrt(jnp.mean(x_BTD**2) + 1e-12)
            wide = self.routing.initial_gate / selected_mean(self.routing.capacity)
            return jax.random.normal(key, shape) * wide / (shape[0] ** 0.5 * rms)

        w_D = self.param('w', init, x_BTD.shape[-1:])
        # On a GPU the default precision would make many scores tie.
        return jnp.einsum('btd,d->bt', x_BTD, w_D, precision='highest')


class Predictor(nn.Module):
    """Logit that a token will be among the top C, from its own vector alone (section 3.5).

    It reads stop_gradient(x), so its loss touches no other parameter.
    """

    hparams: ModelHparams

    @nn.compact
    def __call__(self, x_BTD):
        x_BTD = jax.lax.stop_gradient(x_BTD).astype(jnp.float32)
        init = initializer(self.hparams.init_std)
        if self.hparams.routing.predictor_width:
            width = self.hparams.routing.predictor_width
            hidden = nn.Dense(width, kernel_init=init, precision='highest', name='hidden')
            x_BTD = jax.nn.silu(hidden(x_BTD))
        return nn.Dense(1, kernel_init=init, precision='highest', name='out')(x_BTD)[..., 0]


ROUTERS = {'learned': LearnedRouter}
