"""Causal rules: how a routed block selects tokens without knowing later ones."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from moddepth_jax.hparams import ModelHparams
from moddepth_jax.hparams.registry import CAUSAL_RULES
from moddepth_jax.model.layers import initializer, widen


class CausalRule(nn.Module):
    """Maps (x_BTD, scores_BT, threshold) to float32 logits [B, T]. Above 0, a token is selected."""

    hparams: ModelHparams
    # The knob of `model.routing` with the weight of the loss that fits the logits to the top C.
    loss_weight = None
    needs_threshold = False  # whether it compares scores with a moving average
    is_capped = True  # whether a routed block's cache can be smaller than the context

    @classmethod
    def flops_per_token(cls, hparams: ModelHparams) -> int:
        """Return the FLOPs of the rule's own parameters on one token."""
        return 0


@CAUSAL_RULES.register('predictor')
class Predictor(CausalRule):
    """The logit that a token is in the top C, from stop_gradient(x) (Raposo et al. 2024, 3.5)."""

    loss_weight = 'predictor_loss_weight'

    @nn.compact
    def __call__(self, x_BTD, scores_BT, threshold):
        x_BTD = widen(jax.lax.stop_gradient(x_BTD))
        init = initializer(self.hparams.init_std)
        if self.hparams.routing.predictor_width:
            width = self.hparams.routing.predictor_width
            hidden = nn.Dense(width, kernel_init=init, precision='highest', name='hidden')
            x_BTD = jax.nn.silu(hidden(x_BTD))
        return nn.Dense(1, kernel_init=init, precision='highest', name='out')(x_BTD)[..., 0]

    @classmethod
    def flops_per_token(cls, hparams: ModelHparams) -> int:
        width = hparams.routing.predictor_width
        return 2 * ((hparams.d_model + 1) * width if width else hparams.d_model)


@CAUSAL_RULES.register('positive')
class Positive(CausalRule):
    """r > 0. No loss moves r toward the top C: straight-through routing has this untrained."""

    def __call__(self, x_BTD, scores_BT, threshold):
        return scores_BT


@CAUSAL_RULES.register('aux_loss')
class AuxLoss(Positive):
    """sigmoid(r) > 1/2, that is r > 0. A loss moves the router's own scores toward the top C."""

    loss_weight = 'aux_loss_weight'


@CAUSAL_RULES.register('threshold')
class Threshold(CausalRule):
    """r > moving average of the C-th largest score, or the known threshold of a control."""

    needs_threshold = True

    def __call__(self, x_BTD, scores_BT, threshold):
        return scores_BT - threshold


@CAUSAL_RULES.register('assigned')
class Assigned(CausalRule):
    """The loops that the router chose for the token. The choice is causal, so no rule is needed."""

    is_capped = False

    def __call__(self, x_BTD, scores_BT, threshold):
        return scores_BT


@CAUSAL_RULES.register('dense')
class AllTokens(CausalRule):
    """Every token is selected."""

    is_capped = False

    def __call__(self, x_BTD, scores_BT, threshold):
        return jnp.ones_like(scores_BT)


@CAUSAL_RULES.register('bypass')
class NoTokens(CausalRule):
    """No token is selected: the model without its routed blocks, or with one loop."""

    def __call__(self, x_BTD, scores_BT, threshold):
        return jnp.full_like(scores_BT, -1)
