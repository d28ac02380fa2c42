"""The memory that a step frees stays with the process."""

import subprocess
import sys

import pytest

# A thread writes 96 MiB, as a step does, four times. Prints the page faults of each time.
PROGRAM = """
import resource, threading
from launch import host_memory

def step():
    b'1' * (96 << 20)

{call}
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(call: str, **environment) -> list[int]:
    program = [sys.executable, '-c', PROGRAM.format(call=call)]
    environment = {'PATH': '', 'JAX_PLATFORMS': 'cpu', **environment}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.split()]


@pytest.mark.skipif(sys.platform != 'linux', reason='mallopt belongs to glibc')
def test_freed_memory_is_kept():
    """Without it each allocation faults its pages in again: 24,576, or 48 if all pages are huge."""
    assert faults('')[-1] >= 40
    assert faults('host_memory.keep_freed()')[-1] <= 10
