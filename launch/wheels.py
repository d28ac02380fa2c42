"""Downloads the wheels that a machine without a network lacks, to be carried to it.

python -m launch.wheels --installed=docs/gpu_machine.txt --out=wheels
python -m launch.wheels --installed=docs/gpu_machine.txt --dry_run

--installed is what `pip list` or `pip freeze` prints there, or names alone, a line each. Versions
are those that are installed here. JAX, its CUDA plugin and Triton are never carried.
"""

import pathlib
import re
import sys

from absl import flags
from packaging.utils import canonicalize_name

from launch import cli
from moddepth_jax.benchmarks import wheels

INSTALLED = flags.DEFINE_string('installed', None, 'Packages of that machine.', required=True)
OUT = flags.DEFINE_string('out', 'wheels', 'Directory for the wheels.')
PYTHON = flags.DEFINE_string('python', '3.12', 'Version of Python on that machine.')
PINS = flags.DEFINE_list('pins', [], 'NAME==VERSION in place of the version installed here.')
DRY_RUN = flags.DEFINE_boolean('dry_run', False, 'Print the list and download nothing.')


def main(_):
    installed = wheels.read_installed(pathlib.Path(INSTALLED.value).read_text(encoding='utf-8'))
    if not re.fullmatch(r'3\.\d+', PYTHON.value):
        raise ValueError(f'--python={PYTHON.value}: must be a version such as 3.12')
    pins = {canonicalize_name(pin.partition('==')[0]): pin for pin in PINS.value}
    needed = wheels.find_needed(wheels.required(), PYTHON.value, installed, pins)
    missing = sorted(name for name, lacks in needed.items() if lacks)
    kept = [name for name in missing if name in wheels.OF_THE_MACHINE]
    if kept:
        what = 'missing there or too old, and not carried: install it there'
        print(f'{", ".join(kept)}: {what}', file=sys.stderr)
    carried = [name for name in missing if name not in kept]
    names = [pins.get(name) or wheels.pinned(name) for name in carried]
    print('\n'.join(names) or 'nothing is missing there')
    if DRY_RUN.value or not names:
        return
    out = pathlib.Path(OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    wheels.download(names, out, PYTHON.value)
    files = sorted(out.glob('*.whl'))
    size = sum(wheel.stat().st_size for wheel in files) / 2**20
    print(f'{len(files)} wheels, {size:.1f} MiB, in {out}')


if __name__ == '__main__':
    cli.run(main)
