"""Rehearses a visit to a GPU machine without a network, on a CPU: what `make gpu-rehearsal` runs.

python -m tests.gpu_rehearsal --folder=build/gpu-rehearsal

Makes an environment with the packages of that machine (docs/gpu_machine.txt), in this Python's
versions, carries the missing wheels to it as docs/gpu.md says, and runs launch.gpu --toy there,
without a network if this machine allows that. The run is stopped by its deadline and started again
until it is finished.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

from moddepth_jax.benchmarks.results import BAD, FILE, FINAL

ROOT = pathlib.Path(__file__).parents[1]
FIRST_DEADLINE, DEADLINE, MOST_ROUNDS = 50, 150, 20  # no machine is done after the first


def run(words):
    """Run a command that must succeed; its output is shown if it does not."""
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def install(folder):
    """Make the environment and the folder of carried wheels; returns (packages, wheels)."""
    lines = (ROOT / 'docs/gpu_machine.txt').read_text().splitlines()
    names = {line.partition('==')[0].replace('_', '-') for line in lines if line[0] != '#'}
    held = []
    for name in sorted(names - {'pip', 'triton'}):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            held.append(f'{name}=={importlib.metadata.version(name)}')
    run([sys.executable, '-m', 'venv', folder / 'venv'])
    pip = [folder / 'venv/bin/python', '-m', 'pip', '-q', '--disable-pip-version-check']
    run([*pip, 'install', '--no-deps', *held])
    lacking = ['-d', folder / 'wheels', '-r', ROOT / 'docs/gpu_wheels.txt']
    run([*pip, 'download', '--no-deps', '--only-binary=:all:', *lacking])
    carried = sorted((folder / 'wheels').glob('*.whl'))
    target = ['--no-index', '--no-deps', '--no-compile', '--target', folder / 'site']
    run([*pip, 'install', *target, *carried])
    return held, carried


def without_network():
    """Return the prefix of a command that runs without a network; [] if that is not allowed."""
    words = ['unshare', '--map-root-user', '--net']
    allowed = shutil.which('unshare') and not subprocess.run([*words, 'true']).returncode
    return words if allowed else []


def gpu(folder, *arguments):
    """Run launch.gpu --toy in the environment; returns (status, output, seconds)."""
    env = os.environ | {'PYTHONPATH': str(folder / 'site')}
    words = [*without_network(), folder / 'venv/bin/python', '-m', 'launch.gpu', '--toy']
    begin = time.monotonic()
    done = subprocess.run([*words, *arguments], cwd=ROOT, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - begin


def rehearse(folder):
    """Run in as many rounds as the deadline requires."""
    out = folder / 'out'
    total, said, number = 0.0, 'not done', 0
    while 'not done' in said and number < MOST_ROUNDS:
        deadline = DEADLINE if number else FIRST_DEADLINE
        status, said, seconds = gpu(folder, f'--out={out}', f'--deadline={deadline}')
        total, number = total + seconds, number + 1
        print(f'round {number}: {seconds:.0f} s, {said.strip().splitlines()[-2:]}', flush=True)
        assert seconds < deadline + 20, seconds
    rows = [json.loads(line) for line in (out / FILE).read_text().splitlines()]
    final = [row['case'] for row in rows if row['status'] in FINAL]
    assert len(final) == len(set(final)), 'a case has two results'
    latest = {row['case']: row for row in rows}
    bad = {name: row['reason'] for name, row in latest.items() if row['status'] in BAD}
    assert status == 0 and number > 1 and not bad, (status, number, bad)
    skipped = {name: row['reason'] for name, row in latest.items() if row['status'] == 'skipped'}
    assert not [
        n for n, why in skipped.items() if 'GPU' not in why and 'flash_attention_2' not in n
    ]
    report, said, _ = gpu(folder, '--report', f'--out={out}')
    assert report == 0, said
    cut = sum(row['status'] == 'cut' for row in rows)
    print(f'{len(latest)} cases in {number} rounds, {total:.0f} s,')
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
