"""Routers, which score the tokens of a routed block, and gates on its output."""

import fractions
import functools
import statistics

import flax.linen as nn
import jax
import jax.numpy as jnp

from moddepth_jax.hparams import RoutingHparams
from moddepth_jax.hparams.checks import refuse
from moddepth_jax.hparams.registry import GATES, ROUTERS
from moddepth_jax.model.layers import widen
from moddepth_jax.model.routing import TokenInfo

NORMAL = statistics.NormalDist()

GATES.register('raw')(lambda scores: scores)
GATES.register('sigmoid')(jax.nn.sigmoid)
GATES.register('tanh')(jnp.tanh)
GATES.register('none')(jnp.ones_like)
GATES.register('softmax')(functools.partial(jax.nn.softmax, axis=0))  # over the loops


@GATES.register('straight_through')
def straight_through(scores):
    """Return 1 with the gradient of sigmoid(r), through which the router learns."""
    probability = jax.nn.sigmoid(scores)
    return 1.0 + (probability - jax.lax.stop_gradient(probability))


class Router(nn.Module):
    """Maps (x_BTD, tokens, number of the block) to float32 scores [B, T].

    A router is a subclass that is registered in ROUTERS.
    """

    routing: RoutingHparams
    gates = ('none',)  # the names in GATES that suit its scores; `auto` is the first
    # The causal rules that can replace its top C; `auto` is the first.
    rules = ('threshold', 'predictor', 'dense')
    products = 0  # number of dot products of width D per token, for the FLOP count
    is_control = False  # whether scores ignore the stream, so that there is a `known_threshold`
    draws = False  # whether it needs TokenInfo.seeds_BT
    assigns_depth = False  # whether it chooses the loops of a token, not the tokens of a loop

    @classmethod
    def check(cls, routing: RoutingHparams):
        """Raise a one-line ValueError if the knobs do not fit this router."""
        constant = routing.capacity_form == 'fraction' and not routing.capacity_stages
        if cls.is_control and not constant:
            right = 'its scores are compared with a capacity, which must be one constant fraction'
            refuse('model.routing.router', routing.router, right)

    @classmethod
    def known_threshold(cls, routing: RoutingHparams) -> float:
        """Return the score of a control that a fraction `capacity` of all tokens exceeds."""
        raise NotImplementedError


def selected_mean(capacity: float) -> float:
    """Return the mean of the highest fraction `capacity` of a standard normal, at least 0.5."""
    if capacity >= 1:
        return 0.5
    return max(0.5, NORMAL.pdf(NORMAL.inv_cdf(1 - capacity)) / capacity)


def linear_scores(x_BTD, w_D):
    """Return w . x of each token. On a GPU the default precision would make many scores tie."""
    return jnp.einsum('btd,d->bt', x_BTD, w_D, precision='highest')


def router_init(x_BTD, spread):
    """Return an initializer of w: normal, so that w . x has standard deviation `spread` on x."""

    def init(key, shape):
        rms = jnp.sqrt(jnp.mean(x_BTD**2) + 1e-12)
        return jax.random.normal(key, shape) * spread / (shape[0] ** 0.5 * rms)

    return init


@ROUTERS.register('learned')
class LearnedRouter(Router):
    """r = w . x in float32 on the residual stream, without bias (Raposo et al. 2024, section 3.4).

    w is scaled so that the raw gates of selected tokens initially average `initial_gate`.
    """

    gates = ('raw', 'sigmoid', 'tanh', 'none')
    rules = ('predictor', 'aux_loss', 'threshold', 'dense')
    products = 1

    @nn.compact
    def __call__(self, x_BTD, tokens: TokenInfo, number):
        x_BTD, length = widen(x_BTD), x_BTD.shape[1]
        capacity = self.routing.num_selected(length) / length
        spread = self.routing.initial_gate / selected_mean(capacity)
        return linear_scores(x_BTD, self.param('w', router_init(x_BTD, spread), x_BTD.shape[-1:]))


