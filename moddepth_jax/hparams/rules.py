"""The routings with which a model can run, and its causal one."""

from moddepth_jax.hparams.registry import CAUSAL_RULES
from moddepth_jax.hparams.run import Hparams


def check_routing(hparams: Hparams, routing: str):
    """Raise ValueError for a routing that the model cannot run."""
    if routing not in ('top_c', *CAUSAL_RULES):
        raise ValueError(f'routing={routing!r}: must be one of top_c, {", ".join(CAUSAL_RULES)}')
    knobs, rules = hparams.model.routing, hparams.model.routing.rules
    why = f'this model ({knobs.router} router, trained for {rules[0]}) has no such rule; '
    why += f'must be top_c, {", ".join(rules)}'
    if not hparams.model.routed_layers:
        rules = (causal_routing(hparams),)
        why = 'no block of this model is routed; its only causal rule is dense'
        if rules == ('threshold',):
            why = 'experts choose tokens of whole rows; only the threshold rule is causal'
    if routing not in ('top_c', *rules):
        raise ValueError(f'routing={routing!r}: {why}')


def check_causal(hparams: Hparams, routing: str):
    """Raise ValueError for a routing that the model cannot run or that looks at later tokens."""
    check_routing(hparams, routing)
    if routing == 'top_c' and hparams.model.looks_ahead:
        raise ValueError("routing='top_c': looks at later tokens, which do not exist yet")


def causal_routing(hparams: Hparams) -> str:
    """Return the causal rule of evaluation and generation."""
    if hparams.model.routed_layers:
        return hparams.model.routing.causal_rule
    return 'threshold' if hparams.model.looks_ahead else 'dense'
