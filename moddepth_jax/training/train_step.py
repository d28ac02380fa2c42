"""The state of a training run and the pure function that advances it by one batch."""

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax

from moddepth_jax.hparams import Hparams, Stage
from moddepth_jax.model.cross_entropy import SoftTargets, cross_entropy, distillation
from moddepth_jax.model.layer import Records
from moddepth_jax.model.transformer import Transformer
from moddepth_jax.training.losses import (
    IGNORED,
    causal_rule_loss,
    dead_tokens,
    expert_counts,
    expert_loss,
    expert_ratios,
    masked_labels,
    routing_counts,
    routing_ratios,
)
from moddepth_jax.training.optimizer import learning_rate_schedule, make_optimizer, trunk_norm
from moddepth_jax.training.teacher import Teacher
from moddepth_jax.training.trainable import merge_params, split_params


@flax.struct.dataclass
class TrainState:
    """All that a step reads and writes; `hparams` and `num_steps` are static.

    `step` (int32) is the batches seen, hence the position in the data; `params` are float32.
    `averages`, maybe empty, is the Transformer's collection of that name: moving averages of the
    C-th largest score of each routed layer, and of each expert that chooses. `optimizer_state` is
    of the parameters that train. `skipped` (int32)
    counts steps whose loss or gradient was not finite, `skipped_in_a_row` those since a good one.
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
        """The Linen variables that `Transformer.apply` takes."""
        return model_variables(self.params, self.averages)


def model_variables(params, averages) -> dict:
    """The Linen variables of a Transformer."""
    return {'params': params} | ({'averages': averages} if averages else {})


def init_optimizer(hparams: Hparams, num_steps: int, params) -> optax.OptState:
    """The optimizer's state before step 0, of the parameters that train."""
    trainable, _ = split_params(params, hparams.optimizer.trainable)
    return make_optimizer(hparams, num_steps).init(trainable)


def init_state(hparams: Hparams, num_steps: int) -> TrainState:
    """The state before step 0; a pure function of the hyper-parameters (`hparams.seed`)."""
    tokens_BT = jnp.zeros((1, hparams.data.sequence_length), jnp.int32)
    variables = Transformer(hparams).init(jax.random.key(hparams.seed), tokens_BT)
    params = variables['params']
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        averages=variables.get('averages', {}),
        optimizer_state=init_optimizer(hparams, num_steps, params),
        skipped=jnp.zeros((), jnp.int32),
        skipped_in_a_row=jnp.zeros((), jnp.int32),
        hparams=hparams,
        num_steps=num_steps,
    )


class StepCounts(NamedTuple):
    """What the losses of micro-batches are divided by, so that they sum to the step's loss.

    The targets and the real tokens of the step's batch, and if it has several micro-batches and
    losses of experts the sum of `expert_counts` over them.
    """

    targets: jax.Array
    real: jax.Array
    experts: dict | None = None


def loss_and_metrics(
    params, state, hparams: Hparams, routing: str, batch, counts: StepCounts, teacher=None
):
    """Loss of one (micro-)batch over the `counts` of the whole batch, and metrics that sum up.

    The TrainState gives the averages and the step, `hparams` are those of the stage.
    """
    z_weight, training = hparams.optimizer.z_loss, hparams.training
    x_BTD, records = _forward(params, state, hparams, routing, batch)
    labels_BT, chunk = masked_labels(batch), training.loss_chunk
    if teacher is None:
        total, nll_BT, log_z_BT = cross_entropy(x_BTD, params, labels_BT, z_weight, chunk)
    else:
        targets = SoftTargets(
            teacher.hidden_states(batch),
            teacher.variables['params'],
            training.distill_weight,
            training.distill_temperature,
        )
        total, nll_BT, log_z_BT, divergence_BT = distillation(
            x_BTD, params, labels_BT, z_weight, chunk, targets
        )
    rule_loss = causal_rule_loss(hparams, records.routing, batch['segment_ids_BT'], counts.real)
    metrics = {
        'loss': jnp.sum(nll_BT) / counts.targets,
        'z_loss': z_weight * jnp.sum(log_z_BT**2) / counts.targets,
        'rule_loss': rule_loss,
    }
    if teacher is not None:
        metrics['teacher_divergence'] = jnp.sum(divergence_BT) / counts.targets
    total = total / counts.targets + rule_loss
    if records.routing is not None:
        of_loops = hparams.model.routing.routes_loops
        metrics['routing'] = routing_counts(records.routing, batch['segment_ids_BT'], of_loops)
    if records.experts is not None:
        balance_loss, expert_z_loss = expert_loss(hparams, records.experts, counts.experts)
        metrics |= {'balance_loss': balance_loss, 'expert_z_loss': expert_z_loss}
        metrics['experts'] = expert_counts(records.experts)
        total += balance_loss + expert_z_loss
    return total, metrics


def _forward(params, state, hparams, routing, batch):
    key = jax.random.fold_in(jax.random.key(hparams.seed), state.step)
    x_BTD, records = Transformer(hparams).apply(
        model_variables(params, state.averages),
        batch['tokens_BT'],
        batch['segment_ids_BT'],
        routing,
        rngs={'routing': key},
        method='hidden_states',
    )
    return x_BTD, Records() if records is None else records