@ROUTERS.register('token_choice')
class TokenChoiceRouter(Router):
    """r_n = w_n . x in float32 for each loop n, without bias, on the stream before the loops.

    The loop of the highest score is the token's last loop (Mixture-of-Recursions, Bae et al. 2025,
    arXiv 2507.10524, section 2.2.1). Scores start as N(0, 1).
    """

    gates = ('softmax',)
    rules = ('assigned',)
    products = 1
    assigns_depth = True

    @nn.compact
    def __call__(self, x_BTD, tokens: TokenInfo, number):
        x_BTD = widen(x_BTD)
        return linear_scores(x_BTD, self.param('w', router_init(x_BTD, 1.0), x_BTD.shape[-1:]))

    @classmethod
    def check(cls, routing: RoutingHparams):
        right = f'if model.routing.router is {routing.router}, which has no capacity'
        only_ones = {'layers': 'loops', 'capacity_stages': '', 'overflow': 'skip'}
        for field, only in (only_ones | {'capacity_form': 'fraction'}).items():
            if (value := getattr(routing, field)) != only:
                refuse(f'model.routing.{field}', value, f'must be {only or "empty"} {right}')


@ROUTERS.register('straight_through')
class StraightThroughRouter(Router):
    """r = w . x + b, initially N(0, 1). The gate is 1 with the gradient of sigmoid(r)."""

    gates = ('straight_through',)
    rules = ('threshold', 'predictor', 'aux_loss', 'positive')
    products = 1

    @nn.compact
    def __call__(self, x_BTD, tokens: TokenInfo, number):
        x_BTD = widen(x_BTD)
        w_D = self.param('w', router_init(x_BTD, 1.0), x_BTD.shape[-1:])
        return linear_scores(x_BTD, w_D) + self.param('b', nn.initializers.zeros, ())


@ROUTERS.register('norm')
class NormRouter(Router):
    """r = L2 norm of the residual stream; no parameters and no gradient (at 0 it is infinite)."""

    rules = ('dense', 'threshold', 'predictor')

    def __call__(self, x_BTD, tokens: TokenInfo, number):
        return jnp.sqrt(jnp.sum(widen(jax.lax.stop_gradient(x_BTD)) ** 2, axis=-1))


@ROUTERS.register('random')
class RandomRouter(Router):
    """r ~ N(0, 1), drawn from the token's seed and the block: the paper's control (section 4.1)."""

    rules = ('threshold',)
    is_control = True
    draws = True

    def __call__(self, x_BTD, tokens: TokenInfo, number):
        draw = jax.vmap(jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), number)))
        return jax.vmap(jax.vmap(jax.random.normal))(draw(tokens.seeds_BT))

    @classmethod
    def known_threshold(cls, routing: RoutingHparams) -> float:
        return -jnp.inf if routing.capacity >= 1 else NORMAL.inv_cdf(1 - routing.capacity)


@ROUTERS.register('position')
class PositionRouter(Router):
    """r = 1 where floor((t+1) capacity) > floor(t capacity), else -1: an evenly spread control."""

    rules = ('threshold',)
    is_control = True

    def __call__(self, x_BTD, tokens: TokenInfo, number):
        # A fraction of integers makes the pattern exact at any position.
        share = fractions.Fraction(self.routing.capacity).limit_denominator(10_000)
        phase_BT = (tokens.positions_BT % share.denominator) * share.numerator % share.denominator
        return jnp.where(phase_BT + share.numerator >= share.denominator, 1.0, -1.0)

    @classmethod
    def check(cls, routing: RoutingHparams):
        super().check(routing)
        if routing.capacity < 1e-4:
            right = 'must be 1e-4 or more for the position router'
            refuse('model.routing.capacity', routing.capacity, right)

    @classmethod
    def known_threshold(cls, routing: RoutingHparams) -> float:
        return 0.0


def token_seeds(key, tokens_BT, positions_BT):
    """Return seeds uint32 [B, T] that depend only on `key`, the token's id and its position."""

    def seed(token, position):
        return jax.random.bits(jax.random.fold_in(jax.random.fold_in(key, position), token))

    return jax.vmap(jax.vmap(seed))(tokens_BT, positions_BT)


def fixed_threshold(routing: RoutingHparams) -> float:
    """Return the known threshold of a control, and 0 for other routers."""
    router = routing.router_class
    return router.known_threshold(routing) if router.is_control else 0.0
