"""The benchmark of attention: times as tables, next to their targets, and as plots."""

import sys
import time

import jax
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kernels_pallas.depth_attention import IMPLEMENTATIONS
from moddepth_jax.benchmarks.attention import bench_case, device_ceilings
from moddepth_jax.benchmarks.attention_cases import GPU_CASES, TOY_CASES, Case, product
from moddepth_jax.benchmarks.attention_forms import ALONE, BOTH, PLAIN, RIVALS
from moddepth_jax.benchmarks.models import Dtype
from moddepth_jax.benchmarks.tables import Table, pivot
from moddepth_jax.training.summary import versions

# Times of both passes over plain cuDNN's, at TARGET_SHAPE on an H200, by T.
TARGETS = {
    'fresh': {4096: 1.37, 16384: 1.11, 65536: 1.03},
    'accumulate': {4096: 1.48, 16384: 1.14, 65536: 1.04},
}
TARGET_SHAPE = Case(0)._asdict()
del TARGET_SHAPE['length']
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


def _find(result, key, over, direction):
    """`key` by implementation, of the rows that have it."""
    return {
        row['implementation']: row[key]
        for row in result['rows']
        if key in row and (row['over'], row['direction']) == (over, direction)
    }


def targets_table(results: list[dict], copy_bytes_per_second: float) -> Table:
    """The targets, and what the best of our implementations reached, of results of bench_case."""
    lines = {}

    def add(name, target, by_implementation, best):
        if by_implementation:
            reached = best(by_implementation, key=by_implementation.get)
            lines[name] = [f'{target:.2f}', f'{by_implementation[reached]:.3f}', reached]

    for result in results:
        if any(result[name] != value for name, value in TARGET_SHAPE.items()):
            continue
        start = f'T={result["length"]}'
        for direction, by_length in TARGETS.items():
            if result['baseline'] == 'cudnn' and result['length'] in by_length:
                name = f'{start}, {DIRECTIONS[direction]} ({direction}), over cuDNN'
                reached = _find(result, 'over_plain', BOTH, direction)
                add(name, by_length[result['length']], reached, min)
        for direction in ('forward', *TARGETS):
            rates = _find(result, 'bytes_per_second', ALONE, direction)
            shares = {name: rate / copy_bytes_per_second for name, rate in rates.items()}
            add(f'{start}, depth {direction}, of copy bandwidth', COPY_TARGET, shares, max)
        if plain := _find(result, 'seconds', PLAIN, 'fresh').get('pallas_triton'):
            ours = _find(result, 'seconds', BOTH, 'fresh')
            name = f'{start}, both passes with slots, over plain Pallas-Triton without'
            add(name, 1, {name: seconds / plain for name, seconds in ours.items()}, min)
    return Table('targets (on an H200)', ['', 'target', 'reached', 'by'], lines)


def _shape(results):
    """The shape of the targets if there is a result of it, else the first one with slots."""
    shapes = [{name: result[name] for name in TARGET_SHAPE} for result in results]
    if TARGET_SHAPE in shapes:
        return TARGET_SHAPE
    return next((shape for shape in shapes if shape['slots']), shapes[0])


def _draw_by_length(axes, results, over, direction, key, scale, style='-', suffix=''):
    """Draws a curve over T for each implementation at one shape."""
    shape, curves = _shape(results), {}
    for result in results:
        # Rivals are timed without slots.
        slots = {0, shape['slots']} if over == PLAIN else {shape['slots']}
        if all(result[n] == shape[n] for n in shape if n != 'slots') and result['slots'] in slots:
            for name, value in _find(result, key, over, direction).items():
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


def _finish(axes, title, label):
    axes.set_title(title, fontsize=10)
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.grid(True, alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)


