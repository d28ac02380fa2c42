"""What the operating system says of this process. Imports nothing large."""

import os
import pathlib
import re
import resource
import sys


def usable_cpus() -> int:
    """Return how many CPUs this process may use, which is how many threads XLA starts.

    That is its affinity, as set by taskset or SLURM, on systems that have one.
    """
    affinity = getattr(os, 'sched_getaffinity', None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def peak_bytes() -> int:
    """Return the largest resident memory of this process, in bytes.

    On Linux `ru_maxrss` is at least that of the process which started this one, so the kernel's
    own mark of the memory map counts.
    """
    status = pathlib.Path('/proc/self/status')
    text = status.read_text() if status.exists() else ''
    if mark := re.search(r'^VmHWM:\s+(\d+) kB$', text, re.MULTILINE):
        return 1024 * int(mark[1])
    unit = 1 if sys.platform == 'darwin' else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
