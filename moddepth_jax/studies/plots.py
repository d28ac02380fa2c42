"""Draws the figures of a study from study.json, each as PNG and SVG."""

import pathlib

import matplotlib
import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter

from moddepth_jax.studies import fit, plot_style
from moddepth_jax.studies.plan import OWN_VARIANTS
from moddepth_jax.studies.plot_style import INK, PAPER, budget_name, style
from moddepth_jax.studies.store import flops_at

NO_RUNS = 'No run of this study has finished yet: there is nothing to draw.'
_ROOM_ABOVE = 0.7  # losses further above, in ranges of the sized variants, are only named
# Training curves of a study at equal FLOPs; those of variants that its config adds are drawn too.
_CURVES = ('dense', 'shallow', 'mod', 'random')
_MAX_CURVES = 6  # training curves of other studies
_SMOOTH = 5  # points around each of a curve that are averaged; fewer at its ends, which are exact
_FAR = 4  # variants further from the median than this times (median - best) are only named
_SMALL = 3.5  # size of the marks of the seed that chose a size
_EARLY = 0.2  # share of a run that may lie above the y axis


def draw(study: dict, directory):
    """Write NAME.png and NAME.svg for each of FIGURES; equal studies give equal bytes."""
    directory = pathlib.Path(directory)
    nothing = dict.fromkeys(('Date', 'Creator', 'Format', 'Type'))
    with matplotlib.rc_context(plot_style.SETTINGS):
        for name, make in FIGURES.items():
            figure = make(study) if fit.budgets(study) else plot_style.sentence(NO_RUNS)
            figure.savefig(directory / f'{name}.png', metadata={'Software': None})
            figure.set_layout_engine('none')  # keep the layout: computing it again is slow
            figure.savefig(directory / f'{name}.svg', metadata=nothing)


