"""Parses command lines of launch.* by their own flags, each in a fork: no command is carried out.

stdin: a JSON list of lists of words, each [NAME, ARGUMENT, ...] of `python -m launch.NAME`. stdout:
a JSON list of what is wrong with each, or ''. A config is resolved and checked too.
"""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import runpy
import sys
import tempfile

from absl import flags

from launch import (
    cli,
    config_file,  # noqa: F401 imported once, before the forks
)
from moddepth_jax import hparams


def parse(words):
    """Parses the words as their command would; raises or exits where it would not take them."""
    name, *arguments = words
    sys.argv = [f'launch/{name}.py', *arguments]

    def check(main, argv):
        del main, argv
        if 'config' in flags.FLAGS and flags.FLAGS['config'].value is not None:
            with cli._errors_in_one_line():
                hparams.from_config(flags.FLAGS['config'].value)

    cli._call = check
    runpy.run_module(f'launch.{name}', run_name='__main__')


def fault(words):
    """'' where the words are taken, else the last line of what was said."""
    with tempfile.TemporaryFile('w+') as said:
        child = os.fork()
        if child == 0:
            sys.stderr = said
            status = 1
            with contextlib.redirect_stdout(io.StringIO()):
                try:
                    parse(words)
                    status = 0
                except SystemExit as exit:
                    status = 1 if exit.code else 0
                except BaseException as error:
                    print(type(error).__name__, error, file=said)
            said.flush()
            os._exit(status)
        _, status = os.waitpid(child, 0)
        said.seek(0)
        lines = said.read().strip().splitlines() or ['failed without a word']
    return lines[-1] if status else ''


def make_runs(folders):
    """Directories of runs with a config.json that commands name."""
    from configs import tiny
    from moddepth_jax.training import run_dir

    config = dataclasses.asdict(hparams.from_config(tiny.get_config()))
    for folder in folders:
        run_dir._write_first(pathlib.Path(folder), config)


if __name__ == '__main__':
    asked = json.load(sys.stdin)
    named = {word.removeprefix('--config=') for words in asked for word in words}
    make_runs({os.path.dirname(name) for name in named if name.endswith('/config.json')})
    print(json.dumps([fault(words) for words in asked]))
