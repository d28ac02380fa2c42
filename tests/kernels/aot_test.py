"""Every GPU kernel compiles to Hopper machine code, without a GPU, and spills no register.

    pip install 'jax[cuda13]'
    python -m pytest -m aot -s tests/kernels/aot_test.py

The CUDA plugin of JAX compiles for a GPU that is only described to it. Of what 'jax[cuda13]'
brings, jax-cuda13-plugin and jax-cuda13-pjrt of JAX's own version, nvidia-cuda-nvcc, nvidia-nvvm
and nvidia-cuda-crt are enough. Neither driver nor GPU is needed; the other tests stay on the CPU.
"""

import subprocess
import sys

import pytest

from tests.kernels import hopper

pytestmark = pytest.mark.aot


@pytest.fixture(scope='module')
def table():
    """Lines of the table of all kernels, by kernel; printed when there is nothing to capture it."""
    if reason := hopper.missing():
        pytest.skip(reason)
    # Mosaic writes to the standard output of the process.
    command = [sys.executable, '-W', 'ignore', '-m', 'tests.kernels.hopper']
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(f'\n{run.stdout}')
    lines = [line.split() for line in run.stdout.splitlines()[1:]]
    return {name: [line[1:] for line in lines if line[0] == name] for name in hopper.KERNELS}


@pytest.mark.parametrize('name', hopper.KERNELS)
def test_compiles_without_spills(table, name):
    assert table[name], 'it did not compile: see the standard error'
    for registers, spilled, shared, *_ in table[name]:
        assert int(registers) <= 255 and int(shared) <= 227 * 1024
        assert int(spilled) == 0
