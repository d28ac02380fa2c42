"""AdamW with warm-up and cosine; gradients of the predictor are clipped separately."""

import functools

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


def _in_predictor(params):
    def inside(path, _):
        return any(getattr(key, 'key', None) == 'predictor' for key in path)

    return jax.tree_util.tree_map_with_path(inside, params)


def _outside_predictor(params):
    return jax.tree.map(lambda inside: not inside, _in_predictor(params))


def trunk_norm(gradients):
    """Global norm of all gradients except the predictor's, by which the trunk is clipped."""
    outside = _outside_predictor(gradients)
    leaves = zip(jax.tree.leaves(outside), jax.tree.leaves(gradients), strict=True)
    return optax.tree.norm([leaf for is_outside, leaf in leaves if is_outside])


def _decayed(params, decay_embeddings: bool):
    """Mask of weight decay: matrices, but not norms, biases or the router's vector."""
    matrices = {'kernel', 'embedding'} if decay_embeddings else {'kernel'}

    def decayed(path, _):
        return not matrices.isdisjoint(getattr(key, 'key', None) for key in path)

    return jax.tree_util.tree_map_with_path(decayed, params)


def make_optimizer(hparams: Hparams, num_steps: int) -> optax.GradientTransformation:
    """The transformation that `train_step` applies.

    The gradients of the trunk and of the predictor are clipped by separate global norms: with one
    norm for both, the predictor's loss would scale the trunk's step.
    """
    optimizer = hparams.optimizer
    clips = []
    if optimizer.clip_norm:
        clip = optax.clip_by_global_norm(optimizer.clip_norm)
        clips = [optax.masked(clip, mask) for mask in (_outside_predictor, _in_predictor)]
    return optax.chain(
        *clips,
        optax.adamw(
            learning_rate_schedule(hparams, num_steps),
            b1=optimizer.b1,
            b2=optimizer.b2,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            mask=functools.partial(_decayed, decay_embeddings=optimizer.decay_embeddings),
        ),
    )
