"""Arguments of configs, and model sizes by name: `LxD` has L layers of width D."""

from configs import base


def at_budget(arguments: str, size: str, budget: str):
    """Return base with the size and the FLOP budget of the arguments `size` and `budget`.

    Args:
      arguments: those of the config, such as size=6x128,budget=2e13.
      size: LAYERSxWIDTH if the arguments have none.
      budget: training FLOPs if the arguments have none.
    """
    values = parse(arguments, size=size, budget=budget)
    config = base.get_config()
    apply_size(config, values['size'])
    config.flop_budget = number(values['budget'])
    if not 0 < config.flop_budget < float('inf'):
        right = 'must be a number of FLOPs above 0, such as 2e13'
        raise ValueError(f'budget={values["budget"]!r}: {right}')
    return config


def apply_size(config, size: str):
    """Set the shape of `config.model` to `size`, such as 6x128. Raises ValueError for a bad size.

    A block has about 12 D^2 parameters. At these widths, the initial std of D^-0.5 learns much
    faster than 0.02.
    """
    layers, _, width = size.partition('x')
    numbers = layers.isdecimal() and width.isdecimal()
    if not numbers or int(width) % 64 or not int(layers) * int(width):
        right = 'must be LAYERSxWIDTH with a width that is a multiple of 64, such as 6x128'
        raise ValueError(f'size={size!r}: {right}')
    model = config.model
    model.num_layers, model.d_model = int(layers), int(width)
    model.head_dim = 64 if model.d_model >= 128 else 32
    model.num_heads = model.num_kv_heads = model.d_model // model.head_dim
    model.d_ff = -(-8 * model.d_model // (3 * 64)) * 64
    model.init_std = model.d_model**-0.5
    model.embedding_init_std = 1.0


def parse(arguments: str, **defaults):
    """Return the defaults, updated by arguments such as size=6x128,budget=1e13.

    Raises ValueError for a key without a default.
    """
    values = dict(defaults)
    for pair in filter(None, (arguments or '').split(',')):
        key, _, value = pair.partition('=')
        if key not in defaults:
            raise ValueError(f'{key!r}: no such config argument; it takes {", ".join(defaults)}')
        values[key] = value
    return values


def number(text: str) -> float:
    """Return the text as a float, or NaN if it is not a number."""
    try:
        return float(text)
    except ValueError:
        return float('nan')


def count(text: str, name: str) -> int:
    """Return the value of the argument `name` as an int. Raises ValueError unless it is above 0."""
    if not text.isdecimal() or not int(text):
        raise ValueError(f'{name}={text!r}: must be a whole number above 0')
    return int(text)


def apply_slots(config, slots: str):
    """Set MoDA with these slots, or keep the dense model for `none`."""
    if slots != 'none':
        config.model.depth.stream = 'moda'
        config.model.depth.slots = slots


def apply_olmo2(config):
    """Set OLMo2's norms, vocabulary and RoPE base, tied embeddings, and `apply_large_run`."""
    model = config.model
    model.vocab_size = 100278
    model.norm_placement, model.qk_norm = 'reordered', 'full'
    model.rope_theta = 5e5
    model.tie_embeddings = True
    apply_large_run(config)


def apply_large_run(config):
    """Set the training recipe of the MoDA paper's 700M and 1.5B models (section 4), in bfloat16.

    A run has 400B tokens. Values that the paper does not give, such as the z-loss, are those of
    OLMo2. A step has 32 micro-batches: on 8 devices, each has 4 rows per device.
    """
    config.model.dtype = 'bfloat16'
    config.model.remat = 'block'
    config.data.sequence_length = 4096
    config.data.batch_size = 1024
    config.training.accumulate_steps = 32
    config.training.num_steps = round(400e9 / (1024 * 4096))
    config.optimizer.learning_rate = 3e-4
    config.optimizer.warmup_fraction = 2000 / config.training.num_steps
    config.optimizer.b2 = 0.95
    config.optimizer.z_loss = 1e-5
    config.optimizer.decay_embeddings = False
