"""What Orbax and TensorStore say beside their exceptions, kept off the user's screen."""

import logging
import os
import sys

_LATE = 'Event loop is closed'


def silence() -> None:
    """Drops, in the whole process, two things that tell nobody anything; further calls do nothing.

    The first are Orbax's log records: dozens of lines a save, and its errors reach the caller as
    exceptions anyway. The second are errors that Python cannot raise. Where one array of a save
    cannot be written, Orbax gives up the others and closes its event loop; each of them that
    TensorStore ends later then finds the loop closed, and that would be a traceback on stderr.
    """
    logging.getLogger('absl').addFilter(_not_from_orbax)
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
