"""The routings with which a model can run, and its causal one."""

from moddepth_jax.hparams.checks import did_you_mean
from moddepth_jax.hparams.registry import CAUSAL_RULES
from moddepth_jax.hparams.run import Hparams


def check_routing(hparams: Hparams, routing: str, top_c: bool = True):
    """Raise ValueError for a routing that the model cannot run. `top_c`: whether that is one."""
    first = ('top_c',) * top_c
    knobs, rules = hparams.model.routing, hparams.model.routing.rules
    right = f'must be {", ".join((*first, *rules))}'
    why = f'this model ({knobs.router} router, trained for {rules[0]}) has no such rule; {right}'
    if not hparams.model.routed_layers:
        rules = (causal_routing(hparams),)
        why = 'no block of this model is routed; its only causal rule is dense'
        if rules == ('threshold',):
            why = 'experts choose tokens of whole rows; only the threshold rule is causal'
        right = f'must be {rules[0]}'
    if routing not in ('top_c', *CAUSAL_RULES):
        why = right + did_you_mean(routing, (*first, *rules))
    elif routing == 'top_c' and not top_c:
        why = f'looks at later tokens, which do not exist yet; {right}'
    if routing not in (*first, *rules):
        raise ValueError(f'routing={routing!r}: {why}')


def check_causal(hparams: Hparams, routing: str):
    """Raise ValueError for a routing that the model cannot run or that looks at later tokens."""
    check_routing(hparams, routing, top_c=not hparams.model.looks_ahead)


def causal_routing(hparams: Hparams) -> str:
    """Return the causal rule of evaluation and generation."""
    if hparams.model.routed_layers:
        return hparams.model.routing.causal_rule
    return 'threshold' if hparams.model.looks_ahead else 'dense'
