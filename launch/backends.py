"""What computes the attention of each config on each platform, and why: a table in Markdown.

python -m launch.backends
python -m launch.backends tiny moda_700m
python -m launch.backends --page=docs/backends.md

The model of each config is traced at its own size, and its attentions are looked up as
`model.attention=auto` does, for machines that need not exist.
"""

import importlib
import pathlib

from absl import flags

from launch import cli

PAGE = flags.DEFINE_string('page', None, 'File to write the table into, between its markers.')
BEGIN = '<!-- backends: written by python -m launch.backends -->'
END = '<!-- end of backends -->'
# Columns of devices, on which measuring is assumed to be possible: platform and compute capability.
DEVICES = {
    'CPU': ('cpu', None),
    'Hopper (9.0)': ('gpu', (9, 0)),
    'older GPU (8.0)': ('gpu', (8, 0)),
}
CONFIGS = pathlib.Path(__file__).parents[1] / 'configs'


def config_names() -> list[str]:
    """The configs that train a model: files of configs/ with a get_config, by name."""
    names = sorted(path.stem for path in CONFIGS.glob('*.py'))
    return [n for n in names if hasattr(importlib.import_module(f'configs.{n}'), 'get_config')]


def attentions(name: str) -> list:
    """The Shapes of the attentions in a training step of a config on one device, each once."""
    import jax

    from kernels_pallas.backends import recorded
    from moddepth_jax.hparams import from_config
    from moddepth_jax.model.transformer import Transformer

    config = importlib.import_module(f'configs.{name}').get_config()
    if not config.flop_budget:  # base has neither budget nor steps
        config.training.num_steps = max(1, config.training.num_steps)
    hparams = from_config(config)
    rows = hparams.data.batch_size // hparams.training.accumulate_steps
    model, key = Transformer(hparams), jax.random.key(0)
    tokens_BT = jax.ShapeDtypeStruct((rows, hparams.data.sequence_length), 'int32')
    variables = jax.eval_shape(model.init, key, tokens_BT)
    with recorded() as found:
        jax.eval_shape(
            lambda *args: model.apply(*args, rngs={'routing': key}), variables, tokens_BT
        )
    return list(dict.fromkeys(found))


def cell(shapes, platform, capability, note) -> str:
    """Backends of sequence, depth slots and decoding, and numbers that `note` gives to reasons."""
    from kernels_pallas import backends

    def name(parts):
        depth = parts.depth if shapes.num_slots else '-'
        return f'`{parts.sequence} / {depth} / {backends.DECODING}`'

    if platform == 'cpu':
        return name(backends.Parts())
    kind = {9: 'a Hopper GPU', 8: 'an older GPU'}[capability[0]]
    device = backends.Device(platform, kind, capability, not_measured='')
    candidates, refused = backends.plan(shapes, device)
    reasons = [f'{backend}: {why}' for backend, why in refused.items()]
    names, why = [name(parts) for parts in candidates], backends.not_measured(shapes, device)
    text = names[0] if why or not names[1:] else 'the fastest of ' + ', '.join(names)
    if names[1:] and why:
        reasons.append(f'not measured: {why}')
    numbers = ', '.join(str(note(reason)) for reason in reasons)
    return f'{text} ({numbers})' if numbers else text


def describe(shapes) -> str:
    """Shapes in words: rows and tokens, heads, slots, dtypes, and what hides keys from a query."""
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
    """The table of the configs of these names in Markdown, and its notes."""
    notes = {}

    def note(reason):
        return notes.setdefault(reason, len(notes) + 1)

    heads = ('config', 'attention', *DEVICES)
    lines = [f'| {" | ".join(heads)} |', '|---' * len(heads) + '|']
    for name in names:
        for shapes in attentions(name):
            cells = [cell(shapes, *device, note) for device in DEVICES.values()]
            lines.append(f'| {" | ".join([name, describe(shapes), *cells])} |')
    lines += ['', *(f'{number}. {reason}' for reason, number in notes.items())]
    return '\n'.join(lines)


def replaced(page: str, text: str) -> str:
    """The page with another text between its markers; a ValueError without both, in order, once."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f'page without its markers: must hold {BEGIN} and then {END}, once each')
    return f'{page.split(BEGIN)[0]}{BEGIN}\n\n{text}\n\n{END}{page.split(END)[1]}'


def main(argv):
    known = config_names()
    for name in argv[1:]:
        if name not in known:
            raise ValueError(f'{name}: must be one of {", ".join(known)}')
    names = argv[1:] or known
    if PAGE.value is None:
        return print(table(names))
    page = pathlib.Path(PAGE.value)
    text = page.read_text(encoding='utf-8')
    replaced(text, '')  # before the work
    page.write_text(replaced(text, table(names)), encoding='utf-8')


if __name__ == '__main__':
    cli.run(main, 'CONFIG..., names of configs/ without .py; none: all of them')
