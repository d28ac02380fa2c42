"""Code on four fake CPU devices, in a process of its own, and what their program communicates."""

import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
FAKE_DEVICES = '--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0'
COLLECTIVE = re.compile(
    r'= (\S.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\('
)


def on_four_devices(code: str, *arguments: str):
    """Runs Python code that prints JSON in its last line; returns that."""
    environment = os.environ | {
        'PYTHONPATH': str(ROOT),
        'XLA_FLAGS': FAKE_DEVICES,
        'NPROC': '8',  # with fewer threads than twice the devices JAX 0.10 may abort
    }
    command = [sys.executable, '-W', 'error', '-c', code, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def collectives(text: str) -> dict[str, set[str]]:
    """By kind, the shapes that the collectives of a compiled program return, such as f32[2,8]."""
    found = {}
    for result, kind in COLLECTIVE.findall(text):
        found.setdefault(kind, set()).update(re.findall(r'\w+\[[\d,]*\]', result))
    return found
