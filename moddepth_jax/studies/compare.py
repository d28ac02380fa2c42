"""Compares finished runs: losses with their spread over seeds, costs, and differences."""

import dataclasses
import itertools
import math
import pathlib
import statistics

import numpy as np
from flax import traverse_util
from matplotlib import rc_context

from moddepth_jax.studies.plot_style import SETTINGS, new_figure, scientific, set_y_limits
from moddepth_jax.studies.statistics import Interval, interval
from moddepth_jax.studies.store import MAY_DIFFER, flops_at, training_curve
from moddepth_jax.training import routing_gap
from moddepth_jax.training.metrics import METRICS_FILE, read_metrics
from moddepth_jax.training.progress import format_count
from moddepth_jax.training.run_dir import may_differ, read_finished
from moddepth_jax.training.summary import read_summary
from moddepth_jax.training.tables import Table

SAME_FLOPS = 0.01  # budgets that differ by less are called equal
SILENT = (*MAY_DIFFER, 'seed')  # knobs in which the runs of a variant may differ
SMOOTHED = 30  # points of a training curve, each the mean of the rows before it
_SUMMARY = {  # fields of summary.json that are compared
    'stages': [{'first_step': int, 'flops_per_step': float}],
    'versions': {'device': str},
    'corpus_sha256': str,
    **dict.fromkeys(('parameters', 'final_step'), int),
    **dict.fromkeys(('flops_per_step', 'total_flops', 'seconds'), float),
}
COLUMNS = 4  # variants in one table of the terminal


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """A finished run."""

    path: str  # directory as given by the user
    knobs: dict  # config by dotted name
    summary: dict  # content of summary.json
    rows: list[dict]  # rows of metrics.jsonl

    def value(self, name: str) -> float:
        """Return a number of the evaluation; NaN if it is missing, as in a diverged run."""
        value = self.summary['eval'].get(name)
        return math.nan if value is None else value

    @property
    def flops_per_forward(self) -> float | None:
        """Counted FLOPs of a forward pass over a batch; None for an older run with a teacher."""
        if 'flops_per_forward' in self.summary:
            return self.summary['flops_per_forward']
        if self.knobs.get('training.distill_from'):
            return None
        return self.summary['flops_per_step'] / 3

    def curve(self, name: str) -> np.ndarray:
        """Return the steps and values of a metric in metrics.jsonl as an array [2, points]."""
        points = [
            (row['step'], row[name]) for row in self.rows if isinstance(row.get(name), int | float)
        ]
        return np.array(points, float).reshape(-1, 2).T


@dataclasses.dataclass(frozen=True)
class Variant:
    """Runs that differ only in their seed."""

    name: str  # directory of the first run
    runs: tuple[FinishedRun, ...]  # seeds ascending

    @property
    def seeds(self) -> list[int]:
        """The seeds of the runs."""
        return [run.knobs['seed'] for run in self.runs]

    def values(self, name: str = 'bits_per_byte') -> list[float]:
        """Return a number of the evaluation for each run."""
        return [run.value(name) for run in self.runs]

    def minus(self, other: 'Variant') -> tuple[Interval, int]:
        """Return the mean difference in bits per byte, and over how many pairs of seeds it is.

        Runs with equal seeds read the same data in the same order. With two common seeds or more,
        the other runs are left out; else the means over all runs are compared (0 pairs).
        """
        mine, others = (dict(zip(v.seeds, v.values(), strict=True)) for v in (self, other))
        if len(common := [seed for seed in mine if seed in others]) > 1:
            return interval([[mine[seed] - others[seed] for seed in common]]), len(common)
        return interval([[*mine.values()], [*others.values()]], (1, -1)), 0


def read_run(path: str) -> FinishedRun:
    """Read a run. Raises ValueError if it is missing, unfinished, or has lost rows of metrics."""
    knobs = traverse_util.flatten_dict(read_finished(path), sep='.')
    summary = read_summary(path, _SUMMARY)
    rows, last = read_metrics(path), summary['final_step']
    if last not in (row['step'] for row in rows if 'loss' in row):
        found = f'{path}/{METRICS_FILE}: holds no loss of the last step, {last}'
        raise ValueError(f'{found}; rows are lost: restore the file, or leave the run out')
    return FinishedRun(path, knobs, summary, rows)


