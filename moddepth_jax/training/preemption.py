"""Stop signals: noticed at once, obeyed after the current step."""

import os
import signal
import threading

import jax
from jax.experimental import multihost_utils

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class PreemptionHandler:
    """Context manager in which `signal_name` is the first stop signal received, or None.

    SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 print one line on stderr; the caller asks `should_stop`
    between steps. A second SIGINT raises KeyboardInterrupt. The previous handlers return on exit.
    Outside Python's main thread, which alone handles signals, this changes nothing.

    In a run of several processes JAX listens for SIGTERM and agrees on a step after which all of
    them stop. Handlers of ours would disable that, so none is installed.
    """

    def __init__(self):
        self.signal_name: str | None = None
        self._num_sigint = 0
        self._previous = {}

    def __enter__(self):
        alone = jax.process_count() == 1
        if alone and threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            # None is a handler that was not set from Python and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if jax.process_count() > 1:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # JAX's handler would swallow it

    def should_stop(self, step: int) -> bool:
        """Whether to stop after `step` steps; every process calls it after each step."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.signal_name = 'SIGTERM'
        return self.signal_name is not None

    def _on_signal(self, number, frame):
        del frame
        self._num_sigint += number == signal.SIGINT
        if self._num_sigint > 1 and number == signal.SIGINT:
            raise KeyboardInterrupt
        name = signal.Signals(number).name
        line = f'{name}: stopping after this step, then saving'
        if number == signal.SIGINT:
            line += ' (Ctrl-C again: stop at once, unsaved)'
        if self.signal_name is None or number == signal.SIGINT:
            # Not print: a handler may interrupt a write to the same stream, which would raise.
            os.write(2, f'{line}\n'.encode())
        self.signal_name = self.signal_name or name
