"""The benchmark of attention: tables of times and of targets."""

import itertools
import sys

import jax

from kernels_pallas.depth_attention import IMPLEMENTATIONS
from moddepth_jax.benchmarks.attention import bench_case, device_ceilings
from moddepth_jax.benchmarks.attention_cases import LENGTHS, NO_SLOTS, PACKED, Case
from moddepth_jax.benchmarks.attention_forms import ALONE, BOTH, PARTS, PLAIN, RIVALS, SEQUENCE
from moddepth_jax.benchmarks.models import Dtype
from moddepth_jax.hparams.checks import one_of
from moddepth_jax.studies.plot_style import new_figure
from moddepth_jax.training.summary import versions
from moddepth_jax.training.tables import Table, pivot

# Targets for the time of both passes relative to plain cuDNN, at TARGET_SHAPE on an H200, by T: for
# separate kernels, and for the fused ones.
TARGETS = {4096: 1.37, 16384: 1.11, 65536: 1.03}
FUSED_TARGETS = {4096: 1.20, 16384: 1.06, 65536: 1.02}
TARGET_SHAPE = Case(0)._asdict()
del TARGET_SHAPE['length']
PACKED_SHAPE = TARGET_SHAPE | PACKED | NO_SLOTS
PACKED_TARGET = 0.85  # FLOPs per second of visible pairs, as a share of cuDNN's for one text
COPY_TARGET = 0.85  # target of the depth kernels, as a share of the measured copy bandwidth
DIRECTIONS = {'forward': 'forward', 'fresh': 'forward + backward'}
DIRECTIONS['sums'] = 'forward + backward, adding to float32 sums'


def _cell(row):
    if 'failed' in row:
        return 'wrong' if row['failed'].startswith('wrong') else 'failed'
    cell = f'{1e3 * row["seconds"]:.3g} ms'
    if 'flops_per_second' in row:
        cell += f', {row["flops_per_second"] / 1e12:.3g} TFLOP/s'
    if 'bytes_per_second' in row:
        cell += f', {row["bytes_per_second"] / 1e9:.4g} GB/s'
    return cell + (f', {row["over_plain"]:.3f}x' if 'over_plain' in row else '')


def _titles(rows):
    """The title of each line by (implementation, over), with the backends if they are others."""
    found = {(row['implementation'], row['over']): '' for row in rows}
    for row in rows:
        name, used = row['implementation'], row.get('backends', '')
        if used and {*used.split('+')} != {name}:
            found[name, row['over']] = f' ({used})'
    return {key: f'{key[0]}{others}, {key[1]}' for key, others in found.items()}


def case_table(result: dict) -> Table:
    """Return a table of one result of bench_case, with a line for each implementation and form.

    `x` is the time relative to the baseline without slots. GB/s are those of the depth part; in the
    column with both passes, those of its backward pass.
    """
    case = Case(**{name: result[name] for name in Case._fields})
    titles = _titles(result['rows'])
    return pivot(
        f'attention, {case}; x: relative to {result["baseline"]} without slots',
        result['rows'],
        line=lambda row: titles[row['implementation'], row['over']],
        column=lambda row: DIRECTIONS[row['direction']],
        text=_cell,
    )


def failures(result: dict) -> list[str]:
    """Return a line for each reason why a form was not timed."""
    reasons = {}
    for row in result['rows']:
        if 'failed' in row:
            what = f'{row["over"]}, {row["direction"]}'
            reasons.setdefault((row['implementation'], row['failed']), []).append(what)
    return [f'{name} ({"; ".join(what)}): {why}' for (name, why), what in reasons.items()]


def find(result: dict, key: str, over: str, direction: str) -> dict:
    """Return the value of `key` by implementation for the rows of a form that have it."""
    return {
        row['implementation']: row[key]
        for row in result['rows']
        if key in row and (row['over'], row['direction']) == (over, direction)
    }


def _seconds_of_both_passes(results):
    """Seconds by T, by (implementation, over), at TARGET_SHAPE with its slots or without slots."""
    found = {}
    for result in results:
        if {name: result[name] for name in TARGET_SHAPE} in (TARGET_SHAPE, TARGET_SHAPE | NO_SLOTS):
            for over in (PLAIN, BOTH):
                for name, seconds in find(result, 'seconds', over, 'fresh').items():
                    found.setdefault((name, over), {})[result['length']] = seconds
    return found


