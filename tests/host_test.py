"""Facts of this process are its own, not those of the process that started it."""

import subprocess
import sys

LARGE = 400 * 2**20
PARENT = f"""
import subprocess, sys
block = bytearray({LARGE})
block[:: 4096] = b'x' * len(block[:: 4096])
child = 'from moddepth_jax import host; print(host.peak_bytes())'
print(subprocess.run([sys.executable, '-c', child], capture_output=True, text=True).stdout)
from moddepth_jax import host
print(host.peak_bytes())
"""


def test_peak_memory_is_that_of_this_process():
    """A large process has its own peak, and a small one that it starts does not inherit it."""
    done = subprocess.run([sys.executable, '-c', PARENT], capture_output=True, text=True)
    child, parent = map(int, done.stdout.split())
    assert 2**20 < child < LARGE / 4 and LARGE < parent < 2 * LARGE
