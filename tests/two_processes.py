"""Runs Python code, or a command, on two processes of one run, with fake CPU devices."""

import json
import os
import pathlib
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def start_two(*arguments: str, devices: int = 2, cwd=ROOT, **variables) -> list[subprocess.Popen]:
    """Start `python ARGUMENTS` as process 0 and 1 of one run; both pipes of each are text."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        address = f'127.0.0.1:{free.getsockname()[1]}'
    environment = os.environ | {
        'PYTHONPATH': str(ROOT),
        'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices} '
        '--xla_backend_optimization_level=0',
        'NPROC': str(2 * devices),
        'JAX_COORDINATOR_ADDRESS': address,
        'JAX_NUM_PROCESSES': '2',
        **variables,
    }
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True, 'cwd': cwd}
    return [
        subprocess.Popen(
            [sys.executable, *arguments], env=environment | {'JAX_PROCESS_ID': index}, **pipes
        )
        for index in '01'
    ]


def finish_two(processes, seconds: float = 300) -> list[tuple[int, str, str]]:
    """Wait for both; returns (status, stdout, stderr) of each. No process outlives this."""
    try:
        texts = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, *text) for process, text in zip(processes, texts, strict=True)]


def on_two_processes(code: str, *arguments: str, devices: int = 2) -> list:
    """Run code on both processes; returns the JSON in the last line of each."""
    code = f'from moddepth_jax.training import multihost\nmultihost.initialize()\n{code}'
    done = finish_two(start_two('-c', code, *arguments, devices=devices))
    for status, _, error in done:
        assert status == 0, error
    return [json.loads(out.splitlines()[-1]) for _, out, _ in done]
