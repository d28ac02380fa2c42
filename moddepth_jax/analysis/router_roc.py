"""Measures by ROC area whether routers rank the tokens that need far context highest."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from moddepth_jax.data.recall import needs_far_context
from moddepth_jax.hparams import Hparams
from moddepth_jax.model.cross_entropy import token_losses
from moddepth_jax.model.transformer import Transformer
from moddepth_jax.training.losses import masked_labels


def roc_area(scores, positives) -> float:
    """Return the probability that a positive scores above a negative; a tie counts half.

    `scores` and `positives` (bool) have the same shape. Raises ValueError if a class is empty.
    """
    scores, positives = np.asarray(scores, float), np.asarray(positives, bool)
    above, below = scores[positives], scores[~positives]
    if not above.size or not below.size:
        found = f'{above.size} positives, {below.size} negatives'
        raise ValueError(f'{found}: must be at least one of each')
    pairs = above.size * below.size
    return float(scipy.stats.mannwhitneyu(above, below, method='asymptotic').statistic / pairs)


@functools.partial(jax.jit, static_argnames=('hparams', 'routing'))
def _forward(variables, batch, *, hparams, routing):
    logits_BTV, records = Transformer(hparams).apply(
        variables, batch['tokens_BT'], batch['segment_ids_BT'], routing
    )
    labels_BT = masked_labels(batch)
    nll_BT, _, _ = token_losses(logits_BTV, labels_BT)
    right_BT = jnp.argmax(logits_BTV, axis=-1) == labels_BT
    return records.routing.scores_BT, records.routing.selected_BT, nll_BT, right_BT


def router_roc(
    variables, hparams: Hparams, dataset, num_batches: int, routing: str = 'top_c'
) -> dict:
    """Measure how the routers of a model trained on data.source='recall' rank needed positions.

    Needed positions are those of `needs_far_context`. At most `num_batches` held-out batches are
    read. Raises ValueError if there are none, or if they have no needed position.

    Returns:
      `layers`: for each routed layer the ROC `area` of its scores for needed positions against all
      other real tokens, and the share of needed positions that `entered`; `recall_accuracy`: the
      share of needed positions whose answer is the most likely token; `recall_nats`: loss per
      answer; `loss`: nats per target.
    """
    if num_batches < 1:
        raise ValueError(f'num_batches={num_batches}: must be 1 or more')
    parts = []
    for index in range(min(num_batches, dataset.num_held_out_batches)):
        batch = dataset.held_out_batch(index)
        outputs = jax.device_get(_forward(variables, batch, hparams=hparams, routing=routing))
        real_BT = batch['segment_ids_BT'] > 0
        needed_BT = needs_far_context(batch['tokens_BT'])
        parts.append([output[..., real_BT] for output in (needed_BT, *outputs)])
    needed_N, scores_RN, selected_RN, nll_N, right_N = (
        np.concatenate(arrays, axis=-1) for arrays in zip(*parts, strict=True)
    )
    layers = {}
    for layer, scores_N, selected_N in zip(
        hparams.model.routed_layers, scores_RN, selected_RN, strict=True
    ):
        entered = float(selected_N[needed_N].mean())
        layers[layer] = {'area': roc_area(scores_N, needed_N), 'entered': entered}
    return {
        'layers': layers,
        'recall_accuracy': float(right_N[needed_N].mean()),
        'recall_nats': float(nll_N[needed_N].mean()),
        'loss': float(nll_N.mean()),
    }
