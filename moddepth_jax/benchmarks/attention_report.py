"""Times of attention as tables, next to their targets, and as plots."""

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from moddepth_jax.benchmarks.attention_cases import Case
from moddepth_jax.benchmarks.attention_forms import ALONE, BOTH, PLAIN
from moddepth_jax.benchmarks.tables import Table, pivot

# Times of both passes over plain cuDNN's, at TARGET_SHAPE on an H200, by T.
TARGETS = {
    'fresh': {4096: 1.37, 16384: 1.11, 65536: 1.03},
    'accumulate': {4096: 1.48, 16384: 1.14, 65536: 1.04},
}
TARGET_SHAPE = {'heads': 64, 'kv_heads': 8, 'width': 64, 'slots': 64, 'dtype': 'bfloat16'}
TARGET_SHAPE |= {'batch': 1, 'written': None, 'documents': 0}
COPY_TARGET = 0.9  # of the measured copy bandwidth, by the depth kernels
DIRECTIONS = {
    'forward': 'forward',
    'fresh': 'forward + backward',
    'accumulate': '..., adding in place',
    'accumulate float32': '..., in float32',
}
_COLORS = {
    'cudnn': '#444444',
    'mosaic_gpu': '#1f77b4',
    'mosaic_gpu_fused': '#d62728',
    'pallas': '#2ca02c',
    'xla': '#9467bd',
    'flash_attention_2': '#ff7f0e',
    'pallas_triton': '#8c564b',
}


def case_title(result: dict) -> str:
    """The shape of a case in one line."""
    return str(Case(**{name: result[name] for name in Case._fields}))


def _cell(row):
    if 'failed' in row:
        return 'wrong' if row['failed'].startswith('wrong') else 'failed'
    cell = f'{1e3 * row["seconds"]:.3g} ms'
    if 'flops_per_second' in row:
        cell += f', {row["flops_per_second"] / 1e12:.3g} TFLOP/s'
    if 'bytes_per_second' in row:
        cell += f', {row["bytes_per_second"] / 1e9:.4g} GB/s'
    return cell + (f', {row["over_plain"]:.3f}x' if 'over_plain' in row else '')


def case_table(result: dict) -> Table:
    """A line for each implementation and what it attends to, of one result of bench_case.

    `x` is the time over the baseline's without slots; GB/s are those of the depth part alone, of
    its backward pass where a column has both passes.
    """
    return pivot(
        f'attention, {case_title(result)}; x: over {result["baseline"]}, no slots',
        result['rows'],
        line=lambda row: f'{row["implementation"]}, {row["over"]}',
        column=lambda row: DIRECTIONS[row['direction']],
        text=_cell,
    )


def failures(result: dict) -> list[str]:
    """A line for each reason why some form was not timed."""
    if 'skipped' in result:
        return [f'{case_title(result)}: {result["skipped"]}']
    reasons = {}
    for row in result['rows']:
        if 'failed' in row:
            what = f'{row["over"]}, {row["direction"]}'
            reasons.setdefault((row['implementation'], row['failed']), []).append(what)
    return [f'{name} ({"; ".join(what)}): {why}' for (name, why), what in reasons.items()]


def _find(result, key, **fields):
    """(value of `key`, implementation) of the rows that have it and these fields."""
    for row in result['rows']:
        if key in row and all(row[name] == value for name, value in fields.items()):
            yield row[key], row['implementation']


def targets_table(results: list[dict], copy_bytes_per_second: float) -> Table:
    """The targets, and what the best of our implementations reached.

    Args:
      results: of bench_case.
      copy_bytes_per_second: as measured.
    """
    lines = {}

    def add(name, target, reached, pick):
        if reached := list(reached):
            value, implementation = pick(reached)
            lines[name] = [f'{target:.2f}', f'{value:.3f}', implementation]

    for result in results:
        if any(result[name] != value for name, value in TARGET_SHAPE.items()):
            continue
        start = f'T={result["length"]}'
        for direction, by_length in TARGETS.items():
            if result['baseline'] == 'cudnn' and result['length'] in by_length:
                reached = _find(result, 'over_plain', over=BOTH, direction=direction)
                name = f'{start}, {DIRECTIONS[direction]} ({direction}), over cuDNN'
                add(name, by_length[result['length']], reached, min)
        for direction in ('forward', *TARGETS):
            reached = _find(result, 'bytes_per_second', over=ALONE, direction=direction)
            shares = [(rate / copy_bytes_per_second, name) for rate, name in reached]
            add(f'{start}, depth {direction}, of copy bandwidth', COPY_TARGET, shares, max)
        fresh = {'key': 'seconds', 'direction': 'fresh'}
        for plain, _ in _find(result, **fresh, over=PLAIN, implementation='pallas_triton'):
            reached = [(ours / plain, name) for ours, name in _find(result, **fresh, over=BOTH)]
            name = f'{start}, both passes with slots, over plain Pallas-Triton without'
            add(name, 1, reached, min)
    return Table('targets (on an H200)', ['', 'target', 'reached', 'by'], lines)


