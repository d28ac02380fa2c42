"""Rates are of stepping time only: pauses do not count, waiting for data is told apart."""

import pytest

from moddepth_jax.training import progress


class Clock:
    """Stands still until told."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, 'time', clock)
    return clock


def run_steps(watch, clock, steps, waited, computed):
    for _ in range(steps):
        with watch.waiting_for_data():
            clock.now += waited
        clock.now += computed
        watch.step_done()


def test_rates_of_a_window(clock):
    """Tokens, FLOPs and the share of waiting follow from the steps and seconds since last asked."""
    watch = progress.Stopwatch()
    run_steps(watch, clock, 4, 0.5, 1.5)
    expected = {'tokens_per_second': 50.0, 'flops_per_second': 500.0, 'data_wait_fraction': 0.25}
    assert watch.rates(100, 1000) == pytest.approx(expected)
    run_steps(watch, clock, 1, 0.0, 4.0)
    expected = {'tokens_per_second': 25.0, 'flops_per_second': 250.0, 'data_wait_fraction': 0.0}
    assert watch.rates(100, 1000) == pytest.approx(expected)
    assert watch.seconds() == pytest.approx(12.0)


def test_pauses_count_nowhere(clock):
    """An evaluation of an hour changes neither rates nor total, whenever it comes."""
    watch = progress.Stopwatch()
    for _ in range(2):
        run_steps(watch, clock, 1, 1.0, 1.0)
        with watch.pause():
            clock.now += 3600
    clock.now += 4.0
    rates = watch.rates(8, 0)
    assert rates == pytest.approx(
        {'tokens_per_second': 2.0, 'flops_per_second': 0.0, 'data_wait_fraction': 0.25}
    )
    with watch.pause():
        clock.now += 3600
    assert watch.seconds() == pytest.approx(8.0)


def test_rates_without_time_are_finite(clock):
    """Asked twice at one moment it divides by nothing."""
    watch = progress.Stopwatch()
    assert watch.rates(100, 100) == dict.fromkeys(watch.rates(100, 100), 0.0)
