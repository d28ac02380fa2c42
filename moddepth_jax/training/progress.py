"""Progress of a run for the user: a live line on a terminal, or a sparse table in a log."""

import contextlib
import math
import time

import rich.console
import rich.progress
import rich.table
import rich.text

PLAIN_FIRST_ROWS = 3  # printed at once, so that a log soon shows whether the run is sound
PLAIN_FRACTION = 0.05  # later rows follow after this fraction of the steps
PLAIN_SECONDS = 60.0  # or after this time, whichever comes first

# Widths of the columns; a column without a value is left out.
_COLUMNS = {'step': 13, 'loss': 8, 'bits/byte': 9, 'tokens/s': 8, 'FLOP/s': 8, 'MFU': 6}
_COLUMNS |= {'memory': 8, 'ETA': 8}
_SPANS = ((86400, 'd', 3600, 'h'), (3600, 'h', 60, 'm'), (60, 'm', 1, 's'))
_CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in '\n\t'}


def format_count(value: float) -> str:
    """Format a number with three digits and a unit: '1.23T' for 1.23e12; 'n/a' if not finite."""
    if not math.isfinite(value):
        return 'n/a'
    for power, unit in enumerate(('', 'k', 'M', 'G', 'T', 'P', 'E')):
        scaled = value / 1000**power
        if abs(scaled) < 999.5 or unit == 'E':
            break
    if not unit and float(value).is_integer():
        return str(int(value))
    digits = 0 if abs(scaled) >= 99.95 else 1 if abs(scaled) >= 9.995 else 2
    return f'{scaled:.{digits}f}{unit}'


def format_seconds(seconds: float) -> str:
    """Format a duration with its two largest units: '1h 02m' for 3723; 'n/a' if not finite."""
    if not math.isfinite(seconds):
        return 'n/a'
    seconds = max(0, round(seconds))
    for size, unit, part, part_unit in _SPANS:
        if seconds >= size:
            return f'{seconds // size}{unit} {seconds % size // part:02d}{part_unit}'
    return f'{seconds}s'


def printable(text: str) -> str:
    """Remove control characters, which a terminal would obey, except line ends and tabs."""
    return text.translate(_CONTROL)


class Progress:
    """Shows the step, loss and speed of a run; a context manager.

    On a terminal one line is redrawn. Elsewhere a table gets a row for each of the first few
    updates, then one every 5% of the steps or every minute. `silent` prints nothing.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int,
        tokens_per_step: float,
        console: rich.console.Console | None = None,
        silent: bool = False,
    ):
        self._total, self._tokens = total_steps, tokens_per_step
        self._console = console or rich.console.Console(quiet=silent)
        self._rows, self._row_step, self._row_time = 0, first_step, -math.inf
        self._bar = None
        if self._console.is_terminal and not self._console.is_dumb_terminal and not silent:
            width = min(40, max(5, self._console.width - 85))
            one_line = rich.table.Column(no_wrap=True)
            self._bar = rich.progress.Progress(
                rich.progress.BarColumn(bar_width=width),
                rich.progress.TextColumn('{task.description}', markup=False, table_column=one_line),
                console=self._console,
                refresh_per_second=4,
            )
            start = f'{first_step}/{total_steps}  compiling'
            self._task = self._bar.add_task(start, total=total_steps, completed=first_step)

    def update(self, step: int, values: dict) -> None:
        """Show that `step` steps are done.

        `values` has `loss` (nats), `bits_per_byte`, `tokens_per_second` and `flops_per_second`,
        and may have `mfu` and `peak_memory_bytes`.
        """
        steps_per_second = values['tokens_per_second'] / self._tokens
        remaining = (self._total - step) / steps_per_second if steps_per_second > 0 else math.nan
        cells = {
            'step': f'{step}/{self._total}',
            'loss': f'{values["loss"]:.4f}',
            'bits/byte': f'{values["bits_per_byte"]:.3f}',
            'tokens/s': format_count(values['tokens_per_second']),
            'FLOP/s': format_count(values['flops_per_second']),
            'ETA': format_seconds(remaining),
        }
        if 'mfu' in values:
            cells['MFU'] = f'{values["mfu"]:.1%}'
        if 'peak_memory_bytes' in values:
            cells['memory'] = f'{format_count(values["peak_memory_bytes"])}B'
        if self._bar is not None:
            names = [name for name in ('bits/byte', 'tokens/s', 'FLOP/s', 'MFU') if name in cells]
            rates = '  '.join(f'{cells[name]} {name}' for name in names)
            text = f'{cells["step"]}  loss {cells["loss"]}  {rates}  ETA {cells["ETA"]}'
            self._bar.update(self._task, completed=step, description=text)
            return
        steps, seconds = step - self._row_step, time.monotonic() - self._row_time
        due = steps >= PLAIN_FRACTION * self._total or seconds >= PLAIN_SECONDS
        if due or self._rows < PLAIN_FIRST_ROWS or step >= self._total:
            if not self._rows:
                self._print_row({name: name for name in cells})
            self._rows, self._row_step, self._row_time = self._rows + 1, step, time.monotonic()
            self._print_row(cells)

    def note(self, text: str) -> None:
        """Print `text` literally, without control characters; on a terminal, above the bar."""
        # Rich would read [brackets] in a str as markup, but not in a Text.
        line = rich.text.Text(printable(text))
        self._console.print(line, soft_wrap=True, highlight=False)

    def __enter__(self):
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_):
        if self._bar is not None:
            self._bar.stop()

    def _print_row(self, cells):
        shown = [(cells[name], width) for name, width in _COLUMNS.items() if name in cells]
        self.note('  '.join(cell.rjust(width) for cell, width in shown))


class Stopwatch:
    """Wall-clock time of the steps of a run, without pauses such as evaluations.

    Attributes:
      steps: steps since the last call of `rates`; the caller counts them.
    """

    def __init__(self, seconds: float = 0.0):
        self._begin, self._total = time.monotonic(), seconds
        self._waited = self._window = 0.0
        self.steps = 0

    @contextlib.contextmanager
    def waiting_for_data(self):
        """A context whose time counts as waiting for data."""
        begin = time.monotonic()
        yield
        self._waited += time.monotonic() - begin

    @contextlib.contextmanager
    def pause(self):
        """A context whose time does not count."""
        self.seconds()
        yield
        self._begin = time.monotonic()

    def rates(self, tokens_per_step: float, flops: float) -> dict[str, float]:
        """Return `tokens_per_second`, `flops_per_second` and `data_wait_fraction`.

        All three are means since the last call, in which the steps computed `flops` in total.
        """
        self.seconds()
        seconds = max(self._window, 1e-9)
        rates = {
            'tokens_per_second': self.steps * tokens_per_step / seconds,
            'flops_per_second': flops / seconds,
            'data_wait_fraction': self._waited / seconds,
        }
        self._window, self._waited, self.steps = 0.0, 0.0, 0
        return rates

    def seconds(self) -> float:
        """Return the time of the steps so far, plus the seconds of earlier starts of the run."""
        now = time.monotonic()
        self._total += now - self._begin
        self._window += now - self._begin
        self._begin = now
        return self._total
