"""Routers: what scores the tokens of a routed block, by name; gates; and the causal predictor.

A router maps (x_BTD, tokens, number) to float32 scores [B, T]: the stream that enters the block,
what is known of its tokens, and the block's place among the routed ones, traced. Its PRODUCTS, the
vectors of the stream's width that it multiplies with each token, are what it costs.
"""

import fractions
import statistics

import flax.linen as nn
import jax
import jax.numpy as jnp

from moddepth_jax.hparams import ModelHparams, RoutingHparams
from moddepth_jax.model.layers import initializer

NORMAL = statistics.NormalDist()


def straight_through(scores):
    """1, with the gradient of sigmoid(r): it multiplies the delta, so that the router learns."""
    probability = jax.nn.sigmoid(scores)
    return 1.0 + (probability - jax.lax.stop_gradient(probability))


GATES = {
    'raw': lambda scores: scores,
    'sigmoid': jax.nn.sigmoid,
    'tanh': jnp.tanh,
    'none': jnp.ones_like,
    'straight_through': straight_through,
}


def selected_mean(capacity: float) -> float:
    """Mean of the highest fraction `capacity` of a standard normal, and 0.5 where it is less."""
    if capacity >= 1:
        return 0.5
    return max(0.5, NORMAL.pdf(NORMAL.inv_cdf(1 - capacity)) / capacity)


def widened(x_BTD):
    """x in float32, in which scores are computed, or in its own dtype where that is wider."""
    return x_BTD.astype(jnp.promote_types(x_BTD.dtype, jnp.float32))


def linear_scores(x_BTD, w_D):
    """w . x per token; on a GPU the default precision would make many scores tie."""
    return jnp.einsum('btd,d->bt', x_BTD, w_D, precision='highest')


def router_init(x_BTD, spread):
    """Initialiser of w: normal, so wide that w . x has standard deviation `spread` on this x."""

    def init(key, shape):
        rms = jnp.sqrt(jnp.mean(x_BTD**2) + 1e-12)
        return jax.random.normal(key, shape) * spread / (shape[0] ** 0.5 * rms)

    return init


class LearnedRouter(nn.Module):
    """r = w . x in float32 on the residual stream, no bias (Raposo et al. 2024, section 3.4).

    The initial w is normal, as wide as makes the selected raw gates average `initial_gate` on the
    stream that the block sees when it is initialised.
    """

    routing: RoutingHparams
    PRODUCTS = 1

    @nn.compact
    def __call__(self, x_BTD, tokens, number):
        del tokens, number
        x_BTD = widened(x_BTD)
        length = x_BTD.shape[1]
        capacity = self.routing.num_selected(length) / length
        spread = self.routing.initial_gate / selected_mean(capacity)
        return linear_scores(x_BTD, self.param('w', router_init(x_BTD, spread), x_BTD.shape[-1:]))


class StraightThroughRouter(nn.Module):
    """r = w . x + b, its sigmoid passing a gradient through a hard gate of 1; r starts as N(0, 1).

    See the gate `straight_through`.
    """

    routing: RoutingHparams
    PRODUCTS = 1

    @nn.compact
    def __call__(self, x_BTD, tokens, number):
        del tokens, number
        x_BTD = widened(x_BTD)
        w_D = self.param('w', router_init(x_BTD, 1.0), x_BTD.shape[-1:])
        return linear_scores(x_BTD, w_D) + self.param('b', nn.initializers.zeros, ())


class NormRouter(nn.Module):
    """r = L2 norm of the residual stream; no parameters."""

    routing: RoutingHparams
    PRODUCTS = 0

    def __call__(self, x_BTD, tokens, number):
        del tokens, number
        return jnp.sqrt(jnp.sum(widened(x_BTD) ** 2, axis=-1))


class RandomRouter(nn.Module):
    """r ~ N(0, 1) from each token's seed and the block: the paper's control (section 4.1)."""

    routing: RoutingHparams
    PRODUCTS = 0

    def __call__(self, x_BTD, tokens, number):
        del x_BTD
        draw = jax.vmap(jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), number)))
        return jax.vmap(jax.vmap(jax.random.normal))(draw(tokens.seeds_BT))


class PositionRouter(nn.Module):
    """r = 1 where floor((t+1) capacity) > floor(t capacity), else -1: an evenly spread control.

    Capacity is taken as a fraction of integers, so that the pattern is exact at any position.
    """

    routing: RoutingHparams
    PRODUCTS = 0

    def __call__(self, x_BTD, tokens, number):
        del x_BTD, number
        share = fractions.Fraction(self.routing.capacity).limit_denominator(10_000)
        phase_BT = (tokens.positions_BT % share.denominator) * share.numerator % share.denominator
        return jnp.where(phase_BT + share.numerator >= share.denominator, 1.0, -1.0)


ROUTERS = {
    'learned': LearnedRouter,
    'norm': NormRouter,
    'random': RandomRouter,
    'position': PositionRouter,
    'straight_through': StraightThroughRouter,
}


def token_seeds(key, tokens_BT, positions_BT):
    """uint32 [B, T]: a draw of `key`, the token's id and its position, and of nothing else.

    A row's random choices thus depend on no other row, and decoding repeats those of a full pass.
    """

    def seed(token, position):
        return jax.random.bits(jax.random.fold_in(jax.random.fold_in(key, position), token))

    return jax.vmap(jax.vmap(seed))(tokens_BT, positions_BT)


def fixed_threshold(routing: RoutingHparams) -> float:
    """Where the `threshold` rule of a control cuts: random at N(0, 1)'s quantile, position at 0."""
    if routing.router == 'position' or routing.capacity >= 1:
        return 0.0 if routing.router == 'position' else -jnp.inf
    return NORMAL.inv_cdf(1 - routing.capacity)


class Predictor(nn.Module):
    """Logit that a token will be among the top C, from its own vector alone (section 3.5).

    It reads stop_gradient(x), so its loss touches no other parameter.
    """

    hparams: ModelHparams

    @nn.compact
    def __call__(self, x_BTD):
        x_BTD = widened(jax.lax.stop_gradient(x_BTD))
        init = initializer(self.hparams.init_std)
        if self.hparams.routing.predictor_width:
            width = self.hparams.routing.predictor_width
            hidden = nn.Dense(width, kernel_init=init, precision='highest', name='hidden')
            x_BTD = jax.nn.silu(hidden(x_BTD))
        return nn.Dense(1, kernel_init=init, precision='highest', name='out')(x_BTD)[..., 0]
