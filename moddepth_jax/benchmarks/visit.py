"""A visit to a GPU: runs the cases of gpu_cases.py that have no result yet, until a deadline."""

import os
import pathlib
import sys
import tempfile
from typing import NamedTuple

from moddepth_jax.benchmarks import machine, results, runner, worker
from moddepth_jax.benchmarks.gpu_cases import cases

ROOT = pathlib.Path(__file__).parents[2]


class Options(NamedTuple):
    """How the cases are run.

    Attributes:
      out: directory of the results; None: results/gpu/GPU.
      chosen: only cases whose names contain one of these; empty: all.
      again: repeat cases whose result is of other code; with `chosen` all of these.
      time_all: time kernels of which a case was wrong, too.
      toy: cases of a rehearsal, on the CPU.
      injected: worker.INJECTIONS by name of a case.
      limit: seconds of each case in place of its own limit.
    """

    out: str | None = None
    chosen: tuple[str, ...] = ()
    again: bool = False
    time_all: bool = False
    toy: bool = False
    injected: dict[str, str] = {}
    limit: float | None = None


def parse_injected(texts: list[str]) -> dict[str, str]:
    """Kind of injection by name of the case, of texts such as crash:CASE.

    Raises:
      ValueError: another text, or a wrong result of a case that is no check.
    """
    found = {}
    for text in texts:
        kind, _, name = text.partition(':')
        if kind not in worker.INJECTIONS or not name:
            raise ValueError(f'--inject={text}: must be crash:CASE, hang:CASE or wrong:CASE')
        if kind == 'wrong' and not name.startswith(('right/', 'packed/')):
            raise ValueError(f'--inject={text}: only cases right/... and packed/... can be wrong')
        found[name] = kind
    return found


def choose_cases(options: Options) -> list[runner.Case]:
    """The cases of a visit in their order.

    Raises:
      ValueError: a name that no case has.
    """
    found = cases(options.toy)
    names = [case.name for case in found]
    for text in options.chosen:
        if not any(text in name for name in names):
            raise ValueError(f'--cases={text}: no case has it in its name; --list prints them')
    for name in options.injected:
        if name not in names:
            raise ValueError(f'--inject: no case {name}; --list prints them')
    return [case for case in found if any(text in case.name for text in options.chosen or ('',))]


def list_cases(chosen: list[runner.Case]) -> str:
    """A line for each case with its seconds, and their sum."""
    lines = [f'{c.name:55} {c.expected:5.0f} s, at most {c.limit:.0f} s' for c in chosen]
    minutes = sum(case.expected for case in chosen) / 60
    total = f'{minutes:.0f} minutes expected without the starts of processes'
    return '\n'.join([*lines, f'{len(chosen)} cases, {total}'])


def _set_environment(toy):
    """Sets what the children inherit; compiled programs are kept for the next visit."""
    # The checkout comes first also where another copy is installed.
    paths = [str(ROOT), os.environ.get('PYTHONPATH')]
    os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, paths))
    cache = pathlib.Path(tempfile.gettempdir()) / 'moddepth-gpu-cache'
    defaults = {
        'JAX_COMPILATION_CACHE_DIR': str(cache),
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.3',
    }
    if toy:
        os.environ.update({'JAX_PLATFORMS': 'cpu', 'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'})
    else:
        defaults |= {
            'JAX_PLATFORMS': 'cuda,cpu',
            'CUDA_VISIBLE_DEVICES': '0',  # of several, one is measured
            # A candidate of model.attention=auto is tried in a process next to the one that asks.
            'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.8',
        }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _find_device(toy):
    """The machine, with its versions; None, after a line on stderr, if it lacks the device."""
    # Asked before the defaults are set: why_no_gpu names what the user has set.
    given = dict(os.environ)
    _set_environment(toy)
    found, error = machine.probe()
    wanted = 'cpu' if toy else 'gpu'
    if found.get('platform') != wanted:
        why = error or 'JAX does not start' if toy else machine.why_no_gpu(given, error)
        print(f'error: no {wanted.upper()}: {why}', file=sys.stderr)
        return None
    if missing := machine.missing_packages():
        what = 'cases that need them are skipped; docs/gpu.md says how to carry wheels'
        print(f'missing: {", ".join(missing)}: {what}', flush=True)
    return found | {'versions': machine.versions()}


def _directory(options, device):
    name = 'toy' if options.toy else device.replace('NVIDIA', '').strip().replace(' ', '_')
    out = pathlib.Path(options.out or pathlib.Path('results/gpu') / name.lower())
    out.mkdir(parents=True, exist_ok=True)
    return out.absolute()


def visit(chosen: list[runner.Case], options: Options, seconds_left) -> int:
    """Runs cases and prints a line for each.

    Args:
      chosen: as `choose_cases` returns.
      options: of the visit.
      seconds_left: until the deadline; a function without arguments.

    Returns:
      The exit status: 1 if there is no device or if some case is not right.
    """
    device = _find_device(options.toy)
    if device is None:
        return 1
    out, code = _directory(options, device['device']), results.code_version()
    store = results.Results(out / results.FILE)
    stamp = {key: device[key] for key in ('device', 'capability', 'versions')}
    stamp |= {'driver': device['platform_version'], 'toy': options.toy, **code}
    todo, lines = runner.pending(chosen, store, code, options.again, bool(options.chosen))
    for line in lines:
        print(line, flush=True)
    if not options.toy:
        results.restore_measurements(store.latest.values())
    if options.limit:
        todo = [case._replace(limit=options.limit) for case in todo]
    served = {case.name: case for case in todo}

    def start():
        args = (served, not options.toy, options.injected)
        return runner.Child(worker.serve, args, out / 'log.txt')

    def say(line):
        print(line, flush=True)

    run = runner.Run(store, start, stamp, seconds_left, say, options.time_all)
    try:
        later = run.run(todo)
    except runner.LostError as error:
        print(f'error: {error}; the same command continues', file=sys.stderr)
        return 1
    return _summary(chosen, store, later)


def _summary(chosen, store, later):
    """Prints what became of the cases; returns the exit status."""
    statuses = {case.name: store.status(case.name) or 'not done' for case in chosen}
    counts = {}
    for status in statuses.values():
        counts[status] = counts.get(status, 0) + 1
    print(', '.join(f'{number} {status}' for status, number in counts.items()))
    if later:
        print(f'{len(later)} cases are not done; the same command continues')
    bad = [name for name, status in statuses.items() if status in results.BAD]
    if bad:
        print(f'not right: {", ".join(bad)}')
    return int(bool(bad))
