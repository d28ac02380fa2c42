"""Formats the results of dry runs as lines and tables."""

import re

import rich.console
import rich.text

from moddepth_jax.training.progress import format_count
from moddepth_jax.training.tables import Table, markdown_rows, print_table

GIB = 2**30
NOTES = (
    'Compiled for CPUs; nothing was run. Where the result of an all-reduce is sliced afterwards, a '
    'GPU may use a reduce-scatter, which sends half of the bytes. Programs for CPUs keep many '
    'bfloat16 products in float32 and implement attention and experts differently, so temporaries '
    'and peak are upper bounds. Only the most expensive branch of a conditional counts.',
    'The estimates use data sheet numbers, which no real step reaches, and assume that collectives '
    'overlap neither with computation nor with each other. They are not measurements.',
)


def _sizes(mesh):
    sizes = [f'{axis}={size}' for axis, size in mesh.items() if size > 1]
    return ','.join(sizes) or 'data=1'


def _headlines(result):
    """Lines about the mesh, the model and the step."""
    rows, length, parts = result['rows'], result['length'], result['parts']
    tokens, devices = rows * length, result['devices']
    micro = f' in {parts} micro-batches' * (parts > 1)
    parameters, active = (format_count(result[n]) for n in ('parameters', 'active_parameters'))
    routed = f', {active} active per token' * (active != parameters)
    times = [f'{result[f"{name}_seconds"]:.0f} s' for name in ('compile', 'trace')]
    return [
        f'mesh      {_sizes(result["mesh"])}: {devices} device' + 's' * (devices > 1),
        f'model     {parameters} parameters{routed}',
        f'step      {rows} rows of {length}{micro}: {format_count(tokens)} tokens, '
        f'{tokens // devices} a device',
        f'compiled  in {times[0]}, traced in {times[1]}, JAX {result["jax"]}',
    ]


def _tables(result):
    """Yield the Tables of a result."""
    names = ('parameters', 'optimizer', 'argument', 'temp', 'peak')
    heads = ['', 'parameters', 'optimizer', 'arguments', 'temporaries', 'peak']
    yield Table('Memory a device', heads, {'GiB': [_gib(result['bytes'][name]) for name in names]})
    flops, split = result['flops'], result['split']
    lines = {
        name: [format_count(flops[key]), format_count(flops[key] / result['devices'])]
        for name, key in (
            ('counted (3 forward passes)', 'counted'),
            ('executed (with recomputation)', 'executed'),
        )
    }
    of_one = {
        'products in the compiled program': flops['products'],
        '  in conditionals, at most': flops['in_branches'],
        "XLA's estimate, each loop once": flops['xla'] or float('nan'),
    }
    lines |= {name: ['', format_count(number)] for name, number in of_one.items()}
    lines['traced / products (1: evenly split)'] = ['', 'n/a' if split is None else f'{split:.2f}']
    yield Table('FLOPs of a step', ['', 'all devices', 'a device'], lines)
    heads = ['axes: kind', 'runs', 'MB sent by a device', 'sliced afterwards']
    lines = dict(_collective_line(row) for row in result['collectives'])
    yield Table('Collectives of a step by mesh axes', heads, lines)
    for name, estimate in result['estimates'].items():
        title = f'Estimate for {name}, not measured, from {estimate["source"]}'
        yield Table(title, ['', 'ms per step', 'over products'], _estimate(estimate))


def _gib(count):
    return f'{count / GIB:.2f}' if count >= GIB / 100 else f'{count / GIB:.4f}'


def _collective_line(row):
    runs = str(row['count'])
    runs += ' (unknown loops: once)' if row['unknown_loops'] else ''
    runs += ' (at most)' if row['branches'] else ''
    megabytes = [f'{row[name] / 1e6:,.2f}' for name in ('bytes', 'sliced_bytes')]
    return f'{row["axes"]}: {row["kind"]}', [runs, *megabytes]


def _by_seconds(estimate):
    return sorted(estimate['collectives'].items(), key=lambda pair: -pair[1])


def _estimate(estimate):
    parts = {f'collectives over {axes}': seconds for axes, seconds in _by_seconds(estimate)}
    if parts:
        total = parts['all collectives'] = sum(parts.values())
        parts['  with reduce-scatters'] = total - estimate['sliced']
    compute = estimate['compute']
    lines = {'products at the peak of the data sheet': [_ms(compute), '']}
    return lines | {n: [_ms(seconds), f'{seconds / compute:.2f}'] for n, seconds in parts.items()}


def _ms(seconds):
    return f'{1e3 * seconds:.3g}' if seconds < 0.9995 else f'{1e3 * seconds:.0f}'


def print_result(result: dict):
    """Print everything that `dry_run` returns, with notes on how to read it."""
    console = rich.console.Console(highlight=False)

    def say(text, **options):
        # A Text, because Rich reads [brackets] in a str as markup.
        console.print(rich.text.Text(text), **options)

    for text in _headlines(result):
        say(text)
    for table in _tables(result):
        say('')
        print_table(table)
    say('')
    for text in result['sharding']:
        say(text, soft_wrap=True)
    for text in (*result['warnings'], *NOTES):
        say(f'\n{text}')


def markdown(results: list[dict]) -> str:
    """Return a Markdown table with a row for each dry run, fewest devices first.

    Each result also has the `command` that launch.train was given.
    """
    heads = (
        *('config', '`--mesh`', 'devices', 'tokens per device', 'state, GiB', 'peak, GiB'),
        *('TFLOP', 'GB sent', 'products, ms', 'collectives, ms', 'of these over'),
    )
    rows = []
    for one in results:
        # absl takes one dash or two, and a value after = or as the next argument.
        config = re.search(r'(?:^| )--?config[ =](\S*)', ' '.join(one['command']))
        config = config[1].removeprefix('configs/').replace('.py', '') if config else ''
        (estimate,) = one['estimates'].values()
        cells = (
            str(one['rows'] * one['length'] // one['devices']),
            _gib(one['bytes']['parameters'] + one['bytes']['optimizer']),
            _gib(one['bytes']['peak']),
            f'{one["flops"]["executed"] / one["devices"] / 1e12:.1f}',
            f'{one["sent_bytes"] / 1e9:.2f}',
            _ms(estimate['compute']),
            _ms(sum(estimate['collectives'].values())),
            ', '.join(f'{axes} {_ms(s)}' for axes, s in _by_seconds(estimate) if s >= 1e-4),
        )
        rows.append((one['devices'], config, f'`{_sizes(one["mesh"])}`', cells))
    rows = [(config, mesh, str(devices), *cells) for devices, config, mesh, cells in sorted(rows)]
    return '\n'.join(markdown_rows(heads, *rows))
