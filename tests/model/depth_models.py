"""Small models with a depth stream for tests, drawn so that every part shows in the logits."""

import jax
import numpy as np

from moddepth_jax.hparams import from_config
from moddepth_jax.model.transformer import Transformer

MODA = {'model.depth.stream': 'moda'}
ATTENTION = {'model.depth.stream': 'attention'}
DENSE = {'model.depth.stream': 'dense', 'model.layer_loop': 'unrolled'}
AVERAGE = DENSE | {'model.depth.stream': 'average'}
ROUTED = {'model.routing.router': 'learned', 'model.routing.capacity': 0.25}
SMALL = {
    'model.num_layers': 4,
    'model.vocab_size': 32,
    'model.d_model': 16,
    'model.d_ff': 16,
    'model.head_dim': 4,
    'model.routing.predictor_width': 4,
}
# Compiles in half the time; JAX 0.12 does not know the second option.
FAST = {'xla_backend_optimization_level': 0}
if jax.__version_info__ < (0, 11):
    FAST['xla_cpu_use_fusion_emitters'] = False


def small(make_config, *knobs):
    """Hparams of SMALL with the knobs of some dicts, the last winning."""
    merged = dict(SMALL)
    for some in knobs:
        merged |= some
    return from_config(make_config(**merged))


def drawn(hparams, tokens_BT, seed=0):
    """Variables of a Transformer in its dtype, so large that activations are about 1."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(Transformer(hparams).init, jax.random.key(0), tokens_BT)

    def draw(path, leaf):
        name = path[-1].key
        spread = {'embedding': 1.0, 'scale': 0.2, 'kernel': 0.3, 'w': 0.3}.get(name, 0.2)
        values = float(name == 'scale') + spread * rng.normal(size=leaf.shape)
        return values.astype(leaf.dtype if hparams.model.dtype != 'float64' else np.float64)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def compiled(function, *arguments):
    """`function`, compiled quickly for such arguments."""
    return jax.jit(function).lower(*arguments).compile(compiler_options=FAST)
