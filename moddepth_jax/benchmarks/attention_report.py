"""What bench_attention measured, as tables, beside the targets, and drawn."""

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from moddepth_jax.benchmarks.attention_cases import Case
from moddepth_jax.benchmarks.attention_forms import ALONE, BOTH, PLAIN, SUMS

# Of both passes over plain cuDNN, at TARGET_SHAPE on an H200, by T.
TARGETS = {
    'fresh': {4096: 1.37, 16384: 1.11, 65536: 1.03},
    'accumulate': {4096: 1.48, 16384: 1.14, 65536: 1.04},
}
TARGET_SHAPE = {'heads': 64, 'kv_heads': 8, 'width': 64, 'slots': 64, 'dtype': 'bfloat16'}
TARGET_SHAPE |= {'batch': 1, 'written': None, 'documents': 0}
COPY_TARGET = 0.9  # of the measured copy bandwidth, by the depth kernels
COLUMNS = {
    'forward': 'forward',
    'fresh': 'forward + backward',
    'accumulate': '..., adding in place',
    'accumulate float32': '..., in float32',
}


def case_title(result: dict) -> str:
    """The shape of a case in one line."""
    return str(Case(**{name: result[name] for name in Case._fields}))


def _cell(row):
    if row is None:
        return '-'
    if 'failed' in row:
        return 'wrong' if row['failed'].startswith('wrong') else 'failed'
    cell = f'{1e3 * row["seconds"]:.3g} ms'
    if 'flops_per_second' in row:
        cell += f', {row["flops_per_second"] / 1e12:.3g} TFLOP/s'
    if 'bytes_per_second' in row:
        cell += f', {row["bytes_per_second"] / 1e9:.4g} GB/s'
    return cell + (f', {row["over_plain"]:.3f}x' if 'over_plain' in row else '')


def case_table(result: dict):
    """(title, heads, lines) of one result of bench_case.

    A line for each implementation and what it attends to. `x` is the time over the baseline's
    without slots; GB/s are those of the depth phase alone, of the backward pass where a column is
    of both.
    """
    cells = {}
    for row in result['rows']:
        cells.setdefault(f'{row["implementation"]}, {row["over"]}', {})[row['direction']] = row
    lines = {
        name: [_cell(by_direction.get(direction)) for direction in COLUMNS]
        for name, by_direction in cells.items()
    }
    title = f'attention, {case_title(result)}; x: over {result["baseline"]}, no slots'
    return title, ['', *COLUMNS.values()], lines


def failures(result: dict) -> list[str]:
    """A line for each thing that was not timed, equal ones told once."""
    if 'skipped' in result:
        return [f'{case_title(result)}: {result["skipped"]}']
    told = {}
    for row in result['rows']:
        if 'failed' in row:
            what = f'{row["over"]}, {row["direction"]}'
            told.setdefault((row['implementation'], row['failed']), []).append(what)
    return [f'{name} ({"; ".join(what)}): {why}' for (name, why), what in told.items()]


def _find(result, **fields):
    for row in result['rows']:
        if 'failed' not in row and all(row[name] == value for name, value in fields.items()):
            yield row


def targets(results: list[dict]):
    """(title, heads, lines) of what was aimed at and what the best of ours reached.

    Args:
      results: of bench_attention, the first included.
    """
    copy, lines = results[0]['ceilings']['copy_bytes_per_second'], {}
    for result in results[1:]:
        if 'rows' not in result or any(result[k] != v for k, v in TARGET_SHAPE.items()):
            continue
        length = result['length']
        for direction, by_length in TARGETS.items():
            reached = [
                (row['over_plain'], row['implementation'])
                for row in _find(result, over=BOTH, direction=direction)
                if 'over_plain' in row
            ]
            if reached and result['baseline'] == 'cudnn' and length in by_length:
                best, name = min(reached)
                said = [f'{by_length[length]:.2f}', f'{best:.3f}', name]
                lines[f'T={length}, {COLUMNS[direction]} ({direction}), over cuDNN'] = said
        for direction in ('forward', *TARGETS):
            reached = [
                (row['bytes_per_second'] / copy, row['implementation'])
                for row in _find(result, over=ALONE, direction=direction)
                if 'bytes_per_second' in row
            ]
            if reached:
                best, name = max(reached)
                said = [f'{COPY_TARGET:.2f}', f'{best:.3f}', name]
                lines[f'T={length}, depth {direction}, of copy bandwidth'] = said
        triton = list(_find(result, implementation='pallas_triton', direction='fresh'))
        ours = [
            (row['seconds'], row['implementation'])
            for row in _find(result, over=BOTH, direction='fresh')
        ]
        if triton and ours:
            best, name = min(ours)
            said = ['1.00', f'{best / triton[0]["seconds"]:.3f}', name]
            lines[f'T={length}, both passes with slots, over plain Pallas-Triton without'] = said
    return 'targets (on an H200)', ['', 'aim', 'reached', 'by'], lines


def plot(results: list[dict], path):
    """Draws both passes by sequence length, and the depth phase's bandwidth, of the first shape.

    Args:
      results: of bench_attention, the first included.
      path: of the PNG.
    """
    timed = [result for result in results[1:] if result.get('rows')]
    figure = Figure(figsize=(12, 4.6), dpi=130)
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    same = [r for r in timed if all(r[k] == timed[0][k] for k in TARGET_SHAPE)]
    for axes, over, value, directions in (
        (left, (PLAIN, BOTH), lambda row: 1e3 * row['seconds'], ('fresh',)),
        (right, (ALONE,), lambda row: row.get('bytes_per_second', 0) / 1e9, ('forward', *SUMS)),
    ):
        curves = {}
        for result in same:
            for row in _find(result):
                if row['over'] in over and row['direction'] in directions:
                    name = f'{row["implementation"]}, {row["over"] if over != (ALONE,) else ""}'
                    name = name.rstrip(', ') + (f', {row["direction"]}' if axes is right else '')
                    curves.setdefault(name, []).append((result['length'], value(row)))
        for name, points in curves.items():
            axes.plot(*zip(*sorted(points), strict=True), marker='o', label=name)
        if curves:
            axes.legend(fontsize=6)
        axes.set_xscale('log', base=2)
        axes.set_yscale('log')
        axes.set_xlabel('T')
    left.set_ylabel('forward + backward, ms')
    copy = results[0]['ceilings']['copy_bytes_per_second'] / 1e9
    right.axhline(copy, linestyle='--', color='grey', linewidth=1)
    right.set_ylabel('depth phase alone, GB/s (dashed: copy)')
    if same:
        figure.suptitle(case_title(same[0]).split(' ', 1)[1], fontsize=9)
    figure.tight_layout()
    figure.savefig(path)
