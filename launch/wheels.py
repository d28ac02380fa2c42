"""Downloads the wheels that a machine without a network lacks, to be carried to it.

python -m launch.wheels --installed=docs/gpu_machine.txt --out=wheels
python -m launch.wheels --installed=docs/gpu_machine.txt --dry_run

--installed is what `pip list` or `pip freeze` prints on that machine, or names alone, a line each.
What the project and its packages need is read from the metadata of what is installed here, whose
versions are taken. JAX, its CUDA plugin and Triton are never carried.
"""

import contextlib
import importlib.metadata
import pathlib
import re
import subprocess
import sys

from absl import flags

from launch import cli

INSTALLED = flags.DEFINE_string(
    'installed', None, 'File with the packages of that machine, a line each.', required=True
)
OUT = flags.DEFINE_string('out', 'wheels', 'Directory for the wheels.')
PYTHON = flags.DEFINE_string('python', '3.12', 'Version of Python on that machine.')
PINS = flags.DEFINE_list(
    'pins', [], 'NAME==VERSION in place of the version that is installed here.'
)
DRY_RUN = flags.DEFINE_boolean('dry_run', False, 'Print the list and download nothing.')

# pip takes each tag literally.
PLATFORMS = tuple(f'manylinux_2_{minor}_x86_64' for minor in (39, 35, 34, 31, 28, 27, 24, 17))
PLATFORMS += ('manylinux2014_x86_64', 'manylinux1_x86_64')
# Never carried: hundreds of megabytes, in versions that fit the machine's driver and PyTorch.
OF_THE_MACHINE = ('jax', 'jaxlib', 'triton')


def normal(name: str) -> str:
    """A package's name as pip compares it."""
    return re.sub(r'[-_.]+', '-', name).lower()


def read_installed(text: str) -> dict[str, str | None]:
    """Versions by name, None where a line has none, of a pip list, a pip freeze or a list of names.

    Raises:
      ValueError: a line that is none of these.
    """
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split('#')[0].strip()
        if not line or set(line) <= {'-', ' '} or line.split()[:2] == ['Package', 'Version']:
            continue
        match = re.match(r'^([A-Za-z0-9][\w.-]*?)(?:(?:==|\s+)(\d[\w.+!-]*)(?:\s.*)?)?$', line)
        if not match:
            right = 'must be NAME, NAME==VERSION or NAME VERSION'
            raise ValueError(f'line {number} of the installed packages, {line!r}: {right}')
        found[normal(match[1])] = match[2]
    return found


def required() -> list[str]:
    """What setup.py asks for, and jax-triton of its extra `gpu`, as installed here.

    Raises:
      ValueError: the project is not installed here.
    """
    try:
        lines = importlib.metadata.requires('moddepth-jax')
    except importlib.metadata.PackageNotFoundError:
        raise ValueError('moddepth-jax is not installed here: pip install -e .') from None
    extra = [line.split(';')[0] for line in lines if line.startswith('jax-triton')]
    return [line for line in lines if 'extra ==' not in line] + extra


def needed(requirements: list[str], python: str, installed: dict[str, str | None], known=()):
    """All that is needed on Linux, x86-64, directly or by something that is missing there.

    Args:
      requirements: lines such as numpy>=2.
      python: version, such as 3.12.
      installed: of `read_installed`. What is there in a version that will do has its own needs.
      known: names whose needs are known to be there.

    Returns:
      Whether it is missing, by name. What is not installed here stands there, but not its needs.
    """
    from packaging.markers import default_environment
    from packaging.requirements import Requirement

    target = default_environment() | {
        'python_version': python,
        'python_full_version': f'{python}.3',
    }
    target |= {'sys_platform': 'linux', 'platform_system': 'Linux', 'platform_machine': 'x86_64'}
    target |= {'os_name': 'posix', 'platform_python_implementation': 'CPython'}
    found, waiting = {}, [(Requirement(line), frozenset({''})) for line in requirements]
    seen = set()
    while waiting:
        wanted, extras = waiting.pop()
        asked = (not wanted.marker) or any(
            wanted.marker.evaluate(target | {'extra': extra}) for extra in extras
        )
        name, own = normal(wanted.name), frozenset({'', *wanted.extras})
        if not asked or (name, own, str(wanted.specifier)) in seen:
            continue
        seen.add((name, own, str(wanted.specifier)))
        version = installed.get(name, 'none')
        lacks = version == 'none' or not (
            version is None or wanted.specifier.contains(version, prereleases=True)
        )
        found[name] = found.get(name, False) or lacks
        if lacks and name not in (*OF_THE_MACHINE, *known):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                lines = importlib.metadata.requires(name) or ()
                waiting += [(Requirement(line), own) for line in lines]
    return found


def pinned(name: str) -> str:
    """NAME==VERSION of the version installed here; NAME where there is none."""
    try:
        return f'{name}=={importlib.metadata.version(name)}'
    except importlib.metadata.PackageNotFoundError:
        return name


def download(names: list[str], out: pathlib.Path, python: str):
    """Fetches a wheel of each for that machine, and of nothing else.

    Args:
      names: as pip takes them, such as grain==0.2.18.
      out: directory.
      python: version of that machine's Python.

    Raises:
      ValueError: pip could not; its last line.
    """
    command_line = [sys.executable, '-m', 'pip', 'download', '-q', '--disable-pip-version-check']
    command_line += ['--no-deps', '--only-binary=:all:', '--implementation', 'cp']
    command_line += ['--python-version', python, '-d', str(out)]
    for platform in PLATFORMS:
        command_line += ['--platform', platform]
    done = subprocess.run([*command_line, *names], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise ValueError(f'pip download: {(done.stderr.strip().splitlines() or ["failed"])[-1]}')


def main(_):
    installed = read_installed(pathlib.Path(INSTALLED.value).read_text(encoding='utf-8'))
    if not re.fullmatch(r'3\.\d+', PYTHON.value):
        raise ValueError(f'--python={PYTHON.value}: must be a version such as 3.12')
    pins = {normal(name): version for name, _, version in (p.partition('==') for p in PINS.value)}
    wanted = needed(required(), PYTHON.value, installed, pins)
    absent = [name for name, lacks in wanted.items() if lacks]
    if kept := [name for name in absent if name in OF_THE_MACHINE]:
        what = 'missing there or too old, and not carried: install it there'
        print(f'{", ".join(kept)}: {what}', file=sys.stderr)
    chosen = sorted(name for name in absent if name not in OF_THE_MACHINE)
    names = [f'{name}=={pins[name]}' if name in pins else pinned(name) for name in chosen]
    print('\n'.join(names) or 'nothing is missing there')
    if DRY_RUN.value or not names:
        return
    out = pathlib.Path(OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    download(names, out, PYTHON.value)
    wheels = sorted(out.glob('*.whl'))
    size = sum(wheel.stat().st_size for wheel in wheels) / 2**20
    print(f'{len(wheels)} wheels, {size:.1f} MiB, in {out}')


if __name__ == '__main__':
    cli.run(main)
