"""Every GPU kernel compiles to Hopper machine code, without a GPU, and spills no register.

    pip install 'jax[cuda13]'
    python -m pytest -m aot -s tests/kernels/aot_test.py

The CUDA plugin of JAX compiles for a GPU that is only described; no driver is needed. Of the
packages of 'jax[cuda13]', jax-cuda13-plugin and jax-cuda13-pjrt of JAX's version, nvidia-cuda-nvcc,
nvidia-nvvm and nvidia-cuda-crt are enough. The other tests stay on the CPU.
"""

import subprocess
import sys

import pytest

from tests.kernels import hopper

pytestmark = pytest.mark.aot


@pytest.fixture(scope='module')
def table():
    """Return the table of tests.kernels.hopper as lists of cells by kernel, and print it."""
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
        assert int(registers) <= 255 and int(spilled) == 0 and int(shared) <= 227 * 1024
