"""Runs a benchmark. Ratios of times are of interleaved rounds.

  python -m launch.bench step
  python -m launch.bench step --variants=dense,mod,moda,mod_moda --size=124m --dtype=bfloat16
  python -m launch.bench runs \\
      --workdirs=runs/pretrained,runs/routers_only,runs/tuned_all,runs/dropped
  python -m launch.bench decode --batches=1,8,16,64 --kv_heads=8,2
  python -m launch.bench prompts --length=4096 --chunk=512
  python -m launch.bench pytorch --shapes=16x256x6x128x384x257
  python -m launch.bench depth --depths=8,16,32,64
  python -m launch.bench loops --counts=2,3,6
  python -m launch.bench experts --shapes=1024x256x704x64x6,4096x256x512x8x2
  python -m launch.bench attention --lengths=4096 --slots=16,64 --implementations=cudnn,xla
  python -m launch.bench authors
  python -m launch.bench paper --kv_heads=8 --widths=64,128
  python -m launch.bench scoring --size=6x128 --repeats=11

Each benchmark is a function in moddepth_jax/benchmarks; registry.py lists them.
"""

import inspect
import sys
import typing

from absl import flags

from launch import cli
from moddepth_jax.benchmarks.registry import MODULES, benchmarks, flag_texts
from moddepth_jax.hparams.checks import one_of
from moddepth_jax.training.tables import print_table

JSON = flags.DEFINE_string('json', None, 'File for the results; - for stdout.')
ZERO_ALLOWED = ('slots', 'unrolled_up_to')
OWNERS = {}  # names of the benchmarks that have a flag, by flag


def _define_flags():
    for name, benchmark in benchmarks().items():
        for flag in inspect.signature(benchmark).parameters:
            OWNERS.setdefault(flag, []).append(name)
    for flag, names in OWNERS.items():
        flags.DEFINE_string(flag, None, f'Of {", ".join(names)}.')


def _describe(name):
    """The lines of --help on a benchmark and its flags."""
    benchmark, rows = benchmarks()[name], {}
    for flag, text in flag_texts(benchmark).items():
        default = inspect.signature(benchmark).parameters[flag].default
        default = ','.join(map(str, default)) if isinstance(default, tuple) else default
        rows[f'--{flag}'] = text + (f' Default: {default}.' if default is not None else '')
    return ['', f'{name}: {inspect.getdoc(benchmark).splitlines()[0]}', *cli.columns(rows)]


def _parse(flag, text, annotation):
    """Convert the text of a flag to the type that the benchmark declares."""
    kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
    kind = kinds[0] if type(None) in typing.get_args(annotation) else annotation  # T of T | None
    if typing.get_origin(kind) is typing.Literal:
        one_of(f'--{flag}', text, typing.get_args(kind))
        return text
    words, least = text.split(','), 0 if flag in ZERO_ALLOWED else 1
    if kind in (int, list[int]):
        valid = all(word.isdecimal() and int(word) >= least for word in words)
        if not valid or (kind is int and len(words) > 1):
            what, example = ('one number', '') if kind is int else ('numbers', ', such as 8,2')
            right = f'{what} of {least} or more{example}'
            raise ValueError(f'--{flag}={text}: must be {right}')
        words = [int(word) for word in words]
    return words if typing.get_origin(kind) is list else text if kind is str else words[0]


def main(argv):
    if len(argv) != 2 or argv[1] not in MODULES:
        given = ' '.join(argv[1:]) or 'no benchmark'
        raise ValueError(f'{given}: must be one of {", ".join(MODULES)}')

    from moddepth_jax.benchmarks.timing import DeviceLostError

    name, arguments = argv[1], {}
    benchmark = benchmarks()[name]
    parameters = inspect.signature(benchmark).parameters
    for flag, owners in OWNERS.items():
        if flags.FLAGS[flag].value is None:
            continue
        if name not in owners:
            right = f'only {", ".join(owners)} {"has" if len(owners) == 1 else "have"} it'
            raise ValueError(f'--{flag}: {name} has no such flag; {right}')
        arguments[flag] = _parse(flag, flags.FLAGS[flag].value, parameters[flag].annotation)
    results, width, status = [], None if sys.stdout.isatty() else 160, 0
    with cli.open_json(JSON.value) as file:
        try:
            for result, tables in benchmark(**arguments):
                results.append(result)
                if file:
                    cli.write_json(results, file)
                for table in tables if JSON.value != '-' else ():
                    print_table(table, width)
        except DeviceLostError as error:
            print(f'error: {error}; this process cannot use the device any more', file=sys.stderr)
            status = 1
    if JSON.value == '-':
        cli.write_json(results, None)
    return status


if __name__ == '__main__':
    lines = [f'NAME, one of {", ".join(MODULES)}; NAME --help only describes that benchmark']
    named = set(sys.argv) & set(MODULES)
    if named or any(word.startswith(('-h', '--h', '-?')) for word in sys.argv):
        _define_flags()
        for name in named or MODULES:
            lines += _describe(name)
    else:  # fails without importing JAX, which the flags need
        sys.argv[1:] = [word for word in sys.argv[1:] if not word.startswith('-')]
    cli.run(main, '\n'.join(lines), described=OWNERS)