def group_by_config(runs: list[FinishedRun]) -> list[Variant]:
    """Group runs by their config without the seed and silent knobs, in the order given.

    Raises ValueError if two runs of a group have the same seed.
    """
    groups = {}
    for run in runs:
        key = tuple(sorted((k, repr(v)) for k, v in run.knobs.items() if not may_differ(k, SILENT)))
        groups.setdefault(key, []).append(run)
    variants = []
    for group in groups.values():
        group.sort(key=lambda run: run.knobs['seed'])
        for one, other in itertools.pairwise(group):
            if one.knobs['seed'] == other.knobs['seed']:
                raise ValueError(
                    f'{one.path} and {other.path}: have the same config and seed; give one of '
                    'them, or train another with --config.seed'
                )
        variants.append(Variant(group[0].path, tuple(group)))
    return variants


def differing_knobs(variants: list[Variant]) -> dict[str, list]:
    """Return the values of the knobs in which the variants differ; '-' if a config has no value."""
    configs = [variant.runs[0].knobs for variant in variants]
    names = sorted(name for name in set().union(*configs) if not may_differ(name, SILENT))
    values = {name: [config.get(name, '-') for config in configs] for name in names}
    return {name: row for name, row in values.items() if len(set(map(repr, row))) > 1}


def warnings(variants: list[Variant]) -> list[str]:
    """Return reasons why losses or times of the variants cannot be compared, one line each."""
    runs = [run for variant in variants for run in variant.runs]
    found = []

    def differ(what, values, consequence):
        if len(set(values)) > 1:
            listed = ', '.join(
                f'{run.path} {value}' for run, value in zip(runs, values, strict=True)
            )
            found.append(f'{what} differ: {consequence} ({listed})')

    def knobs(name):
        return [str(run.knobs.get(name)) for run in runs]

    texts = [run.summary['corpus_sha256'][:8] for run in runs]
    differ('texts', texts, 'their losses say nothing about the models')
    differ('rows', knobs('data.sequence_length'), 'longer rows give tokens more context')
    held_out = [run.summary['eval'].get('targets') for run in runs]
    fractions = knobs('data.held_out_fraction')
    differ('values of data.held_out_fraction', fractions, 'the held-out text is not the same')
    right = 'set evaluation.final_batches to one number'
    differ('numbers of held-out targets', held_out, f'losses are of more or less text; {right}')
    flops = [run.summary['total_flops'] for run in runs]
    if max(flops) > (1 + SAME_FLOPS) * min(flops) > 0:
        ratio = max(flops) / min(flops)
        found.append(f'training FLOPs differ by a factor of {ratio:.3g}: more training, less loss')
    devices = [run.summary['versions']['device'] for run in runs]
    differ('devices', devices, 'tokens per second do not compare the models')
    for run in runs:
        if routing_gap.is_large(gap := run.value('routing_gap')):
            found.append(
                f'{run.path}: a large routing gap of {gap:+.3f} nats; compare by both losses'
            )
    if any(len(variant.runs) < 2 for variant in variants):
        found.append('one seed shows no spread: train more seeds with --config.seed')
    return found


def _median_rate(run):
    rates = run.curve('tokens_per_second')[1]
    return float(np.median(rates)) if len(rates) else math.nan


def describe(variants: list[Variant]) -> list[dict]:
    """Return a dict of numbers for each variant; `difference` is to the first variant."""
    rows = []
    for variant in variants:
        losses, summary = variant.values(), variant.runs[0].summary
        row = {
            'name': variant.name,
            'runs': [run.path for run in variant.runs],
            'seeds': variant.seeds,
            'bits_per_byte': losses,
            'mean_bits_per_byte': statistics.fmean(losses),
            'std_bits_per_byte': float(np.std(losses, ddof=1)) if len(losses) > 1 else None,
            'loss': statistics.fmean(variant.values('loss')),
            'routing_gap': statistics.fmean(variant.values('routing_gap')),
            'parameters': summary['parameters'],
            'active_parameters': summary.get('active_parameters'),
            'steps': summary['final_step'],
            'total_flops': summary['total_flops'],
            'flops_per_forward': variant.runs[0].flops_per_forward,
            'tokens_per_second': statistics.fmean(map(_median_rate, variant.runs)),
            'seconds': statistics.fmean(run.summary['seconds'] for run in variant.runs),
        }
        if _held_out(variant) != _held_out(variants[0]):
            row['not_compared'] = 'other held-out text'
        elif variant is not variants[0]:
            difference, pairs = variant.minus(variants[0])
            row['difference'] = {**difference._asdict(), 'pairs': pairs}
        rows.append(row)
    return rows


