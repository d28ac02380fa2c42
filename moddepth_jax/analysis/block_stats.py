"""What a trained model's blocks do to which tokens, on held-out text under its causal rule.

`measure` gives one dict of JSON values for one model; launch.isoflop writes measures.json, a dict
of them by name of the run. Quantities that a model does not have are None. In it:

routing         the causal rule that decided who enters (dense for a model without routed blocks)
tokens          real held-out tokens that were read
layers          of each block, the first one first:
    layer             its number, from 0
    routed            whether a router decides who enters
    tokens            how many of the tokens it processed
    delta_over_input  |block(x) - x| / |x| over these tokens, without the gate: {'mean', 'quantiles'
                      {'0.05', '0.25', '0.5', '0.75', '0.95'}}
    added_over_input  the same of what the stream really gains: times the gate
    score_correlation Spearman's, of delta_over_input with the router's score, over these tokens
    probe_r2          R^2 of a ridge probe that recovers the block's delta (without the gate) from
                      the final stream before its norm, of these tokens; fitted on the first, third,
                      .. batch and scored on the others. Low: the signal is diluted
    probe_tokens      [fitted on, scored on]; far more than the model's width, or R^2 is too low
blocks_entered  of a routed model, over tokens:
    every, none       share that entered every routed block, and none
    every_by_chance, none_by_chance   what they would be if the blocks chose independently: products
                      of the blocks' shares
entropy         of the next-token distributions, in nats:
    mean              over all tokens
    by_blocks         of a routed model: [{'blocks', 'tokens', 'mean'}], by the number of routed
                      blocks that the token entered
    correlation       of a routed model: Spearman's, of the entropy with that number
classes         of a routed model, over its blocks, by class of token (analysis/token_classes.py):
                {class: {'tokens', 'entered' (share), 'by_layer' [share in each routed block]}}
language        python or prose, by which the classes were told
first_token     of a routed model: {'tokens', 'entered', 'others_entered'}: shares of the first
                tokens of rows, and of all others, that entered, over its blocks
depth_mass      as analysis/depth_mass.py: {'layers', 'depth', 'first_token', 'slots', 'by_slot'}:
                names of the layers that read; the share of their attention on slots and on the
                first token (the sink); names of the slots, and the share on each, by layer. Means
                over batches. None in `dense` and `average`
"""

import operator

import jax
import numpy as np

from moddepth_jax.analysis.depth_mass import depth_mass
from moddepth_jax.analysis.held_out_classes import held_out_classes, language_of
from moddepth_jax.analysis.layer_deltas import entropies, layer_deltas
from moddepth_jax.analysis.signal_dilution import moments, probe_r2
from moddepth_jax.analysis.token_classes import CLASSES
from moddepth_jax.analysis.wasted_compute import delta_ratios, rank_correlation, spread
from moddepth_jax.hparams import Hparams
from moddepth_jax.model.transformer import causal_routing


def block_stats(variables, hparams: Hparams, dataset, num_batches: int) -> dict:
    """The measures of one model (see the module) on the first held-out batches.

    Args:
      variables: of the Transformer.
      hparams: of the same.
      dataset: of `make_dataset` or `make_held_out`.
      num_batches: 2 or more; fewer are read where there are fewer.

    Raises:
      ValueError: less than two batches to read; logits that are not finite.
    """
    num_read = min(num_batches, dataset.num_held_out_batches)
    if num_read < 2:
        raise ValueError(
            f'num_batches={num_batches}: of {dataset.num_held_out_batches} that are held out; must '
            'be 2 or more, one to fit the probes and one to score them'
        )
    routing = causal_routing(hparams)
    batches = [dataset.held_out_batch(index) for index in range(num_read)]
    tokens, halves = [], [None, None]
    for index, batch in enumerate(batches):
        seen, sums = _one_batch(variables, hparams, batch, routing)
        tokens.append(seen)
        before = halves[index % 2]
        halves[index % 2] = sums if before is None else list(map(operator.add, before, sums))
    seen = {name: np.concatenate([part[name] for part in tokens], axis=-1) for name in tokens[0]}
    result = {
        'routing': routing,
        'tokens': seen['entropy_N'].size,
        'layers': _layers(hparams, seen, halves),
        'blocks_entered': None,
        'entropy': {'mean': float(np.mean(seen['entropy_N'], dtype=np.float64))},
        'classes': None,
        'language': None,
        'first_token': None,
        'depth_mass': _depth_mass(variables, hparams, batches, routing),
    }
    routed = list(hparams.model.routed_layers)
    entered_RN = seen['entered_LN'][routed]
    by_blocks, correlation = (None, None) if not routed else _by_blocks(entered_RN, seen)
    result['entropy'] |= {'by_blocks': by_blocks, 'correlation': correlation}
    if routed:
        result['language'], class_N = _classes(batches, dataset)
        result['blocks_entered'] = _blocks_entered(entered_RN)
        result['classes'] = _by_class(entered_RN, class_N)
        result['first_token'] = _first_token(entered_RN, seen['first_N'])
    return result


