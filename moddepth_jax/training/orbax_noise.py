"""What Orbax and TensorStore say beside their exceptions, kept off the user's screen."""

import logging
import os
import sys

_LATE = 'Event loop is closed'


def silence() -> None:
    """Drops, in the whole process, two things that tell nobody anything; further calls do nothing.

    The first are Orbax's log records: dozens of lines a save, and its errors reach the caller as
    exceptions anyway. The second are errors that Python cannot raise. Where one array of a save
    cannot be written, Orbax gives up the others and closes its event loop. TensorStore then finds
    the loop closed, or nobody asks for its error; either would be pages of tracebacks on stderr.
    """
    logging.getLogger('absl').addFilter(_not_from_orbax)
    logging.getLogger('asyncio').addFilter(_not_given_up)
    if not isinstance(sys.unraisablehook, _WithoutLateWrites):
        sys.unraisablehook = _WithoutLateWrites(sys.unraisablehook)


class _WithoutLateWrites:
    """A sys.unraisablehook that gives all but TensorStore's late errors to the one before it."""

    def __init__(self, hook):
        self._hook = hook

    def __call__(self, unraisable):
        # A callback of C++ has no Python object that the error could be blamed on.
        of_cpp = unraisable.object is None and unraisable.exc_type is RuntimeError
        if not (of_cpp and str(unraisable.exc_value) == _LATE):
            self._hook(unraisable)


def _not_from_orbax(record):
    return f'{os.sep}orbax{os.sep}' not in record.pathname


def _not_given_up(record):
    text = record.getMessage()
    of_save = f'{os.sep}orbax{os.sep}' in text or 'OCDBT' in text  # TensorStore's format
    return not (of_save and text.startswith(('Future exception', 'Task ')))
