"""One text through one model, token by token: who enters which block, what it adds, how sure."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moddepth_jax.analysis.layer_deltas import entropies, layer_deltas
from moddepth_jax.analysis.token_classes import CLASSES
from moddepth_jax.analysis.wasted_compute import rank_correlation
from moddepth_jax.hparams import Hparams
from moddepth_jax.model.cross_entropy import token_losses
from moddepth_jax.model.transformer import check_routing
from moddepth_jax.training.losses import IGNORED


class Inspection(NamedTuple):
    """What a model does with each token of a text: NumPy arrays of N tokens.

    The text is cut into windows of data.sequence_length, as evaluation does; the last one may be
    shorter. Of L blocks R are routed.

    Attributes:
      routed_layers: numbers of the R routed blocks, ascending.
      tokens_N: int32 ids.
      pieces: the bytes of each token; b'' for the separator.
      windows_N: int32, the number of the token's window.
      positions_N: int32, its place in the window.
      scores_RN, rule_logits_RN, gates_RN: float32, as in RoutingRecord.
      top_c_RN, entered_RN, refused_RN: bool, likewise; the top C are those of the window.
      relative_LN: float32, |delta| / |input| of the block, L2 norms, without the gate; NaN where
        the token did not enter.
      entropy_N: float32, of the distribution of the next token, in nats.
      loss_N: float32, nats of the next token, which may be the first of the next window; NaN at
        the end of the text.
    """

    routed_layers: tuple[int, ...]
    tokens_N: np.ndarray
    pieces: tuple[bytes, ...]
    windows_N: np.ndarray
    positions_N: np.ndarray
    scores_RN: np.ndarray
    rule_logits_RN: np.ndarray
    gates_RN: np.ndarray
    top_c_RN: np.ndarray
    entered_RN: np.ndarray
    refused_RN: np.ndarray
    relative_LN: np.ndarray
    entropy_N: np.ndarray
    loss_N: np.ndarray


def inspect_tokens(
    variables, hparams: Hparams, tokens_N, tokenizer, routing: str, on_window=lambda: None
) -> Inspection:
    """The model on one text, a window at a time: memory does not grow with the text.

    Args:
      variables: of the Transformer.
      hparams: of the same.
      tokens_N: int [N], ids of the text, its separator first; one or more.
      tokenizer: which they are of.
      routing: as `Transformer` takes it.
      on_window: called after each window.

    Raises:
      ValueError: no token; a routing that the model cannot run.
    """
    check_routing(hparams, routing)
    tokens_N = np.asarray(tokens_N, np.int32)
    if not tokens_N.size:
        raise ValueError('tokens_N=[]: must hold one token at least')
    labels_N = np.append(tokens_N[1:], IGNORED).astype(np.int32)
    length, found = hparams.data.sequence_length, []
    for start in range(0, len(tokens_N), length):
        tokens_1T, labels_1T = (
            tokens_N[None, start:][:, :length],
            labels_N[None, start:][:, :length],
        )
        found.append(_window(variables, tokens_1T, labels_1T, hparams, routing))
        on_window()
    arrays = {name: np.concatenate([one[name] for one in found], axis=-1) for name in found[0]}
    index_N = np.arange(len(tokens_N), dtype=np.int32)
    pieces = tuple(tokenizer.pieces(tokens_N))
    places = (index_N // length, index_N % length)
    return Inspection(hparams.model.routed_layers, tokens_N, pieces, *places, **arrays)


def _window(variables, tokens_1T, labels_1T, hparams, routing):
    """The arrays of one window by their names in Inspection."""
    ones_1T = np.ones_like(tokens_1T)
    deltas = layer_deltas(variables, hparams, tokens_1T, ones_1T, routing)
    measured = _measure(
        deltas.inputs_LBTD, deltas.deltas_LBTD, deltas.selected_LBT, deltas.logits_BTV, labels_1T
    )
    record = deltas.records and deltas.records.routing
    names = ('scores', 'rule_logits', 'gates', 'top_c', 'entered', 'refused')
    empty = [np.zeros((0, 1, tokens_1T.shape[1]), bool if i > 2 else np.float32) for i in range(6)]
    sides = empty if record is None else [getattr(record, f'{name}_BT') for name in names]
    measured |= {f'{name}_RN': side for name, side in zip(names, sides, strict=True)}
    return {name: np.asarray(side).squeeze(-2) for name, side in measured.items()}


@jax.jit
def _measure(inputs_LBTD, deltas_LBTD, selected_LBT, logits_BTV, labels_BT):
    norm_LBT = jnp.linalg.norm(inputs_LBTD.astype(deltas_LBTD.dtype), axis=-1)
    relative_LBT = jnp.linalg.norm(deltas_LBTD, axis=-1) / norm_LBT
    nll_BT, _, counted_BT = token_losses(logits_BTV, labels_BT)
    return {
        'relative_LN': jnp.where(selected_LBT, relative_LBT, jnp.nan).astype(jnp.float32),
        'entropy_N': entropies(logits_BTV).astype(jnp.float32),
        'loss_N': jnp.where(counted_BT > 0, nll_BT, jnp.nan).astype(jnp.float32),
    }


def totals(inspection: Inspection, classes_N) -> dict:
    """Sums over the text, as JSON scalars and lists; NaN where there is nothing to divide by.

    Args:
      inspection: of N tokens.
      classes_N: of `token_classes`.

    Returns:
      `entropy` and `loss` in nats, means over tokens; `enter_all` and `enter_none`, the shares of
      tokens that enter every routed block and none; `blocks_entered`, for each number of routed
      blocks from 0 to R the `tokens` that enter so many and their mean `entropy`;
      `entropy_correlation`, the rank correlation of that number with the entropy; `layers`, for
      each block `entered` (share), `relative` (its mean, 10th, 50th and 90th percentile over tokens
      that entered), and of a routed block `top_c`, `both` (entered and of the top C) and `refused`
      (shares), `score_correlation` (rank correlation of the score with `relative` over tokens that
      entered); `classes`, for each that occurs `tokens`, `entered` (a share for each routed block),
      `entropy` and `loss`.
    """
    entered_RN, num_tokens = inspection.entered_RN, len(inspection.tokens_N)
    times_N, num_routed = entered_RN.sum(axis=0), len(inspection.routed_layers)
    counts = [
        {'tokens': int(mine.sum()), 'entropy': _mean(inspection.entropy_N[mine])}
        for mine in (times_N == count for count in range(num_routed + 1))
    ]
    return {
        'tokens': num_tokens,
        'entropy': _mean(inspection.entropy_N),
        'loss': _mean(inspection.loss_N),
        'enter_all': _mean(times_N == num_routed) if num_routed else float('nan'),
        'enter_none': _mean(times_N == 0) if num_routed else float('nan'),
        'blocks_entered': counts,
        'entropy_correlation': rank_correlation(times_N, inspection.entropy_N),
        'layers': [_layer(inspection, layer) for layer in range(len(inspection.relative_LN))],
        'classes': [
            {'class': CLASSES[number], **_class(inspection, classes_N == number)}
            for number in np.unique(classes_N)
        ],
    }


def _mean(values):
    values = np.asarray(values, float)
    values = values[np.isfinite(values)]
    return float(values.mean()) if values.size else float('nan')


def _layer(inspection, layer):
    relative_N = inspection.relative_LN[layer]
    some = relative_N[np.isfinite(relative_N)]
    low, middle, high = np.percentile(some, (10, 50, 90)) if some.size else [float('nan')] * 3
    result = {
        'layer': layer,
        'routed': layer in inspection.routed_layers,
        'entered': 1.0,
        'relative': [_mean(some), float(low), float(middle), float(high)],
    }
    if not result['routed']:
        return result
    i = inspection.routed_layers.index(layer)
    entered_N, top_c_N = inspection.entered_RN[i], inspection.top_c_RN[i]
    return result | {
        'entered': _mean(entered_N),
        'top_c': _mean(top_c_N),
        'both': _mean(entered_N & top_c_N),
        'refused': _mean(inspection.refused_RN[i]),
        'score_correlation': rank_correlation(inspection.scores_RN[i], relative_N),
    }


def _class(inspection, mine_N):
    return {
        'tokens': int(mine_N.sum()),
        'entered': [_mean(entered_N[mine_N]) for entered_N in inspection.entered_RN],
        'entropy': _mean(inspection.entropy_N[mine_N]),
        'loss': _mean(inspection.loss_N[mine_N]),
    }
