"""Traces some steps of a run, on the host and on every device."""

import contextlib
import pathlib
import shlex

import jax

from moddepth_jax.training import multihost

PROFILE_DIRECTORY = 'profile'


def check_profiled(steps: tuple[int, int] | None, num_steps: int):
    """Raise ValueError, one line, if a run of `num_steps` has no step of (first, last)."""
    if steps is not None and steps[0] >= num_steps:
        found = f'this run has {num_steps} steps; must include one of them'
        raise ValueError(f'--profile={steps[0]}:{steps[1]}: {found}')


class Profile(contextlib.AbstractContextManager):
    """Traces the steps after `first` and up to `last` into `profile/` in the directory of a run.

    Each process traces itself. A run that stops or fails meanwhile keeps the trace so far. A run
    that resumes after `last` traces nothing, so that the same command resumes it.
    """

    def __init__(self, workdir, steps: tuple[int, int] | None, num_steps: int):
        self.first, self.last = steps or (num_steps, num_steps)
        self.folder = pathlib.Path(workdir) / PROFILE_DIRECTORY
        if jax.process_count() > 1:  # on one host they would write the same file
            self.folder /= f'process-{jax.process_index()}'
        self._tracing = False

    def begins(self, step: int) -> bool:
        """Return whether to start the trace when `step` steps are done."""
        return not self._tracing and self.first <= step < self.last

    def ends(self, step: int) -> bool:
        """Return whether to end the trace when `step` steps are done."""
        return self._tracing and step >= self.last

    def start(self) -> str:
        """Start the trace; returns a line for the user if that fails, otherwise ''."""
        try:
            jax.profiler.start_trace(self.folder)
        except (OSError, RuntimeError) as error:
            return self._failed(error)
        self._tracing = True
        return ''

    def stop(self) -> str:
        """Write the trace; returns a line for the user, or '' without a trace."""
        if not self._tracing:
            return ''
        self._tracing = False
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:  # such as a full disk, which does not end a run
            return self._failed(error)
        quoted = shlex.quote(str(self.folder))
        return f'profile   {self.folder}: open it with xprof --logdir={quoted}'

    def _failed(self, error):
        self.last = 0  # one try
        return f'profile   {self.folder}: not written: {multihost.one_line(error)}'

    def step(self, number: int):
        """A context that names step `number` (from 0) in the trace."""
        if self._tracing:
            return jax.profiler.StepTraceAnnotation('train', step_num=number)
        return contextlib.nullcontext()

    def __exit__(self, *_):
        self.stop()
