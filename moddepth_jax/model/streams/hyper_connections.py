"""The stream `hyper_connections`: several residual streams, mixed around every sublayer."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from moddepth_jax.hparams import DepthHparams, ModelHparams
from moddepth_jax.hparams.checks import refuse
from moddepth_jax.hparams.registry import STREAMS
from moddepth_jax.model.attention import DepthSlots
from moddepth_jax.model.layers import wide_dtype
from moddepth_jax.model.streams.base import Stream

STREAMS_BY_DEFAULT = 4
SCALE = 0.01  # initial scale of the part of the weights that depends on the token
SINKHORN_STEPS = 20
FARTHEST = 50.0  # exp(-50) is far above the smallest float32
# Initial values of `constrained`: the logit of the stream that a sublayer reads (the weights of all
# streams sum to 1), and the logits of the mixture on and off its diagonal.
READ_LOGIT, MIX_LOGITS = 3.0, (3.0, -3.0)


def sinkhorn(logits):
    """Return positive matrices [..., S, S] whose rows sum to 1, and whose columns nearly do.

    exp, and then SINKHORN_STEPS times: divide columns, then rows, by their sums. The last division
    makes the rows exact. Because columns are divided first, subtracting the largest logit of each
    changes nothing, and no exponential overflows. Logits more than FARTHEST below it count as
    FARTHEST below, so that no sum is 0.
    """
    # With the tokens last, sums over S add vectors of tokens.
    logits = jnp.moveaxis(logits, (-2, -1), (0, 1))
    largest = jax.lax.stop_gradient(logits.max(axis=0, keepdims=True))
    matrix = jnp.exp(jnp.maximum(logits - largest, -FARTHEST))
    for _ in range(SINKHORN_STEPS):
        matrix = _shares(1, _shares(0, matrix))
    return jnp.moveaxis(matrix, (0, 1), (-2, -1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _shares(axis, x):
    """Return positive numbers divided by their sums along an axis.

    The gradient is the exact one, written with the results. XLA on a CPU takes a third of the time
    of the derived form or less, and no squared sum underflows.
    """
    return x / x.sum(axis=axis, keepdims=True)


def _shares_forward(axis, x):
    sums = x.sum(axis=axis, keepdims=True)
    shares = x / sums
    return shares, (shares, sums)


def _shares_backward(axis, saved, gradient):
    shares, sums = saved
    return ((gradient - jnp.sum(gradient * shares, axis=axis, keepdims=True)) / sums,)


_shares.defvjp(_shares_forward, _shares_backward)


def _normed(x, axes, epsilon):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=axes, keepdims=True) + epsilon)


class HyperConnection(nn.Module):
    """How one sublayer reads a mixture of the S streams and updates them.

    Weights and sums are float32 or wider. The part that depends on the token starts at 0.
    """

    hparams: ModelHparams
    opens: bool = False  # not used

    def setup(self):
        size, zeros = num_streams(self.hparams), nn.initializers.zeros
        form, dtype = self.hparams.depth.hyper_form, wide_dtype(self.hparams.dtype)
        parts, first = ('read', 'mix', 'add'), first_values(self.hparams, 0)
        self.biases = {
            name: self.param(f'{name}_bias', lambda _, name=name: first[f'{name}_bias'])
            for name in parts
        }
        if form == 'static':
            return
        self.scales = {
            name: self.param(f'{name}_scale', nn.initializers.constant(SCALE), ()) for name in parts
        }
        # Each stream gives its own read and add weight and its row of the mixture. If constrained,
        # all streams together give all weights.
        sizes = {'read': 1, 'mix': size, 'add': 1}
        if form == 'constrained':
            sizes = {'read': size, 'mix': size * size, 'add': size}
        self.projections = {
            name: nn.Dense(out, use_bias=False, kernel_init=zeros, dtype=dtype, precision='highest')
            for name, out in sizes.items()
        }

    def _weights(self, name, x_BTSD):
        """Return the weights of a part: [B, T, S] or [B, T, S, S], without B and T if static."""
        form, bias = self.hparams.depth.hyper_form, self.biases[name].astype(x_BTSD.dtype)
        if form == 'static':
            return bias
        scale, epsilon = self.scales[name].astype(x_BTSD.dtype), self.hparams.norm_eps
        if form == 'dynamic':
            found = self.projections[name](_normed(x_BTSD, -1, epsilon))
            found = found[..., 0] if name != 'mix' else found
            return bias[None, None] + scale * jnp.tanh(found)
        all_BTE = _normed(x_BTSD, (-2, -1), epsilon).reshape(*x_BTSD.shape[:2], -1)
        found = self.projections[name](all_BTE)
        logits = bias[None, None] + scale * found.reshape(*found.shape[:2], *bias.shape)
        if name == 'mix':
            return sinkhorn(logits)
        return jax.nn.sigmoid(logits) * (2.0 if name == 'add' else 1.0)

    def _split(self, x_BTE):
        size = num_streams(self.hparams)
        return x_BTE.reshape(*x_BTE.shape[:2], size, -1).astype(wide_dtype(self.hparams.dtype))

    def read(self, x_BTE, depth: DepthSlots | None):
        """Return the input of the sublayer before its norm, [B, T, D], and `depth`."""
        x_BTSD = self._split(x_BTE)
        weights = self._weights('read', x_BTSD)
        weights_BTS = jnp.broadcast_to(weights, x_BTSD.shape[:3])
        x_BTD = jnp.einsum('btsd,bts->btd', x_BTSD, weights_BTS, precision='highest')
        return x_BTD.astype(x_BTE.dtype), depth

    def add(self, x_BTE, output_BTD):
        """Return the streams after the sublayer: a mixture, plus the weighted output for each."""
        x_BTSD = self._split(x_BTE)
        mix_BTSS, add = self.mixture(x_BTSD), self._weights('add', x_BTSD)
        y_BTSD = jnp.einsum('btij,btjd->btid', mix_BTSS, x_BTSD, precision='highest')
        add_BTS = jnp.broadcast_to(add, x_BTSD.shape[:3])
        y_BTSD += add_BTS[..., None] * output_BTD[:, :, None].astype(y_BTSD.dtype)
        return y_BTSD.reshape(x_BTE.shape).astype(x_BTE.dtype)

    def mixture(self, x_BTSD):
        """Return the weights of the old streams in the new ones, [B, T, new, old]."""
        mix = self._weights('mix', x_BTSD)
        if self.hparams.depth.hyper_form != 'constrained':
            mix = jnp.swapaxes(mix, -2, -1)  # the rows of the paper's A_r are the old streams
        return jnp.broadcast_to(mix, (*x_BTSD.shape[:3], x_BTSD.shape[2]))

    def skip(self, x_BTE):
        """Return the streams of tokens that skip the sublayer."""
        return x_BTE


def num_streams(hparams: ModelHparams) -> int:
    """Return S, the number of residual streams."""
    return hparams.depth.num_streams or STREAMS_BY_DEFAULT


def first_values(hparams: ModelHparams, sublayer) -> dict[str, jax.Array]:
    """Return the initial biases of a sublayer, counted from 0. It reads stream `sublayer` mod S."""
    size = num_streams(hparams)
    home = jnp.arange(size) == sublayer % size
    if hparams.depth.hyper_form != 'constrained':
        home = home.astype(jnp.float32)
        return {'read_bias': home, 'mix_bias': jnp.eye(size), 'add_bias': jnp.ones(size)}
    # With a sum of 1, equal streams are read as they are. Routers and `reordered` would notice any
    # other factor.
    share = 1 / (1 + math.exp(READ_LOGIT)) / max(size - 1, 1)
    rest = math.log(share / (1 - share))
    return {
        'read_bias': jnp.where(home, jnp.float32(READ_LOGIT), rest),
        'mix_bias': jnp.where(jnp.eye(size, dtype=bool), *map(jnp.float32, MIX_LOGITS)),
        'add_bias': jnp.zeros(size),
    }


@STREAMS.register('hyper_connections')
class HyperConnections(Stream):
    """Hyper-connections: S residual streams instead of one.

    `static` and `dynamic` are from Zhu et al. 2024 (arXiv 2409.19606). `constrained` is mHC,
    manifold-constrained hyper-connections (arXiv 2512.24880). The stream carries all S side by
    side, [B, T, S D]. They start as copies of the embedding, and the final norm reads their mean.
    """

    choices = {'hyper_form': ('dynamic', 'static', 'constrained')}
    counts = ('num_streams',)
    connection = HyperConnection
    gates_state = True

    def read(self, x_BTD, depth: DepthSlots | None):
        return x_BTD, depth, depth

    @classmethod
    def enter(cls, hparams: ModelHparams, x_BTD):
        return jnp.tile(x_BTD, (1, 1, num_streams(hparams)))

    @classmethod
    def leave(cls, hparams: ModelHparams, x_BTD):
        x_BTSD = x_BTD.reshape(*x_BTD.shape[:2], num_streams(hparams), -1)
        return jnp.mean(x_BTSD.astype(wide_dtype(hparams.dtype)), axis=2).astype(x_BTD.dtype)

    @classmethod
    def check(cls, hparams: ModelHparams):
        if hparams.norm_placement == 'post':
            right = 'must be pre or reordered: post norms the sum of one stream and an output, and '
            right += 'hyper_connections has several streams'
            refuse('model.norm_placement', hparams.norm_placement, right)

    @classmethod
    def start(cls, hparams: ModelHparams, number) -> dict:
        return {
            f'{name}_connection': {'read_bias': first_values(hparams, 2 * number + i)['read_bias']}
            for i, name in enumerate(('attention', 'mlp'))
        }

    @classmethod
    def reading_flops(cls, hparams, kind, length, num_selected, written) -> float:
        """2 S D for the read mixture, 2 S^2 D for the new streams, and the projections."""
        if kind.part != 'block':
            return 0.0
        width, size = hparams.d_model, num_streams(hparams)
        form = hparams.depth.hyper_form
        read, add = 2 * size * width, 2 * size**2 * width
        if form == 'dynamic':
            read, add = read + 2 * size * width, add + 2 * size * width * (size + 1)
        elif form == 'constrained':
            read += 2 * size * width * size
            add += 2 * size * width * (size**2 + size)
        router = length * read if kind.routed else 0
        return 2 * num_selected * (read + add) + router

    @classmethod
    def difference_at_start(cls, depth: DepthHparams) -> str:
        if depth.hyper_form != 'constrained' or depth.num_streams != 1:
            return ''
        return 'a constrained read of one stream has a weight below 1'

    @classmethod
    def describe(cls, hparams: ModelHparams) -> str:
        return f'{hparams.depth.hyper_form} hyper-connections of {num_streams(hparams)} streams'
