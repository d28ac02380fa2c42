"""Optimizers and learning-rate schedules, by name."""

import fnmatch

import jax
import optax
from optax import contrib

from moddepth_jax.hparams import Hparams
from moddepth_jax.hparams.registry import OPTIMIZERS, SCHEDULES
from moddepth_jax.model.adapters import ADAPTER
from moddepth_jax.model.sharding import axis_names, matrix_sides

# A schedule takes the peak rate, the final rate, the number of steps after the warm-up, and the
# fraction of these in which it decays. An optimizer takes its schedule and the OptimizerHparams.


@SCHEDULES.register('cosine')
def _cosine(peak, end, steps, decay_fraction):
    del decay_fraction
    return optax.cosine_decay_schedule(peak, steps, end / peak)


@SCHEDULES.register('constant')
def _constant(peak, end, steps, decay_fraction):
    del end, steps, decay_fraction
    return optax.constant_schedule(peak)


@SCHEDULES.register('wsd')
def _wsd(peak, end, steps, decay_fraction):
    """Warm-up, stable, decay (Hu et al. 2024, arXiv 2404.06395, section 4)."""
    decay = min(steps, max(1, round(decay_fraction * steps)))
    return optax.linear_schedule(peak, end, decay, transition_begin=steps - decay)


def learning_rate_schedule(hparams: Hparams, num_steps: int):
    """Return the function from step to learning rate.

    The rate rises linearly from 0, then follows `optimizer.schedule`; the last of `num_steps` steps
    has the final rate.
    """
    optimizer = hparams.optimizer
    last, peak = max(1, num_steps - 1), optimizer.learning_rate
    steps = hparams.steps_of_shares(num_steps)
    most = max(1, min(steps, num_steps) - 1) - 1
    warmup = min(most, round(optimizer.warmup_fraction * steps))
    end = optimizer.final_fraction * peak
    after = SCHEDULES[optimizer.schedule](peak, end, last - warmup, optimizer.decay_fraction)
    if not warmup:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


def _mask(params, select):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: select([getattr(key, 'key', None) for key in path]), params
    )


def _in_predictor(params):
    return _mask(params, lambda keys: 'predictor' in keys)


def _outside_predictor(params):
    return _mask(params, lambda keys: 'predictor' not in keys)


def trunk_norm(gradients):
    """Return the global norm of all gradients except the predictor's, which clips the trunk."""
    outside = jax.tree.leaves(_outside_predictor(gradients))
    leaves = zip(outside, jax.tree.leaves(gradients), strict=True)
    return optax.tree.norm([leaf for is_outside, leaf in leaves if is_outside])


def _muon_axes(params):
    """Return the input and output axes of each matrix of a block; None for other parameters.

    It is also None for adapters, whose narrow matrices Adam updates. Leaves are stacked over layers
    and experts; these axes are a batch of matrices.
    """

    def axes(path, leaf):
        names = axis_names(jax.tree_util.keystr(path, simple=True, separator='/'), leaf.ndim)
        keys = [key.key for key in path]
        if keys[0] != 'stack' or ADAPTER in keys or 'vocab' in names:
            return None
        if (sides := matrix_sides(names[1:])) is None:
            return None
        inputs, outputs = (tuple(1 + axis for axis in side) for side in sides[1:])
        return contrib.MuonDimensionNumbers(inputs, outputs)

    return jax.tree_util.tree_map_with_path(axes, params)


def _decayed(optimizer):
    """Return the mask of weight decay: matrices, but not norms, biases or the router's vector."""
    names = {'kernel', 'embedding'} if optimizer.decay_embeddings else {'kernel'}
    return lambda params: _mask(params, lambda keys: not names.isdisjoint(keys))


@OPTIMIZERS.register('adamw')
def _adamw(rate, optimizer):
    decay = optimizer.weight_decay
    return optax.adamw(
        rate,
        optimizer.b1,
        optimizer.b2,
        optimizer.eps,
        weight_decay=decay,
        mask=_decayed(optimizer),
    )


@OPTIMIZERS.register('lion')
def _lion(rate, optimizer):
    """Chen et al. 2023, arXiv 2302.06675; a good rate is a tenth to a third of AdamW's."""
    decay = optimizer.weight_decay
    return optax.lion(
        rate, optimizer.b1, optimizer.b2, weight_decay=decay, mask=_decayed(optimizer)
    )


@OPTIMIZERS.register('muon')
def _muon(rate, optimizer):
    """Muon for the matrices of the blocks; Adam with Nesterov momentum, without decay, for others.

    Updates are scaled to the size of AdamW's, so that its learning rates fit (arXiv 2502.16982,
    eq. 4).
    """
    return contrib.muon(
        rate,
        beta=optimizer.b1,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        weight_decay_mask=_decayed(optimizer),
        adam_b1=optimizer.b1,
        adam_b2=optimizer.b2,
        muon_weight_dimension_numbers=_muon_axes,
        consistent_rms=0.2,
    )


def _scale_rates(factors):
    """Scale each update, decay included, by the factor of the first glob that fits its name."""

    def scale(path, update):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        fitting = (factor for glob, factor in factors if fnmatch.fnmatch(name, glob))
        return next(fitting, 1.0) * update

    return optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(scale, updates))


def make_optimizer(hparams: Hparams, num_steps: int) -> optax.GradientTransformation:
    """Return the optimizer that `train_step` applies.

    The gradients of the trunk and of the predictor are clipped by separate global norms. With a
    common norm, the predictor's loss would scale the trunk's step.
    """
    optimizer = hparams.optimizer
    clips = []
    if optimizer.clip_norm:
        clip = optax.clip_by_global_norm(optimizer.clip_norm)
        clips = [optax.masked(clip, mask) for mask in (_outside_predictor, _in_predictor)]
    rate = learning_rate_schedule(hparams, num_steps)
    scales = [_scale_rates(optimizer.factors)] if optimizer.factors else []
    return optax.chain(*clips, OPTIMIZERS[optimizer.name](rate, optimizer), *scales)
