"""Measures how much products of the mixing matrices of hyper-connections amplify along depth.

As in the paper of manifold-constrained hyper-connections (arXiv 2512.24880), row sums are the
gains of the forward signal, and column sums are the gains of gradients.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moddepth_jax.analysis.layer_walk import walk
from moddepth_jax.hparams import Hparams


class StreamGains(NamedTuple):
    """Gains of the map from the streams before each of L blocks to the last ones; token means."""

    forward_L: np.ndarray  # largest absolute row sum (over the weights of old streams)
    backward_L: np.ndarray  # largest absolute column sum (over the weights in new streams)


def has_mixtures(hparams: Hparams) -> bool:
    """Return whether each block mixes several streams of every token."""
    model = hparams.model
    return hasattr(model.depth.stream_class.connection, 'mixture') and not model.routed_layers


def stream_gains(variables, hparams: Hparams, batch, routing: str) -> StreamGains:
    """Return the gains on the real tokens of a batch. Raises ValueError without mixtures."""
    if not has_mixtures(hparams):
        right = 'must be hyper_connections without routed blocks'
        raise ValueError(f'model.depth.stream={hparams.model.depth.stream!r}: {right}')
    tokens_BT, segment_ids_BT = batch['tokens_BT'], batch['segment_ids_BT']
    found, _ = walk(variables, hparams, tokens_BT, segment_ids_BT, routing, _mixtures, _catch)
    mixtures_LPBTSS = np.stack([observed for _, observed in found]).astype(np.float64)
    product_BTSS, gains = np.eye(mixtures_LPBTSS.shape[-1]), []
    for of_block in mixtures_LPBTSS[::-1]:
        for mixture_BTSS in of_block[::-1]:
            product_BTSS = product_BTSS @ mixture_BTSS
        of_token = product_BTSS[np.asarray(segment_ids_BT) > 0]
        gains.append([np.abs(of_token.sum(axis)).max(-1).mean() for axis in (-1, -2)])
    return StreamGains(*np.array(gains[::-1]).T)


def _catch(caught, module, method, args, result):
    if method == 'mixture':  # of attention and mlp
        caught.setdefault('mixtures', []).append(result)


def _mixtures(seen) -> jax.Array:
    """The mixtures of attention and mlp, [2, B, T, new streams, old streams]."""
    return jnp.stack(seen.caught['mixtures'])
