"""Traces some steps of a run, on the host and on every device."""

import contextlib
import pathlib
import shlex

import jax

PROFILE_DIRECTORY = 'profile'


def check_profiled(steps: tuple[int, int] | None, num_steps: int, first_step: int = 0):
    """Raise ValueError, one line, if no step of (first, last) remains after `first_step`."""
    if steps is not None and not (first_step < steps[1] and steps[0] < num_steps):
        done = f', {first_step} of which are done' if first_step else ''
        found = f'this run has {num_steps} steps{done}'
        right = 'must include one of the remaining steps'
        raise ValueError(f'--profile={steps[0]}:{steps[1]}: {found}; {right}')


class Profile(contextlib.AbstractContextManager):
    """Traces the steps after `first` and up to `last` into `profile/` in the directory of a run.

    Each process traces itself. A run that stops or fails meanwhile keeps the trace so far. Raises
    ValueError like `check_profiled`.
    """

    def __init__(self, workdir, steps: tuple[int, int] | None, num_steps: int, first_step: int):
        self.first, self.last = steps or (num_steps, num_steps)
        self.folder = pathlib.Path(workdir) / PROFILE_DIRECTORY
        if jax.process_count() > 1:  # on one host they would write the same file
            self.folder /= f'process-{jax.process_index()}'
        self._tracing = False
        check_profiled(steps, num_steps, first_step)

    def begins(self, step: int) -> bool:
        """Return whether to start the trace when `step` steps are done."""
        return not self._tracing and self.first <= step < self.last

    def ends(self, step: int) -> bool:
        """Return whether to end the trace when `step` steps are done."""
        return self._tracing and step >= self.last

    def start(self):
        """Start the trace."""
        jax.profiler.start_trace(self.folder)
        self._tracing = True

    def stop(self) -> str:
        """Write the trace; returns a line for the user, or '' without a trace."""
        if not self._tracing:
            return ''
        self._tracing = False
        jax.profiler.stop_trace()
        quoted = shlex.quote(str(self.folder))
        return f'profile   {self.folder}: open it with xprof --logdir={quoted}'

    def step(self, number: int):
        """A context that names step `number` (from 0) in the trace."""
        if self._tracing:
            return jax.profiler.StepTraceAnnotation('train', step_num=number)
        return contextlib.nullcontext()

    def __exit__(self, *_):
        self.stop()
