"""The figures of a study, from study.json alone: PNG for a README, SVG for its page.

Every figure shows the shallower dense control where the study has it, and every seed that was run.
"""

import pathlib

import matplotlib
import numpy as np
from matplotlib.lines import Line2D

from moddepth_jax.studies import fit, plot_style
from moddepth_jax.studies.curves import loss_by_steps
from moddepth_jax.studies.fit import sizes
from moddepth_jax.studies.plot_style import INK, PAPER

_ABOVE = 0.7  # of the sizes' range: what lies further above them would squeeze them
NOTHING = 'No run of this study has finished yet: there is nothing to draw.'


def draw(study: dict, directory):
    """Writes NAME.png and NAME.svg for each name of FIGURES; equal studies give equal bytes.

    Args:
      study: the content of study.json.
      directory: an existing one.
    """
    directory = pathlib.Path(directory)
    nothing = dict.fromkeys(('Date', 'Creator', 'Format', 'Type'))
    with matplotlib.rc_context(plot_style.SETTINGS):
        for name, make in FIGURES.items():
            figure = make(study) if fit.budgets(study) else plot_style.sentence(NOTHING)
            figure.savefig(directory / f'{name}.png', metadata={'Software': None})
            figure.set_layout_engine('none')  # everything has its place, and finding it is slow
            figure.savefig(directory / f'{name}.svg', metadata=nothing)


