"""Optima are those of the parabola if its minimum lies among the sizes that ran."""

import math

import pytest

from moddepth_jax.studies import fit
from tests.studies.made_up_study import made_up

A, B, C = 9.0, -1.1, 0.045  # vertex at exp(1.1 / 0.09) = 202,805 parameters


def _row(parameters, seed=0, loss=None, size=None):
    """A row of `fit.select`. Seed 0 chose the size."""
    log = math.log(parameters)
    loss = A + B * log + C * log**2 if loss is None else loss
    row = {'size': size or f'{parameters}x1', 'parameters': parameters, 'seed': seed, 'loss': loss}
    return row | {'flops_per_forward': 2.0 * parameters, 'judges': seed != 0}


def test_fit_recovers_a_known_parabola():
    found = fit.fit([_row(n) for n in (90_000, 150_000, 300_000, 500_000)])
    assert found[:3] == pytest.approx((A, B, C), rel=1e-6)
    assert found.inside
    assert found.optimum_parameters == pytest.approx(math.exp(-B / (2 * C)), rel=1e-6)
    assert found.optimum_loss == pytest.approx(A - B**2 / (4 * C), rel=1e-9)


def test_only_the_first_seed_chooses_and_only_others_judge():
    """Other seeds shift the parabola to their mean at the best size, and nothing else.

    Also where the first seed lies below the parabola, as it tends to where it is best.
    """
    lucky = [_row(n) for n in (90_000, 150_000, 250_000, 500_000)]
    lucky[1]['loss'] -= 0.4
    others = [_row(150_000, seed, loss) for seed, loss in ((1, 3.0), (2, 3.2))]
    found, alone, best = fit.fit(others + lucky), fit.fit(lucky), fit.best(others + lucky)
    assert best.size == '150000x1' and best.losses == (3.0, 3.2) and best.loss == 3.1
    log = math.log(150_000)
    assert found.a + found.b * log + found.c * log**2 == pytest.approx(3.1)
    assert found[1:4] == pytest.approx(alone[1:4]) and found.inside
    assert found.optimum_loss - found.a == pytest.approx(alone.optimum_loss - alone.a)


def test_sizes_of_another_width_are_no_points_of_the_parabola():
    """Unless the best size's width has fewer than three: here a wider model has a bad rate."""
    own = [_row(n, size=f'{n}x64') for n in (90_000, 200_000, 500_000)]
    wide = _row(300_000, loss=9.0, size='2x128')
    assert fit.fit([*own, wide]) == fit.fit(own)
    assert fit.fit([*own[1:], wide]).optimum_loss != fit.fit(own).optimum_loss


def test_a_seed_that_chose_a_size_or_a_rate_does_not_judge():
    study = {'seeds': [3, 4], 'sizes': ['4x64'], 'tuning': []}
    assert fit.choosing_seeds(study) == []
    assert fit.choosing_seeds(study | {'sizes': ['2x64', '4x64']}) == [3]
    assert fit.choosing_seeds(study | {'tuning': [{'learning_rate': 0.01}]}) == [3]


DOWNWARDS = ((1000, 1.5), (2000, 1.6), (4000, 1.4))  # the vertex is the worst place


@pytest.mark.parametrize(
    ('rows', 'best'),
    [
        ([_row(n) for n in (300_000, 400_000, 900_000)], 300_000),
        ([_row(n) for n in (20_000, 50_000, 100_000)], 100_000),
        ([_row(n, loss=loss) for n, loss in DOWNWARDS], 4000),
    ],
)
def test_without_a_vertex_among_the_sizes_the_best_size_is_returned(rows, best):
    found, losses = fit.fit(rows), {row['parameters']: row['loss'] for row in rows}
    assert not found.inside
    assert (found.optimum_parameters, found.optimum_loss) == (best, losses[best])


def test_parabola_needs_three_parameter_counts():
    two = [_row(1000), _row(2000)]
    assert fit.fit(two) is None
    assert fit.fit([*two, _row(2000, size='other')]) is None
    assert fit.fit([]) is None and fit.optimum([]) is None


def test_flops_of_an_optimum_between_sizes_are_interpolated():
    """FLOPs that are proportional to the parameters stay so at the vertex."""
    found = fit.optimum([_row(n) for n in (90_000, 150_000, 500_000)])
    assert found.flops_per_forward == pytest.approx(2 * found.parameters, rel=1e-9)
    edge = fit.optimum([_row(n) for n in (300_000, 400_000, 900_000)])
    assert (edge.parameters, edge.flops_per_forward) == (300_000, 600_000)


@pytest.mark.parametrize('loss', [None, math.nan, math.inf])
def test_runs_without_a_finite_loss_are_left_out(loss):
    study = made_up(budgets=(6e11,), variants=('dense',), seeds=(0,))
    study['runs'][0]['loss'] = loss
    rows = fit.select(study, 'dense', 6e11)
    assert len(fit.sizes(rows)) == 2 and fit.fit(rows) is None
    assert 1 < fit.bits_per_nat(study) < 2
