"""Runs the cases of gpu_cases.py that have no result yet, until a deadline."""

import collections
import contextlib
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from kernels_pallas import autotune
from kernels_pallas.backends import WITHOUT
from moddepth_jax.benchmarks import results, runner, worker
from moddepth_jax.benchmarks.attention_forms import PARTS
from moddepth_jax.benchmarks.gpu_cases import cases
from moddepth_jax.data.directory import parse_object

MEASURED = 'attention.json'  # what model.attention=auto measured, by the names of the files
PACKAGES = ('jax', 'jaxlib', 'jax-cuda13-plugin', 'jax-triton', 'triton', 'flax', 'numpy')
_PROBE = """
import json, jax
from kernels_pallas.backends import software_of
device = jax.devices()[0]
print(json.dumps({
    'platform': device.platform, 'device': device.device_kind,
    'capability': str(getattr(device, 'compute_capability', '')),
    'software': software_of(device)}))
"""


def choose_cases(texts, toy: bool) -> list[runner.Case]:
    """Return the cases whose names contain one of `texts`, in order; all cases without texts.

    Raises ValueError for a text that no name contains.
    """
    found = cases(toy)
    for text in texts:
        if not any(text in case.name for case in found):
            raise ValueError(f'--cases={text}: no case has it in its name; --list prints them')
    return [case for case in found if any(text in case.name for text in texts or ('',))]


def list_cases(chosen: list[runner.Case]) -> str:
    """Return a line for each case with its seconds, and their sum."""
    lines = [f'{c.name:55} {c.expected:5.0f} s, at most {c.limit:.0f} s' for c in chosen]
    minutes = sum(case.expected for case in chosen) / 60
    total = f'{minutes:.0f} minutes expected, plus the starts of processes'
    return '\n'.join([*lines, f'{len(chosen)} cases, {total}'])


def versions() -> dict[str, str]:
    """Return the versions of Python and of installed packages that may change results."""
    found = {'python': sys.version.split()[0]}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def probe() -> tuple[dict, str]:
    """Ask another process about JAX's first device, so that this process allocates no memory on it.

    Returns the fields of _PROBE ({} if JAX did not start), and the last line on stderr.
    """
    command = [sys.executable, '-c', _PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return {}, 'JAX did not start within 120 s'
    output, errors = done.stdout.strip().splitlines(), done.stderr.strip().splitlines()
    found = json.loads(output[-1]) if done.returncode == 0 and output else {}
    return found, errors[-1] if errors else ''


def _share_measurements(path: pathlib.Path, kind: str):
    """Copy what `auto` measured on this kind of GPU between the user's cache and a file, both ways.

    The next session may be on a machine with an empty cache.
    """
    if (cache := autotune.cache_folder()) is None:
        return
    kept, folder = _read_object(path), cache / 'attention'
    for name, contents in kept.items():
        file = folder / pathlib.Path(name).name
        with contextlib.suppress(OSError):  # without a cache, `auto` measures again, and says so
            folder.mkdir(parents=True, exist_ok=True)
            if not file.exists():
                file.write_text(json.dumps(contents), encoding='utf-8')
    found = folder.glob(f'{autotune.file_prefix(kind)}*.json')
    measured = {file.name: _read_object(file) for file in sorted(found)}
    both = kept | {name: contents for name, contents in measured.items() if contents}
    if both != kept:
        new = path.with_suffix('.new')
        new.write_text(json.dumps(both, indent=1), encoding='utf-8')
        os.replace(new, path)


def _hung_kernels(rows: dict) -> list[str]:
    """Return the backends of checks that hung, which `auto` need not wait for in each model."""
    checks = [name for name, row in rows.items() if row.get('status') == 'hung']
    names = {name.split('/')[1] for name in checks if name.startswith(('right/', 'packed/'))}
    return sorted({PARTS[name].sequence if name in PARTS else name for name in names - {'decode'}})


def _read_object(path):
    """Return the JSON object in a file; {} if the file is missing or damaged."""
    try:
        return parse_object(path.read_text(encoding='utf-8'))
    except (OSError, ValueError):
        return {}


def _set_environment(toy):
    """Set the environment of the children; compiled programs are kept for the next visit."""
    # Import this checkout even if another copy is installed.
    paths = [str(results.ROOT), os.environ.get('PYTHONPATH')]
    os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, paths))
    defaults = {
        'OPENBLAS_NUM_THREADS': '1',  # its threads may wait for each other for seconds
        'JAX_COMPILATION_CACHE_DIR': os.path.join(tempfile.gettempdir(), 'moddepth-gpu-cache'),
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.3',
    }
    if toy:
        os.environ.update({'JAX_PLATFORMS': 'cpu', 'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'})
    else:
        defaults |= {
            'JAX_PLATFORMS': 'cuda,cpu',
            'CUDA_VISIBLE_DEVICES': '0',  # one of several GPUs is measured
            # model.attention=auto tries its candidates in a second process, which needs memory.
            'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.8',
        }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _find_device(toy):
    """The result of `probe`; None, after a line on stderr, without the wanted device."""
    asked = os.environ.get('JAX_PLATFORMS', '')
    _set_environment(toy)
    found, error = probe()
    wanted = 'cpu' if toy else 'gpu'
    if found.get('platform') == wanted:
        return found
    why = f'JAX says: {error}' if error else f'JAX only finds {found.get("platform", "nothing")}'
    why += '; --toy rehearses everything on a CPU' * (not toy)
    if not toy and asked and not {'cuda', 'gpu'} & set(asked.split(',')):
        why = f'JAX_PLATFORMS={asked} is set; unset it, or set it to cuda,cpu'
    print(f'error: no {wanted.upper()}: {why}', file=sys.stderr)
    return None


