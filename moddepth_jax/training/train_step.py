"""The state of a training run and the pure function that advances it by one batch."""

import flax.struct
import jax
import jax.numpy as jnp
import optax

from moddepth_jax.hparams import Hparams, Stage
from moddepth_jax.model.transformer import Transformer
from moddepth_jax.training.losses import (
    IGNORED,
    causal_rule_loss,
    masked_labels,
    routing_counts,
    routing_ratios,
    token_losses,
)
from moddepth_jax.training.optimizer import learning_rate_schedule, make_optimizer, trunk_norm


@flax.struct.dataclass
class TrainState:
    """Everything that a step reads and writes.

    Attributes:
      step: int32, batches seen; it is also the position in the data.
      params: float32 pytree of the Transformer.
      averages: the Transformer's collection of that name: moving averages of the C-th largest
        score of each routed layer; empty where the router has none.
      optimizer_state: of `make_optimizer`.
      skipped: int32, steps whose loss or gradient was not finite, all told.
      skipped_in_a_row: int32, those since the last good step.
      hparams, num_steps: static; what the step is built from.
    """

    step: jax.Array
    params: dict
    averages: dict
    optimizer_state: optax.OptState
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    hparams: Hparams = flax.struct.field(pytree_node=False)
    num_steps: int = flax.struct.field(pytree_node=False)

    @property
    def variables(self) -> dict:
        """What `Transformer.apply` takes: params, and averages where there are any."""
        return model_variables(self.params, self.averages)


def model_variables(params, averages) -> dict:
    """The Linen variables of a Transformer."""
    return {'params': params} | ({'averages': averages} if averages else {})


def init_state(hparams: Hparams, num_steps: int) -> TrainState:
    """The state before step 0; a pure function of the hyper-parameters (`hparams.seed`)."""
    tokens_BT = jnp.zeros((1, hparams.data.sequence_length), jnp.int32)
    variables = Transformer(hparams).init(jax.random.key(hparams.seed), tokens_BT)
    params = variables['params']
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        averages=variables.get('averages', {}),
        optimizer_state=make_optimizer(hparams, num_steps).init(params),
        skipped=jnp.zeros((), jnp.int32),
        skipped_in_a_row=jnp.zeros((), jnp.int32),
        hparams=hparams,
        num_steps=num_steps,
    )


def loss_and_metrics(params, state, hparams: Hparams, routing: str, batch, num_targets, num_real):
    """Loss of one (micro-)batch, normalised by the whole batch.

    Args:
      params: of the Transformer; what is differentiated.
      state: the TrainState, for its averages and step.
      hparams: static; those of the stage.
      routing: who enters.
      batch: `tokens_BT`, `labels_BT`, `segment_ids_BT`, int32 [B, T].
      num_targets: float32, counted targets of the whole step's batch.
      num_real: float32, its tokens that are not padding.

    Returns:
      The scalar that is differentiated, and the metrics that sum over micro-batches.
    """
    key = jax.random.fold_in(jax.random.key(hparams.seed), state.step)
    logits_BTV, records = Transformer(hparams).apply(
        model_variables(params, state.averages),
        batch['tokens_BT'],
        batch['segment_ids_BT'],
        routing,
        rngs={'routing': key},
    )
    nll_BT, log_z_BT, _ = token_losses(logits_BTV, masked_labels(batch))
    loss = jnp.sum(nll_BT) / num_targets
    z_loss = hparams.optimizer.z_loss * jnp.sum(log_z_BT**2) / num_targets
    rule_loss = causal_rule_loss(hparams, records, batch['segment_ids_BT'], num_real)
    metrics = {'loss': loss, 'z_loss': z_loss, 'rule_loss': rule_loss}
    if records is not None:
        metrics['routing'] = routing_counts(records, batch['segment_ids_BT'])
    return loss + z_loss + rule_loss, metrics


