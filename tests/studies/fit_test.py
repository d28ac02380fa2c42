"""Optima are those of the parabola, where it has one among the sizes that were run."""

import math

import pytest

from moddepth_jax.studies import fit as isoflop_fit
from tests.studies.made_up_study import made_up

A, B, C = 9.0, -1.1, 0.045  # vertex at exp(1.1 / 0.09) = 202,805 parameters


def _row(parameters, seed=0, loss=None, **more):
    log = math.log(parameters)
    loss = A + B * log + C * log**2 if loss is None else loss
    size = f'{parameters}x1'
    row = {'size': size, 'parameters': parameters, 'seed': seed, 'loss': loss}
    return row | {'flops_per_forward': 2.0 * parameters} | more


def test_fit_finds_a_known_parabola_again():
    """From losses on a parabola come its coefficients, and the vertex as the optimum."""
    found = isoflop_fit.fit([_row(n) for n in (90_000, 150_000, 300_000, 500_000)])
    assert found[:3] == pytest.approx((A, B, C), rel=1e-6)
    assert found.inside
    assert found.optimum_parameters == pytest.approx(math.exp(-B / (2 * C)), rel=1e-6)
    assert found.optimum_loss == pytest.approx(A - B**2 / (4 * C), rel=1e-9)


def test_fit_goes_through_the_means_of_the_seeds():
    """Seeds around the parabola, as far above as below it, change nothing; one above it does."""
    sizes = (90_000, 200_000, 500_000)
    rows = [_row(n) for n in sizes]
    around = [_row(90_000, seed, rows[0]['loss'] + off) for seed, off in enumerate((0.1, -0.1))]
    same = isoflop_fit.fit(around + rows[1:])
    assert same.c == pytest.approx(C, rel=1e-6)
    assert isoflop_fit.fit(around[:1] + rows[1:]).c > 1.1 * C
    assert isoflop_fit.fit(rows[1:] + around[::-1]) == same


@pytest.mark.parametrize('sizes', [(300_000, 400_000, 900_000), (20_000, 50_000, 100_000)])
def test_vertex_beyond_the_sizes_is_no_optimum(sizes):
    """Then the best of the sizes stands for it, and `inside` says so."""
    found = isoflop_fit.fit([_row(n) for n in sizes])
    nearest = min(sizes, key=lambda n: abs(math.log(n / 202_805)))
    assert not found.inside
    assert (found.optimum_parameters, found.optimum_loss) == (nearest, _row(nearest)['loss'])


def test_parabola_that_opens_downwards_has_no_optimum():
    """Its vertex is the worst place, even where it lies among the sizes."""
    rows = [_row(n, loss=loss) for n, loss in ((1000, 1.5), (2000, 1.6), (4000, 1.4))]
    found = isoflop_fit.fit(rows)
    assert found.c < 0 and not found.inside
    assert found.optimum_parameters == 4000


def test_two_sizes_have_no_parabola():
    """Nor have three that two different numbers of parameters are behind, nor no rows."""
    two = [_row(1000), _row(2000)]
    assert isoflop_fit.fit(two) is None
    assert isoflop_fit.fit([*two, _row(2000) | {'size': 'other'}]) is None
    assert isoflop_fit.fit([]) is None and isoflop_fit.optimum([]) is None


def test_best_size_is_among_those_with_all_seeds():
    """One lucky run of another size is not better than the mean of three."""
    lucky = _row(1000, loss=1.40)
    rows = [_row(2000, seed, 1.5 + seed / 100) for seed in range(3)]
    assert isoflop_fit.best([lucky, *rows]).size == '2000x1'
    assert isoflop_fit.best([lucky, *rows[:1]]).size == '1000x1'
    assert isoflop_fit.best(rows).losses == (1.5, 1.51, 1.52)
    with pytest.raises(ValueError, match='rows'):
        isoflop_fit.best([])


def test_optimum_between_sizes_has_the_flops_between_theirs():
    """FLOPs that are proportional to the parameters stay so at the vertex."""
    found = isoflop_fit.optimum([_row(n) for n in (90_000, 150_000, 500_000)])
    assert found.flops_per_forward == pytest.approx(2 * found.parameters, rel=1e-9)
    edge = isoflop_fit.optimum([_row(n) for n in (300_000, 400_000, 900_000)])
    assert (edge.parameters, edge.flops_per_forward) == (300_000, 600_000)


def test_fits_name_what_they_fit():
    """Of a study: the variants of three sizes at each budget, in its order, as plain values."""
    study = made_up()
    found = isoflop_fit.fits(study)
    names = [(fit['budget'], fit['variant']) for fit in found]
    assert names == [(b, name) for b in study['budgets'] for name in ('dense', 'shallow', 'mod')]
    assert all(type(value) in (float, int, bool, str) for fit in found for value in fit.values())


def test_runs_without_a_finite_loss_count_nowhere():
    """A diverged run neither makes a mean infinite nor a size."""
    study = made_up(budgets=(6e11,), variants=('dense',), seeds=(0,))
    for loss in (None, math.nan, math.inf):
        study['runs'][0]['loss'] = loss
        rows = isoflop_fit.select(study, 'dense', 6e11)
        assert len(isoflop_fit.sizes(rows)) == 2
        assert isoflop_fit.fits(study) == []
        assert 1 < isoflop_fit.bits_per_nat(study) < 2