def _held_out(variant):
    """Return a key of the held-out tokens: equal for variants evaluated on the same ones."""
    run = variant.runs[0]
    knobs = (run.knobs.get(f'data.{name}') for name in ('sequence_length', 'held_out_fraction'))
    return run.summary['corpus_sha256'], run.summary['eval'].get('targets'), *knobs


def _number(value, digits, missing=''):
    return missing if value is None or math.isnan(value) else format(value, digits)


def _difference(row):
    if 'difference' not in row:
        return row.get('not_compared', 'base')
    found = Interval(*(row['difference'][name] for name in Interval._fields))
    text = format(found, '+.4f')
    if text.endswith('(no interval)'):
        return text.removesuffix(' (no interval)')
    pairs = row['difference']['pairs']
    return text.replace(' (', '\n(') + (f'\n{pairs} pairs' if pairs else '\nunpaired')


def _value(value):
    return f'{value:.12g}' if isinstance(value, float) else str(value)


def _cells(row):
    """The cells of a variant by heading."""
    forward = row['flops_per_forward']
    spread = _number(row['std_bits_per_byte'], '.4f')
    return {
        'seed numbers': ', '.join(map(str, row['seeds'])),
        'bits per byte, held out': _number(row['mean_bits_per_byte'], '.4f', 'n/a')
        + (spread and f' ± {spread}'),
        'difference (95%)': _difference(row),
        'nats per token': _number(row['loss'], '.4f', 'n/a'),
        'routing gap (nats)': _number(row['routing_gap'], '+.4f'),
        'parameters': format_count(row['parameters']),
        'training FLOPs': f'{row["total_flops"]:.4g}'.replace('e+', 'e'),
        'forward FLOPs a batch': 'n/a' if forward is None else format_count(forward),
        'steps': f'{row["steps"]:,}',
        'tokens per second': _number(row['tokens_per_second'], ',.0f'),
    }


def tables(variants: list[Variant], rows: list[dict]) -> list[Table]:
    """Return tables of up to COLUMNS variants: the numbers of `describe` and differing knobs."""
    cells = [_cells(row) for row in rows]
    lines = {name: [cell[name] for cell in cells] for name in cells[0]}
    lines = {name: texts for name, texts in lines.items() if any(texts)}
    if not any('(' in text for text in lines['difference (95%)']):  # one seed has no interval
        lines = {name.removesuffix(' (95%)'): texts for name, texts in lines.items()}
    lines |= {name: list(map(_value, values)) for name, values in differing_knobs(variants).items()}
    parts = [slice(first, first + COLUMNS) for first in range(0, len(variants), COLUMNS)]
    return [
        Table(
            title='',
            heads=['', *(variant.name for variant in variants[part])],
            lines={name: texts[part] for name, texts in lines.items()},
        )
        for part in parts
    ]


def draw_curves(variants: list[Variant], path: pathlib.Path):
    """Plot training and held-out loss over training FLOPs, with a colour per variant."""
    with rc_context(SETTINGS):
        figure = new_figure(8.6, 3.6)
        panels = figure.subplots(1, 2)
        for place, variant in enumerate(variants):
            for number, run in enumerate(variant.runs):
                look = {'color': f'C{place}', 'linewidth': 1.2, 'alpha': 0.85}
                label = None if number else f'{variant.name} (seeds: {len(variant.runs)})'
                steps, means = np.reshape(training_curve(run.rows, SMOOTHED), (-1, 2)).T
                panels[0].plot(flops_at(run.summary, steps), means, label=label, **look)
                steps, bits = run.curve('eval/bits_per_byte')
                spent = flops_at(run.summary, steps)
                panels[1].plot(spent, bits, marker='o', markersize=2.5, **look)
        for axes, what in zip(
            panels, ('training loss (nats per token)', 'held-out (bits per byte)'), strict=True
        ):
            axes.set_xlabel('training FLOPs')
            axes.set_ylabel(what)
            axes.locator_params(axis='x', nbins=5)
            axes.xaxis.set_major_formatter(lambda value, _: scientific(value) if value else '0')
            _zoom(axes)
        figure.legend(loc='outside lower center', ncols=min(3, len(variants)))
        figure.savefig(path)


def _zoom(axes):
    """Fit the y axis to the last 90% of every curve, because the first losses are far above."""
    late = [line.get_ydata()[len(line.get_ydata()) // 10 :] for line in axes.lines]
    values = np.concatenate([np.asarray(part, float) for part in late]) if late else np.zeros(0)
    values = values[np.isfinite(values)]
    if len(values):
        set_y_limits(axes, values)
