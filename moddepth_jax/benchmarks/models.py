"""The models that benchmarks compare, by variant and size."""

from typing import Literal

import jax
import jax.numpy as jnp

from configs import dense_isoflop, moda_700m, mode_integrated, moe, mor
from moddepth_jax.hparams import Hparams, from_config
from moddepth_jax.hparams.checks import did_you_mean
from moddepth_jax.model.transformer import Transformer
from moddepth_jax.studies.plan import STREAM_VARIANTS, VARIANTS

Dtype = Literal['float32', 'bfloat16']
# Name of each variant in tables: variants of this module, and depth streams of the studies, without
# the dense models that only a study makes as wide as another model costs.
TITLES = {
    **{name: kind.label for name, kind in STREAM_VARIANTS.items() if not name.startswith('wider')},
    'dense': 'dense',
    'mod': 'MoD',
    'moda': 'MoDA',
    'looped': 'looped',
    'exits': 'looped, exits',
    'mor': 'MoR',
    'mor_first': 'MoR, first keys',
    'moe': 'experts',
    'staged': 'MoDE staged',
    'integrated': 'MoDE integrated',
}
GROUPS = {'mode': ('staged', 'integrated')}  # names that stand for several variants
LOOPED, LOOPS = ('looped', 'exits', 'mor', 'mor_first'), 3
# Named sizes: sequence lengths, and tokens of a batch, that fit one large GPU.
NAMED_SIZES = {'124m': ((2048,), 32768), '700m': ((2048, 4096), 16384)}


def check_variants(names: list[str]) -> list[str]:
    """Return the variants (keys of TITLES) for names of variants or GROUPS; dense must be first.

    Raises ValueError for unknown names.
    """
    known = (*TITLES, *GROUPS)
    for name in names:
        if name not in known:
            right = f'must be one of {", ".join(known)}{did_you_mean(name, known)}'
            raise ValueError(f'--variants={name}: {right}')
    if names[0] != 'dense':
        raise ValueError(f'--variants={",".join(names)}: must begin with dense, as in dense,mod')
    return [name for one in names for name in GROUPS.get(one, [one])]


def _dense_config(size: str):
    """The dense config of a size: LAYERSxWIDTH, 124m (the smallest GPT-2) or 700m (moda_700m)."""
    if size == '700m':
        return moda_700m.get_config('slots=none')
    if size != '124m':
        return dense_isoflop.get_config(f'size={size}')
    config = dense_isoflop.get_config('size=12x768')
    config.model.vocab_size = 50304
    config.model.tie_embeddings = True
    return config


def make_model(
    variant: str,
    size: str,
    length: int,
    batch: int,
    router: str | None = None,
    loops: int = LOOPS,
    **knobs,
) -> Hparams:
    """Return the Hparams of a variant.

    Variants of the studies have their knobs: mod, staged and mod_moda route an eighth of the tokens
    through every other block. moe, staged and integrated have the experts of configs/moe.py instead
    of the mlp. looped, exits, mor and mor_first run all blocks `loops` times; mor and mor_first
    have the routing of configs/mor.py, and mor_first reads the keys of the first loop.

    Args:
      variant: key of TITLES.
      size: LAYERSxWIDTH, or a key of NAMED_SIZES.
      length: sequence length.
      batch: rows of a batch.
      router: of mod, staged and mod_moda; None: learned.
      loops: of looped variants.
      **knobs: of `config.model`; None keeps the value of the size.
    """
    config = _dense_config(size)
    if variant in VARIANTS:
        config.update_from_flattened_dict(VARIANTS[variant].changes)
    if config.model.routing.router != 'none':
        config.model.routing.router = router or config.model.routing.router
    if variant in LOOPED:
        config.model.looped_layers, config.model.loops = 'all', loops
    if variant in ('mor', 'mor_first'):
        config.model.routing = mor.get_config(f'loops={loops}').model.routing
    if variant == 'mor_first':
        config.model.routing.loop_keys, config.model.routing.overflow = 'first', 'grow'
    if config.model.experts.choice != 'none':
        moe.apply_experts(config)
    if variant == 'integrated':
        mode_integrated.apply_noop(config)
    for knob, value in knobs.items():
        if value is not None:
            config.model[knob] = value
    config.data.sequence_length, config.data.batch_size = length, batch
    config.training.accumulate_steps = 1
    return from_config(config)


def random_variables(hparams: Hparams) -> dict:
    """Return the variables of a newly initialised model."""
    init = jax.jit(Transformer(hparams).init)
    return init(jax.random.key(hparams.seed), jnp.zeros((1, 16), jnp.int32))