def _shape(results):
    """The shape of the targets if there is a result of it, else the first one with slots."""
    for result in results:
        if all(result[name] == value for name, value in TARGET_SHAPE.items()):
            return TARGET_SHAPE
    first = next((result for result in results if result['slots']), results[0])
    return {name: first[name] for name in TARGET_SHAPE}


def _draw_by_length(axes, results, over, direction, key, scale, style='-', suffix=''):
    """A curve over T for each implementation at one shape; returns whether there is any."""
    shape, curves = _shape(results), {}
    for result in results:
        # Rivals are timed without slots.
        slots = {0, shape['slots']} if over == PLAIN else {shape['slots']}
        if all(result[n] == shape[n] for n in shape if n != 'slots') and result['slots'] in slots:
            for value, name in _find(result, key, over=over, direction=direction):
                curves.setdefault(name, {}).setdefault(result['length'], scale * value)
    for name, points in curves.items():
        lengths, values = zip(*sorted(points.items()), strict=True)
        color = _COLORS.get(name, 'black')
        axes.plot(lengths, values, style, marker='o', color=color, label=name + suffix)
    lengths = sorted({length for points in curves.values() for length in points})
    if lengths:
        axes.set_xscale('log', base=2)
        axes.set_xticks(lengths, [f'{T // 1024}k' if T % 1024 == 0 else str(T) for T in lengths])
    axes.set_xlabel('T')
    return bool(curves)


def _draw_by_slots(axes, results):
    """The time over the plain baseline by number of slots, a curve for each T."""
    shape, points = _shape(results), {}
    for result in results:
        if result['slots'] and all(result[n] == shape[n] for n in shape if n != 'slots'):
            fields = {'implementation': 'mosaic_gpu', 'over': BOTH, 'direction': 'fresh'}
            for value, _ in _find(result, 'over_plain', **fields):
                points.setdefault(result['length'], {})[result['slots']] = value
    for length, values in sorted(points.items()):
        axes.plot(*zip(*sorted(values.items()), strict=True), marker='o', label=f'T={length}')
    axes.set_xlabel('L')


def _draw_times(panels, results):
    left, middle, right = panels
    slots, rate = _shape(results)['slots'], 'flops_per_second'
    drawn = _draw_by_length(left, results, PLAIN, 'fresh', rate, 1e-12, '--', ', no slots')
    drawn |= _draw_by_length(left, results, BOTH, 'fresh', rate, 1e-12, '-', f', {slots} slots')
    _finish(left, 'forward + backward', 'TFLOP/s, counted')
    _draw_by_length(middle, results, BOTH, 'fresh', 'over_plain', 1)
    if _shape(results) == TARGET_SHAPE:
        middle.plot(*zip(*TARGETS['fresh'].items(), strict=True), 'k:', marker='x', label='target')
    title = f'forward + backward with {slots} slots'
    _finish(middle, title, 'time over the plain baseline')
    _draw_by_slots(right, results)
    _finish(right, 'mosaic_gpu by number of slots', 'time over the plain baseline')
    return drawn


def _draw_depth(panels, results, copy_bytes_per_second):
    titles, drawn = ('forward', 'backward', 'backward, adding in place'), False
    for axes, direction, title in zip(panels, ('forward', *TARGETS), titles, strict=True):
        drawn |= _draw_by_length(axes, results, ALONE, direction, 'bytes_per_second', 1e-9)
        if copy_bytes_per_second:
            axes.axhline(copy_bytes_per_second / 1e9, linestyle='--', color='grey', label='copy')
        _finish(axes, f'{_shape(results)["slots"]} slots alone, {title}', 'GB/s of ideal bytes')
    return drawn


def _finish(axes, title, label):
    axes.set_title(title, fontsize=10)
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.grid(True, alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)


def draw(results: list[dict], copy_bytes_per_second: float | None, path, rows) -> bool:
    """Draws plots by sequence length, of the shape of the targets if there is any of it.

    Args:
      results: of bench_case; those without `rows` are left out.
      copy_bytes_per_second: as measured; None: unknown.
      path: of the PNG.
      rows: of the figure: `times` (rates, and times over the baseline), `depth` (bandwidth of the
        slots alone), or both.

    Returns:
      Whether there was something to draw; else no file is written.
    """
    results = [result for result in results if result.get('rows')]
    if not results:
        return False
    figure = Figure(figsize=(15.6, 4.4 * len(rows)), dpi=120)
    FigureCanvasAgg(figure)
    axes, drawn = figure.subplots(len(rows), 3, squeeze=False), False
    panels = dict(zip(rows, axes, strict=True))
    if 'times' in panels:
        drawn |= _draw_times(panels['times'], results)
    if 'depth' in panels:
        drawn |= _draw_depth(panels['depth'], results, copy_bytes_per_second)
    if not drawn:
        return False
    figure.suptitle(str(Case(0, **_shape(results))).removeprefix('T=0 '), fontsize=9)
    figure.tight_layout()
    figure.savefig(path)
    return True
