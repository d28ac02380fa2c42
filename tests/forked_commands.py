"""Runs command lines in forks of a process that has imported their common modules.

A command that starts alone takes seconds to import JAX; a fork takes a tenth of a second. The
process goes on for later calls with the same environment.
"""

import atexit
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
    environment.pop('PYTEST_CURRENT_TEST', None)
    # Often another one, and not read by these imports.
    cache = environment.pop('XDG_CACHE_HOME', None)
    how = {'parse_only': parse_only, 'at_a_time': at_a_time}
    asked = json.dumps({'lines': lines, 'folder': str(folder), 'cache': cache, 'how': how})
    # The configs of a folder are its own: they may not be those imported from another one.
    start = folder if (pathlib.Path(folder) / 'configs').exists() else ROOT
    key = str(start), tuple(preload), tuple(sorted(environment.items()))
    server = _server(*key)
    try:
        print(asked, file=server.stdin, flush=True)
        answer = server.stdout.readline()
        assert answer, 'the process that forks has ended; its error is on stderr'
    except BaseException:  # a late answer may not become that of the next call
        server.kill()
        server.communicate()
        raise
    _servers[key] = server
    return [Finished(*found) for found in json.loads(answer)]


_servers = {}  # the last one used is the last


@atexit.register
def _end_servers(but=0):
    """End the processes that were not used last; they end with their input."""
    while len(_servers) > but:
        _servers.pop(next(iter(_servers))).communicate()


def _server(folder, preload, environment):
    """Return a process that forks, with its pipes: one of the last two, or a new one."""
    key = folder, preload, environment
    if (server := _servers.pop(key, None)) is None or server.poll() is not None:
        _end_servers(but=1)
        command = [sys.executable, '-W', 'ignore', '-m', 'tests.forked_commands', *preload]
        how = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE, 'text': True}
        server = subprocess.Popen(command, env=dict(environment), cwd=folder, **how)
    return server


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
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.freeze()  # or each fork would copy what it collects
    for request in sys.stdin:
        asked = json.loads(request)
        os.chdir(asked['folder'])
        if asked['cache'] is not None:
            os.environ['XDG_CACHE_HOME'] = asked['cache']
        else:
            os.environ.pop('XDG_CACHE_HOME', None)
        print(json.dumps(_run_all(asked['lines'], **asked['how'])), flush=True)
