"""Training loss along the way: the largest budget of a study, each variant at its best size."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from moddepth_jax.studies import fit, plot_style

_CURVES = ('dense', 'shallow', 'mod', 'random')
_MOST_CURVES = 6  # of other studies
_SMOOTH = 5  # points of a curve that are averaged; fewer at its ends
_EARLY = 0.2  # of a run: what only it shows is cut off


def loss_by_steps(study: dict) -> Figure:
    """Loss against steps, and its difference to the reference's after what the budgets are in.

    Args:
      study: the content of study.json, with a run to show.
    """
    budget = fit.budgets(study)[-1]
    found = dict(fit.found(study, budget))
    names = [name for name in _CURVES if name in found]
    if study['kind'] == 'steps' or len(names) < 2:
        names = list(found)[:_MOST_CURVES]
    curves = {name: _curve(found[name]) for name in names}
    curves = {name: curve for name, curve in curves.items() if curve is not None}
    if not curves:
        return plot_style.sentence('No run of the largest budget has a training curve.')
    base = fit.reference(study)
    base = base if base in curves else next(iter(curves))
    figure = plot_style.new_figure(9.2, 3.6)
    left, right = figure.subplots(1, 2)
    highs, late = [], []
    for name, (steps, losses_SP, _) in curves.items():
        highs.append(np.interp(_EARLY * steps[-1], steps, losses_SP.max(0)))
        _band(left, steps, losses_SP, plot_style.style(study, name))
        spent = _spent(study, curves[name])
        same_P = np.interp(spent, _spent(study, curves[base]), curves[base][1].mean(0))
        _band(right, spent, losses_SP - same_P, plot_style.style(study, name))
        late.append((losses_SP - same_P)[:, spent > _EARLY * spent[-1]])
    low = min(losses_SP.min() for _, losses_SP, _ in curves.values())
    plot_style.limit(left, low, max(highs))
    plot_style.limit(right, min(map(np.min, late)), max(map(np.max, late)))
    units = {'steps': '{:,.0f}'.format, 'FLOPs': plot_style.scientific}
    unit = 'steps' if study['kind'] == 'steps' else 'FLOPs'
    for axes, text in ((left, units['steps']), (right, units[unit])):
        axes.set_xlim(left=0)
        axes.locator_params(axis='x', nbins=5)
        write = FuncFormatter(lambda value, _, text=text: text(value) if value else '0')
        axes.xaxis.set_major_formatter(write)
    left.set_xlabel('steps')
    right.set_xlabel('steps' if unit == 'steps' else 'training FLOPs')
    left.set_ylabel('training loss (nats a token)')
    label = study['variants'][base]['label']
    right.set_ylabel(f'training loss minus that of "{label}" (nats)')
    left.set_title(f'{plot_style.budget_name(study, budget)}, each at its best size', loc='left')
    right.set_title(f'the difference after the same {unit}', loc='left')
    plot_style.legend(figure, study, curves, linewidth=1.5)
    return figure


def _spent(study, curve):
    """What of the budget was spent at each point of a curve: steps or FLOPs [P]."""
    steps, _, flops_per_step = curve
    return steps if study['kind'] == 'steps' else steps * flops_per_step


def _band(axes, x, values_SP, style):
    """The mean over the seeds, and their range as a band."""
    mean_P, hollow = values_SP.mean(0), style['markerfacecolor'] != style['color']
    axes.plot(x, mean_P, '--' if hollow else '-', color=style['color'], linewidth=1.5)
    axes.fill_between(
        x, values_SP.min(0), values_SP.max(0), color=style['color'], alpha=0.14, linewidth=0
    )
    axes.plot(x[-1:], mean_P[-1:], **style)


def _curve(rows):
    """Steps [P], losses [S, P] of the S seeds at the best size, FLOPs of a step; None without."""
    size = fit.best(rows).size
    rows = [row for row in rows if row['size'] == size]
    known = [[point for point in row['curve'] if point[1] is not None] for row in rows]
    arrays = [np.array(points, float) for points in known if points]
    if not arrays:
        return None
    steps = arrays[0][:, 0]
    losses_SP = np.stack([np.interp(steps, *points.T) for points in arrays])
    reach = _SMOOTH // 2
    windows = [slice(max(0, i - reach), i + reach + 1) for i in range(len(steps))]
    losses_SP = np.stack([losses_SP[:, window].mean(1) for window in windows], axis=1)
    return steps, losses_SP, rows[0]['flops_per_step']