def draw(results: list[dict], copy_bytes_per_second: float | None, path) -> bool:
    """Draws times and bandwidths by sequence length, of the shape of the targets if it was timed.

    `results` are of bench_case; if none was timed, no PNG is written, and False is returned.
    """
    results = [r for r in results if any('seconds' in row for row in r.get('rows', ()))]
    if not results:
        return False
    shape = _shape(results)
    figure = Figure(figsize=(15.6, 4.4), dpi=120)
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    for over, style, slots in ((PLAIN, '--', 'no'), (BOTH, '-', shape['slots'])):
        label = f', {slots} slots'
        _draw_by_length(left, results, over, 'fresh', 'flops_per_second', 1e-12, style, label)
    _finish(left, 'forward + backward', 'TFLOP/s, counted')
    _draw_by_length(middle, results, BOTH, 'fresh', 'over_plain', 1)
    if shape == TARGET_SHAPE:
        middle.plot(*zip(*TARGETS['fresh'].items(), strict=True), 'k:', marker='x', label='target')
    title = f'forward + backward with {shape["slots"]} slots'
    _finish(middle, title, 'time over the plain baseline')
    for direction, style in (('forward', '--'), ('fresh', '-')):
        label = ', forward' if direction == 'forward' else ', backward'
        key = 'bytes_per_second'
        _draw_by_length(right, results, ALONE, direction, key, 1e-9, style, label)
    if copy_bytes_per_second:
        right.axhline(copy_bytes_per_second / 1e9, linestyle=':', color='grey', label='copy')
    _finish(right, f'{shape["slots"]} slots alone', 'GB/s of ideal bytes')
    figure.suptitle(str(Case(0, **shape)).removeprefix('T=0 '), fontsize=9)
    figure.tight_layout()
    figure.savefig(path)
    return True


def attention(
    *,
    implementations: list[str] | None = None,
    lengths: list[int] | None = None,
    heads: list[int] | None = None,
    kv_heads: list[int] | None = None,
    widths: list[int] | None = None,
    slots: list[int] | None = None,
    dtype: Dtype | None = None,
    seconds: int = 300,
    plot: str | None = None,
):
    """Every implementation of attention over sequence and depth slots, and plain attention.

    Each is compared with the equation before it is timed; on a GPU at the shapes of a large model,
    on a CPU at toy shapes, where kernels are interpreted.

    Args:
      implementations: what is timed. Default: ours, cudnn, pallas_triton, flash_attention_2.
      lengths: sequence lengths.
      heads: query heads.
      kv_heads: key/value heads.
      widths: of a head.
      slots: depth slots of a token.
      dtype: of all arrays. Default: bfloat16.
      seconds: after which no further shape is begun.
      plot: PNG for a picture of the results.
    """
    known = (*RIVALS, *IMPLEMENTATIONS)
    for name in implementations or ():
        if name not in known:
            raise ValueError(f'--implementations={name}: must be one of {", ".join(known)}')
    on_gpu = jax.default_backend() == 'gpu'
    cases = [c._replace(dtype=dtype or c.dtype) for c in (GPU_CASES if on_gpu else TOY_CASES)]
    sizes = (lengths, heads, kv_heads, widths, slots)
    if any(size is not None for size in sizes):
        sizes = [[c] if size is None else size for size, c in zip(sizes, cases[0], strict=False)]
        cases = product(*sizes, cases[0].dtype)
    names, begin, results = implementations or known, time.perf_counter(), []
    facts = device_ceilings('cudnn' in names, toy=not on_gpu)
    yield {'versions': versions(), **facts, 'budget_seconds': seconds}, []
    for case in cases:
        if time.perf_counter() - begin > seconds:
            result = {**case._asdict(), 'skipped': f'the budget of {seconds:g} s is spent'}
        else:
            result = bench_case(case, names, 0.3 * seconds / len(cases))
        results.append(result)
        yield result, [case_table(result)] if 'rows' in result else []
        for line in failures(result):
            print(line, file=sys.stderr)
    copy = facts['ceilings']['copy_bytes_per_second']
    if plot:
        draw(results, copy, plot)
    if facts['hopper']:
        table = targets_table([r for r in results if 'rows' in r], copy)
        yield {'targets': table.lines}, [table]
