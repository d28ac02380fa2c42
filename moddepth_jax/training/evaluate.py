"""Held-out loss under any routing rule, with statistics of the routers and experts."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from moddepth_jax.hparams import Hparams
from moddepth_jax.hparams.rules import causal_routing
from moddepth_jax.model import ahead
from moddepth_jax.model.cross_entropy import cross_entropy
from moddepth_jax.model.transformer import Transformer
from moddepth_jax.training.losses import (
    IGNORED,
    dead_tokens,
    expert_counts,
    expert_ratios,
    masked_labels,
    routing_counts,
    routing_ratios,
)
from moddepth_jax.training.mesh import replicated, shard_batch


@functools.partial(jax.jit, static_argnames=('hparams', 'routing', 'mesh'))
def eval_step(variables, batch, causal_layers_R, *, hparams: Hparams, routing: str, mesh):
    """Sums over one batch: nats, targets, routing and expert counts; replicated over the mesh."""
    x_BTD, records = Transformer(hparams).apply(
        variables,
        batch['tokens_BT'],
        batch['segment_ids_BT'],
        routing,
        causal_layers_R,
        method='hidden_states',
    )
    labels_BT, params = masked_labels(batch), variables['params']
    _, nll_BT, _ = cross_entropy(x_BTD, params, labels_BT, 0.0, hparams.training.loss_chunk)
    targets = jnp.sum(labels_BT != IGNORED, dtype=jnp.float32)
    sums = {'nats': jnp.sum(nll_BT), 'targets': targets}
    if records is not None and records.routing is not None:
        of_loops = hparams.model.routing.routes_loops
        sums['routing'] = routing_counts(records.routing, batch['segment_ids_BT'], of_loops)
    if records is not None and records.experts is not None:
        sums['experts'] = expert_counts(records.experts)
    if records is not None and records.loops_BT is not None:
        real_BT = batch['segment_ids_BT'] > 0
        sums['loops'] = jnp.sum(records.loops_BT * real_BT, dtype=jnp.float32)
        sums['real'] = jnp.sum(real_BT, dtype=jnp.float32)
    return jax.lax.with_sharding_constraint(sums, replicated(mesh))


def evaluate(
    variables, hparams: Hparams, dataset, mesh, num_batches: int, routing: str, causal_layers_R=None
) -> dict:
    """Loss over the first `num_batches` held-out batches, or all of them if there are fewer.

    Every process of a run calls this and gets the same numbers. The mesh is also that of the
    context (`jax.set_mesh`), for it to split the work; `variables` are those of a TrainState, and
    `routing` and `causal_layers_R` are as the Transformer takes them. Of abstract variables, it
    compiles only. Raises ValueError, one line, for fewer batches than a mixture has members.

    Returns:
      dict: `loss` in nats a target, `bits_per_byte`, `targets`; lists over routed layers,
      `routing`, of `routing_ratios`, with the share of `dead_tokens`, and over layers with experts,
      `experts`, of `expert_ratios`; `loops_per_token`, the mean loops of a token, if tokens leave
      them by a threshold.
      For a mixture also `domains`: `loss`, `bits_per_byte`, `perplexity` (a token) and `targets` of
      each member. All other values are then weighted by the members' shares of the training data.
    """
    sums = _sums(variables, hparams, dataset, mesh, num_batches, routing, causal_layers_R)
    return {} if ahead.is_abstract(sums) else _summarize(sums, hparams, dataset)


def _sums(variables, hparams, dataset, mesh, num_batches, routing, causal_layers_R=None):
    """What `eval_step` sums over each of the batches of `evaluate`, and their bytes."""
    if num_batches < len(dataset.domains):
        right = f'must be at least {len(dataset.domains)}: one for each member of the mixture'
        raise ValueError(f'num_batches={num_batches}: {right}')
    if causal_layers_R is None:
        causal_layers_R = np.ones(len(hparams.model.routed_layers), bool)
    step = functools.partial(ahead.call, eval_step, hparams=hparams, routing=routing, mesh=mesh)
    each = []
    for index in range(min(num_batches, dataset.num_held_out_batches)):
        batch = dataset.held_out_batch(index)
        labels_BT = masked_labels(batch)
        num_bytes = dataset.tokenizer.token_bytes_V[labels_BT[labels_BT != IGNORED]].sum()
        sums = step(variables, shard_batch(mesh, batch), causal_layers_R)
        if ahead.is_abstract(sums):
            return [sums]
        each.append(jax.tree.map(np.float64, jax.device_get(sums) | {'bytes': num_bytes}))
    return each


def _summarize(each, hparams, dataset):
    """The result of `evaluate` from the sums of the first batches."""
    totals = {}  # by member of a mixture; one entry, None, without a mixture
    for index, sums in enumerate(each):
        domain = dataset.domain(index)
        if domain in totals:
            sums = jax.tree.map(np.add, totals[domain], sums)
        totals[domain] = sums
    result = _ratios(_weight_domains(totals, dataset.domains), hparams)
    result['targets'] = int(sum(sums['targets'] for sums in totals.values()))
    if dataset.domains:
        domains = {name: _losses(totals[name]) for name in dataset.domains}
        for name, losses in domains.items():
            losses['perplexity'] = perplexity(losses['loss'])
            losses['targets'] = int(totals[name]['targets'])
        result['domains'] = domains
    return result


def _losses(sums):
    return {
        'loss': float(sums['nats'] / sums['targets']),
        'bits_per_byte': float(sums['nats'] / math.log(2) / sums['bytes']),
    }


def _ratios(sums, hparams):
    result = _losses(sums)
    with np.errstate(invalid='ignore', divide='ignore'):
        if 'routing' in sums:
            result['routing'] = routing_ratios(sums['routing'])
            result['dead_tokens'] = float(dead_tokens(sums['routing']))
        if 'loops' in sums:
            result['loops_per_token'] = float(sums['loops'] / sums['real'])
        if 'experts' in sums:
            experts = hparams.model.experts
            result['experts'] = expert_ratios(sums['experts'], experts.top_k, experts.num_routed)
    return jax.tree.map(lambda x: x.tolist() if isinstance(x, np.ndarray) else x, result)


def _weight_domains(totals, shares):
    """The sums over all domains, weighted so that their shares of the targets are `shares`."""
    if not shares:
        return totals[None]
    weights = {name: share / totals[name]['targets'] for name, share in shares.items()}
    weighted = [jax.tree.map(lambda x, w=weights[name]: x * w, totals[name]) for name in totals]
    return functools.reduce(functools.partial(jax.tree.map, np.add), weighted)


def perplexity(loss: float) -> float:
    """exp of a loss in nats a token; infinity if that overflows."""
    with np.errstate(over='ignore'):
        return float(np.exp(loss))


def evaluate_causal(
    variables, hparams: Hparams, dataset, mesh, num_batches: int, batches_per_layer: int = 0
) -> dict:
    """`evaluate` under the causal rule, together with the top-C loss of the same weights.

    For a model that looks ahead in training its dict also has `loss_top_c` and `routing_gap` =
    loss - loss_top_c (0.01 nats or less is negligible, 0.05 invalidates a run), also for each
    member in `domains`. With `batches_per_layer`, `routing` of a routed model has a list
    `routing_gap`, measured on so many batches: the gap if only that layer uses the rule.
    """
    rule, inputs = causal_routing(hparams), (variables, hparams, dataset, mesh)
    result = evaluate(*inputs, num_batches, rule)
    if not hparams.model.looks_ahead:
        return result
    top_c_sums = _sums(*inputs, num_batches, 'top_c')
    top_c = _summarize(top_c_sums, hparams, dataset)
    pairs = [(result, top_c)]
    for name in dataset.domains:
        pairs.append((result['domains'][name], top_c['domains'][name]))
    for causal, looking_ahead in pairs:
        causal['loss_top_c'] = looking_ahead['loss']
        causal['routing_gap'] = causal['loss'] - looking_ahead['loss']
    num_routed = len(hparams.model.routed_layers)
    if batches_per_layer and num_routed:
        few = min(num_batches, batches_per_layer)
        base = _summarize(top_c_sums[:few], hparams, dataset)['loss']
        alone = [np.arange(num_routed) == layer for layer in range(num_routed)]
        losses = [evaluate(*inputs, few, rule, only)['loss'] for only in alone]
        result['routing']['routing_gap'] = [loss - base for loss in losses]
    return result
