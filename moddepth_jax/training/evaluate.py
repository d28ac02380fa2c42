"""Evaluation on held-out text under any routing rule, with statistics of routers and experts."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from moddepth_jax.hparams import Hparams, ModelHparams
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
from moddepth_jax.training.train_step import sum_micro_batches


@functools.partial(jax.jit, static_argnames=('hparams', 'routing', 'mesh'))
def eval_step(variables, batch, causal_layers_R, *, hparams: Hparams, routing: str, mesh):
    """Sum nats, targets, routing and expert counts over a batch; replicated over the mesh.

    The batch is split into micro-batches as in training, so that it fits the same memory.
    """

    def sums_of(micro_batch):
        return _sums_of(variables, micro_batch, causal_layers_R, hparams, routing)

    sums = sum_micro_batches(sums_of, batch, hparams.training.accumulate_steps)
    return jax.lax.with_sharding_constraint(sums, replicated(mesh))


def _sums_of(variables, batch, causal_layers_R, hparams, routing):
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
    return sums


def evaluate(
    variables, hparams: Hparams, dataset, mesh, num_batches: int, routing: str, causal_layers_R=None
) -> dict:
    """Evaluate the first `num_batches` held-out batches, or all of them if there are fewer.

    Every process of a run calls this and gets the same numbers. With abstract variables it only
    compiles.

    Args:
      variables: those of a TrainState.
      hparams: hyper-parameters of the model and its stage.
      dataset: Dataset or HeldOut.
      mesh: must also be the mesh of the context (`jax.set_mesh`), which splits the work.
      num_batches: number of batches; for a mixture, one or more for each member.
      routing: routing rule, as the Transformer takes it.
      causal_layers_R: layers that use the rule, as the Transformer takes them; by default all.

    Returns:
      dict: `loss` (nats per target), `bits_per_byte` (bytes as the tokenizer counts them, see
      docs/evaluation.md) and `targets`. For a routed model `routing` (lists over routed layers, of
      `routing_ratios`) and `dead_tokens` (a fraction). With experts `experts` (lists over expert
      layers, of `expert_ratios`). If tokens leave the loops by a threshold, `loops_per_token`
      (mean). For a mixture `domains`: `loss`, `bits_per_byte`,
      `perplexity` (per token) and `targets` of each member; the other values are then weighted by
      the shares of the members in the training data.

    Raises:
      ValueError: one line, for fewer batches than a mixture has members.
    """
    sums = _sums(variables, hparams, dataset, mesh, num_batches, routing, causal_layers_R)
    return {} if ahead.is_abstract(sums) else _summarize(sums, hparams, dataset)


def _sums(variables, hparams, dataset, mesh, num_batches, routing, causal_layers_R=None):
    """Return the sums of `eval_step` for each batch, and the bytes of its targets."""
    if num_batches < len(dataset.domains):
        right = f'must be at least {len(dataset.domains)}, one for each member of the mixture'
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
    """Return the result of `evaluate`; `each` has the sums of the first batches in order."""
    totals = {}  # by member of a mixture; without a mixture, there is one entry, None
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
    """Add the sums of all domains, weighted so that their shares of the targets are `shares`."""
    if not shares:
        return totals[None]
    weights = {name: share / totals[name]['targets'] for name, share in shares.items()}
    weighted = [jax.tree.map(lambda x, w=weights[name]: x * w, totals[name]) for name in totals]
    return functools.reduce(functools.partial(jax.tree.map, np.add), weighted)


def perplexity(loss: float) -> float:
    """Return exp of a loss in nats per token; infinity if that overflows."""
    with np.errstate(over='ignore'):
        return float(np.exp(loss))


def num_passes(model: ModelHparams, per_layer: bool) -> int:
    """Return how often `evaluate_causal` reads the batches, with or without gaps per layer."""
    return 1 + model.looks_ahead * (1 + per_layer * len(model.routed_layers))


def evaluate_causal(
    variables, hparams: Hparams, dataset, mesh, num_batches: int, batches_per_layer: int = 0
) -> dict:
    """Evaluate under the causal rule, and compare with top-C if that is the rule of training.

    The result is that of `evaluate`. For a model that looks ahead in training it also has
    `loss_top_c`, the loss of the same weights under top-C, and `routing_gap` = loss - loss_top_c
    (see routing_gap.py), and so have the members in `domains`.
    With `batches_per_layer`, `routing` also has a list `routing_gap`: the gap if only that layer
    uses the causal rule, measured on that many batches. Experts that choose tokens use thresholds
    in all layers there.
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
        layers_RR = np.eye(num_routed, dtype=bool)
        losses = [evaluate(*inputs, few, rule, layer_R)['loss'] for layer_R in layers_RR]
        result['routing']['routing_gap'] = [loss - base for loss in losses]
    return result
