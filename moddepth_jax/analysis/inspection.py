"""Runs a text through a model and records, for each token, routing, change, entropy and loss."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moddepth_jax.analysis.block_stats import rank_correlation
from moddepth_jax.analysis.layer_walk import entropies, layer_deltas, relative_change
from moddepth_jax.analysis.token_classes import CLASSES
from moddepth_jax.hparams import Hparams
from moddepth_jax.hparams.rules import check_routing
from moddepth_jax.model.cross_entropy import token_losses
from moddepth_jax.model.routing import RoutingRecord
from moddepth_jax.training.losses import IGNORED


class Inspection(NamedTuple):
    """NumPy arrays that describe what a model with L blocks and R routers does with N tokens."""

    routers: tuple[int | None, ...]  # index of each block's router; None for an unrouted block
    tokens_N: np.ndarray  # int32 ids
    pieces: tuple[bytes, ...]  # the bytes of each token; b'' for the separator
    routing: RoutingRecord  # arrays [R, N]; the top C are those of the window
    # |delta| / |input| of the block, without the gate; NaN if the block skipped the token.
    change_LN: np.ndarray
    entropy_N: np.ndarray  # entropy of the next-token distribution, in nats
    # Loss on the next token in nats (it may begin the next window); NaN at the end of the text.
    loss_N: np.ndarray


def inspect_tokens(
    variables, hparams: Hparams, tokens_N, tokenizer, routing: str, on_window=lambda: None
) -> Inspection:
    """Run the model on the ids of a text, including the separator, in windows of sequence_length.

    `on_window` is called after each window. Raises ValueError if there is no token, and for a
    routing that the model cannot run.
    """
    check_routing(hparams, routing)
    tokens_N = np.asarray(tokens_N, np.int32)
    if not tokens_N.size:
        raise ValueError('tokens_N=[]: must hold one token at least')
    labels_N = np.append(tokens_N[1:], IGNORED).astype(np.int32)
    length, windows = hparams.data.sequence_length, []
    for start in range(0, len(tokens_N), length):
        tokens_1T, labels_1T = (ids[None, start : start + length] for ids in (tokens_N, labels_N))
        windows.append(_window(variables, tokens_1T, labels_1T, hparams, routing))
        on_window()
    record, *arrays = jax.tree.map(lambda *sides: np.concatenate(sides, axis=-1), *windows)
    pieces = tuple(tokenizer.pieces(tokens_N))
    return Inspection(hparams.model.router_of_block, tokens_N, pieces, record, *arrays)


def _window(variables, tokens_1T, labels_1T, hparams, routing):
    """The RoutingRecord, changes, entropies and losses of one window, without its batch axis."""
    deltas = layer_deltas(variables, hparams, tokens_1T, np.ones_like(tokens_1T), routing)
    measured = _measure(deltas, labels_1T)
    record = deltas.records and deltas.records.routing
    if record is None:
        shape = (0, *tokens_1T.shape)
        floats, bools = np.zeros(shape, np.float32), np.zeros(shape, bool)
        record = RoutingRecord(floats, floats, bools, bools, bools, floats)
    return jax.tree.map(lambda side: np.asarray(side).squeeze(-2), (record, *measured))


@jax.jit
def _measure(deltas, labels_BT):
    change_LBT = relative_change(deltas.inputs_LBTD, deltas.deltas_LBTD)
    nll_BT, _, counted_BT = token_losses(deltas.logits_BTV, labels_BT)
    return (
        jnp.where(deltas.selected_LBT, change_LBT, jnp.nan).astype(jnp.float32),
        entropies(deltas.logits_BTV).astype(jnp.float32),
        jnp.where(counted_BT > 0, nll_BT, jnp.nan).astype(jnp.float32),
    )


def totals(inspection: Inspection, classes_N) -> dict:
    """Summarize the text as JSON scalars and lists; NaN if there is nothing to average.

    `blocks_entered` has an entry for each possible number of entered blocks, from 0. In `layers`,
    `both` is the share of tokens that are in the top C and entered, and `relative` has the mean and
    the 10th, 50th and 90th percentile of the change. Correlations are rank correlations: entropy
    with the number of entered blocks, and score with change.
    """
    selected_RN = inspection.routing.selected_BT
    num_routed = len(selected_RN)
    blocks_N = selected_RN.sum(axis=0)
    counts = [
        {'tokens': int(mine_N.sum()), 'entropy': _mean(inspection.entropy_N[mine_N])}
        for mine_N in (blocks_N == count for count in range(num_routed + 1))
    ]
    routed_N = blocks_N if num_routed else blocks_N[:0]
    return {
        'tokens': len(inspection.tokens_N),
        'entropy': _mean(inspection.entropy_N),
        'loss': _mean(inspection.loss_N),
        'enter_all': _mean(routed_N == num_routed),
        'enter_none': _mean(routed_N == 0),
        'blocks_entered': counts,
        'entropy_correlation': rank_correlation(blocks_N, inspection.entropy_N),
        'layers': [_layer_totals(inspection, layer) for layer in range(len(inspection.change_LN))],
        'classes': [
            {'class': CLASSES[number], **_class_totals(inspection, classes_N == number)}
            for number in np.unique(classes_N)
        ],
    }


def _mean(values):
    values = np.asarray(values, float)
    values = values[np.isfinite(values)]
    return float(values.mean()) if values.size else float('nan')


def _layer_totals(inspection, layer):
    change_N = inspection.change_LN[layer]
    some = change_N[np.isfinite(change_N)]
    percentiles = np.percentile(some, (10, 50, 90)) if some.size else [float('nan')] * 3
    router = inspection.routers[layer]
    routed = router is not None
    relative = [_mean(some), *map(float, percentiles)]
    result = {'layer': layer, 'routed': routed, 'entered': 1.0, 'relative': relative}
    if not routed:
        return result
    record = jax.tree.map(lambda side_RN: side_RN[router], inspection.routing)
    return result | {
        'entered': _mean(record.selected_BT),
        'top_c': _mean(record.top_c_BT),
        'both': _mean(record.selected_BT & record.top_c_BT),
        'refused': _mean(record.dropped_BT),
        'score_correlation': rank_correlation(record.scores_BT, change_N),
    }


def _class_totals(inspection, mine_N):
    return {
        'tokens': int(mine_N.sum()),
        'entered': [_mean(selected_N[mine_N]) for selected_N in inspection.routing.selected_BT],
        'entropy': _mean(inspection.entropy_N[mine_N]),
        'loss': _mean(inspection.loss_N[mine_N]),
    }
