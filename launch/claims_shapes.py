"""Counted FLOPs of the shapes of the MoDA paper: what its claims on cost are judged by."""

from configs import moda_1b5, moda_48l, moda_700m
from moddepth_jax.hparams import from_config
from moddepth_jax.model.flops import forward_breakdown

_SHAPES = {'moda_700m': moda_700m, 'moda_48l': moda_48l, 'moda_1b5': moda_1b5}


def counted() -> dict[str, dict]:
    """FLOPs of one row's forward pass, for `claim.Evidence`.

    By shape, `length` of the row and, of the `dense` model and of `moda` with mlp slots, `halved`,
    in which causal attention counts the pairs that it shows, and `full`, in which it counts all.
    """
    found = {}
    for name, module in _SHAPES.items():
        length = from_config(module.get_config()).data.sequence_length
        models = {'dense': module.get_config('slots=none'), 'moda': module.get_config()}
        found[name] = {'length': length}
        for model, config in models.items():
            parts = forward_breakdown(from_config(config), 1, length)
            total = sum(parts.values())
            found[name][model] = {'halved': total, 'full': total + parts['attention']}
    return found
