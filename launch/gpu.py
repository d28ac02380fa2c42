"""All that wants a GPU, in visits of minutes: correctness, times, training steps, runs.

  python -m launch.gpu --list                                    # the cases, and their seconds
  python -m launch.gpu --out=results/gpu/h200 --deadline=540     # as often as it takes
  python -m launch.gpu --out=results/gpu/h200 --cases=right/mosaic_gpu,step/700m
  python -m launch.gpu --out=results/gpu/h200 --report
  python -m launch.gpu --toy --out=/tmp/toy                      # a rehearsal on a CPU

Every case runs in a child process with a time limit and adds one line to OUT/results.jsonl when it
ends. One that crashes, hangs or is wrong costs itself, and the times of a kernel that is wrong. The
same command continues where it stopped, on another machine too if it has the file. docs/gpu.md has
the full procedure, also for a machine without a network.
"""

import os
import pathlib
import signal
import sys
import tempfile
import time

from absl import flags

from launch import cli

BEGIN = time.monotonic()
OUT = flags.DEFINE_string('out', None, 'Directory of the results. Default: results/gpu/GPU.')
CHOSEN = flags.DEFINE_list('cases', [], 'Run only cases whose names contain one of these.')
DEADLINE = flags.DEFINE_float(
    'deadline', None, 'Seconds after which nothing runs any more; no case starts that needs longer.'
)
AGAIN = flags.DEFINE_boolean(
    'again', False, 'Repeat cases whose result is of other code; with --cases: all that are chosen.'
)
LIST = flags.DEFINE_boolean('list', False, 'Print the cases with their seconds and exit.')
REPORT = flags.DEFINE_boolean('report', False, 'Write table.md, plots and claims.json into --out.')
TOY = flags.DEFINE_boolean('toy', False, 'Some cases of each kind at toy size, on the CPU.')
TIME_ALL = flags.DEFINE_boolean(
    'time_all', False, 'Time kernels of which a case was wrong, too, if right at the timed size.'
)
INJECT = flags.DEFINE_list(
    'inject', [], 'crash:CASE, hang:CASE or wrong:CASE, to test that only these cases are lost.'
)
LIMIT = flags.DEFINE_float('limit', None, 'Seconds of each case, in place of its own limit.')
WORKER = flags.DEFINE_boolean('worker', False, 'For internal use: run what standard input names.')


def _environment(toy):
    """Of the children: compiled programs are kept for the next command on this machine."""
    cache = pathlib.Path(tempfile.gettempdir()) / 'moddepth-gpu-cache'
    env = dict(os.environ)
    env.setdefault('JAX_COMPILATION_CACHE_DIR', str(cache))
    env.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.3')
    # The checkout comes first also where another copy is installed.
    paths = [str(pathlib.Path(__file__).parents[1]), env.get('PYTHONPATH')]
    env['PYTHONPATH'] = os.pathsep.join(filter(None, paths))
    if toy:
        return env | {'JAX_PLATFORMS': 'cpu', 'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'}
    env.setdefault('JAX_PLATFORMS', 'cuda,cpu')
    env.setdefault('CUDA_VISIBLE_DEVICES', '0')  # of several, one is measured
    # A candidate of model.attention=auto is tried in a process next to the one that asks.
    env.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', '0.8')
    return env


def _injected():
    """Kind of injection by name of the case."""
    from moddepth_jax.benchmarks.worker import INJECTIONS

    found = {}
    for text in INJECT.value:
        kind, _, name = text.partition(':')
        if kind not in INJECTIONS or not name:
            raise ValueError(f'--inject={text}: must be crash:CASE, hang:CASE or wrong:CASE')
        if kind == 'wrong' and not name.startswith(('right/', 'packed/')):
            raise ValueError(f'--inject={text}: only cases right/... and packed/... can be wrong')
        found[name] = kind
    return found


def _choose(cases):
    """The cases of --cases; all of them without it."""
    names = [case.name for case in cases]
    for text in CHOSEN.value:
        if not any(text in name for name in names):
            raise ValueError(f'--cases={text}: no case has it in its name; --list prints them')
    for name in _injected():
        if name not in names:
            raise ValueError(f'--inject: no case {name}; --list prints them')
    chosen = CHOSEN.value or ['']
    return [case for case in cases if any(text in case.name for text in chosen)]