def _panels(study, budgets, height, x, y='', columns=3, strip=0.0):
    """A figure with one panel per budget, `height` inches high, and axis labels x and y.

    Returns the figure and {budget: [axes]}. If `strip` is not 0, each list also has the axes of a
    strip on the right, `strip` times as wide as the panel.
    """
    columns = min(len(budgets), columns)
    rows = -(-len(budgets) // columns)
    figure = plot_style.new_figure((7.2, 9.2, 9.8)[columns - 1], height * rows)
    ratios = [1, strip] * columns if strip else [1] * columns
    grid = figure.subplots(rows, len(ratios), squeeze=False, width_ratios=ratios)
    grid = grid.reshape(rows * columns, -1)
    for axes in grid[len(budgets) :].ravel():
        axes.set_visible(False)
    panels = dict(zip(budgets, grid, strict=False))
    for index, (budget, (axes, *_)) in enumerate(panels.items()):
        steps = [row['steps'] for row in study['runs'] if row['budget'] == budget]
        title = budget_name(study, budget)
        if study['kind'] == 'flops':
            span = dict.fromkeys(f'{number:,}' for number in (min(steps), max(steps)))
            title += f'\nruns of {" to ".join(span)} steps'
        axes.set_title(title, loc='left')
        axes.set_xlabel(x if index + columns >= len(budgets) else '')
        axes.set_ylabel('' if index % columns else y)
    return figure, panels


def _of_several_sizes(found):
    """The variants in pairs (variant, rows) that ran at several sizes."""
    return [name for name, rows in found if len({row['size'] for row in rows}) > 1]


def _marks(rows):
    """Return [(size, how to draw it)]: small marks for the seed that chose the best size.

    The best size has a full mark, of the seeds that judge. Without such seeds all marks are full.
    """
    chose = fit.sizes(fit.choosing(rows))
    if not fit.judging(rows):
        return [(size, {}) for size in chose]
    small = {'markersize': _SMALL}
    return [*((size, small) for size in chose if len(chose) > 1), (fit.best(rows), {})]


def _by_parameters(study):
    """Loss and parabola by size (Raposo et al., figure 3), and a strip of one-size variants."""
    budgets = fit.budgets(study)
    found = [pair for budget in budgets for pair in fit.found(study, budget)]
    shown = {name for name, _ in found}
    lined = set(_of_several_sizes(found)) or set(study['variants'])
    others = len(shown - lined)
    strip = min(max(0.07 * others, 0.25), 0.5) if others else 0.0
    y = 'held-out loss, causal (bits/byte)'
    figure, panels = _panels(study, budgets, 3.3, 'parameters', y, strip=strip)
    bits, inside = fit.bits_per_nat(study), set()
    for budget, (axes, *strips) in panels.items():
        found = fit.found(study, budget)
        in_panel = [(name, rows) for name, rows in found if name in lined]
        in_strip = {name: fit.best(rows) for name, rows in found if name not in lined}
        marks = [(name, *mark) for name, rows in in_panel for mark in _marks(rows)]
        parameters = [size.parameters for _, size, _ in marks]
        plot_style.log_axis(axes, parameters, EngFormatter(sep=''))
        for name, rows in in_panel:
            inside |= _draw_parabola(axes, rows, bits, style(name))
        values = [loss * bits for _, size, _ in marks for loss in size.losses]
        top = max(values) + _ROOM_ABOVE * np.ptp(values)
        more = [loss * bits for size in in_strip.values() for loss in size.losses]
        plot_style.set_y_limits(axes, [*values, *more], top)
        for name, size, how in marks:
            losses = np.multiply(size.losses, bits)
            plot_style.draw_point(axes, size.parameters, losses, style(name) | how)
        for strip_axes in strips:
            _draw_strip(strip_axes, axes, in_strip, bits)
    hollow = {'color': INK, 'markerfacecolor': 'none', 'markersize': 11, 'linewidth': 0}
    more = []
    if True in inside:
        more.append((Line2D([], [], marker='*', **hollow), 'optimum of the parabola'))
    if False in inside:
        more.append((Line2D([], [], marker='o', **hollow), 'at an edge: no optimum'))
    more += _small_marks(study)
    plot_style.legend(figure, study, shown, more)
    return figure


def _small_marks(study):
    """The entry of a legend for the small marks of `_marks`, if there are any."""
    rows = [rows for budget in fit.budgets(study) for _, rows in fit.found(study, budget)]
    if not any(how for each in rows for _, how in _marks(each)):
        return []
    small = Line2D([], [], marker='o', color=INK, markersize=_SMALL, linewidth=0)
    return [(small, 'small: the seed that chose the size')]


def _draw_strip(strip, axes, best_sizes, bits):
    """Draw the best size of each variant in a column, on the y axis of `axes`."""
    strip.set(yticks=axes.get_yticks(), xticks=[])
    strip.set(ylim=axes.get_ylim(), xlim=(-0.8, max(len(best_sizes), 1) - 0.2))
    strip.tick_params(left=False, labelleft=False)
    strip.grid(visible=False, axis='x')
    strip.spines['left'].set_visible(False)
    for column, (name, size) in enumerate(best_sizes.items()):
        _draw_or_name(strip, column, np.multiply(size.losses, bits), style(name))
    sizes = ', '.join(dict.fromkeys(size.size for size in best_sizes.values()))
    strip.set_xlabel(f'others\n{sizes}', fontsize=8)


def _draw_or_name(axes, x, losses, keywords):
    """Draw a point or, if it lies above the panel, a marker with its value at the upper edge."""
    mean = np.mean(losses)
    if mean < axes.get_ylim()[1]:
        plot_style.draw_point(axes, x, losses, keywords)
        return
    edge = axes.get_xaxis_transform()
    axes.plot([x], [0.97], transform=edge, linewidth=0, **keywords)
    text = {'rotation': 90, 'ha': 'center', 'va': 'top', 'fontsize': 7, 'transform': edge}
    axes.text(x, 0.93, f'{mean:.3f} →', **text)


def _draw_parabola(axes, rows, bits, keywords):
    """Draw the parabola of a variant and its optimum. Returns {whether it lies inside} or {}."""
    parabola, sizes = fit.fit(rows), fit.fitted_sizes(rows)
    line = {'color': keywords['color'], 'linewidth': 1.2, 'alpha': 0.8}
    if parabola is None:
        losses = [size.loss * bits for size in sizes]
        axes.plot([size.parameters for size in sizes], losses, linestyle=':', **line)
        return set()
    x = np.geomspace(sizes[0].parameters, sizes[-1].parameters, 100)
    y = parabola.a + parabola.b * np.log(x) + parabola.c * np.log(x) ** 2
    axes.plot(x, y * bits, **line)
    # A ring surrounds the marker of a size; a star lies on the curve.
    kind = {'marker': '*', 'zorder': 3.5} if parabola.inside else {'marker': 'o', 'zorder': 2.5}
    place = [parabola.optimum_parameters], [parabola.optimum_loss * bits]
    axes.plot(*place, **kind, color=keywords['color'], markerfacecolor=PAPER, markersize=12)
    return {parabola.inside}


def _by_flops(study):
    """Loss over FLOPs per forward pass, relative to the reference (Raposo et al., figure 4)."""
    reference = fit.reference(study)
    label = study['variants'][reference]['label']
    budgets = [b for b in fit.budgets(study) if fit.select(study, reference, b)]
    if not budgets:
        return plot_style.sentence(f'No run of "{label}" has finished: nothing to compare with.')
    labels = 'FLOPs of a forward pass, relative', 'held-out loss, causal, relative'
    figure, panels = _panels(study, budgets, 3.3, *labels)
    found = [pair for budget in budgets for pair in fit.found(study, budget)]
    lined = _of_several_sizes(found)
    for budget, (axes, *_) in panels.items():
        base = fit.best(fit.select(study, reference, budget))
        marks = [
            (name, size.flops_per_forward / base.flops_per_forward, losses, how)
            for name, rows in fit.found(study, budget)
            for size, how in _marks(rows)
            for losses in [np.divide(size.losses, base.loss)]
        ]
        main = [v for name, _, losses, _ in marks for v in losses if name in lined or not lined]
        top = max(main) + 0.1 * np.ptp(main)
        plot_style.log_axis(axes, [x for _, x, *_ in marks], '{x:g}')
        for draw_line in (axes.axhline, axes.axvline):
            draw_line(1, color=INK, linewidth=0.9, linestyle='--', alpha=0.8)
        for name in lined:
            mine = [(x, np.mean(losses), how) for other, x, losses, how in marks if other == name]
            points = [point for *point, how in mine if how or not mine[0][-1]]  # of one seed
            colour = style(name)['color']
            axes.plot(*np.reshape(points, (-1, 2)).T, linewidth=1, color=colour, alpha=0.6)
        near = [v for _, _, losses, _ in marks for v in losses if np.mean(losses) <= top]
        plot_style.set_y_limits(axes, near)
        for name, x, losses, how in marks:
            _draw_or_name(axes, x, losses, style(name) | how)
    line = Line2D([], [], color=INK, linewidth=0.9, linestyle='--')
    shown = {name for name, _ in found}
    more = [(line, f'"{label}" at its best size = 1'), *_small_marks(study)]
    plot_style.legend(figure, study, shown, more)
    return figure


def _by_steps(study):
    """Training loss at the largest budget, and its difference to the reference."""
    budget = fit.budgets(study)[-1]
    found = dict(fit.found(study, budget))
    names = [name for name in found if name in _CURVES or name not in OWN_VARIANTS]
    if study['kind'] == 'steps' or len(names) < 2:
        names = list(found)
    names = names[:_MAX_CURVES]
    curves = {name: _curve(found[name], study['kind']) for name in names}
    curves = {name: curve for name, curve in curves.items() if curve is not None}
    if not curves:
        return plot_style.sentence('No run of the largest budget has a training curve.')
    base = fit.reference(study)
    base = base if base in curves else next(iter(curves))
    _, base_spent, base_losses_SP = curves[base]
    figure = plot_style.new_figure(9.2, 3.6)
    left, right = figure.subplots(1, 2)
    highs, late = [], []
    for name, (steps, spent, losses_SP) in curves.items():
        highs.append(np.interp(_EARLY * steps[-1], steps, losses_SP.max(0)))
        _draw_band(left, steps, losses_SP, style(name))
        difference_SP = losses_SP - np.interp(spent, base_spent, base_losses_SP.mean(0))
        _draw_band(right, spent, difference_SP, style(name))
        late.append(difference_SP[:, spent > _EARLY * spent[-1]])
    lows = [losses_SP.min() for *_, losses_SP in curves.values()]
    plot_style.set_y_limits(left, [*lows, max(highs)])
    plot_style.set_y_limits(right, np.concatenate(late, axis=None))
    unit = 'steps' if study['kind'] == 'steps' else 'FLOPs'
    for axes, form in ((left, '{:,.0f}'.format), (right, plot_style.scientific)):
        axes.set_xlim(left=0)
        axes.locator_params(axis='x', nbins=5)
        form = '{:,.0f}'.format if unit == 'steps' else form
        axes.xaxis.set_major_formatter(lambda value, _, form=form: form(value) if value else '0')
    label = study['variants'][base]['label']
    left.set(xlabel='steps', ylabel='training loss, smoothed (nats per token)')
    right.set_xlabel('steps' if unit == 'steps' else 'training FLOPs')
    right.set_ylabel(f'training loss minus that of "{label}" (nats)')
    left.set_title(f'{budget_name(study, budget)}, each at its best size', loc='left')
    right.set_title(f'difference after the same {unit}', loc='left')
    plot_style.legend(figure, study, curves, linewidth=1.5)
    return figure


def _curve(rows, kind):
    """Steps [P], steps or FLOPs spent [P], and losses [S, P] of the seeds at the best size."""
    rows = fit.at_best_size(rows)
    known = [[point for point in row['curve'] if point[1] is not None] for row in rows]
    arrays = [np.array(points, float) for points in known if points]
    if not arrays:
        return None
    steps = arrays[0][:, 0]
    losses_SP = np.stack([np.interp(steps, *points.T) for points in arrays])
    reaches = [min(_SMOOTH // 2, i, len(steps) - 1 - i) for i in range(len(steps))]
    windows = [slice(i - reach, i + reach + 1) for i, reach in enumerate(reaches)]
    losses_SP = np.stack([losses_SP[:, window].mean(1) for window in windows], axis=1)
    return steps, steps if kind == 'steps' else flops_at(rows[0], steps), losses_SP


def _draw_band(axes, x, values_SP, keywords):
    """Draw the mean over seeds, and their range as a band."""
    mean_P, hollow = values_SP.mean(0), keywords['markerfacecolor'] != keywords['color']
    line = {'color': keywords['color'], 'zorder': keywords['zorder'] - 0.6}
    width = 1.5 * (keywords['markersize'] / plot_style.MARKER_SIZE) ** 2
    axes.plot(x, mean_P, '--' if hollow else '-', linewidth=width, **line)
    band = {'color': keywords['color'], 'alpha': 0.14, 'linewidth': 0}
    axes.fill_between(x, values_SP.min(0), values_SP.max(0), **band)
    axes.plot(x[-1:], mean_P[-1:], **keywords)


def _seeds(study):
    """Every seed of every variant at its best size, with the best mean on top."""
    budgets, base = fit.budgets(study), fit.reference(study)
    height = 1.1 + 0.24 * max(len(fit.found(study, budget)) for budget in budgets)
    x = 'held-out loss, causal (bits/byte)'
    figure, panels = _panels(study, budgets, height, x, columns=1)
    bits, labels = fit.bits_per_nat(study), study['variants']
    for budget, (axes,) in panels.items():
        best = [(name, fit.best(rows)) for name, rows in fit.found(study, budget)]
        best.sort(key=lambda entry: -entry[1].loss)
        means = np.array([size.loss for _, size in best]) * bits
        limit = np.median(means) + _FAR * (np.median(means) - means.min())
        limit = limit if limit > means.min() else means.max()
        far = {name for name, size in best if min(size.losses) * bits > limit} - {base}
        near = [loss for name, size in best if name not in far for loss in size.losses]
        left, right = min(near) * bits, max(near) * bits
        right = max(right, limit) if far else right
        for row, (name, size) in enumerate(best):
            losses, colour = np.multiply(size.losses, bits), style(name)['color']
            if name in far:
                text = {'ha': 'right', 'va': 'center', 'color': colour, 'fontsize': 8}
                axes.text(right, row, f'mean {size.loss * bits:.3f} →', **text)
                continue
            band = {'color': colour, 'alpha': 0.25, 'linewidth': 7, 'solid_capstyle': 'butt'}
            axes.plot([losses.min(), losses.max()], [row] * 2, **band)
            if len(losses) > 1:
                mark = {'color': colour, 'markersize': 12, 'markeredgewidth': 2}
                axes.plot([losses.mean()], [row], '|', **mark)
            axes.plot(losses, [row] * len(losses), '.', color=colour, markersize=7)
        if (reference := dict(best).get(base)) is not None:
            axes.axvline(reference.loss * bits, color=INK, linewidth=0.9, linestyle='--', zorder=1)
        names = [f'{labels[name]["label"]} · {size.size}' for name, size in best]
        axes.set_yticks(range(len(best)), names, fontsize=8)
        axes.set_ylim(-0.6, len(best) - 0.4)
        room = 0.05 * (right - left) or 0.01
        axes.set_xlim(left - room, right + room)
        axes.locator_params(axis='x', nbins=8)
        axes.tick_params(axis='y', length=0)
        axes.grid(visible=False, axis='y')
    looks = {
        'a seed': {'marker': '.', 'linewidth': 0},
        'mean': {'marker': '|', 'markersize': 12, 'markeredgewidth': 2, 'linewidth': 0},
        'range of the seeds': {'linewidth': 7, 'alpha': 0.25},
        f'mean of "{labels[base]["label"]}"': {'linewidth': 0.9, 'linestyle': '--'},
    }
    more = [(Line2D([], [], color=INK, **look), label) for label, look in looks.items()]
    plot_style.legend(figure, study, (), more)
    return figure


FIGURES = {
    'loss_by_parameters': _by_parameters,
    'loss_by_flops': _by_flops,
    'loss_by_steps': _by_steps,
    'seeds': _seeds,
}