def visit(
    chosen: list[runner.Case],
    seconds_left,
    out: str | None = None,
    by_name: bool = False,
    again: bool = False,
    toy: bool = False,
) -> int:
    """Run cases and print a line for each.

    Args:
      chosen: the cases.
      seconds_left: function that returns the seconds until the deadline.
      out: directory of the results; --out.
      by_name: whether --cases named the cases.
      again: --again.
      toy: --toy.

    Returns:
      The exit status: 1 if there is no device or if some case is bad.
    """
    found = _find_device(toy)
    if found is None:
        return 1
    device = 'toy' if toy else found['device'].replace('NVIDIA', '').strip().replace(' ', '_')
    out = pathlib.Path(out or f'results/gpu/{device.lower()}').absolute()
    out.mkdir(parents=True, exist_ok=True)
    code, store = results.code_version(), results.Results(out / results.FILE)
    others = {row.get('device') for row in store.latest.values() if not row.get('toy')}
    if not toy and others - {found['device']}:
        other = ', '.join(sorted(map(str, others - {found['device']})))
        why = f'holds results of {other}, and this is {found["device"]}; use another --out'
        print(f'error: {store.path}: {why}', file=sys.stderr)
        return 1
    stamp = {'device': found['device'], 'capability': found['capability']}
    stamp |= {'versions': versions(), 'software': found['software'], 'toy': toy}
    todo, lines = runner.pending(chosen, store, code['code'], again, by_name)
    for line in lines:
        print(line, flush=True)

    def start(group):
        os.environ[WITHOUT] = ','.join(_hung_kernels(store.latest))
        args = {case.name: case for case in todo if case.group == group}, not toy
        return runner.Child(worker.serve, args, out / 'log.txt')

    def say(line):
        print(line, flush=True)
        _share_measurements(out / MEASURED, found['device'])

    _share_measurements(out / MEASURED, found['device'])
    run = runner.CaseRunner(store, start, stamp | code, seconds_left, say)
    try:
        later = run.run(todo)
    except runner.LostError as error:
        print(f'error: {error}; the same command continues', file=sys.stderr)
        return 1
    statuses = {case.name: store.status(case.name) or 'not done' for case in chosen}
    counts = collections.Counter(statuses.values())
    print(', '.join(f'{number} {status}' for status, number in counts.items()))
    if later:
        print(f'{len(later)} cases are not done; the same command continues')
    bad = [name for name, status in statuses.items() if status in results.BAD]
    if bad:
        print(f'not right: {", ".join(bad)}')
    return int(bool(bad))
