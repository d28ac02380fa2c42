"""A checkpoint that could not be written, told to the user in one line."""

import errno
import os
import re

from moddepth_jax.training import agreement, processes

_FULL = [os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)]


class SaveError(ValueError):
    """A checkpoint could not be written. The message is one line; earlier checkpoints are kept."""

    everywhere = True  # every process of a run meets it


class SaveErrorToldByFirst(SaveError, agreement.ToldByAnother):
    """The same on the other processes: process 0 raises the SaveError that the user sees."""


def not_saved(step: int, directory, reason: str, kept: list[int]) -> SaveError:
    """The error of a checkpoint: what failed, which steps are kept, and what to do.

    Args:
      step: of the checkpoint.
      directory: of all checkpoints.
      reason: of `one_line`.
      kept: steps of those that are there.
    """
    steps = ', '.join(map(str, kept)) or 'none'
    mend = 'make room there' if any(full in reason for full in _FULL) else 'mend that'
    again = f'the same command goes on after step {kept[-1]}' if kept else 'start again'
    where = f'checkpoint {step} in {directory}: not saved'
    kind = SaveError if processes.is_first() else SaveErrorToldByFirst
    return kind(f'{where}, {reason}; steps kept: {steps}; {mend}, then {again}')


def one_line(error: BaseException) -> str:
    """What an error says, in a line of 300 characters at most."""
    os_error = re.search(r"os_error_code='(\d+)'", str(error))  # in half a page of TensorStore's
    if os_error:
        return os.strerror(int(os_error[1]))
    return ' '.join(str(error).split())[:300] or type(error).__name__
