"""Runs code on fake CPU devices in a separate process, and reads a program's communication."""

import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
COLLECTIVE = re.compile(
    r'= (\S.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\('
)


def on_devices(count: int, code: str, *arguments: str):
    """Run Python code on `count` fake devices that prints JSON in its last line; returns that."""
    environment = os.environ | {
        'PYTHONPATH': str(ROOT),
        'XLA_FLAGS': f'{os.environ["XLA_FLAGS"]} --xla_force_host_platform_device_count={count}',
        'NPROC': str(2 * count),  # with fewer threads JAX 0.10 may abort
    }
    command = [sys.executable, '-W', 'error', '-c', code, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def collectives(text: str) -> dict[str, set[str]]:
    """Return {kind: shapes such as f32[2,8]} of the collectives of a compiled program."""
    found = {}
    for result, kind in COLLECTIVE.findall(text):
        found.setdefault(kind, set()).update(re.findall(r'\w+\[[\d,]*\]', result))
    return found
