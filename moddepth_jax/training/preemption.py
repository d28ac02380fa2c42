"""Signals that ask a run to stop: noticed at once, obeyed after the step."""

import os
import signal
import threading

import jax
from jax.experimental import multihost_utils

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class PreemptionHandler:
    """While entered, `requested` is the name of the first stop signal received, or None.

    SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 say so in one line on stderr and leave the stopping to the
    caller, who asks between steps. A second SIGINT raises KeyboardInterrupt. The earlier handlers
    return on exit. Python gives signals to its main thread only: entered in another thread, it
    changes nothing and `requested` stays None.

    Where several processes run, JAX listens for SIGTERM and makes out a step after which all of
    them can stop; a handler of ours would put an end to that, so none is installed, and the other
    signals do what they do to any program. So does SIGTERM once this is left.
    """

    def __init__(self):
        self.requested: str | None = None
        self._num_sigint = 0
        self._previous = {}

    def __enter__(self):
        self.requested, self._num_sigint = None, 0
        alone = jax.process_count() == 1
        if alone and threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            # None stands for a handler that was not set from Python and cannot be set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}
        if jax.process_count() > 1:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # JAX's would swallow it from here on

    def asked(self, step: int) -> bool:
        """Whether to stop now, `step` steps being done; to be asked once after each of them.

        On several processes the answer is the same on all, once each of them has asked.
        """
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.requested = 'SIGTERM'
        return self.requested is not None

    def _on_signal(self, number, frame):
        del frame
        self._num_sigint += number == signal.SIGINT
        if self._num_sigint > 1 and number == signal.SIGINT:
            raise KeyboardInterrupt
        name = signal.Signals(number).name
        line = f'{name}: stopping after this step, then saving'
        if number == signal.SIGINT:
            line += ' (Ctrl-C again: stop at once, unsaved)'
        if self.requested is None or number == signal.SIGINT:
            # Not print: a handler may interrupt a write to the same stream, which then refuses.
            os.write(2, f'{line}\n'.encode())
        self.requested = self.requested or name
