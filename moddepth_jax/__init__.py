"""Mixture-of-Depths and Mixture-of-Depths Attention in JAX and Flax.

These are the public names. Each is imported at its first use, so `import moddepth_jax` is fast.

    route(block_fn, x_BTD, scores_BT, capacity)   run any block on the top C tokens of each row
    select_top_c(scores_BT, num_selected)         indices of the top C tokens
    depth_attention(q_BTNH, k_BSKH, v_BSKH, ...)  attention over a sequence and depth slots
    from_config(config)                           checked hyper-parameters of a config
    Transformer(hparams)                          the language model, a Flax module
"""

import importlib as _importlib

_MODULES = {
    'Transformer': 'moddepth_jax.model.transformer',
    'depth_attention': 'kernels_pallas',
    'from_config': 'moddepth_jax.hparams',
    'route': 'moddepth_jax.model.routing',
    'select_top_c': 'moddepth_jax.model.routing',
}


def __getattr__(name):
    if name not in _MODULES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(_importlib.import_module(_MODULES[name]), name)


def __dir__():
    return sorted(_MODULES)