def _one_batch(variables, hparams, batch, routing):
    """Arrays over the batch's N real tokens, and of each layer the probe's Moments."""
    tokens_BT, segment_ids_BT = batch['tokens_BT'], batch['segment_ids_BT']
    found = layer_deltas(variables, hparams, tokens_BT, segment_ids_BT, routing)
    layers = zip(found.deltas_LBTD, found.selected_LBT, strict=True)
    sums = [moments(found.final_BTD, deltas, entered) for deltas, entered in layers]
    scores_RBT = np.zeros((0, *tokens_BT.shape))
    if hparams.model.routed_layers:
        scores_RBT = found.records.routing.scores_BT
    seen = {
        'ratio_LN': delta_ratios(found.inputs_LBTD, found.deltas_LBTD),
        'gate_LN': found.gates_LBT,
        'entered_LN': found.selected_LBT,
        'entropy_N': entropies(found.logits_BTV),
        'first_N': np.broadcast_to(np.arange(tokens_BT.shape[1]) == 0, tokens_BT.shape),
        'score_RN': scores_RBT,
    }
    real_BT = segment_ids_BT > 0
    seen = {name: array[..., real_BT] for name, array in jax.device_get(seen).items()}
    if not np.isfinite(seen['entropy_N']).all():
        raise ValueError(
            'logits: not finite on held-out text; must be those of a run that did not end so'
        )
    return seen, sums


def _layers(hparams, seen, halves):
    fitted, scored = halves
    routed, layers = list(hparams.model.routed_layers), []
    for layer, entered_N in enumerate(seen['entered_LN']):
        ratio_N = seen['ratio_LN'][layer, entered_N]
        correlation = None
        if layer in routed:
            score_N = seen['score_RN'][routed.index(layer), entered_N]
            correlation = rank_correlation(ratio_N, score_N)
        gate_N = np.abs(seen['gate_LN'][layer, entered_N])
        layers.append(
            {
                'layer': layer,
                'routed': layer in routed,
                'tokens': int(entered_N.sum()),
                'delta_over_input': spread(ratio_N),
                'added_over_input': spread(gate_N * ratio_N),
                'score_correlation': correlation,
                'probe_r2': probe_r2(fitted[layer], scored[layer]),
                'probe_tokens': [int(half[layer].count) for half in halves],
            }
        )
    return layers


def _by_blocks(entered_RN, seen):
    blocks_N, entropy_N = entered_RN.sum(axis=0), seen['entropy_N']
    rows = []
    for blocks in range(len(entered_RN) + 1):
        mine_N = entropy_N[blocks_N == blocks]
        mean = float(np.mean(mine_N, dtype=np.float64)) if len(mine_N) else None
        rows.append({'blocks': blocks, 'tokens': len(mine_N), 'mean': mean})
    return rows, rank_correlation(entropy_N, blocks_N)


def _blocks_entered(entered_RN):
    share_R = entered_RN.mean(axis=1)
    return {
        'every': float(entered_RN.all(axis=0).mean()),
        'none': float((~entered_RN).all(axis=0).mean()),
        'every_by_chance': float(np.prod(share_R)),
        'none_by_chance': float(np.prod(1 - share_R)),
    }


def _by_class(entered_RN, class_N):
    classes = {}
    for number, name in enumerate(CLASSES):
        mine_RN = entered_RN[:, class_N == number]
        if mine_RN.size:
            share_R = mine_RN.mean(axis=1).tolist()
            entered = float(mine_RN.mean())
            classes[name] = {'tokens': mine_RN.shape[1], 'entered': entered, 'by_layer': share_R}
    return classes


def _classes(batches, dataset):
    """The language of the text, and the class of each real token of all batches, in order."""
    language = language_of(dataset.corpus)
    tokens_XT, segments_XT = (
        np.concatenate([batch[name] for batch in batches])
        for name in ('tokens_BT', 'segment_ids_BT')
    )
    # Rows that fill a batch up are no windows of the text.
    real_X = segments_XT[:, 0] > 0
    class_XT = held_out_classes(dataset, tokens_XT[real_X], language)
    return language, class_XT.reshape(-1)


def _first_token(entered_RN, first_N):
    return {
        'tokens': int(first_N.sum()),
        'entered': float(entered_RN[:, first_N].mean()),
        'others_entered': float(entered_RN[:, ~first_N].mean()),
    }


def _depth_mass(variables, hparams, batches, routing):
    if hparams.model.depth.reads_outputs:
        return None
    masses = [depth_mass(variables, hparams, batch, routing) for batch in batches]
    first = masses[0]
    means = [np.mean(arrays, axis=0).tolist() for arrays in list(zip(*masses, strict=True))[2:]]
    by_slot, depth, first_token = means
    return {
        'layers': list(first.layers),
        'depth': depth,
        'first_token': first_token,
        'slots': list(first.slots),
        'by_slot': by_slot,
    }