def _gradients(state, hparams, routing, batch):
    """Gradients and metrics of a batch, summed over its micro-batches one at a time."""
    counts = (
        jnp.maximum(jnp.sum(masked_labels(batch) != IGNORED, dtype=jnp.float32), 1),
        jnp.maximum(jnp.sum(batch['segment_ids_BT'] > 0, dtype=jnp.float32), 1),
    )
    differentiate = jax.grad(loss_and_metrics, has_aux=True)
    parts = hparams.training.accumulate_steps
    given = (state, hparams, routing)
    if parts == 1:
        return differentiate(state.params, *given, batch, *counts)

    def add(total, micro_batch):
        part = differentiate(state.params, *given, micro_batch, *counts)
        return jax.tree.map(jnp.add, total, part), None

    # Row i goes to micro-batch i % parts: a batch sharded by rows stays sharded in every one.
    micro_batches = jax.tree.map(
        lambda rows: jnp.moveaxis(rows.reshape(-1, parts, *rows.shape[1:]), 1, 0), batch
    )
    first = jax.tree.map(lambda rows: rows[0], micro_batches)
    shapes = jax.eval_shape(lambda p: differentiate(p, *given, first, *counts), state.params)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return jax.lax.scan(add, zeros, micro_batches)[0]


def _move_averages(state: TrainState, decay: float, lowest_R):
    """The moving average of the C-th largest scores; the first steps weigh more than `decay` says.

    Before many steps are in it, the average over them is better than one that remembers its start.
    """
    if not state.averages:
        return state.averages
    taken = (state.step - state.skipped).astype(jnp.float32)
    decay = jnp.minimum(decay, (taken + 1) / (taken + 10))
    old_R = state.averages['thresholds_R']
    moved_R = decay * old_R + (1 - decay) * lowest_R
    return {'thresholds_R': jnp.where(jnp.isfinite(moved_R), moved_R, old_R)}


def train_step(state: TrainState, batch, stage: Stage | None = None) -> tuple[TrainState, dict]:
    """One step of the optimizer. Pure; the caller jits it, donating `state`.

    Args:
      state: before the step.
      batch: `tokens_BT`, `labels_BT`, `segment_ids_BT`, int32 [B, T].
      stage: static, one of `hparams.stages`; None: the last, which trains at the final capacity.

    Returns:
      The state after it, and metrics: `loss` (nats a target), `z_loss`, `rule_loss`, `grad_norm`
      (of all but the predictor),
      `learning_rate`, `skipped`, `skipped_in_a_row`, and `routing`, as `routing_ratios` says.
      A step whose loss or gradient is not finite changes nothing but the counters.
    """
    hparams, num_steps = state.hparams, state.num_steps
    stage = hparams.stages[-1] if stage is None else stage
    gradients, metrics = _gradients(state, hparams.at(stage), stage.routing, batch)
    updates, optimizer_state = make_optimizer(hparams, num_steps).update(
        gradients, state.optimizer_state, state.params
    )
    params = optax.apply_updates(state.params, updates)
    good = jnp.isfinite(optax.tree.norm(gradients)) & jnp.isfinite(metrics['loss'])
    averages = state.averages
    if 'routing' in metrics:
        metrics['routing'] = routing_ratios(metrics['routing'])
        lowest_R = metrics['routing']['lowest_selected_score']
        averages = _move_averages(state, hparams.model.routing.threshold_decay, lowest_R)
    params, averages, optimizer_state = jax.tree.map(
        lambda new, old: jnp.where(good, new, old),
        (params, averages, optimizer_state),
        (state.params, state.averages, state.optimizer_state),
    )
    metrics['grad_norm'] = trunk_norm(gradients)
    # The optimizer counts the steps that it took.
    taken = state.step - state.skipped
    metrics['learning_rate'] = learning_rate_schedule(hparams, num_steps)(taken)
    state = state.replace(
        step=state.step + 1,
        params=params,
        averages=averages,
        optimizer_state=optimizer_state,
        skipped=state.skipped + ~good,
        skipped_in_a_row=jnp.where(good, 0, state.skipped_in_a_row + 1),
    )
    metrics['skipped'], metrics['skipped_in_a_row'] = state.skipped, state.skipped_in_a_row
    return state, metrics
