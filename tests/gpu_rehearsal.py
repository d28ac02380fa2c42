"""Rehearses a visit to a GPU machine without a network, on a CPU: what `make gpu-rehearsal` runs.

python -m tests.gpu_rehearsal --folder=build/gpu-rehearsal

Makes an environment with the packages of that machine (docs/gpu_machine.txt), in this Python's
versions, carries the missing wheels to it as docs/gpu.md says, and runs launch.gpu --toy there,
without a network if this machine allows that. A crash, a hang and a wrong kernel are injected; the
run is stopped by its deadline and started again until it is finished.
"""

import argparse
import importlib.metadata
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

from moddepth_jax.benchmarks import wheels
from moddepth_jax.benchmarks.results import BAD, FILE, FINAL

ROOT = pathlib.Path(__file__).parents[1]
PYTHON = f'{sys.version_info.major}.{sys.version_info.minor}'
MACHINE = ROOT / 'docs/gpu_machine.txt'
PIN = {'jax-triton': '0.3.1'}
INJECTED = {
    'right/pallas/rows': ('wrong', 'wrong'),
    'right/decode/64_rows_of_2048_slots_0': ('hang', 'hung'),
    'step/124m/moda': ('crash', 'failed'),
}
NOT_TIMED = ['time/pallas/slots_24_4k']  # needs right/pallas/
DEADLINE, LIMIT, MOST_ROUNDS = 150, 130, 20


def run(words):
    """Runs a command that must succeed; its output is shown if it does not."""
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def install(folder):
    """Makes the environment and the folder of carried wheels; returns (packages, wheels)."""
    installed = wheels.read_installed(MACHINE.read_text())
    of_jax = [line for name in ('jax', 'jaxlib') for line in importlib.metadata.requires(name)]
    everything = wheels.find_needed([*wheels.required(), *of_jax], PYTHON, {}, PIN)
    held = sorted(name for name in everything if name in installed and name != 'triton')
    needed = wheels.find_needed(wheels.required(), PYTHON, installed, PIN)
    absent = sorted(name for name, lacks in needed.items() if lacks)
    run([sys.executable, '-m', 'venv', folder / 'venv'])
    pip = [folder / 'venv/bin/python', '-m', 'pip', '-q', '--disable-pip-version-check', 'install']
    versions = [f'{name}=={installed[name] or importlib.metadata.version(name)}' for name in held]
    run([*pip, '--no-deps', *versions])
    carried = [f'{n}=={PIN[n]}' if n in PIN else wheels.pinned(n) for n in absent]
    wheels.download(carried, folder / 'wheels', PYTHON)
    found = sorted((folder / 'wheels').glob('*.whl'))
    target = ['--no-index', '--no-deps', '--no-compile', '--target', folder / 'site']
    run([*pip, *target, *found])
    return versions, found


def without_network():
    """The first words of a command that runs without a network; [] if that is not allowed here."""
    words = ['unshare', '--map-root-user', '--net']
    allowed = shutil.which('unshare') and not subprocess.run([*words, 'true']).returncode
    return words if allowed else []


def gpu(folder, *arguments):
    """Runs launch.gpu --toy in the environment; returns (status, output, seconds)."""
    env = os.environ | {'PYTHONPATH': str(folder / 'site')}
    words = [*without_network(), folder / 'venv/bin/python', '-m', 'launch.gpu', '--toy']
    begin = time.monotonic()
    done = subprocess.run([*words, *arguments], cwd=ROOT, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - begin


def rehearse(folder):
    """The run with injected faults, in as many rounds as its deadline makes of it."""
    out = folder / 'out'
    inject = ','.join(f'{kind}:{name}' for name, (kind, _) in INJECTED.items())
    arguments = [f'--out={out}', f'--deadline={DEADLINE}', f'--limit={LIMIT}', f'--inject={inject}']
    total, said, number = 0.0, 'not done', 0
    while 'not done' in said and number < MOST_ROUNDS:
        status, said, seconds = gpu(folder, *arguments)
        total, number = total + seconds, number + 1
        print(f'round {number}: {seconds:.0f} s, {said.strip().splitlines()[-2:]}', flush=True)
        assert seconds < DEADLINE + 20, seconds
    rows = [json.loads(line) for line in (out / FILE).read_text().splitlines()]
    final = [row['case'] for row in rows if row['status'] in FINAL]
    assert len(final) == len(set(final)), 'a case has two results'
    latest = {row['case']: row for row in rows}
    lost = {name: row['status'] for name, row in latest.items() if row['status'] in BAD}
    assert status == 1 and number > 1, (status, number)
    assert lost == {name: status for name, (_, status) in INJECTED.items()}, lost
    skipped = {name: row['reason'] for name, row in latest.items() if row['status'] == 'skipped'}
    able = [n for n, why in skipped.items() if 'GPU' not in why and 'pallas_triton' not in n]
    assert able == NOT_TIMED, skipped
    report, said, _ = gpu(folder, '--report', f'--out={out}')
    assert report == 0, said
    page = (out / 'table.md').read_text()
    assert all(f'**{status}** {name}: ' in page for name, status in lost.items()), page
    cut = sum(row['status'] == 'cut' for row in rows)
    print(f'{len(latest)} cases in {number} rounds, {total:.0f} s: {len(lost)} lost as injected,')
    print(f'{len(skipped)} skipped, {cut} cut by the deadline and repeated')


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--folder', type=pathlib.Path, default=ROOT / 'build/gpu-rehearsal')
    folder = parser.parse_args().folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    held, carried = install(folder)
    size = sum(path.stat().st_size for path in carried) / 2**20
    print(f'{len(held)} packages held, {len(carried)} wheels carried, {size:.1f} MiB')
    print('network: ' + ('none' if without_network() else 'could not be taken away'), flush=True)
    rehearse(folder)


if __name__ == '__main__':
    main()
