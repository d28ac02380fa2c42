"""Few, aligned and literal lines in a log; one live line on a terminal; rates without pauses."""

import io
import math
import types

import pytest
import rich.console

from moddepth_jax.training import devices, progress

SPEED = {'tokens_per_second': 1e5, 'flops_per_second': 2e11}


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, 'monotonic', lambda: now[0])

    def turn(seconds):
        now[0] += seconds

    return turn


def run(clock, total_steps=1000, first_step=0, every=1, seconds=0.01, terminal=False):
    """What a run prints whose steps take `seconds` each, as the lines of its output."""
    file = io.StringIO()
    console = rich.console.Console(file=file, force_terminal=terminal, width=100)
    with progress.Progress(total_steps, first_step, 1000, console) as shown:
        for step in range(first_step + every, total_steps + 1, every):
            clock(seconds * every)
            speed = {'tokens_per_second': 1000 / seconds, 'flops_per_second': 2e9 / seconds}
            shown.update(step, {'loss': 2.0 + step / total_steps, 'bits_per_byte': 3.25} | speed)
    return file.getvalue().removesuffix('\n').split('\n')


def steps_of(lines):
    return [int(line.split('/')[0]) for line in lines[1:]]


def test_a_log_gets_few_aligned_rows(clock):
    lines = run(clock)
    assert lines[0].split() == ['step', 'loss', 'bits/byte', 'tokens/s', 'FLOP/s', 'ETA']
    assert steps_of(lines) == [1, 2, 3, *range(53, 1000, 50), 1000]
    assert {len(line) for line in lines} == {len(lines[0])} and len(lines[0]) <= 80
    assert lines[1].split() == ['1/1000', '2.0010', '3.250', '100k', '200G', '10s']
    assert lines[5].split() == ['103/1000', '2.1030', '3.250', '100k', '200G', '9s']
    assert lines[-1].split()[-1] == '0s'


def test_a_slow_run_shows_a_row_a_minute_and_a_short_one_each_step(clock):
    assert steps_of(run(clock, total_steps=10_000, every=10, seconds=1.0))[:6] == [
        10, 20, 30, 90, 150, 210,
    ]  # fmt: skip
    assert steps_of(run(clock, total_steps=5, seconds=0.1)) == [1, 2, 3, 4, 5]
    resumed = run(clock, first_step=900)
    assert steps_of(resumed)[:4] == [901, 902, 903, 953] and resumed[2].endswith(' 1s')


@pytest.mark.parametrize('terminal', [False, True])
def test_notes_are_literal(clock, terminal):
    """Brackets are no markup, long lines are not wrapped, and control characters do not act."""
    file = io.StringIO()
    console = rich.console.Console(file=file, force_terminal=terminal, width=100)
    text = '[bold]x[/bold] [/] \N{SNOWMAN} ' + 'y' * 150
    with progress.Progress(100, 0, 1000, console) as shown:
        shown.update(1, {'loss': 1.0, 'bits_per_byte': 1.0} | SPEED)
        shown.note(text + '\x1b[2J\x07\x9b\r')
    assert text + '[2J\n' in file.getvalue()
    for control in ('\x1b[2J', '\x07', '\x9b'):
        assert control not in file.getvalue()


def test_a_terminal_gets_one_live_line(clock, monkeypatch):
    monkeypatch.setenv('TERM', 'xterm')
    lines = run(clock, terminal=True)
    assert len(lines) == 2 and 'compiling' in lines[0]
    last = lines[0].split('\x1b[2K')[-1]
    for shown in ('1000/1000', 'loss 3.0000', '3.250 bits/byte', '100k tokens/s', '200G FLOP/s'):
        assert shown in last
    assert 'ETA 0s' in last


@pytest.mark.parametrize(
    ('value', 'count', 'seconds'),
    [
        (0, '0', '0s'), (0.125, '0.12', '0s'), (59.6, '59.6', '1m 00s'), (83, '83', '1m 23s'),
        (999.6, '1.00k', '16m 40s'), (3599.7, '3.60k', '1h 00m'), (97_200, '97.2k', '1d 03h'),
        (99_960, '100k', '1d 03h'), (2e21, '2000E', None), (math.nan, 'n/a', 'n/a'),
    ],
)  # fmt: skip
def test_counts_have_three_digits_and_seconds_two_units(value, count, seconds):
    """Also where rounding crosses a thousand, a minute or an hour."""
    assert progress.format_count(value) == count
    assert seconds is None or progress.format_seconds(value) == seconds


@pytest.mark.parametrize(
    ('kind', 'peak'),
    [
        ('NVIDIA H100 80GB HBM3', 989e12), ('NVIDIA H100 PCIe', 756e12), ('NVIDIA H200', 989e12),
        ('NVIDIA A100-SXM4-80GB', 312e12), ('NVIDIA A10', 125e12), ('NVIDIA L40S', 362e12),
        ('NVIDIA L4', 121e12), ('TPU v5 lite', 197e12), ('TPU v5e', 197e12), ('TPU v5p', 459e12),
        ('TPU v5', 459e12), ('TPU v6e', 918e12), ('TPU v4', 275e12),
        ('NVIDIA B200', 2250e12), ('NVIDIA GB200', 2500e12),
        ('cpu', None), ('NVIDIA A1000', None),
    ],
)  # fmt: skip
def test_the_peak_is_that_of_the_device(kind, peak, monkeypatch):
    """MFU is counted FLOP/s over it, of the devices that the run uses; none if it is not known."""
    assert devices.peak_flops(kind) == peak
    monkeypatch.setattr(devices, 'jax', FakeJax(kind))
    assert devices.mfu(1e12, 1) == ({'mfu': 1e12 / peak} if peak else {})  # it has two
    assert devices.peak_memory() == (7, 'a device')


class FakeJax:
    def __init__(self, kind):
        self.found = [
            types.SimpleNamespace(
                device_kind=kind, memory_stats=lambda n=n: {'peak_bytes_in_use': n}
            )
            for n in (7, 5)
        ]

    def devices(self):
        return self.found

    local_devices = devices


def time_steps(watch, clock, steps, waited, computed):
    for _ in range(steps):
        with watch.waiting_for_data():
            clock(waited)
        clock(computed)
        watch.steps += 1


def test_rates_of_a_window_do_not_count_pauses(clock):
    """Per second since the last call; an evaluation of an hour changes neither rates nor total."""
    watch = progress.Stopwatch()
    for _ in range(2):
        time_steps(watch, clock, 2, 0.5, 1.5)
        with watch.pause():
            clock(3600)
    expected = {'tokens_per_second': 50.0, 'flops_per_second': 500.0, 'data_wait_fraction': 0.25}
    assert watch.steps == 4 and watch.rates(100, 4000) == pytest.approx(expected)
    time_steps(watch, clock, 1, 0.0, 4.0)
    expected = {'tokens_per_second': 25.0, 'flops_per_second': 250.0, 'data_wait_fraction': 0.0}
    assert watch.rates(100, 1000) == pytest.approx(expected)
    with watch.pause():
        clock(3600)
    assert watch.seconds() == pytest.approx(12.0)


def test_a_terminal_that_cannot_erase_gets_the_rows_of_a_log(clock, monkeypatch):
    monkeypatch.setenv('TERM', 'dumb')
    assert steps_of(run(clock, terminal=True)) == [1, 2, 3, *range(53, 1000, 50), 1000]