def _gradients(state, hparams, routing, batch, teacher):
    """Gradients of the parameters that train, and the metrics of the batch."""
    trainable, frozen = split_params(state.params, hparams.optimizer.trainable)
    counts = StepCounts(
        jnp.maximum(jnp.sum(masked_labels(batch) != IGNORED, dtype=jnp.float32), 1),
        jnp.maximum(jnp.sum(batch['segment_ids_BT'] > 0, dtype=jnp.float32), 1),
    )

    def loss(trainable, batch, counts):
        params = merge_params(trainable, frozen)
        return loss_and_metrics(params, state, hparams, routing, batch, counts, teacher)

    differentiate = jax.grad(loss, has_aux=True)
    parts = hparams.training.accumulate_steps
    if parts == 1:
        return differentiate(trainable, batch, counts)
    # Row i goes to micro-batch i % parts: a batch sharded by rows stays sharded in every one.
    micro_batches = jax.tree.map(
        lambda rows: jnp.moveaxis(rows.reshape(-1, parts, *rows.shape[1:]), 1, 0), batch
    )
    if hparams.model.experts.has_loss:

        def count_experts(micro_batch):
            _, records = _forward(state.params, state, hparams, routing, micro_batch)
            return expert_counts(records.experts)

        # The balance loss multiplies loads and scores of the whole step, and both losses are means
        # over the tokens of the experts: these must be known before the first gradient.
        counts = counts._replace(experts=_sum_over(micro_batches, count_experts))
    return _sum_over(micro_batches, lambda batch: differentiate(trainable, batch, counts))


def _sum_over(micro_batches, function):
    """The sum of `function(micro_batch)`, a pytree, computed one micro-batch at a time."""

    def add(total, micro_batch):
        return jax.tree.map(jnp.add, total, function(micro_batch)), None

    first = jax.tree.map(lambda rows: rows[0], micro_batches)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, first))
    return jax.lax.scan(add, zeros, micro_batches)[0]


def _update_average(state, average, lowest, decay):
    """Updates a moving average of the lowest scores taken; early steps use a smaller decay."""
    taken = (state.step - state.skipped).astype(jnp.float32)
    decay = jnp.minimum(decay, (taken + 1) / (taken + 10))
    moved = decay * average + (1 - decay) * lowest
    return jnp.where(jnp.isfinite(moved), moved, average)


def train_step(
    state: TrainState,
    batch,
    stage: Stage | None = None,
    loops: int = 0,
    teacher: Teacher | None = None,
) -> tuple[TrainState, dict]:
    """One step of the optimizer. Pure; the caller jits it, donating `state`.

    The batch is `tokens_BT`, `labels_BT`, `segment_ids_BT`, int32 [B, T]; `stage`, static, one of
    `hparams.stages`, by default the last; `loops`, static, by default those of the model; `teacher`
    that of `training.distill_from`. Returns the state after the step, and metrics: `loss` (nats a
    target), `z_loss`, `rule_loss`, `grad_norm` (of what trains but the predictor), `learning_rate`,
    `skipped`, `skipped_in_a_row`, and `routing`, of `routing_ratios`, with `dead_tokens`; with
    experts `balance_loss`, `expert_z_loss`, and `experts`, of `expert_ratios`; with a teacher
    `teacher_divergence`, T^2 KL in nats a target. A step whose loss or gradient is not finite
    changes only the counters.
    """
    hparams, num_steps = state.hparams, state.num_steps
    stage = hparams.stages[-1] if stage is None else stage
    of_step = hparams.at(stage).with_loops(loops)
    if bool(hparams.training.distill_from) != (teacher is not None):
        right = 'needs the Teacher of that run, and no other'
        raise ValueError(f'training.distill_from={hparams.training.distill_from!r}: {right}')
    gradients, metrics = _gradients(state, of_step, stage.routing, batch, teacher)
    trainable, frozen = split_params(state.params, hparams.optimizer.trainable)
    updates, optimizer_state = make_optimizer(hparams, num_steps).update(
        gradients, state.optimizer_state, trainable
    )
    params = merge_params(optax.apply_updates(trainable, updates), frozen)
    good = jnp.isfinite(optax.tree.norm(gradients)) & jnp.isfinite(metrics['loss'])
    taken = {}  # by the name of an average: what it averages, and its decay
    if 'routing' in metrics:
        metrics['dead_tokens'] = dead_tokens(metrics['routing'])
        ratios = metrics['routing'] = routing_ratios(metrics['routing'])
        decay = hparams.model.routing.threshold_decay
        taken['thresholds_R'] = ratios['lowest_selected_score'], decay
    if 'experts' in metrics:
        experts = hparams.model.experts
        ratios = expert_ratios(metrics['experts'], experts.top_k, experts.num_routed)
        metrics['experts'] = ratios
        taken['expert_thresholds_XE'] = ratios.get('lowest_taken'), experts.threshold_decay
    averages = {
        name: _update_average(state, average, *taken[name])
        for name, average in state.averages.items()
    }
    params, averages, optimizer_state = jax.tree.map(
        lambda new, old: jnp.where(good, new, old),
        (params, averages, optimizer_state),
        (state.params, state.averages, state.optimizer_state),
    )
    metrics['grad_norm'] = trunk_norm(gradients)
    # The optimizer counts only the steps that were not skipped.
    schedule = learning_rate_schedule(hparams, num_steps)
    metrics['learning_rate'] = schedule(state.step - state.skipped)
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
