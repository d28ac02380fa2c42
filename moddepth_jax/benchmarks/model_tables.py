"""Tables of launch.gpu's cases on models: training steps, decoding, memory, runs."""

from moddepth_jax.benchmarks.tables import TITLES

# Dense bf16 peak of the maker, FLOP/s, by what the device's name contains.
PEAKS = {'H200': 989e12, 'H100': 989e12, 'A100': 312e12, 'B200': 2250e12}


def peak_flops(device: str) -> float | None:
    """The maker's bf16 peak of a device; None: unknown."""
    return next((peak for name, peak in PEAKS.items() if name in device), None)


def _of(rows, start):
    """Rows that are ok, by the rest of the name."""
    return {
        name.removeprefix(start): row
        for name, row in rows.items()
        if name.startswith(start) and row['status'] == 'ok'
    }


def saving(row: dict, dense: dict) -> float:
    """(dense time / time) over (dense FLOPs / FLOPs): 1 where time falls as the count does."""
    return dense['step_seconds'] / row['step_seconds'] * row['flops'] / dense['flops']


def _step_cells(row, dense):
    """Cells of one model."""
    peak, gib = peak_flops(row['device']), 2**30
    cells = {
        'ms': f'{1e3 * row["step_seconds"]:.1f}',
        'tokens/s': f'{row["tokens_per_second"]:.0f}',
        'TFLOP/s, counted': f'{row["flops_per_second"] / 1e12:.3g}',
        'MFU': f'{row["flops_per_second"] / peak:.1%}' if peak else '-',
    }
    compared = ('time / dense', 'FLOPs / dense', 'realised saving (time ratio / FLOP ratio)')
    cells |= dict.fromkeys(compared, '-')
    if dense:
        ratios = (row['step_seconds'] / dense['step_seconds'], row['flops'] / dense['flops'])
        values = (*ratios, saving(row, dense))
        cells |= {name: f'{value:.3f}' for name, value in zip(compared, values, strict=True)}
    held = row['peak_bytes']
    return cells | {
        'peak memory, GiB': f'{held / gib:.2f}' if held else '-',
        'temporary memory, GiB': f'{row["temp_bytes"] / gib:.2f}',
        'compilation, s': f'{row["compile_seconds"]:.1f}',
        'parameters, million': f'{row["parameters"] / 1e6:.1f}',
    }


def _steps(rows):
    by_size = {}
    for name, row in _of(rows, 'step/').items():
        by_size.setdefault(name.split('/')[0], {})[name.split('/')[1]] = row
    for size, models in by_size.items():
        dense = models.get('dense')
        columns = {name: _step_cells(row, dense) for name, row in models.items()}
        first = next(iter(models.values()))
        shape = f'{size}, {first["rows"]} rows of {first["length"]}, bfloat16'
        lines = {
            cell: [column[cell] for column in columns.values()]
            for cell in next(iter(columns.values()))
        }
        yield f'train step, {shape}', ['', *(TITLES[name] for name in models)], lines


def _decoding(rows):
    for name, row in _of(rows, 'decode/').items():
        title = TITLES[row['model']]
        lines = {}
        for which, model in (('dense', 'dense'), ('routed', title)):
            lines[f'{model}, ms a step'] = [
                f'{1e3 * cell["seconds"][which]:.2f}' for cell in row['rows']
            ]
            lines[f'{model}, tokens/s'] = [
                f'{cell["tokens_per_second"][which]:.0f}' for cell in row['rows']
            ]
        lines[f'{title} / dense, tokens/s'] = [f'{cell["speedup"]:.2f}' for cell in row['rows']]
        first = row['time_to_first_token']
        said = ', '.join(f'{1e3 * first["seconds"][which]:.1f}' for which in ('dense', 'routed'))
        what = f'first token after {first["prompt"]}: dense, {title}, ms'
        lines[what] = [said] + [''] * (len(row['rows']) - 1)
        heads = ['batch', *(str(cell['batch']) for cell in row['rows'])]
        yield f'decoding, {name}, context {row["context"]}', heads, lines


def _memory(rows):
    found = _of(rows, 'memory/packed/')
    lengths = list(dict.fromkeys(t for row in found.values() for t in row['temp_bytes']))
    lines = {
        name: [f'{row["temp_bytes"].get(length, 0) / 2**30:.3f}' for length in lengths]
        for name, row in found.items()
    }
    if lines:
        title = 'temporary memory of one attention over packed documents, both passes, GiB'
        yield title, ['', *(f'T={length}' for length in lengths)], lines


def _runs(rows):
    if row := _of(rows, 'run/').get('train'):
        names = ('final_step', 'parameters', 'train_loss', 'tokens_per_second', 'flops_per_second')
        lines = {name: [f'{row[name]:.6g}'] for name in names if row[name] is not None}
        lines |= {f'eval {name}': [str(value)] for name, value in row['eval'].items()}
        yield 'training run, MoD with MoDA, bfloat16', ['', ''], lines
    if row := _of(rows, 'run/').get('study'):
        lines = {
            f'{run["variant"]} {run["size"]}, seed {run["seed"]}': [
                run['steps'],
                f'{run["total_flops"]:.3g}',
                f'{run["bits_per_byte"]:.3f}',
            ]
            for run in row['rows']
        }
        yield 'first runs of the study', ['', 'steps', 'FLOPs', 'bits a byte'], lines


def tables(rows: dict[str, dict]):
    """Yields (title, heads, lines) of each table there is something for.

    Args:
      rows: of cases, by name.
    """
    for table in (_steps, _decoding, _memory, _runs):
        yield from table(rows)
