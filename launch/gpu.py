"""Runs everything that needs a GPU in short visits: checks, timings, training steps, runs.

  python -m launch.gpu --list                                    # the cases, and their seconds
  python -m launch.gpu --out=results/gpu/h200 --deadline=540     # as often as it takes
  python -m launch.gpu --out=results/gpu/h200 --cases=right/mosaic_gpu,step/700m
  python -m launch.gpu --out=results/gpu/h200 --report
  python -m launch.gpu --toy --out=/tmp/toy                      # a rehearsal on a CPU

Every case runs in a child process with a time limit and adds one line to OUT/results.jsonl. A case
that crashes or hangs does not affect others, and wrong kernels are not timed. The same command
continues where it stopped. docs/gpu.md has the procedure, including machines without a network.
"""

import pathlib
import signal
import sys
import time

from absl import flags

from launch import cli

BEGIN = time.monotonic()
OUT = flags.DEFINE_string('out', None, 'Directory of the results. Default: results/gpu/GPU.')
CASES = flags.DEFINE_list('cases', [], 'Run only cases whose names contain one of these.')
DEADLINE = flags.DEFINE_float('deadline', None, 'Seconds after which the command stops.')
AGAIN = flags.DEFINE_boolean('again', False, 'Repeat results of other code, or all --cases.')
LIST = flags.DEFINE_boolean('list', False, 'Print the cases with their seconds and exit.')
REPORT = flags.DEFINE_boolean('report', False, 'Write table.md, claims.json and attention.png.')
TOY = flags.DEFINE_boolean('toy', False, 'Some cases of each kind at toy size, on the CPU.')


def _seconds_left():
    return (DEADLINE.value or 1e9) - (time.monotonic() - BEGIN)


def main(_):
    if REPORT.value:
        if OUT.value is None:
            raise ValueError('--report: needs --out=DIR, the directory of results.jsonl')
        from moddepth_jax.benchmarks import report

        return print(*report.write(pathlib.Path(OUT.value)), sep='\n')
    # Import only what the cases of kernels need, which is JAX: other packages may be missing.
    from moddepth_jax.benchmarks import visit

    chosen = visit.choose_cases(CASES.value, TOY.value)
    if LIST.value:
        return print(visit.list_cases(chosen))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # children end with this process
    return visit.visit(
        chosen,
        _seconds_left,
        out=OUT.value,
        by_name=bool(CASES.value),
        again=AGAIN.value,
        toy=TOY.value,
    )


if __name__ == '__main__':
    cli.run(main)