def targets_table(results: list[dict], copy_bytes_per_second: float) -> Table:
    """Return a table of the targets and what the best of our implementations reached."""
    lines, flash = {}, _seconds_of_both_passes(results).get(('flash_attention_2', PLAIN), {})

    def add(name, target, by_implementation, best):
        if by_implementation:
            reached = best(by_implementation, key=by_implementation.get)
            lines[name] = [f'{target:.2f}', f'{by_implementation[reached]:.3f}', reached]

    for result in results:
        start = f'T={result["length"]}'
        shape = {name: result[name] for name in TARGET_SHAPE}
        if shape == PACKED_SHAPE:
            rates = find(result, 'flops_per_second', PLAIN, 'fresh')
            if {SEQUENCE, 'cudnn'} <= rates.keys():  # the others may run cuDNN themselves
                share = {SEQUENCE: rates[SEQUENCE] / rates['cudnn']}
                add(f'{start}, packed documents, of the rate of cuDNN', PACKED_TARGET, share, max)
        if shape != TARGET_SHAPE:
            continue
        if result['baseline'] == 'cudnn' and result['length'] in TARGETS:
            reached = find(result, 'over_plain', BOTH, 'fresh')
            fused = {name: reached.pop(name) for name in [*reached] if name.endswith('fused')}
            for targets, ours, what in ((TARGETS, reached, ''), (FUSED_TARGETS, fused, ', fused')):
                name = f'{start}, forward + backward{what}, over cuDNN'
                add(name, targets[result['length']], ours, min)
        for direction in DIRECTIONS:
            rates = find(result, 'bytes_per_second', ALONE, direction)
            shares = {name: rate / copy_bytes_per_second for name, rate in rates.items()}
            add(f'{start}, depth {direction}, of copy bandwidth', COPY_TARGET, shares, max)
        if plain := flash.get(result['length']):
            ours = find(result, 'seconds', BOTH, 'fresh')
            name = f'{start}, both passes with slots, over FlashAttention-2 without'
            add(name, 1, {name: seconds / plain for name, seconds in ours.items()}, min)
    return Table('targets (on an H200)', ['', 'target', 'reached', 'by'], lines)


def attention(
    *,
    implementations: list[str] | None = None,
    lengths: list[int] | None = None,
    heads: list[int] | None = None,
    kv_heads: list[int] | None = None,
    widths: list[int] | None = None,
    slots: list[int] | None = None,
    dtype: Dtype = 'bfloat16',
    seconds: int = 60,
):
    """Attention over sequence and depth slots by every implementation, and plain attention.

    Each implementation is checked against the reference before it is timed. Everything runs in this
    process; launch.gpu times fixed shapes in separate processes. On a CPU, kernels are interpreted.

    Args:
      implementations: names to time. Default: ours, cudnn and flash_attention_2.
      lengths: sequence lengths. Default: 4096,16384,65536; on a CPU 48.
      heads: query heads. Default: 64; on a CPU 4.
      kv_heads: key/value heads. Default: 8; on a CPU 2.
      widths: head widths. Default: 64; on a CPU 16.
      slots: depth slots per token. Default: 64; on a CPU 5.
      dtype: dtype of all arrays.
      seconds: time budget for each shape.
    """
    known = dict.fromkeys((*RIVALS, *IMPLEMENTATIONS, *PARTS))
    on_gpu = jax.default_backend() == 'gpu'
    for name in implementations or ():
        one_of('--implementations', name, known)
    sizes = [tuple(LENGTHS.values()), (64,), (8,), (64,), (64,)]
    sizes = sizes if on_gpu else [(48,), (4,), (2,), (16,), (5,)]
    given = (lengths, heads, kv_heads, widths, slots)
    sizes = [chosen or usual for chosen, usual in zip(given, sizes, strict=True)]
    for many, few in itertools.product(sizes[1], sizes[2]):
        if many % few:
            raise ValueError(f'--kv_heads={few}: must divide --heads={many}')
    yield {'versions': versions(), **device_ceilings(toy=not on_gpu)}, []
    for shape in itertools.product(*sizes):
        case = Case(*shape, dtype=dtype)
        try:
            result = bench_case(case, implementations or known, seconds)
        except ValueError as error:  # the inputs do not fit; other shapes may
            print(f'{case}: {error}', file=sys.stderr)
            continue
        yield result, [case_table(result)]
        for line in failures(result):
            print(line, file=sys.stderr)


def draw_times(results: list[dict], path) -> bool:
    """Plot the times of both passes by T at TARGET_SHAPE, with its slots and without slots.

    Returns False if no result of bench_case has this shape.
    """
    times = _seconds_of_both_passes(results)
    if not times:
        return False
    lengths = sorted(set().union(*times.values()))
    figure = new_figure(9.2, 4.0)
    axes, width = figure.subplots(), 0.8 / len(times)
    for number, ((name, over), by_length) in enumerate(sorted(times.items())):
        places = [lengths.index(length) + number * width for length in by_length]
        milliseconds = [1e3 * seconds for seconds in by_length.values()]
        bars = axes.bar(places, milliseconds, width, label=f'{name}, {over}')
        axes.bar_label(bars, fmt='%.3g', fontsize=7)
    middles = [place + (0.8 - width) / 2 for place in range(len(lengths))]
    axes.set_xticks(middles, [f'T = {length:,}' for length in lengths])
    axes.set(yscale='log', ylabel='forward and backward, ms')
    axes.set_title(str(Case(0, **TARGET_SHAPE)).removeprefix('T=0 '), loc='left', fontsize=9)
    figure.legend(loc='outside lower center', ncols=3, fontsize=8)
    figure.savefig(path)
    return True
