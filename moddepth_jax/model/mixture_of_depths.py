"""A routed block: the tokens that its router selects pass through, the others stay as they are."""

import flax.linen as nn
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moddepth_jax.hparams import ModelHparams
from moddepth_jax.model.attention import Tokens
from moddepth_jax.model.block import Block
from moddepth_jax.model.routing import (
    GATES,
    ROUTERS,
    Predictor,
    RoutingRecord,
    gather_rows,
    membership,
    scatter_add_rows,
    select_top_c,
)

CHOICE = 'routing choice'  # name by which rematerialisation keeps the selected indices


class MixtureOfDepths(nn.Module):
    """x'_t = x_t + gate(r_t) f(X_selected)_t for selected t, x'_t = x_t for the others.

    f(X) = block(X) - X sees the selected tokens alone, at their original positions (Raposo et al.
    2024, equation 1). `routing` names who is selected: `top_c` the C highest scores of each row,
    which looks at the whole row; `predictor`, `aux_loss`, `dense` a causal rule. Padding (segment
    0) never enters and never takes a place from a real token.
    """

    hparams: ModelHparams
    window: int
    routing: str

    @nn.compact
    def __call__(self, x_BTD, tokens: Tokens):
        """Returns x'_BTD and the RoutingRecord."""
        routing = self.hparams.routing
        real_BT = tokens.segment_ids_BT > 0
        scores_BT = ROUTERS[routing.router](routing, name='router')(x_BTD)
        rule_logits_BT = self._rule_logits(x_BTD, scores_BT)
        eligible_BT = jnp.where(real_BT, scores_BT, -jnp.inf)
        indices_BC = select_top_c(eligible_BT, routing.num_selected(x_BTD.shape[1]))
        indices_BC = checkpoint_name(indices_BC, CHOICE)
        top_c_BT = membership(indices_BC, x_BTD.shape[1]) & real_BT
        gate_BT = jnp.where(real_BT, GATES[routing.gate](scores_BT), 0.0)
        block = Block(self.hparams, self.window, name='block')
        if self.routing == 'top_c':
            entered_BT = top_c_BT
            y_BTD = self._gathered(block, x_BTD, tokens, gate_BT, indices_BC)
        else:
            entered_BT = real_BT if self.routing == 'dense' else real_BT & (rule_logits_BT > 0)
            y_BTD = masked_block(block, x_BTD, tokens, gate_BT, entered_BT)
        return y_BTD, RoutingRecord(scores_BT, rule_logits_BT, top_c_BT, entered_BT)

    def _rule_logits(self, x_BTD, scores_BT):
        if self.hparams.routing.causal_rule == 'predictor':
            return Predictor(self.hparams, name='predictor')(x_BTD)
        if self.hparams.routing.causal_rule == 'aux_loss':
            return scores_BT
        return jnp.ones_like(scores_BT)

    def _gathered(self, block, x_BTD, tokens, gate_BT, indices_BC):
        selected = Tokens(*(gather_rows(side, indices_BC) for side in tokens))
        delta_BCD = block.delta(gather_rows(x_BTD, indices_BC), selected)
        update_BCD = gather_rows(gate_BT, indices_BC)[..., None] * delta_BCD
        return scatter_add_rows(x_BTD, indices_BC, update_BCD.astype(x_BTD.dtype))


def masked_block(block, x_BTD, tokens: Tokens, gate_BT, entered_BT):
    """The routed update computed on all T tokens: any set of tokens may enter, nothing is saved.

    It is the form of causal rules, whose number of entering tokens is not known beforehand, and the
    ruler of the gathered form.
    """
    # A segment of their own hides the tokens that stay out from those that enter.
    segment_ids_BT = jnp.where(entered_BT, tokens.segment_ids_BT, -1)
    delta_BTD = block.delta(x_BTD, tokens._replace(segment_ids_BT=segment_ids_BT))
    update_BTD = (gate_BT[..., None] * delta_BTD).astype(x_BTD.dtype)
    return jnp.where(entered_BT[..., None], x_BTD + update_BTD, x_BTD)
