"""Wall-clock time of a run's steps, with what is not a step taken out."""

import contextlib
import time


class Stopwatch:
    """Seconds spent stepping and seconds of these spent waiting for data.

    `rates` reports since it was last asked; `total` since the start. Both leave out what happened
    inside `pause`, such as evaluations.
    """

    def __init__(self):
        self.total = 0.0
        self._begin = time.monotonic()
        self._waited = 0.0
        self._window = 0.0
        self._steps = 0

    def step_done(self):
        """Counts one step."""
        self._steps += 1

    @contextlib.contextmanager
    def waiting_for_data(self):
        """Time inside is the input pipeline's."""
        begin = time.monotonic()
        yield
        self._waited += time.monotonic() - begin

    @contextlib.contextmanager
    def pause(self):
        """Time inside does not count."""
        self._advance()
        yield
        self._begin = time.monotonic()

    def rates(self, tokens_per_step: float, flops_per_step: float) -> dict[str, float]:
        """`tokens_per_second`, `flops_per_second` and `data_wait_fraction` since the last call."""
        self._advance()
        seconds = max(self._window, 1e-9)
        rates = {
            'tokens_per_second': self._steps * tokens_per_step / seconds,
            'flops_per_second': self._steps * flops_per_step / seconds,
            'data_wait_fraction': self._waited / seconds,
        }
        self._window, self._waited, self._steps = 0.0, 0.0, 0
        return rates

    def seconds(self) -> float:
        """Stepping time since the start."""
        self._advance()
        return self.total

    def _advance(self):
        now = time.monotonic()
        self.total += now - self._begin
        self._window += now - self._begin
        self._begin = now
