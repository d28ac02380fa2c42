"""Prints which backend computes the attention of each config on each platform, and why.

python -m launch.backends
python -m launch.backends tiny moda_700m
python -m launch.backends --page=docs/backends.md

The output is a Markdown table. The model of each config is traced at its own size, and the backends
are chosen as `model.attention=auto` does. --page replaces the text between the two markers of a
file. That needs JAX 0.11.2 or newer: for older releases, which support fewer backends, the table
is only printed.
"""

import functools
import importlib
import pathlib

from absl import flags

from launch import cli, listing
from moddepth_jax.hparams.checks import did_you_mean
from moddepth_jax.training.tables import markdown_rows, replace_between

PAGE = flags.DEFINE_string(
    'page', None, 'Write the table between the markers of this file instead of printing it.'
)
BEGIN = '<!-- backends: written by python -m launch.backends -->'
END = '<!-- end of backends -->'
OLDEST_JAX = (0, 11, 2)  # for --page
# Columns: kind and compute capability of a GPU; None: CPU.
DEVICES = {
    'CPU': None,
    'Hopper (9.0)': ('a Hopper GPU', (9, 0)),
    'older GPU (8.0)': ('an older GPU', (8, 0)),
}


def attentions(name: str) -> list:
    """Return the distinct attention Shapes in a training step of a config on one device."""
    import jax

    from kernels_pallas.backends import recorded
    from moddepth_jax.hparams import from_config
    from moddepth_jax.model.transformer import Transformer

    config = importlib.import_module(f'configs.{name}').get_config()
    if not config.flop_budget:  # configs/base.py has neither a budget nor steps
        config.training.num_steps = max(1, config.training.num_steps)
    hparams = from_config(config)
    rows = hparams.data.batch_size // hparams.training.accumulate_steps
    tokens_BT = jax.ShapeDtypeStruct((rows, hparams.data.sequence_length), 'int32')
    model, key = Transformer(hparams), jax.random.key(0)
    variables = jax.eval_shape(model.init, key, tokens_BT)
    apply = functools.partial(model.apply, rngs={'routing': key})
    with recorded() as seen:
        jax.eval_shape(apply, variables, tokens_BT)
    return list(dict.fromkeys(seen))


def cell(shapes, device, notes) -> str:
    """Return the backends on a device, with numbers of reasons; `notes` collects the reasons."""
    from kernels_pallas import backends

    decoding = next(iter(backends.DECODING))  # the default without measurements

    def name(parts):
        depth = parts.depth if shapes.num_slots else '-'
        return f'`{parts.sequence} / {depth} / {decoding}`'

    if device is None:
        return name(backends.Parts())
    device = backends.Device('gpu', *device, not_measured='')
    candidates, refused = backends.plan(shapes, device)
    reasons = [f'{backend}: {why}' for backend, why in refused.items()]
    names = [name(parts) for parts in candidates]
    text = names[0] if len(names) == 1 else 'the fastest of ' + ', '.join(names)
    if len(names) > 1 and (why := backends.not_measured(shapes, device)):
        text = names[0]
        reasons.append(f'not measured: {why}')
    numbers = ', '.join(str(notes.setdefault(reason, len(notes) + 1)) for reason in reasons)
    return f'{text} ({numbers})' if numbers else text


def describe(shapes) -> str:
    """Describe Shapes in words: rows, tokens, heads, slots, dtypes and masks."""
    (batch, length, heads, width), (_, keys, kv_heads, _) = shapes.q, shapes.k
    words = [f'{batch} x {length} queries', f'{heads} heads on {kv_heads} of {width}']
    words += [f'{keys} keys'] * (keys != length)
    if shapes.num_slots:
        tokens = f' of {shapes.slot_rows}' if shapes.slot_rows else ''
        words.append(f'{shapes.num_slots} slots{tokens}')
    words.append(' and '.join(shapes.dtypes))
    words += [f'window {shapes.window}'] * bool(shapes.window)
    words += ['documents'] * shapes.segments
    return ', '.join(words + ['gathered tokens'] * (not shapes.consecutive))


def table(names: list[str]) -> str:
    """Return the Markdown table of some configs, and its notes."""
    notes, heads = {}, ('config', 'attention', *DEVICES)
    rows = [
        [name, describe(shapes), *(cell(shapes, device, notes) for device in DEVICES.values())]
        for name in names
        for shapes in attentions(name)
    ]
    reasons = [f'{number}. {reason}' for reason, number in notes.items()]
    return '\n'.join([*markdown_rows(heads, *rows), '', *reasons])


def main(argv):
    known = list(listing.configs())
    for name in argv[1:]:
        if name not in known:
            right = f'must be one of {", ".join(known)}{did_you_mean(name, known)}'
            raise ValueError(f'{name}: {right}')
    names = argv[1:] or known
    if PAGE.value is None:
        print(table(names))
        return
    page = pathlib.Path(PAGE.value)
    text = page.read_text(encoding='utf-8')
    replace_between(text, BEGIN, END, '')  # fails early if a marker is missing
    import jax

    if jax.__version_info__ < OLDEST_JAX:
        oldest = '.'.join(map(str, OLDEST_JAX))
        right = f'must run with jax {oldest} or newer, not {jax.__version__}: older releases'
        raise ValueError(f'--page={PAGE.value}: {right} support fewer backends')
    page.write_text(replace_between(text, BEGIN, END, table(names)), encoding='utf-8')


if __name__ == '__main__':
    cli.run(main, 'CONFIG...   names in configs/ without .py. Default: all.')
