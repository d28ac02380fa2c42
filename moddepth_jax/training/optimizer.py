"""AdamW with warm-up and cosine; gradients of the predictor are clipped separately."""

import jax
import optax

from moddepth_jax.hparams import Hparams


def learning_rate_schedule(hparams: Hparams, num_steps: int):
    """The schedule from step to learning rate: linear warm-up from 0, then a cosine to the end."""
    optimizer = hparams.optimizer
    last = max(1, num_steps - 1)
    warmup = min(last - 1, round(optimizer.warmup_fraction * num_steps))
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if warmup else optimizer.learning_rate,
        peak_value=optimizer.learning_rate,
        warmup_steps=warmup,
        decay_steps=last,
        end_value=optimizer.final_fraction * optimizer.learning_rate,
    )


def _mask(params, select):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: select([getattr(key, 'key', None) for key in path]), params
    )


def _in_predictor(params):
    return _mask(params, lambda keys: 'predictor' in keys)


def _outside_predictor(params):
    return _mask(params, lambda keys: 'predictor' not in keys)


def trunk_norm(gradients):
    """Global norm of all gradients except the predictor's, by which the trunk is clipped."""
    outside = jax.tree.leaves(_outside_predictor(gradients))
    leaves = zip(outside, jax.tree.leaves(gradients), strict=True)
    return optax.tree.norm([leaf for is_outside, leaf in leaves if is_outside])


def make_optimizer(hparams: Hparams, num_steps: int) -> optax.GradientTransformation:
    """The transformation that `train_step` applies.

    The gradients of the trunk and of the predictor are clipped by separate global norms: with one
    norm for both, the predictor's loss would scale the trunk's step. Weight decay is for matrices,
    not for norms, biases or the router's vector.
    """
    optimizer = hparams.optimizer
    clips = []
    if optimizer.clip_norm:
        clip = optax.clip_by_global_norm(optimizer.clip_norm)
        clips = [optax.masked(clip, mask) for mask in (_outside_predictor, _in_predictor)]
    decayed = {'kernel', 'embedding'} if optimizer.decay_embeddings else {'kernel'}
    return optax.chain(
        *clips,
        optax.adamw(
            learning_rate_schedule(hparams, num_steps),
            b1=optimizer.b1,
            b2=optimizer.b2,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            mask=lambda params: _mask(params, lambda keys: not decayed.isdisjoint(keys)),
        ),
    )
