"""Counts the FLOPs of the papers' models for `launch.claims`, without running them."""

from configs import base, moda_1b5, moda_48l, moda_700m
from moddepth_jax.hparams import from_config
from moddepth_jax.model.flops import depth_readers, forward_breakdown, forward_flops

CAPACITIES = (0.75, 0.5, 0.25, 0.12)


def counted_flops() -> dict[str, dict]:
    """Return the FLOPs of a forward pass over one row, by model shape, for `places.Evidence`.

    Each shape has `length`, the length of the row. Shapes of the MoDA paper have `dense` and `moda`
    with several ways to count attention. `mod_7b` has `dense` and each of CAPACITIES, with every
    block routed.
    """
    counted = {'mod_7b': _mod_7b()}
    for module in (moda_700m, moda_48l, moda_1b5):
        counted[module.__name__.removeprefix('configs.')] = found = {}
        for model, arguments in (('dense', ['slots=none']), ('moda', [])):
            hparams = from_config(module.get_config(*arguments))
            found['length'] = hparams.data.sequence_length
            found[model] = _by_way(hparams, found['length'])
    return counted


def _by_way(hparams, length):
    """FLOPs of visible pairs and slots, and also of those that causality hides."""
    parts = forward_breakdown(hparams, 1, length)
    visible = sum(parts.values())
    pairs = visible + parts['attention']
    readers = depth_readers(hparams, length, 'top_c')
    seen = sum(seen for _, seen, _ in readers)
    # The slots of all layers, in each layer that reads.
    held = len(readers) * hparams.model.num_layers * hparams.model.depth.slots_per_layer
    slots = parts['depth_attention'] * (held / seen - 1) if seen else 0
    return {
        'visible pairs and slots': visible,
        'all pairs': pairs,
        'all pairs and slots': pairs + slots,
    }


def _mod_7b():
    """FLOPs of a 7B model with every block routed, including the output layer."""
    config = base.get_config()
    config.training.num_steps = 1
    model = config.model
    model.num_layers, model.d_model, model.d_ff = 32, 4096, 11008
    model.num_heads = model.num_kv_heads = 32
    model.head_dim, model.vocab_size = 128, 32000
    config.data.sequence_length = 2048
    found = {'length': 2048, 'dense': forward_flops(from_config(config), 1, 2048)}
    model.routing.router, model.routing.layers = 'learned', 'every:1'
    for capacity in CAPACITIES:
        model.routing.capacity = capacity
        found[f'{capacity:g}'] = forward_flops(from_config(config), 1, 2048)
    return found
