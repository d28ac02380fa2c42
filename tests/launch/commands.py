"""Runs one command as its users do, in a process of its own; tests.forked_commands runs many."""

import os
import subprocess
import sys

from tests.forked_commands import ROOT, Finished


def call(name, *arguments, cwd=ROOT, **variables) -> Finished:
    """Runs `python -m launch.NAME ARGUMENTS`, compiled as fast as can be.

    Args:
      name: of the command.
      *arguments: strings or paths.
      cwd: the current directory, also of its cache.
      **variables: of its environment.
    """
    environment = os.environ | {
        'PYTHONPATH': str(ROOT),
        'XLA_FLAGS': '',
        'XDG_CACHE_HOME': f'{cwd}/cache',
        'JAX_DISABLE_MOST_OPTIMIZATIONS': 'true',
    }
    line = [sys.executable, '-m', f'launch.{name}', *map(str, arguments)]
    pipes = {'capture_output': True, 'text': True, 'timeout': 900, 'cwd': cwd}
    done = subprocess.run(line, env=environment | variables, **pipes)
    return Finished(done.returncode, done.stdout, done.stderr)