def _worker_command():
    arguments = [sys.executable, '-m', 'launch.gpu', '--worker']
    arguments += ['--toy'] if TOY.value else []
    return [*arguments, f'--inject={",".join(INJECT.value)}']


def _work(cases):
    from moddepth_jax.benchmarks.worker import serve

    serve({case.name: case for case in cases}, not TOY.value, _injected())


def _probe(env):
    """The machine, and what JAX said of it; None: no GPU, which has been said."""
    from moddepth_jax.benchmarks import machine

    found, error = machine.probe(env)
    wanted = 'cpu' if TOY.value else 'gpu'
    if found.get('platform') != wanted:
        why = error or 'JAX does not start' if TOY.value else machine.why_no_gpu(env, error)
        print(f'error: no {wanted.upper()}: {why}', file=sys.stderr)
        return None
    if missing := machine.missing_modules():
        what = 'cases that need them are skipped; docs/gpu.md says how to carry wheels'
        print(f'missing: {", ".join(missing)}: {what}', flush=True)
    return found | {'versions': machine.versions()}


def _directory(machine):
    name = 'toy' if TOY.value else machine['device'].replace('NVIDIA', '').strip().replace(' ', '_')
    out = pathlib.Path(OUT.value or pathlib.Path('results/gpu') / name.lower())
    out.mkdir(parents=True, exist_ok=True)
    return out.absolute()


def _run(cases):
    from moddepth_jax.benchmarks import measurements, runner
    from moddepth_jax.benchmarks import results as store

    env = _environment(TOY.value)
    machine = _probe(env)
    if machine is None:
        return 1
    out, code = _directory(machine), store.code_version()
    results = store.Results(out / store.FILE)
    stamp = {key: machine[key] for key in ('device', 'capability', 'versions')}
    stamp |= {'driver': machine['platform_version'], 'toy': TOY.value, **code}
    todo, lines = runner.pending(cases, results, code, AGAIN.value, bool(CHOSEN.value))
    for line in lines:
        print(line, flush=True)
    if not TOY.value:
        measurements.restore(results.latest.values())
    if LIMIT.value:
        todo = [case._replace(limit=LIMIT.value) for case in todo]

    def seconds_left():
        return (DEADLINE.value or 1e9) - (time.monotonic() - BEGIN)

    def start(group):
        del group
        return runner.Child(_worker_command(), env, out / 'log.txt')

    def say(line):
        print(line, flush=True)

    run = runner.Run(results, start, stamp, seconds_left, say, TIME_ALL.value)
    try:
        later = run.run(todo)
    except runner.LostError as error:
        print(f'error: {error}; the same command continues', file=sys.stderr)
        return 1
    return _summary(cases, results, later)


def _summary(cases, results, later):
    """Prints what became of the cases; the exit status."""
    from moddepth_jax.benchmarks.results import BAD

    found = [(case.name, results.status(case.name)) for case in cases]
    counts = {}
    for _, status in found:
        counts[status or 'not done'] = counts.get(status or 'not done', 0) + 1
    print(', '.join(f'{number} {status}' for status, number in counts.items()))
    if later:
        print(f'{len(later)} cases are not done; the same command continues')
    bad = [name for name, status in found if status in BAD]
    if bad:
        print(f'not right: {", ".join(bad)}')
    return int(bool(bad))


def _report():
    if OUT.value is None:
        raise ValueError('--report: needs --out=DIR, the directory of results.jsonl')
    from moddepth_jax.benchmarks import report

    for path in report.write(pathlib.Path(OUT.value)):
        print(path)


def _print_list(cases):
    for case in cases:
        print(f'{case.name:55} {case.expected:5.0f} s, at most {case.limit:.0f} s')
    total = sum(case.expected for case in cases)
    print(f'{len(cases)} cases, {total / 60:.0f} minutes expected without the starts of processes')


def main(_):
    if REPORT.value:
        return _report()
    # Missing packages must not keep kernels from being tested: their cases need JAX alone.
    from moddepth_jax.benchmarks import gpu_cases

    cases = gpu_cases.cases(TOY.value)
    if WORKER.value:
        return _work(cases)
    cases = _choose(cases)
    if LIST.value:
        return _print_list(cases)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # children end with this process
    return _run(cases)


if __name__ == '__main__':
    cli.run(main)