def _panels(study, height, most=3, strip=0.0, **options):
    """A figure with a panel for each budget that has runs, `most` beside each other.

    Returns:
      The figure; lists of a panel's axes and its budget; the second axes are a strip at the right,
      of that width over the panel's, None if 0.
    """
    budgets = fit.budgets(study)
    columns = min(len(budgets), most)
    rows = -(-len(budgets) // columns)
    figure = plot_style.new_figure((7.2, 9.2, 9.8)[columns - 1], height * rows)
    ratios = [1, strip] * columns if strip else [1] * columns
    grid = figure.subplots(rows, len(ratios), squeeze=False, width_ratios=ratios, **options)
    grid = grid.reshape(rows * columns, -1)
    for axes in grid[len(budgets) :].ravel():
        axes.set_visible(False)
    for (axes, *_), budget in zip(grid, budgets, strict=False):
        steps = [row['steps'] for row in study['runs'] if row['budget'] == budget]
        title = plot_style.budget_name(study, budget)
        if study['kind'] == 'flops':
            steps = dict.fromkeys(f'{number:,}' for number in (min(steps), max(steps)))
            title += f'\nruns of {" to ".join(steps)} steps'
        axes.set_title(title, loc='left')
    panels = [
        (axes[0], axes[1] if strip else None, b) for axes, b in zip(grid, budgets, strict=False)
    ]
    return figure, panels


def _name_axes(panels, x, y, most=3):
    """The lowest panels of each column name x, those of the first column y."""
    columns = min(len(panels), most)
    for index, (axes, *_) in enumerate(panels):
        if index + columns >= len(panels):
            axes.set_xlabel(x)
        if index % columns == 0:
            axes.set_ylabel(y)


def _by_parameters(study):
    """Raposo et al., figure 3, left: the loss of every size, a parabola for each variant.

    Variants that ran at one size stand in a strip beside, where no two cover each other.
    """
    found = {b: [(n, r, sizes(r)) for n, r in fit.found(study, b)] for b in fit.budgets(study)}
    every = [name for at in found.values() for name, rows, _ in at if _lined(rows)]
    lined = set(every) or set(study['variants'])
    others = len({name for at in found.values() for name, *_ in at} - lined)
    figure, panels = _panels(study, 3.3, strip=min(max(0.07 * others, 0.25), 0.5) * (others > 0))
    bits, marked = fit.bits_per_nat(study), set()
    for axes, strip, budget in panels:
        given = [at for at in found[budget] if at[0] in lined]
        parameters = [size.parameters for *_, found_sizes in given for size in found_sizes]
        plot_style.log_axis(axes, parameters, plot_style.short_number)
        for name, rows, _ in given:
            marked |= _parabola(axes, rows, bits, plot_style.style(study, name))
        marks = [(n, s.parameters, np.multiply(s.losses, bits)) for n, _, z in given for s in z]
        values = np.concatenate([losses for *_, losses in marks])
        beside = [(name, fit.best(rows)) for name, rows, _ in found[budget]]
        beside = [(name, size) for name, size in beside if name not in lined]
        more = [loss * bits for _, size in beside for loss in size.losses]
        top = max(values) + _ABOVE * np.ptp(values)
        span = min([*values, *more]), max([*values, *(loss for loss in more if loss < top)])
        plot_style.points(axes, study, marks, span, every)
        if strip:
            _strip(strip, axes, study, beside, bits)
    _name_axes(panels, 'parameters', 'held-out loss, causal (bits/byte)')
    kinds = {True: ('*', 'optimum of the parabola'), False: ('o', 'at an edge: no optimum')}
    hollow = {'color': INK, 'markerfacecolor': 'none', 'markersize': 11, 'linewidth': 0}
    more = [
        (Line2D([], [], marker=marker, **hollow), label)
        for inside, (marker, label) in kinds.items()
        if inside in marked
    ]
    shown = {name for at in found.values() for name, *_ in at}
    plot_style.legend(figure, study, shown, more)
    return figure


def _strip(strip, axes, study, beside, bits):
    """(variant, its best size) in columns, on the y axis of `axes`; what lies above is written."""
    strip.set_yticks(axes.get_yticks())
    strip.set_ylim(axes.get_ylim())
    strip.tick_params(left=False, labelleft=False)
    strip.grid(visible=False, axis='x')
    strip.spines['left'].set_visible(False)
    strip.set_xticks([])
    strip.set_xlim(-0.8, max(len(beside), 1) - 0.2)
    for place, (name, size) in enumerate(beside):
        losses, style = np.multiply(size.losses, bits), plot_style.style(study, name)
        if losses.mean() < strip.get_ylim()[1]:
            plot_style.point(strip, place, losses, style)
        else:
            _above(strip, place, losses.mean(), style)
    found = ', '.join(dict.fromkeys(size.size for _, size in beside))
    strip.set_xlabel(f'others\n{found}', fontsize=8)


def _above(axes, x, value, style):
    """A mark at the upper edge, and below it the value that lies beyond."""
    edge = axes.get_xaxis_transform()
    axes.plot([x], [0.97], transform=edge, linewidth=0, **style)
    text = {'rotation': 90, 'ha': 'center', 'va': 'top', 'fontsize': 7, 'transform': edge}
    axes.text(x, 0.93, f'{value:.3f} →', **text)


def _parabola(axes, rows, bits, style):
    """Draws it and marks its optimum; {inside}, or nothing without a parabola, as a set."""
    parabola, at = fit.fit(rows), sizes(rows)
    line = {'color': style['color'], 'linewidth': 1.2, 'alpha': 0.8}
    if parabola is None:
        losses = [size.loss * bits for size in at]
        axes.plot([size.parameters for size in at], losses, linestyle=':', **line)
        return set()
    x = np.geomspace(at[0].parameters, at[-1].parameters, 100)
    y = parabola.a + parabola.b * np.log(x) + parabola.c * np.log(x) ** 2
    axes.plot(x, y * bits, **line)
    # A ring lies around the marker of its size, a star upon the curve.
    kind = {'marker': '*', 'zorder': 3.5} if parabola.inside else {'marker': 'o', 'zorder': 2.5}
    place = [parabola.optimum_parameters], [parabola.optimum_loss * bits]
    axes.plot(*place, **kind, color=style['color'], markerfacecolor=PAPER, markersize=12)
    return {parabola.inside}


def _by_flops(study):
    """Raposo et al., figure 4: loss against FLOPs per forward, both over the optimal dense's."""
    budgets = [b for b in fit.budgets(study) if fit.select(study, fit.reference(study), b)]
    label = study['variants'][fit.reference(study)]['label']
    if not budgets:
        return plot_style.sentence(f'No run of "{label}" has finished: nothing to compare with.')
    figure, panels = _panels(study | {'budgets': budgets}, 3.3)
    marks = {budget: _relative(study, budget) for budget in budgets}
    sized = [name for budget in budgets for name, rows in fit.found(study, budget) if _lined(rows)]
    shown = {name for at in marks.values() for name, *_ in at}
    for axes, _, budget in panels:
        here = marks[budget]
        main = [v for name, _, losses in here for v in losses if name in sized or not sized]
        top = max(main) + 0.1 * np.ptp(main)
        values = [value for *_, losses in here for value in losses if np.mean(losses) <= top]
        plot_style.log_axis(axes, [x for _, x, _ in marks[budget]], '{:g}'.format)
        for draw_line in (axes.axhline, axes.axvline):
            draw_line(1, color=INK, linewidth=0.9, linestyle='--', alpha=0.8)
        for name in sized:
            mine = [(x, np.mean(losses)) for other, x, losses in marks[budget] if other == name]
            colour = plot_style.style(study, name)['color']
            axes.plot(*np.reshape(mine, (-1, 2)).T, linewidth=1, color=colour, alpha=0.6)
        inside = [mark for mark in here if np.mean(mark[2]) <= top]
        # All in their place: beside it a mark could stand on the other side of the line at 1.
        plot_style.points(axes, study, inside, (min(values), max(values)), shown)
        for name, x, losses in here:
            if np.mean(losses) > top:
                _above(axes, x, np.mean(losses), plot_style.style(study, name))
    best = 'its best size' if study['kind'] == 'steps' else 'its isoFLOP optimum'
    _name_axes(panels, 'FLOPs of a forward pass, relative', 'held-out loss, causal, relative')
    line = Line2D([], [], color=INK, linewidth=0.9, linestyle='--')
    plot_style.legend(figure, study, shown, [(line, f'"{label}" at {best} = 1')])
    return figure


def _lined(rows):
    return len({row['size'] for row in rows}) > 1


def _relative(study, budget):
    """(variant, FLOPs per forward, losses) of each size, over those of the reference's optimum."""
    base = fit.optimum(fit.select(study, fit.reference(study), budget))
    return [
        (name, size.flops_per_forward / base.flops_per_forward, np.divide(size.losses, base.loss))
        for name, rows in fit.found(study, budget)
        for size in sizes(rows)
    ]


def _seeds(study):
    """Every seed of every variant at its best size, sorted by the mean, best on top."""
    most = max(len(fit.found(study, budget)) for budget in fit.budgets(study))
    figure, panels = _panels(study, 1.1 + 0.24 * most, most=1)
    bits, base = fit.bits_per_nat(study), fit.reference(study)
    for axes, _, budget in panels:
        found = {name: fit.best(rows) for name, rows in fit.found(study, budget)}
        order = sorted(found, key=lambda name: -found[name].loss)
        for place, name in enumerate(order):
            _row(axes, place, np.multiply(found[name].losses, bits), study, name)
        rows = fit.select(study, base, budget)
        if rows:
            optimum = fit.optimum(rows).loss * bits
            axes.axvline(optimum, color=INK, linewidth=0.9, linestyle='--', zorder=1)
        names = [f'{study["variants"][name]["label"]} · {found[name].size}' for name in order]
        axes.set_yticks(range(len(order)), names, fontsize=8)
        axes.set_ylim(-0.6, len(order) - 0.4)
        axes.locator_params(axis='x', nbins=5)
        axes.tick_params(axis='y', length=0)
        axes.grid(visible=False, axis='y')
    _name_axes(panels, 'held-out loss, causal (bits/byte)', '', most=1)
    hollow = {'color': INK, 'linewidth': 0}
    more = [
        (Line2D([], [], marker='.', **hollow), 'a seed'),
        (Line2D([], [], marker='|', markersize=12, markeredgewidth=2, **hollow), 'mean'),
        (Line2D([], [], color=INK, linewidth=7, alpha=0.25), 'range of the seeds'),
        (
            Line2D([], [], color=INK, linewidth=0.9, linestyle='--'),
            f'"{study["variants"][base]["label"]}", best or optimum',
        ),
    ]
    handles, labels = zip(*more, strict=True)
    figure.legend(handles, labels, loc='outside lower center', ncols=4)
    return figure


def _row(axes, place, losses, study, name):
    colour = plot_style.style(study, name)['color']
    band = {'color': colour, 'alpha': 0.25, 'linewidth': 7, 'solid_capstyle': 'butt'}
    axes.plot([losses.min(), losses.max()], [place] * 2, **band)
    if len(losses) > 1:
        axes.plot([losses.mean()], [place], '|', color=colour, markersize=12, markeredgewidth=2)
    axes.plot(losses, [place] * len(losses), '.', color=colour, markersize=7)


FIGURES = {
    'loss_by_parameters': _by_parameters,
    'loss_by_flops': _by_flops,
    'loss_by_steps': loss_by_steps,
    'seeds': _seeds,
}
