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
    count_ends,
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
    """Everything that a step reads and writes.

    Attributes:
      step: int32, the number of batches seen, which is also the position in the data.
      params: parameters of the Transformer, in float32 (with JAX's 64 bits, some in float64).
      averages: the Transformer's collection of that name, which may be empty: moving averages of
        the C-th largest score of each routed layer, and of each expert that chooses its tokens.
      optimizer_state: state of the optimizer for the trainable parameters.
      skipped: int32, the number of steps whose loss or gradient was not finite.
      skipped_in_a_row: int32, the number of such steps since the last good one.
      hparams, num_steps: static.
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
    """Return the Linen variables of a Transformer."""
    return {'params': params} | ({'averages': averages} if averages else {})


def init_optimizer(hparams: Hparams, num_steps: int, params) -> optax.OptState:
    """Return the optimizer's state before step 0, for the trainable parameters."""
    trainable, _ = split_params(params, hparams.optimizer.trainable)
    return make_optimizer(hparams, num_steps).init(trainable)


def init_state(hparams: Hparams, num_steps: int) -> TrainState:
    """Return the state before step 0, a pure function of the hyper-parameters and their seed."""
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
    """Counts over the whole batch of a step, by which the losses of its micro-batches are divided.

    The losses of the micro-batches then sum to the loss of the step.

    Attributes:
      targets: number of targets.
      real: number of tokens that are not padding.
      experts: sum of `expert_counts` over the micro-batches, if there are several and the experts
        have losses.
      ends_N: sum of `count_ends` over the micro-batches, if there are several and tokens choose
        their last loop with a balance loss.
    """

    targets: jax.Array
    real: jax.Array
    experts: dict | None = None
    ends_N: jax.Array | None = None


