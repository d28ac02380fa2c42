"""Which wheels a machine without a network lacks, from the metadata of what is installed here."""

import contextlib
import importlib.metadata
import pathlib
import re
import subprocess
import sys

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# pip takes each tag literally.
PLATFORMS = tuple(f'manylinux_2_{minor}_x86_64' for minor in (39, 35, 34, 31, 28, 27, 24, 17))
PLATFORMS += ('manylinux2014_x86_64', 'manylinux1_x86_64')
# Never carried: hundreds of megabytes, in versions that fit the machine's driver and PyTorch.
OF_THE_MACHINE = ('jax', 'jaxlib', 'triton')


def read_installed(text: str) -> dict[str, str | None]:
    """Versions by name, None if a line has none, of a pip list, a pip freeze or a list of names.

    Raises ValueError for a line that is none of these.
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
        found[canonicalize_name(match[1])] = match[2]
    return found


def required() -> list[str]:
    """What setup.py asks for, and jax-triton of its extra `gpu`, as installed here.

    Raises ValueError if the project is not installed here.
    """
    try:
        lines = importlib.metadata.requires('moddepth-jax')
    except importlib.metadata.PackageNotFoundError:
        raise ValueError('moddepth-jax is not installed here: pip install -e .') from None
    extra = [line.split(';')[0] for line in lines if line.startswith('jax-triton')]
    return [line for line in lines if 'extra ==' not in line] + extra


def find_needed(requirements: list[str], python: str, installed: dict, known=()) -> dict[str, bool]:
    """Whether each needed package is missing on Linux, x86-64, by name.

    Needed is what is required, by lines such as numpy>=2, and what a missing package requires, as
    far as it is installed here. What is `installed` (by `read_installed`) in a suitable version has
    what it needs, and so have those of `known` names.
    """
    machine = {'sys_platform': 'linux', 'platform_system': 'Linux', 'platform_machine': 'x86_64'}
    machine |= {'python_version': python, 'python_full_version': f'{python}.3'}
    machine |= {'os_name': 'posix', 'platform_python_implementation': 'CPython'}
    found, waiting, seen = {}, [(line, ('',)) for line in requirements], set()
    while waiting:
        line, extras = waiting.pop()
        wanted = Requirement(line)
        marker, name = wanted.marker, canonicalize_name(wanted.name)
        if marker and not any(marker.evaluate(machine | {'extra': extra}) for extra in extras):
            continue
        if (line, extras) in seen:
            continue
        seen.add((line, extras))
        version = installed.get(name)
        missing = name not in installed or bool(
            version and not wanted.specifier.contains(version, prereleases=True)
        )
        found[name] = found.get(name, False) or missing
        if missing and name not in (*OF_THE_MACHINE, *known):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                lines = importlib.metadata.requires(name) or ()
                waiting += [(other, ('', *wanted.extras)) for other in lines]
    return found


def pinned(name: str) -> str:
    """NAME==VERSION of the version installed here; NAME if there is none."""
    try:
        return f'{name}=={importlib.metadata.version(name)}'
    except importlib.metadata.PackageNotFoundError:
        return name


def download(names: list[str], out: pathlib.Path, python: str):
    """Downloads a wheel of each package, such as grain==0.2.18, for that version of Python.

    Raises ValueError with pip's last line if it fails.
    """
    words = [sys.executable, '-m', 'pip', 'download', '-q', '--disable-pip-version-check']
    words += ['--no-deps', '--only-binary=:all:', '--implementation', 'cp']
    words += ['--python-version', python, '-d', str(out)]
    words += [word for platform in PLATFORMS for word in ('--platform', platform)]
    done = subprocess.run([*words, *names], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise ValueError(f'pip download: {(done.stderr.strip().splitlines() or ["failed"])[-1]}')
