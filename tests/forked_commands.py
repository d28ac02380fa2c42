"""Runs many command lines in forks of one process that has imported their common modules.

A command that starts alone takes seconds to import JAX; a fork takes a tenth of a second.
"""

import gc
import importlib
import json
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
from typing import NamedTuple

from moddepth_jax.benchmarks.registry import MODULES

ROOT = pathlib.Path(__file__).parents[1]
# Common imports of commands. They start no JAX backend, which would make forks impossible.
LIBRARY = (
    'launch.cli',
    'launch.config_file',
    'moddepth_jax.analysis.report',
    *MODULES.values(),
    'moddepth_jax.conversion.hugging_face',
    'moddepth_jax.data.preparation.prepare',
    'moddepth_jax.studies.runner',
    'moddepth_jax.training.saved_run',
)
AT_A_TIME = 2


class Finished(NamedTuple):
    """Exit status and output of a command line."""

    status: int
    stdout: str
    stderr: str


def run_commands(
    lines, folder, preload=LIBRARY, parse_only=False, at_a_time=AT_A_TIME, **environment
):
    """Run command lines in `folder`, some at a time; returns a Finished for each.

    `lines` are lists [NAME, ARGUMENT, ...] of `python -m launch.NAME`; or of a script, NAME.py.
    Modules of `preload` are imported once, before the forks. If `parse_only`, main is not called;
    flags are parsed, and a config is resolved and checked.
    """
    environment = {**os.environ, 'PYTHONPATH': str(ROOT), **environment}
    how = {'parse_only': parse_only, 'at_a_time': at_a_time}
    asked = json.dumps({'lines': lines, 'preload': list(preload), 'how': how})
    command = [sys.executable, '-W', 'ignore', '-m', 'tests.forked_commands']
    pipes = {'input': asked, 'capture_output': True, 'text': True}
    done = subprocess.run(command, env=environment, cwd=folder, **pipes)
    assert done.returncode == 0, done.stderr
    return [Finished(*found) for found in json.loads(done.stdout)]


def _only_parse():
    """Make `cli.run` check the config where it would call main."""
    from absl import flags

    from launch import cli
    from moddepth_jax import hparams

    def check(main, argv):
        del main, argv
        if 'config' in flags.FLAGS and flags.FLAGS['config'].value is not None:
            with cli._errors_in_one_line():
                hparams.from_config(flags.FLAGS['config'].value)

    cli._call = check


def _start(words, files, parse_only):
    """Forks a process that runs the command line with output to files; returns its id."""
    child = os.fork()
    if child:
        return child
    for number, file in zip((1, 2), files, strict=True):
        os.dup2(file.fileno(), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    name, *arguments = words
    status = 1
    try:
        sys.path[0] = os.getcwd()  # as `python -m` has it
        if parse_only:
            _only_parse()
        if name.endswith('.py'):
            sys.argv = [name, *arguments]
            runpy.run_path(name, run_name='__main__')
        else:
            sys.argv = [f'launch/{name}.py', *arguments]
            runpy.run_module(f'launch.{name}', run_name='__main__', alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run_all(lines, parse_only, at_a_time):
    waiting, running, found = list(enumerate(lines)), {}, {}
    while waiting or running:
        while waiting and len(running) < at_a_time:
            number, words = waiting.pop(0)
            files = tempfile.TemporaryFile(), tempfile.TemporaryFile()
            running[_start(words, files, parse_only)] = number, files
        child, status = os.wait()
        if child not in running:
            continue
        number, files = running.pop(child)
        texts = []
        for file in files:
            file.seek(0)
            texts.append(file.read().decode('utf-8', 'replace'))
        found[number] = [os.waitstatus_to_exitcode(status), *texts]
    return [found[number] for number in range(len(lines))]


if __name__ == '__main__':
    asked = json.load(sys.stdin)
    for module in asked['preload']:
        importlib.import_module(module)
    gc.freeze()  # or each fork would copy what it collects
    sys.stdout.write(json.dumps(_run_all(asked['lines'], **asked['how'])))
