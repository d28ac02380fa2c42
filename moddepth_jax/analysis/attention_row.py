"""What one token of one layer attends to: tokens before it, and what layers before left of it."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from moddepth_jax.analysis.layer_walk import after, depth_of, walk
from moddepth_jax.hparams import Hparams
from moddepth_jax.model.streams import layer_kinds
from moddepth_jax.model.transformer import causal_routing


class AttentionRow(NamedTuple):
    """One row of the softmax of each head; sequence and slots sum to 1.

    Attributes:
      sequence_NT: float64 [N, T], the weight on each token of the text; 0 where it is not seen.
      slots_NL: float64 [N, L], on each of the L slots that layers before have written, the oldest
        first; 0 where it is not seen.
    """

    sequence_NT: np.ndarray
    slots_NL: np.ndarray


def attention_row(variables, hparams: Hparams, tokens_T, layer: int, position: int) -> AttentionRow:
    """The attention of the token at `position` in the block `layer`, in one softmax (method.md, 4).

    Args:
      variables: of the Transformer.
      hparams: of the same, whose stream is residual or moda.
      tokens_T: int [T], one document.
      layer: number of a block that no router guards.
      position: from 0 to T - 1.

    Raises:
      ValueError: another stream; a layer or position that is not there; a routed layer.
    """
    model, length = hparams.model, len(tokens_T)
    if model.depth.stream not in ('residual', 'moda'):
        right = 'must be residual or moda, whose blocks attend to both in one softmax'
        raise ValueError(f'model.depth.stream={model.depth.stream!r}: {right}')
    dense = [i for i in range(model.num_layers) if i not in model.routed_layers]
    if layer not in dense:
        raise ValueError(f'layer={layer}: must be of the dense blocks {dense}')
    if not 0 <= position < length:
        raise ValueError(f'position={position}: must lie in [0, {length})')
    tokens_1T = np.asarray(tokens_T, np.int32)[None]
    routing = causal_routing(hparams)
    found, _ = walk(variables, hparams, tokens_1T, np.ones_like(tokens_1T), routing, _visit)
    blocks = [seen for kind, seen in found if kind.part == 'block']
    written = sum(kind.slots for kind in layer_kinds(model)[:layer])
    q_1TNH, q_depth_1TNH, k_1TKH, k_depth_L1TKH, mask_L1T = jax.device_get(blocks[layer])
    scores_NT = _scores(q_1TNH[0, position], k_1TKH[0])
    scores_NT[:, position + 1 :] = -np.inf
    if model.window(layer):
        scores_NT[:, : max(0, position + 1 - model.window(layer))] = -np.inf
    scores_NL = _scores(q_depth_1TNH[0, position], k_depth_L1TKH[:written, 0, position])
    scores_NL[:, ~mask_L1T[:written, 0, position]] = -np.inf
    if model.depth.slot_window:
        scores_NL[:, : max(0, written - model.depth.slot_window)] = -np.inf
    scores_NX = np.concatenate([scores_NT, scores_NL], axis=1)
    weights_NX = np.exp(scores_NX - scores_NX.max(axis=1, keepdims=True))
    weights_NX /= weights_NX.sum(axis=1, keepdims=True)
    return AttentionRow(weights_NX[:, :length], weights_NX[:, length:])


def _scores(q_NH, k_SKH):
    """float64 [N, S]; query head n reads key head n // G."""
    heads, width = q_NH.shape
    k_SNH = np.repeat(k_SKH.astype(np.float64), heads // k_SKH.shape[1], axis=1)
    return np.einsum('nh,snh->ns', q_NH.astype(np.float64), k_SNH) * width**-0.5


@functools.partial(jax.jit, static_argnames=('stack', 'kind'))
def _visit(params, carry, count, tokens, told, *, stack, kind):
    """One layer: the carry after it, and queries, those for slots, keys, slots' keys, which are."""
    given = ({'params': params}, carry[0], depth_of(carry, count), tokens, told)
    output, sown = stack.layer(kind).apply(*given, mutable=['intermediates'])
    flat = traverse_util.flatten_dict(sown['intermediates'])
    ((q_BTNH, k_BTKH, given, _),) = next(v for path, v in flat.items() if path[-1] == 'sequence')
    k_depth_LBTKH = given.get('k_depth_LBRKH', k_BTKH[None][:0])  # no slots: none of them
    mask_LBT, q_depth_BTNH = given.get('slot_mask_LBR'), given.get('q_depth_BTNH')
    if mask_LBT is None:
        mask_LBT = jnp.ones(k_depth_LBTKH.shape[:3], bool)
    q_depth_BTNH = q_BTNH if q_depth_BTNH is None else q_depth_BTNH
    return after(carry, output, count), (q_BTNH, q_depth_BTNH, k_BTKH, k_depth_LBTKH, mask_LBT)
