"""Benchmarks, as ratios measured in one run.

  python -m launch.bench step
  python -m launch.bench step --size=6x256 --lengths=512,2048 --json=step.json
  python -m launch.bench step --variants=dense,mod,moda,both --size=124m --dtype=bfloat16
  python -m launch.bench step --variants=dense,moe,mode
  python -m launch.bench decode --batches=1,8,16,64 --kv_heads=8,2
  python -m launch.bench depth --depths=8,16,32,64
  python -m launch.bench experts --shapes=1024x256x704x64x6,4096x256x512x8x2
  python -m launch.bench attention --json=attention.json --plot=attention.png
  python -m launch.bench attention --lengths=4096 --slots=0,64 --implementations=cudnn,pallas
  python -m launch.bench scoring --size=6x128 --repeats=11

What is compared is timed in turn. The benchmarks are functions of moddepth_jax.benchmarks.registry.
"""

import contextlib
import inspect
import json
import sys
import types
import typing

from absl import flags

from launch import cli
from moddepth_jax.benchmarks.registry import BENCHMARKS, flag_texts
from moddepth_jax.benchmarks.tables import print_table

JSON = flags.DEFINE_string('json', None, 'File for the result, as it grows; - for stdout.')
ZERO_ALLOWED = ('slots', 'unrolled_up_to', 'seconds')


def _define_flags():
    """Defines a flag for each argument of the benchmarks; returns the benchmarks of each flag."""
    owners, texts = {}, {}
    for name, benchmark in BENCHMARKS.items():
        described = flag_texts(benchmark)
        for flag, argument in inspect.signature(benchmark).parameters.items():
            default = argument.default
            default = ','.join(map(str, default)) if isinstance(default, tuple) else default
            text = described[flag] + (f' Default: {default}.' if default is not None else '')
            texts.setdefault(flag, {}).setdefault(text, []).append(name)
            owners.setdefault(flag, []).append(name)
    for flag, by_text in texts.items():
        parts = [f'{", ".join(names)}: {text}' for text, names in by_text.items()]
        flags.DEFINE_string(flag, None, ' '.join(parts))
    return owners


OWNERS = _define_flags()


def _numbers(flag, texts):
    least = 0 if flag in ZERO_ALLOWED else 1
    if not all(text.isdecimal() and int(text) >= least for text in texts):
        given = ','.join(texts)
        raise ValueError(f'--{flag}={given}: must be numbers of {least} or more, such as 8,2')
    return [int(text) for text in texts]


def _parse(flag, text, annotation):
    """The value of a flag, of the type that the benchmark declares for it."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):  # with None, the default
        (annotation,) = (kind for kind in typing.get_args(annotation) if kind is not type(None))
    if choices := typing.get_args(annotation) if annotation not in (list[int], list[str]) else ():
        if text not in choices:
            raise ValueError(f'--{flag}={text}: must be one of {", ".join(choices)}')
        return text
    if annotation is int:
        return _numbers(flag, [text])[0]
    if annotation is str:
        return text
    return _numbers(flag, text.split(',')) if annotation == list[int] else text.split(',')


def _arguments(name):
    """The arguments of a benchmark that were given as flags."""
    for flag, owners in OWNERS.items():
        if flags.FLAGS[flag].present and name not in owners:
            raise ValueError(f'--{flag}: is of {" and ".join(owners)}, {name} has no use for it')
    parameters = inspect.signature(BENCHMARKS[name]).parameters
    given = {flag: flags.FLAGS[flag].value for flag in parameters}
    return {
        flag: _parse(flag, text, parameters[flag].annotation)
        for flag, text in given.items()
        if text is not None
    }


def main(argv):
    if len(argv) != 2 or argv[1] not in BENCHMARKS:
        given = ' '.join(argv[1:]) or 'no benchmark'
        raise ValueError(f'{given}: must be one of {", ".join(BENCHMARKS)}')
    arguments = _arguments(argv[1])
    from moddepth_jax.benchmarks.timing import DeviceLostError

    results, width = [], None if sys.stdout.isatty() else 160
    with contextlib.ExitStack() as stack:
        file = None
        if JSON.value not in (None, '-'):  # opened first: a bad path shows before the timing
            file = stack.enter_context(open(JSON.value, 'w', encoding='utf-8'))
        try:
            for result, tables in BENCHMARKS[argv[1]](**arguments):
                results.append(result)
                if file:  # complete after each result: what ends the process keeps those before it
                    file.seek(0)
                    file.truncate()
                    print(json.dumps(results, indent=2), file=file, flush=True)
                for table in tables if JSON.value != '-' else ():
                    print_table(table, width)
        except DeviceLostError as error:
            print(f'error: {error}; nothing more can run in this process', file=sys.stderr)
            return 1
    if JSON.value == '-':
        print(json.dumps(results, indent=2))
    return 0


if __name__ == '__main__':
    summaries = [f'{name}: {inspect.getdoc(f).splitlines()[0]}' for name, f in BENCHMARKS.items()]
    cli.run(main, f'NAME of the benchmark. {" ".join(summaries)}')
