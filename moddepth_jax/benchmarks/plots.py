"""Plots of the attention times of launch.gpu."""

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from moddepth_jax.benchmarks.attention_forms import ALONE, BOTH, PLAIN
from moddepth_jax.benchmarks.attention_report import TARGET_SHAPE, TARGETS

_COLORS = {
    'cudnn': '#444444',
    'mosaic_gpu': '#1f77b4',
    'mosaic_gpu_fused': '#d62728',
    'pallas': '#2ca02c',
    'xla': '#9467bd',
    'flash_attention_2': '#ff7f0e',
    'pallas_triton': '#8c564b',
}


def _figure(columns):
    figure = Figure(figsize=(5.2 * columns, 4.4), dpi=120)
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _curves(results, over, direction, value):
    """Points (T, value) of each implementation at the shape of the targets."""
    curves = {}
    for result in results:
        if any(result[name] != wanted for name, wanted in TARGET_SHAPE.items()):
            same = result['slots'] == 0 and over == PLAIN  # rivals are timed without slots
            rest = {name: TARGET_SHAPE[name] for name in TARGET_SHAPE if name != 'slots'}
            if not same or any(result[name] != wanted for name, wanted in rest.items()):
                continue
        for row in result['rows']:
            if row['over'] == over and row['direction'] == direction and value(row) is not None:
                points = curves.setdefault(row['implementation'], {})
                points.setdefault(result['length'], value(row))
    return curves


def _draw(axes, curves, style='-', suffix=''):
    for name, points in curves.items():
        lengths = sorted(points)
        values = [points[length] for length in lengths]
        color = _COLORS.get(name, 'black')
        axes.plot(lengths, values, style, marker='o', color=color, label=name + suffix)


def _finish(axes, title, label):
    lengths = sorted(
        {x for line in axes.lines if line.get_marker() == 'o' for x in line.get_xdata()}
    )
    if lengths:
        axes.set_xscale('log', base=2)
        axes.set_xticks(lengths, [f'{T // 1024}k' if T % 1024 == 0 else str(T) for T in lengths])
    axes.set_xlabel('T')
    axes.set_ylabel(label)
    axes.set_title(title, fontsize=10)
    axes.grid(True, which='major', alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)


def draw_times(results: list[dict], rows: dict[str, dict], path) -> bool:
    """Draws times over plain cuDNN by T and by number of slots.

    Args:
      results: of report.timed.
      rows: not used.
      path: of the PNG.

    Returns:
      Whether there was something to draw.
    """
    del rows
    figure, (left, middle, right) = _figure(3)

    def ratio(row):
        return row.get('over_plain')

    def rate(row):
        return row['flops_per_second'] / 1e12 if 'flops_per_second' in row else None

    drawn = _curves(results, PLAIN, 'fresh', rate)
    _draw(left, drawn, '--', ', no slots')
    _draw(left, _curves(results, BOTH, 'fresh', rate), '-', ', 64 slots')
    _finish(left, 'forward + backward', 'TFLOP/s, counted')
    left.set_ylim(bottom=0)
    with_slots = _curves(results, BOTH, 'fresh', ratio)
    _draw(middle, with_slots)
    middle.plot(*zip(*TARGETS['fresh'].items(), strict=True), 'k:', marker='x', label='target')
    _finish(middle, 'forward + backward with 64 slots', 'time over plain cuDNN')
    _draw_slots(right, results)
    if not drawn and not with_slots:
        return False
    figure.suptitle('N=64 K=8 H=64 B=1 bfloat16', fontsize=9)
    figure.tight_layout()
    figure.savefig(path)
    return True


def _draw_slots(axes, results):
    """The time over plain cuDNN by the number of slots, a curve for each T."""
    wanted = {name: TARGET_SHAPE[name] for name in TARGET_SHAPE if name != 'slots'}
    points = {}
    for result in results:
        if any(result[name] != value for name, value in wanted.items()) or not result['slots']:
            continue
        for row in result['rows']:
            fields = (row['implementation'], row['over'], row['direction'])
            if fields == ('mosaic_gpu', BOTH, 'fresh') and 'over_plain' in row:
                points.setdefault(result['length'], {})[result['slots']] = row['over_plain']
    for length, values in sorted(points.items()):
        if len(values) > 1:
            slots = sorted(values)
            axes.plot(slots, [values[s] for s in slots], marker='o', label=f'T={length}')
    _finish(axes, 'mosaic_gpu by number of slots', 'time over plain cuDNN')
    axes.set_xscale('linear')
    slots = sorted({count for values in points.values() for count in values})
    axes.set_xticks(slots, map(str, slots))
    axes.set_xlabel('L')


def draw_depth(results: list[dict], rows: dict[str, dict], path) -> bool:
    """Draws the bandwidth that the depth part reaches alone, and that of a copy.

    Args:
      results, path: as in draw_times.
      rows: of all cases, for the ceiling.

    Returns:
      Whether there was something to draw.
    """

    def bandwidth(row):
        return row['bytes_per_second'] / 1e9 if 'bytes_per_second' in row else None

    ways = {'forward': 'forward', 'fresh': 'backward', 'accumulate': 'backward, adding in place'}
    found = {way: _curves(results, ALONE, way, bandwidth) for way in ways}
    if not any(found.values()):
        return False
    figure, panels = _figure(len(ways))
    ceilings = rows.get('machine/ceilings', {}).get('ceilings')
    for axes, (way, title) in zip(panels, ways.items(), strict=True):
        _draw(axes, found[way])
        if ceilings:
            copy = ceilings['copy_bytes_per_second'] / 1e9
            axes.axhline(copy, linestyle='--', color='grey', linewidth=1, label='copy')
        _finish(axes, f'64 slots alone, {title}', 'GB/s of ideal bytes')
        axes.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(path)
    return True
