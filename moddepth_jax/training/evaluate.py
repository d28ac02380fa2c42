"""Held-out loss under any routing, with what the routers did."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from moddepth_jax.hparams import Hparams
from moddepth_jax.model.cross_entropy import cross_entropy
from moddepth_jax.model.transformer import Transformer, causal_routing
from moddepth_jax.training.losses import (
    IGNORED,
    expert_counts,
    expert_ratios,
    masked_labels,
    routing_counts,
    routing_ratios,
)
from moddepth_jax.training.mesh import replicated, shard_batch


@functools.partial(jax.jit, static_argnames=('hparams', 'routing', 'mesh'))
def eval_step(variables, batch, causal_layers_R, *, hparams: Hparams, routing: str, mesh):
    """Sums over one batch: nats, counted targets, routing and expert counts per layer.

    Every device of the mesh has all of them, so that every process can read them.
    """
    inputs = batch['tokens_BT'], batch['segment_ids_BT'], routing, causal_layers_R
    x_BTD, records = Transformer(hparams).apply(variables, *inputs, method='hidden_states')
    labels_BT, params = masked_labels(batch), variables['params']
    _, nll_BT, _ = cross_entropy(x_BTD, params, labels_BT, 0.0, hparams.training.loss_chunk)
    targets = jnp.sum(labels_BT != IGNORED, dtype=jnp.float32)
    sums = {'nats': jnp.sum(nll_BT), 'targets': targets}
    if records is not None and records.routing is not None:
        sums['routing'] = routing_counts(records.routing, batch['segment_ids_BT'])
    if records is not None and records.experts is not None:
        sums['experts'] = expert_counts(records.experts)
    return jax.lax.with_sharding_constraint(sums, replicated(mesh))


def evaluate(
    variables,
    hparams: Hparams,
    dataset,
    mesh,
    num_batches: int,
    routing: str,
    causal_layers_R=None,
) -> dict:
    """Loss over the first `num_batches` held-out batches, or all of them if there are fewer.

    Where several processes have joined, each of them calls this and gets the same numbers.

    Args:
      variables: of the Transformer; TrainState.variables. On the devices of the mesh.
      hparams: of the same.
      dataset: of `make_dataset`.
      mesh: of `make_mesh`, and that of the context (`jax.set_mesh`) for it to split the work.
      num_batches: 1 or more.
      routing, causal_layers_R: as the Transformer takes them.

    Returns:
      `loss` in nats a target, `bits_per_byte`, `targets`, and for a routed model `routing`: lists
      over its routed layers, as `routing_ratios` says; with experts `experts`: lists over the
      layers that have them, as `expert_ratios` says.
      Of a mixture `domains`: for each member `loss`, `bits_per_byte`, `perplexity` (a token) and
      `targets`. All else is then what the members' shares make of it: `loss` is the mean of their
      losses, weighted by their shares, not by what is held out of each.

    Raises:
      ValueError: one line, for fewer batches than a mixture has members.
    """
    if num_batches < len(dataset.domains):
        right = f'must be at least {len(dataset.domains)}: one for each member of the mixture'
        raise ValueError(f'num_batches={num_batches}: {right}')
    if causal_layers_R is None:
        causal_layers_R = np.ones(len(hparams.model.routed_layers), bool)
    totals = {}  # by member of a mixture; None for text that is one
    for index in range(min(num_batches, dataset.num_held_out_batches)):
        batch = dataset.held_out_batch(index)
        labels_BT = masked_labels(batch)
        targets = labels_BT[labels_BT != IGNORED]
        num_bytes = dataset.tokenizer.token_bytes_V[targets].sum()
        batch = shard_batch(mesh, batch)
        how = {'hparams': hparams, 'routing': routing, 'mesh': mesh}
        sums = eval_step(variables, batch, causal_layers_R, **how)
        sums = jax.tree.map(np.float64, jax.device_get(sums) | {'bytes': num_bytes})
        domain = dataset.domain(index)
        if domain in totals:
            sums = jax.tree.map(np.add, totals[domain], sums)
        totals[domain] = sums
    whole = _together(totals, dataset.domains)
    result = _losses(whole) | {'targets': int(sum(sums['targets'] for sums in totals.values()))}
    with np.errstate(invalid='ignore', divide='ignore'):
        if 'routing' in whole:
            result['routing'] = _lists(routing_ratios(whole['routing']))
        if 'experts' in whole:
            experts = hparams.model.experts
            ratios = expert_ratios(whole['experts'], experts.top_k, experts.num_routed)
            result['experts'] = _lists(ratios)
    if dataset.domains:
        result['domains'] = {name: _of_domain(totals[name]) for name in dataset.domains}
    return result


def _losses(sums):
    return {
        'loss': float(sums['nats'] / sums['targets']),
        'bits_per_byte': float(sums['nats'] / math.log(2) / sums['bytes']),
    }


def _of_domain(sums):
    losses = _losses(sums)
    more = {'perplexity': perplexity(losses['loss']), 'targets': int(sums['targets'])}
    return losses | more


def _together(totals, shares):
    """The sums of all domains, each weighted so that its share of the targets is that of `shares`.

    How many batches of a domain were read thus does not matter, and the loss is that of the text on
    which the run is trained.
    """
    if not shares:
        (sums,) = totals.values()
        return sums
    shares = {name: shares[name] / sums['targets'] for name, sums in totals.items()}
    weighted = [
        jax.tree.map(lambda leaf, share=shares[name]: leaf * share, sums)
        for name, sums in totals.items()
    ]
    return functools.reduce(functools.partial(jax.tree.map, np.add), weighted)


def perplexity(loss: float) -> float:
    """exp of a loss in nats a token; infinity where that is too large for a number."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _compare(result, top_c):
    result['loss_top_c'] = top_c['loss']
    result['routing_gap'] = result['loss'] - top_c['loss']


def _lists(ratios):
    return {name: values.tolist() for name, values in ratios.items()}


def evaluate_causal(
    variables, hparams: Hparams, dataset, mesh, num_batches: int, batches_per_layer: int = 0
) -> dict:
    """`evaluate` under the causal rule, with the top-C loss on the same weights beside it.

    Args:
      variables, hparams, dataset, mesh, num_batches: as `evaluate` takes them.
      batches_per_layer: first batches on which to measure too what the rule costs in each routed
        block alone; 0: not at all.

    Returns:
      The dict of `evaluate`, plus `loss_top_c` and `routing_gap` = loss - loss_top_c for a model
      that looks ahead in training (0.01 nats or less is negligible, 0.05 invalidates a run); of a
      mixture each member's in `domains` too. With
      `batches_per_layer`, `routing` of a routed model has a list `routing_gap` too: the gap, on
      those batches, where only that layer obeys the rule.
    """
    rule = causal_routing(hparams)
    given = (hparams, dataset, mesh, num_batches)
    result = evaluate(variables, *given, rule)
    num_routed = len(hparams.model.routed_layers)
    if not hparams.model.looks_ahead:
        return result
    top_c = evaluate(variables, *given, 'top_c')
    _compare(result, top_c)
    if dataset.domains:
        for name, values in result['domains'].items():
            _compare(values, top_c['domains'][name])
    if batches_per_layer and num_routed:
        few = (hparams, dataset, mesh, min(num_batches, batches_per_layer))
        top_c = evaluate(variables, *few, 'top_c')['loss']
        alone = [np.arange(num_routed) == layer for layer in range(num_routed)]
        losses = [evaluate(variables, *few, rule, only)['loss'] for only in alone]
        result['routing']['routing_gap'] = [loss - top_c for loss in losses]
    return result
