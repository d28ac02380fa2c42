"""Stop signals, after which a run finishes its step and saves a checkpoint."""

import os
import signal
import threading

import jax
from jax.experimental import multihost_utils

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class PreemptionHandler:
    """Context manager that catches SIGTERM, SIGINT (Ctrl-C) and SIGUSR1.

    The first signal and each SIGINT print one line on stderr. The caller asks `should_stop` after
    each step. A second SIGINT raises KeyboardInterrupt. On exit, the previous handlers are
    restored. Python handles signals in the main thread only, so in another thread this installs no
    handler.

    With several processes, JAX catches SIGTERM and agrees on a step after which all of them stop.
    Handlers of our own would disable that, so none are installed.

    Attributes:
      signal_name: name of the first stop signal, or None.
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
        """Return whether to stop after `step` steps; every process calls this after each step."""
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
            line += ' (Ctrl-C again: stop without saving)'
        if self.signal_name is None or number == signal.SIGINT:
            # Not `print`, which raises if the handler interrupted a write to the same stream.
            os.write(2, f'{line}\n'.encode())
        self.signal_name = self.signal_name or name