def loss_and_metrics(
    params, state, hparams: Hparams, routing: str, batch, counts: StepCounts, teacher=None
):
    """Return the loss of a micro-batch, divided by the `counts` of the whole batch, and metrics.

    Loss and metrics of the micro-batches are summed. `state` provides the averages and the step;
    `hparams` are those of the stage.
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
    ids_BT = batch['segment_ids_BT']
    rule_loss = causal_rule_loss(hparams, records.routing, ids_BT, counts.real, counts.ends_N)
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
        metrics['routing'] = routing_counts(records.routing, ids_BT, of_loops)
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
    """Return the gradients of the trainable parameters and the metrics of the batch."""
    trainable, frozen = split_params(state.params, hparams.optimizer.trainable)
    counts = StepCounts(
        jnp.maximum(jnp.sum(masked_labels(batch) != IGNORED, dtype=jnp.float32), 1),
        jnp.maximum(jnp.sum(batch['segment_ids_BT'] > 0, dtype=jnp.float32), 1),
    )

    def loss(trainable, batch, counts):
        params = merge_params(trainable, frozen)
        return loss_and_metrics(params, state, hparams, routing, batch, counts, teacher)

    differentiate = jax.grad(loss, has_aux=True)
    parts, routing_knobs = hparams.training.accumulate_steps, hparams.model.routing
    experts = hparams.model.experts.has_loss
    ends = routing_knobs.traits.assigns_depth and routing_knobs.balance_weight > 0
    if parts > 1 and (experts or ends):

        def count(micro_batch):
            _, records = _forward(state.params, state, hparams, routing, micro_batch)
            of_loops = count_ends(records.routing, micro_batch['segment_ids_BT']) if ends else None
            return expert_counts(records.experts) if experts else None, of_loops

        # The balance losses multiply loads and scores of the whole step, and the experts' losses
        # are means over their tokens. These counts are needed before the first gradient.
        counts_of_step = sum_micro_batches(count, batch, parts)
        counts = counts._replace(experts=counts_of_step[0], ends_N=counts_of_step[1])
    return sum_micro_batches(lambda batch: differentiate(trainable, batch, counts), batch, parts)


def sum_micro_batches(function, batch, parts: int):
    """Sum `function(micro_batch)`, a pytree, over `parts` micro-batches, one at a time.

    `batch` is a pytree of arrays [B, ...]; `parts` divides B. With one part, it is
    `function(batch)`.
    """
    if parts == 1:
        return function(batch)
    # Row i goes to micro-batch i % parts, so that each micro-batch is sharded like the batch.
    micro_batches = jax.tree.map(
        lambda rows: jnp.moveaxis(rows.reshape(-1, parts, *rows.shape[1:]), 1, 0), batch
    )

    def add(total, micro_batch):
        return jax.tree.map(jnp.add, total, function(micro_batch)), None

    first = jax.tree.map(lambda rows: rows[0], micro_batches)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, first))
    return jax.lax.scan(add, zeros, micro_batches)[0]


def _update_average(state, average, lowest, decay, begin=0):
    """Update a moving average of the lowest selected scores.

    The first steps after `begin` use a smaller decay, so that older scores are soon forgotten.
    """
    taken = state.step - (begin or state.skipped)
    taken = jnp.maximum(taken, 0).astype(jnp.float32)
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
    """Take one optimizer step. Pure; the caller jits it and donates `state`.

    A step whose loss or gradient is not finite changes only the counters.

    Args:
      state: TrainState before the step.
      batch: `tokens_BT`, `labels_BT` and `segment_ids_BT`, int32 [B, T].
      stage: one of `hparams.stages`, by default the last. Static.
      loops: number of loops, by default that of the model. Static.
      teacher: Teacher of `training.distill_from`, or None without one.

    Returns:
      The TrainState after the step, and a dict of metrics: `loss` (nats per target), `z_loss`,
      `rule_loss`, `grad_norm` (of the trainable parameters without the predictor's),
      `learning_rate`, `skipped`, `skipped_in_a_row`; for a routed model `routing` of
      `routing_ratios` and `dead_tokens`; with experts `balance_loss`, `expert_z_loss` and `experts`
      of `expert_ratios`; with a teacher `teacher_divergence` (T^2 KL, nats per target).
    """
    hparams, num_steps = state.hparams, state.num_steps
    stage = hparams.stages[-1] if stage is None else stage
    of_step = hparams.at(stage).with_loops(loops)
    if bool(hparams.training.distill_from) != (teacher is not None):
        right = 'train_step must get the Teacher of that run, or none if it is empty'
        raise ValueError(f'training.distill_from={hparams.training.distill_from!r}: {right}')
    gradients, metrics = _gradients(state, of_step, stage.routing, batch, teacher)
    trainable, frozen = split_params(state.params, hparams.optimizer.trainable)
    updates, optimizer_state = make_optimizer(hparams, num_steps).update(
        gradients, state.optimizer_state, trainable
    )
    params = merge_params(optax.apply_updates(trainable, updates), frozen)
    good = jnp.isfinite(optax.tree.norm(gradients)) & jnp.isfinite(metrics['loss'])
    averaged = {}  # for each moving average by name: this step's value, the decay, the first step
    if 'routing' in metrics:
        metrics['dead_tokens'] = dead_tokens(metrics['routing'])
        ratios = metrics['routing'] = routing_ratios(metrics['routing'])
        decay = hparams.model.routing.threshold_decay
        begin = hparams.first_step_of_capacity(stage, num_steps)
        averaged['thresholds_R'] = ratios['lowest_selected_score'], decay, begin
    if 'experts' in metrics:
        experts = hparams.model.experts
        ratios = expert_ratios(metrics['experts'], experts.top_k, experts.num_routed)
        metrics['experts'] = ratios
        averaged['expert_thresholds_XE'] = ratios.get('lowest_taken'), experts.threshold_decay
    averages = {
        name: _update_average(state, average, *averaged[name])
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


def compile_step(lowered):
    """Compile a lowered `train_step`.

    On CPUs XLA copies the donated moments of the optimizer before it updates them, unless it
    analyzes their lifetimes, which is off by default there. The copies change no result.
    """
    on_cpu = jax.default_backend() == 'cpu'
    return lowered.compile({'xla_cpu_copy_insertion_use_region_analysis': True} if on_cpu else None)
