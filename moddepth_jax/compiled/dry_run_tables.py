"""The results of dry runs as lines and tables."""

from moddepth_jax.training.progress import format_count

GIB = 2**30
NOTES = (
    'Compiled for CPUs, nothing was run. Where the sum of an all-reduce is sliced afterwards, a '
    'GPU may scatter it instead, with half of the bytes. Programs for CPUs hold many products of '
    'bfloat16 in float32 and their own form of attention and of the experts: temporaries and peak '
    'are upper bounds. Of a conditional the most expensive branch counts.',
    'The estimates divide by numbers of data sheets, which no real step reaches, and add up '
    'collectives as if none ran during computation or another one. They are not measurements.',
)


def _sizes(mesh):
    sizes = [f'{axis}={size}' for axis, size in mesh.items() if size > 1]
    return ','.join(sizes) or 'data=1'


def headlines(result: dict) -> list[str]:
    """Lines on the mesh, the model and the step."""
    rows, length, parts = result['rows'], result['length'], result['parts']
    micro = f' in {parts} micro-batches' * (parts > 1)
    active = ''
    if result['active_parameters'] != result['parameters']:
        active = f', {format_count(result["active_parameters"])} of them for one token'
    seconds = result['trace_seconds'], result['compile_seconds']
    devices = f'{result["devices"]} device' + 's' * (result['devices'] > 1)
    return [
        f'mesh      {_sizes(result["mesh"])}: {devices}',
        f'model     {format_count(result["parameters"])} parameters{active}',
        f'step      {rows} rows of {length}{micro}: {format_count(rows * length)} tokens, '
        f'{rows * length // result["devices"]} a device',
        f'compiled  in {seconds[1]:.0f} s, traced in {seconds[0]:.0f} s, JAX {result["jax"]}',
    ]


def tables(result: dict):
    """Yields titles, heads and rows of cells."""
    names = ('parameters', 'optimizer', 'argument', 'temp', 'peak')
    heads = ('', 'parameters', 'optimizer', 'arguments', 'temporaries', 'peak')
    cells = [_gib(result['bytes'][name]) for name in names]
    yield 'Memory a device', heads, [('GiB', *cells)]
    flops, devices = result['flops'], result['devices']
    split = 'n/a' if result['split'] is None else f'{result["split"]:.2f}'
    rows = [
        ('counted (3 forward passes)', *_both(flops['counted'], devices)),
        ('executed (with what is recomputed)', *_both(flops['executed'], devices)),
        ('products in the compiled program', '', format_count(flops['products'])),
        ('  of these in conditionals, at most', '', format_count(flops['in_branches'])),
        ("XLA's estimate, each loop once", '', format_count(flops['xla'] or float('nan'))),
        ('traced / products: 1 = evenly split', '', split),
    ]
    yield 'FLOPs of a step', ('', 'all devices', 'a device'), rows
    yield (
        'Collectives of a step, by the mesh axes that they join',
        ('axes', 'kind', 'runs', 'MB a device sends', 'of it sliced after'),
        [_collective_row(row) for row in result['collectives']],
    )
    for name, estimate in result['estimates'].items():
        yield f'Estimate for {name}, not measured', *_estimate(result, estimate)


def _gib(count):
    return f'{count / GIB:.2f}' if count >= GIB / 100 else f'{count / GIB:.4f}'


def _both(flops, devices):
    return format_count(flops), format_count(flops / devices)


def _collective_row(row):
    runs = str(row['count'])
    if row['unknown_loops']:
        runs += ' (trips unknown: once)'
    if row['branches']:
        runs += ' (at most)'
    megabytes = [f'{row[name] / 1e6:,.2f}' for name in ('bytes', 'sliced_bytes')]
    return row['axes'], row['kind'], runs, *megabytes


def _estimate(result, estimate):
    compute = estimate['compute']
    rows = [('products at the peak of the data sheet', _ms(compute), '')]
    for axes, seconds in sorted(estimate['collectives'].items(), key=lambda pair: -pair[1]):
        rows.append((f'collectives over {axes}', _ms(seconds), f'{seconds / compute:.2f}'))
    total = sum(estimate['collectives'].values())
    if estimate['collectives']:
        rows.append(('all collectives', _ms(total), f'{total / compute:.2f}'))
        scattered = total - estimate['sliced']
        rows.append(('  with reduce-scatters', _ms(scattered), f'{scattered / compute:.2f}'))
    return (f'source: {estimate["source"]}', 'ms a step', 'over products'), rows


def _ms(seconds):
    return f'{1e3 * seconds:.3g}' if seconds < 0.9995 else f'{1e3 * seconds:.0f}'


def print_result(result: dict):
    """Prints everything that `dry_run` returns, and what to keep in mind about it."""
    import rich.console
    import rich.table
    import rich.text

    console = rich.console.Console(highlight=False)

    def say(text, **options):
        # A Text, since the [brackets] of a str are read as markup.
        console.print(rich.text.Text(text), **options)

    for text in headlines(result):
        say(text)
    for title, heads, rows in tables(result):
        table = rich.table.Table(title=title, title_justify='left')
        for number, head in enumerate(heads):
            table.add_column(head, justify='right' if number else 'left')
        for row in rows:
            table.add_row(*row)
        say('')
        console.print(table)
    say('')
    for text in result['sharding']:
        say(text, soft_wrap=True)
    for text in (*result['warnings'], *NOTES):
        say('')
        say(text)


def markdown(results: list[dict]) -> str:
    """Several dry runs as a table in Markdown, a line each, fewer devices first.

    Args:
      results: of `dry_run`, with the `command` that launch.train was given.
    """
    heads = (
        *('config', '`--mesh`', 'devices', 'tokens a device', 'state, GiB', 'peak, GiB'),
        *('TFLOP', 'GB sent', 'products, ms', 'collectives, ms', 'of these over'),
    )
    lines = ['| ' + ' | '.join(heads) + ' |', '|---|---|' + '---:|' * (len(heads) - 3) + '---|']
    by_size = sorted(results, key=lambda one: (one['devices'], _config(one), _sizes(one['mesh'])))
    for one in by_size:
        held = one['bytes']['parameters'] + one['bytes']['optimizer']
        (estimate,) = one['estimates'].values()
        axes = sorted(estimate['collectives'].items(), key=lambda pair: -pair[1])
        cells = (
            _config(one),
            f'`{_sizes(one["mesh"])}`',
            str(one['devices']),
            str(one['rows'] * one['length'] // one['devices']),
            _gib(held),
            _gib(one['bytes']['peak']),
            f'{one["flops"]["executed"] / one["devices"] / 1e12:.1f}',
            f'{one["sent_bytes"] / 1e9:.2f}',
            _ms(estimate['compute']),
            _ms(sum(estimate['collectives'].values())),
            ', '.join(f'{names} {_ms(seconds)}' for names, seconds in axes if seconds >= 1e-4),
        )
        lines.append('| ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines)


def _config(result):
    names = [part for part in result['command'] if part.startswith('--config=')]
    return names[0].removeprefix('--config=configs/').replace('.py', '')
