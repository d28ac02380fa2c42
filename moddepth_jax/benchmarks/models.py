"""The models that launch.bench compares, by size and by what sets them apart."""

from configs import base, dense_isoflop, mod_isoflop, moda_700m, mode_integrated, moe, sizes
from moddepth_jax.hparams import from_config

VARIANTS = ('dense', 'mod', 'moda', 'both', 'moe', 'staged', 'integrated')
TOGETHER = {'mode': ('staged', 'integrated')}  # names that stand for several
# Of these, lengths and tokens of a batch that fit one large GPU.
NAMED = {'124m': ((2048,), 32768), '700m': ((2048, 4096), 16384)}


def _config(size: str):
    """The dense model of a size: LAYERSxWIDTH, 124m (GPT-2's smallest) or 700m (moda_700m)."""
    if size not in NAMED:
        return dense_isoflop.get_config(f'size={size}')
    if size == '700m':
        return moda_700m.get_config('slots=none')
    config = dense_isoflop.get_config('size=12x768')
    config.model.vocab_size = 50304
    config.model.tie_embeddings = True
    return config


def one_model(name: str, size: str, length: int, rows: int, router=None, **knobs):
    """Hparams of a variant: routed ones (mod, both, staged) at an eighth in every other block.

    Those with experts (moe, staged, integrated) have them as configs/moe.py, in place of the mlp
    of that size.

    Args:
      name: of VARIANTS.
      size: LAYERSxWIDTH or one of NAMED.
      length, rows: of a batch.
      router: in place of the learned one of routed models.
      knobs: of the model, such as num_kv_heads; None leaves one as it is.
    """
    config = _config(size)
    if name in ('moda', 'both'):
        config.model.depth.stream = 'moda'
    if name in ('mod', 'both', 'staged'):
        config.model.routing = mod_isoflop.get_config().model.routing
        config.model.routing.router = router or config.model.routing.router
    if name in ('moe', 'staged', 'integrated'):
        moe.apply_experts(config)
    if name == 'integrated':
        mode_integrated.apply_noop(config)
    for knob, value in knobs.items():
        if value is not None:
            config.model[knob] = value
    config.data.sequence_length, config.data.batch_size = length, rows
    config.training.accumulate_steps = 1
    return from_config(config)


def dense_and_routed(size: str, kv_heads=None, router=None, context=None):
    """The dense model and the routed one of one size, in float32."""
    for module in (dense_isoflop, mod_isoflop):
        config = module.get_config(f'size={size}')
        config.model.num_kv_heads = kv_heads or config.model.num_kv_heads
        config.data.sequence_length = context or config.data.sequence_length
        if router and module is mod_isoflop:
            config.model.routing.router = router
        yield from_config(config)


def dense_and_compared(name: str, size: str, kv_heads: int, context: int):
    """The dense model and that of a variant, in bfloat16, for decoding.

    Args:
      name: mod, whose router is random: it has a known rate without training; or moda.
      size: LAYERSxWIDTH.
      kv_heads: key/value heads of both.
      context: places of a cache.
    """
    for variant, router in (('dense', None), (name, 'random' if name == 'mod' else None)):
        knobs = {'num_kv_heads': kv_heads, 'dtype': 'bfloat16'}
        yield one_model(variant, size, context, 1, router, **knobs)


def grouped_heads(size: str) -> int:
    """Half of the query heads of a size, or 1 where they are odd; a named size keeps its own."""
    if size in NAMED:
        return _config(size).model.num_kv_heads
    config = base.get_config()
    sizes.apply_size(config, size)
    heads = config.model.num_heads
    return heads // 2 if heads % 2 == 0 else 1
