"""Figures show every variant, seed and budget of a study, and are reproducible."""

import matplotlib
import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_rgba

from moddepth_jax.studies import fit, plot_style
from moddepth_jax.studies.plan import VARIANTS, Variant
from moddepth_jax.studies.plots import FIGURES, NO_RUNS, draw
from tests.studies.made_up_study import SIZED, made_up

MODA = tuple(f'{name}{norm}' for norm in ('', '_post') for name in ('dense', 'wider', 'moda'))


@pytest.fixture(autouse=True)
def settings():
    with matplotlib.rc_context(plot_style.SETTINGS):
        yield


def _legend(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def _colours(axes):
    return {to_rgba(line.get_color())[:3] for line in axes.lines if len(line.get_xdata())}


def test_equal_studies_give_equal_bytes(tmp_path):
    small = {'budgets': (6e11,), 'variants': ('dense', 'mod', 'random'), 'seeds': (0, 1)}
    for place in ('a', 'b'):
        (tmp_path / place).mkdir()
        draw(made_up(**small), tmp_path / place)
    names = {f'{name}.{kind}' for name in FIGURES for kind in ('png', 'svg')}
    assert {path.name for path in (tmp_path / 'a').iterdir()} == names
    for name in names:
        content = (tmp_path / 'a' / name).read_bytes()
        assert content == (tmp_path / 'b' / name).read_bytes()
        assert b'dc:date' not in content and b'matplotlib.org' not in content


@pytest.mark.parametrize('name', FIGURES)
def test_the_shallower_dense_control_is_in_every_figure(name):
    study = made_up(variants=(*SIZED, 'random'))
    figure = FIGURES[name](study)
    colour = to_rgba(plot_style.style('shallow')['color'])[:3]
    assert any(colour in _colours(axes) for axes in figure.axes)
    ticks = [text.get_text() for axes in figure.axes for text in axes.get_yticklabels()]
    assert any('shallower' in text for text in (*_legend(figure), *ticks))


def test_panels_mark_the_optima_of_the_parabolas():
    """A star at the vertex, at its loss in bits/byte; a ring where the best size is at an edge."""
    study, inside = made_up(variants=SIZED, seeds=(0,)), set()
    axes = FIGURES['loss_by_parameters'](study).axes
    for panel, budget in zip(axes, study['budgets'], strict=True):
        for name in SIZED:
            parabola = fit.fit(fit.select(study, name, budget))
            colour = plot_style.style(name)['color']
            mark = '*' if parabola.inside else 'o'
            inside.add(parabola.inside)
            found = [
                line.get_xydata()[0]
                for line in panel.lines
                if (line.get_marker(), line.get_color()) == (mark, colour)
                and line.get_markersize() == 12
            ]
            expected = parabola.optimum_parameters, parabola.optimum_loss / np.log(2)
            np.testing.assert_allclose(found, [expected], rtol=1e-6)
    assert inside == {True, False}


def test_every_seed_that_judges_is_a_point():
    study = made_up(variants=(*SIZED, 'random'))
    panel = FIGURES['seeds'](study).axes[-1]
    points = {
        line.get_ydata()[0]: np.array(line.get_xdata())
        for line in panel.lines
        if line.get_marker() == '.'
    }
    best = [fit.best(rows) for _, rows in fit.found(study, study['budgets'][-1])]
    best.sort(key=lambda size: -size.loss)
    assert len(study['seeds']) == 4 and max(len(values) for values in points.values()) == 3
    for row, size in enumerate(best):
        np.testing.assert_allclose(points[row], np.divide(size.losses, np.log(2)))


def test_losses_far_above_the_others_are_shown_as_numbers_at_the_edge():
    study = made_up(budgets=(6e11,), variants=(*SIZED, 'random'))
    for run in study['runs']:
        far = 4 if run['variant'] == 'random' else 1
        run |= {'loss': far * run['loss'], 'bits_per_byte': far * run['bits_per_byte']}
    panel = FIGURES['seeds'](study).axes[0]
    (loss,) = (fit.best(rows).loss for name, rows in fit.found(study, 6e11) if name == 'random')
    assert [text.get_text() for text in panel.texts] == [f'mean {loss / np.log(2):.3f} →']
    assert panel.get_xlim()[1] < loss / np.log(2) / 2


def test_curves_end_at_the_last_loss_and_show_variants_of_the_config(monkeypatch):
    """Smoothed in between; a variant of the project that is not among the main ones is left out.

    Regression: the FLOPs of all steps were those of the last stage.
    """
    monkeypatch.setitem(VARIANTS, 'mine', Variant('my own', {}, 'rose h'))
    study = made_up(budgets=(6e11,), variants=('dense', 'mine', 'norm'), seeds=(0,))
    for mine in (row for row in study['runs'] if row['variant'] == 'mine'):
        cost, half = mine['flops_per_step'], mine['steps'] // 2
        costs = {0: 3 * cost, half: cost}
        mine['stages'] = [{'first_step': n, 'flops_per_step': cost} for n, cost in costs.items()]
        mine['total_flops'] = cost * (2 * half + mine['steps'])
    figure = FIGURES['loss_by_steps'](study)
    assert _legend(figure) == ['dense', 'my own']
    rows = {name: fit.at_best_size(fit.select(study, name, 6e11)) for name in ('dense', 'mine')}
    spent = [line.get_xdata()[-1] for line in figure.axes[1].lines if len(line.get_xdata()) > 1]
    np.testing.assert_allclose(spent, [row['total_flops'] for (row,) in rows.values()])
    lines = [line.get_ydata() for line in figure.axes[0].lines if len(line.get_ydata()) > 1]
    for (row,), losses in zip(rows.values(), lines, strict=True):
        np.testing.assert_allclose(losses[[0, -1]], [row['curve'][i][1] for i in (0, -1)])


def test_the_reference_is_never_too_far_to_be_drawn():
    study = made_up(budgets=(6e11,), variants=('dense', 'mod', 'random'))
    for run in study['runs']:
        far = 2 if run['variant'] == 'dense' else 1
        run |= {'loss': far * run['loss'], 'bits_per_byte': far * run['bits_per_byte']}
    assert not FIGURES['seeds'](study).axes[0].texts


def test_a_dense_marker_is_drawn_over_an_equal_shallower_one():
    dense, shallow = plot_style.style('dense'), plot_style.style('shallow')
    assert shallow['zorder'] < dense['zorder'] and shallow['markersize'] > dense['markersize'] + 2


def test_losses_are_relative_to_the_best_dense_size():
    """It is at (1, 1); FLOPs of MoD are divided by its FLOPs."""
    study = made_up(budgets=(6e11,), variants=('dense', 'mod'), seeds=(0,))
    figure = FIGURES['loss_by_flops'](study)
    dense, mod = (fit.select(study, name, 6e11) for name in ('dense', 'mod'))
    assert not fit.fit(dense).inside
    base, first = fit.best(dense), fit.sizes(mod)[0]
    expected = first.flops_per_forward / base.flops_per_forward, first.loss / base.loss
    marks = [line.get_xydata()[0] for line in figure.axes[0].lines if line.get_marker() in 'oD']
    assert any(np.allclose(mark, (1, 1)) for mark in marks)
    assert any(np.allclose(mark, expected) for mark in marks)


HALF_DONE = made_up(variants=('dense', 'mod'))


@pytest.mark.parametrize(
    'study',
    [
        made_up(kind='steps', budgets=(600,), sizes=('4x64',), variants=MODA),
        made_up(budgets=(6e11,), sizes=('4x64', '8x64'), variants=('mod', 'random'), seeds=(0,)),
        HALF_DONE | {'runs': HALF_DONE['runs'][4:5]},
        made_up(budgets=(1e12, 2e12, 4e12, 8e12), sizes=('4x64',), variants=('dense', 'norm')),
    ],
    ids=['equal tokens', 'no dense', 'mod only', 'four budgets'],
)
def test_small_and_unfinished_studies_are_drawn(study):
    for name, make in FIGURES.items():
        figure = make(study)
        figure.canvas.draw()
        assert figure.axes or figure.texts, name


def test_figures_of_a_study_without_a_finite_loss_say_so(tmp_path):
    study = made_up(budgets=(6e11,), sizes=('4x64',), variants=('dense',), seeds=(0,))
    study['runs'][0]['loss'] = None
    draw(study, tmp_path)
    assert plot_style.sentence(NO_RUNS).texts[0].get_text() == NO_RUNS
    heights = {matplotlib.image.imread(tmp_path / f'{name}.png').shape for name in FIGURES}
    assert heights == {(180, 960, 4)}


def test_numbers_are_formatted_briefly():
    flops = {6e11: '6·10¹¹', 1e15: '10¹⁵', 2.5e-3: '2.5·10⁻³', 9.996e11: '9.996·10¹¹'}
    for value, text in flops.items():
        assert plot_style.budget_name({'kind': 'flops'}, value) == f'{text} FLOPs'
    assert plot_style.budget_name({'kind': 'steps'}, 4000.0) == '4,000 steps'


def test_a_run_that_is_filed_at_two_sizes_of_mod_is_one_seed():
    """Regression: the page gave it a spread of 0 over two seeds."""
    row = {'variant': 'shallow', 'budget': 1e9, 'loss': 2.0, 'run': 'dense-2x64', 'seed': 0}
    row |= {'size': '2x64', 'parameters': 5, 'flops_per_forward': 7.0, 'size_of_mod': '3x64'}
    both = [row | {'at_best_size': True}, row | {'size_of_mod': '4x64', 'at_best_size': False}]
    study = {'runs': both, 'variants': {}, 'budgets': [1e9], 'sizes': ['2x64'], 'tuning': []}
    (found,) = fit.select(study | {'seeds': [0]}, 'shallow', 1e9)
    assert found['size_of_mod'] == '3x64'
