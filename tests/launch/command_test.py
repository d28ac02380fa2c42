"""Every command ends with status 0 and its work done, or with one line that says what is wrong."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
BASE = '--config=configs/base.py'

TOY = '''"""A toy command.

Example:
  python -m launch.toy --config=configs/base.py --workdir=runs/base
"""
import logging, os, sys, time
from absl import flags
from absl import logging as absl_logging
from launch import command

CONFIG = command.define_config()
flags.DEFINE_string('workdir', None, 'Directory of the run.')
flags.DEFINE_integer('max_tokens', 8, 'Tokens to write.')
flags.DEFINE_enum('routing', 'top_c', ['top_c', 'dense'], 'Who enters.')
flags.DEFINE_string('act', '', 'What to do.')


def main(argv):
    act = flags.FLAGS.act
    if act == 'bad value':
        raise ValueError('model.num_layers=0:\\n  must be 1 or more')
    if act == 'no file':
        open('/no/such/file')
    if act == 'forbidden':
        raise PermissionError(13, 'Permission denied', '/locked/file')
    if act == 'bug':
        raise RuntimeError('a bug')
    if act == 'status':
        return 3
    if act == 'wait':
        print('waiting', flush=True)
        time.sleep(60)
    if act == 'noise':
        absl_logging.info('quiet')
        absl_logging.warning('quiet')
        logging.getLogger('grain').info('quiet')
        logging.getLogger('moddepth_jax').warning('to be seen')
    model = CONFIG.value.model
    print(command.config_name(), model.num_layers, model.windows, model.use_bias,
          os.environ.get('NPROC'), 'jax' in sys.modules)


if __name__ == '__main__':
    command.run(main)
'''

CONFIGS = {
    'text.py': 'from configs import base\n'
    'def get_config(text):\n'
    '    config = base.get_config()\n'
    '    config.model.num_layers = int(text)\n'
    '    return config\n',
    'refuses.py': 'def get_config():\n'
    '    raise ValueError("flop_budget=-1:\\n must be 0 or more")\n',
    'lacks.py': 'def config():\n    return {}\n',
    'returns.py': 'def get_config():\n    return {"seed": 0}\n',
    'syntax.py': 'def get_config()\n    return 1\n',
    'unreadable.py': 'def get_config():\n    open("/no/such/words")\n',
    'mistyped.py': 'from configs import base\n'
    'def get_config():\n'
    '    config = base.get_config()\n'
    '    config.modle.num_layers = 3\n'
    '    return config\n',
    'buggy.py': 'def get_config():\n    return 1 / 0\n',
    'imports.py': 'import no_such_module\n',
    'ill_typed.py': 'from configs import base\n'
    'def get_config():\n'
    '    config = base.get_config()\n'
    '    config.model.num_layers = "three"\n'
    '    return config\n',
    'unset.py': 'from configs import base\n'
    'from ml_collections import config_dict\n'
    'def get_config():\n'
    '    config = base.get_config()\n'
    '    with config.ignore_type():\n'
    '        config.seed = config_dict.required_placeholder(int)\n'
    '    return config\n',
}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('commands')
    (folder / 'toy.py').write_text(TOY)
    for name, text in CONFIGS.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope='module')
def toy(folder):
    """toy(*arguments, **environment) runs the toy command; {} in an argument is its folder."""

    def run(*arguments, **environment):
        line = [sys.executable, folder / 'toy.py', *(a.format(folder) for a in arguments)]
        env = {**os.environ, 'PYTHONPATH': str(ROOT), **environment}
        return subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)

    return run


@pytest.mark.parametrize(
    ('arguments', 'printed'),
    [
        ([BASE], 'base 6 (0,) False'),
        (['--config', 'configs/base.py', '--config.model.num_layers', '3'], 'base 3 (0,) False'),
        ([BASE, '--config.model.num_layers=3', '--config.model.use_bias'], 'base 3 (0,) True'),
        ([BASE, '--config.model.windows=(8, 0)', '--noconfig.model.use_bias'], 'base 6 (8, 0) F'),
        ([BASE, '--config.model.windows=8', '--config.model.windows=0'], 'base 6 (8, 0) False'),
        (['--config={}/text.py:5', '--workdir', 'somewhere'], 'text 5 (0,) False'),
        (['--config={}/text.py:5', '--config.model.num_layers=7'], 'text 7 (0,) False'),
    ],
)
def test_main_runs_with_overridden_config(toy, arguments, printed):
    """Both forms of each flag reach main, which alone writes; status 0; JAX is not loaded."""
    done = toy(*arguments)
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.startswith(printed) and done.stdout.endswith('False\n')


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        ([], ['--config: missing', 'configs/base.py']),
        ([BASE, '--config.model.experts.n_group=4'], ['experts.n_group=4:', 'group', 'not built']),
        ([BASE, '--config.model.num_layer=3'], ['num_layer=3:', '--config.model.num_layers?']),
        ([BASE, '--config.model.num_layer', '3'], ['num_layer=3:', '--config.model.num_layers?']),
        ([BASE, '--config.modle.d_ff=3'], ['--config.modle.d_ff=3:', '--config.model.d_ff?']),
        ([BASE, '--config.capacity=1'], ['--config.capacity=1:', 'config.model.routing.capacity?']),
        ([BASE, '--noconfig.model.use_bais'], ['use_bais:', '--config.model.use_bias?']),
        ([BASE, '--config.data.zzz=1'], ['config.data.zzz=1:', 'batch_size', 'tokenizer']),
        ([BASE, '--config.zzz=1'], ['config.zzz=1:', 'flop_budget', 'optimizer']),
        ([BASE, '--config.model=1'], ['--config.model=1:', 'group', '--config.model.']),
        ([BASE, '--config.model.num_layers=x'], ['num_layers=x:', 'must be an integer']),
        ([BASE, '--config.model.num_layers=3.5'], ['num_layers=3.5:', 'must be an integer']),
        ([BASE, '--config.optimizer.b1=x'], ['--config.optimizer.b1=x:', 'must be a number']),
        ([BASE, '--config.model.use_bias=2'], ['use_bias=2:', 'must be true or false']),
        ([BASE, '--config.model.use_bias', 'true'], ['true:', '--config.model.use_bias=']),
        ([BASE, '--config.model.windows=(1,'], ['windows=(1,:', "'(256, 0)'"]),
        ([BASE, '--config.model.num_layers'], ['num_layers: missing value', '=VALUE']),
        (['--config.seed=1'], ['--config.seed=1:', '--config=FILE.py']),
        (['--config.seed=1', BASE], ['--config.seed=1:', '--config=FILE.py first']),
        ([BASE, BASE], [f'{BASE}:', 'twice']),
        (['--config=configs/bsae.py'], ['configs/bsae.py:', 'mean configs/base.py?']),
        (['--config=configs/'], ['--config=configs/:', 'no such Python file']),
        (['--config=configs/base.py:4'], ['configs/base.py:4:', 'no text after the colon']),
        (['--config={}/text.py'], ['text.py:', 'FILE.py:TEXT']),
        (['--config={}/text.py:x'], ['text.py:x:', "'x'"]),
        (['--config={}/lacks.py'], ['lacks.py:', 'no get_config()']),
        (['--config={}/returns.py'], ['returns.py:', 'returned dict', 'ConfigDict']),
        (['--config={}/refuses.py'], ['refuses.py:', 'flop_budget=-1: must be 0 or more']),
        (['--config={}/syntax.py'], ['syntax.py:', 'line 1']),
        (['--config={}/mistyped.py'], ['mistyped.py:4: modle: no such knob', 'mean model?']),
        (['--config={}/ill_typed.py'], ['ill_typed.py:4: num_layers=three: must be int, not str']),
        (['--config={}/buggy.py'], ['buggy.py:2: ZeroDivisionError: division by zero']),
        (['--config={}/imports.py'], ['imports.py:1: ', 'no_such_module']),
        (['--config={}/unset.py'], ['unset.py: ', 'required']),
        (['--config={}/unreadable.py'], ['/no/such/words: No such file']),
        ([BASE, '--workdri=x'], ['--workdri=x:', '--workdir?']),
        ([BASE, '--workdri', 'x'], ['--workdri:', '--workdir?']),
        ([BASE, '--model.num_layers=3'], ['--model.num_layers=3:', '--config.model.num_layers?']),
        ([BASE, '--zzz'], ['--zzz:', '--max_tokens, ', '--workdir']),
        ([BASE, '--max_tokens=many'], ['--max_tokens=many:', 'must be an integer']),
        ([BASE, '--routing=top'], ['--routing=top:', 'top_c, dense']),
        ([BASE, 'stray'], ['stray:', '--help']),
        ([BASE, '--flagfile=/no/such/flags'], ['/no/such/flags']),
        ([BASE, '--act=bad value'], ['model.num_layers=0: must be 1 or more']),
        ([BASE, '--act=no file'], ['/no/such/file: No such file']),
        ([BASE, '--act=forbidden'], ['/locked/file: Permission denied']),
        ([BASE, '--print_config', '--config.seed=-1'], ['seed=-1:', 'must lie in [0, 2**32)']),
    ],
    ids=lambda value: ' '.join(value)[:60] or 'nothing',
)
def test_error_is_one_line(toy, arguments, words):
    """What the user got wrong is told in one line, with the value and what would be right."""
    done = toy(*arguments)
    assert (done.returncode, done.stdout) == (2, '')
    assert done.stderr.startswith('error: ') and done.stderr.endswith('\n')
    assert done.stderr.count('\n') == 1, done.stderr
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize(
    ('arguments', 'last'),
    [
        ([BASE, '--act=bug'], 'RuntimeError: a bug'),
        (['--config={}/buggy.py', '--traceback'], 'error: --config='),
        ([BASE, '--act=bad value', '--traceback'], 'error: model.num_layers=0: must be 1 or more'),
    ],
)
def test_bug_keeps_its_traceback(toy, arguments, last):
    """An exception that is nobody's input shows where it arose, as does any with --traceback."""
    done = toy(*arguments)
    assert done.returncode == (2 if last.startswith('error') else 1)
    assert 'Traceback' in done.stderr and done.stderr.splitlines()[-1].startswith(last)


def test_status_of_main_is_kept(toy):
    """An int that main returns is the exit status."""
    assert toy(BASE, '--act=status').returncode == 3


def test_interrupt_is_one_line(folder):
    """Ctrl-C ends a command with status 130 and one line."""
    line = [sys.executable, folder / 'toy.py', BASE, '--act=wait']
    env = {**os.environ, 'PYTHONPATH': str(ROOT)}
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
    # Where the tests themselves ignore SIGINT, as a shell's background jobs do, a child would too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(line, cwd=ROOT, env=env, **pipes) as process:
        signal.signal(signal.SIGINT, before)
        assert process.stdout.readline() == 'waiting\n'
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[1] == 'interrupted\n'
    assert process.returncode == 130


@pytest.mark.parametrize('arguments', [['--help'], ['--act=bug', '-h'], ['--zzz', '--help']])
def test_help_shows_example_and_own_flags(toy, arguments):
    """--help ends with status 0 after the docstring and our flags, without those of libraries."""
    done = toy(*arguments)
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.startswith('A toy command.\n')
    assert 'python -m launch.toy --config=configs/base.py' in done.stdout
    named = [line.split()[0] for line in done.stdout.splitlines() if line.startswith('  --')]
    assert {'--config', '--[no]print_config', '--workdir', '--routing'} <= set(named)
    assert len(named) == 7


def test_print_config_is_the_resolved_config(toy):
    """--print_config writes, as JSON, the knobs after the overrides, and main does not run."""
    done = toy(BASE, '--print_config', '--config.flop_budget=1e12', '--act=bug')
    assert (done.returncode, done.stderr) == (0, '')
    printed = json.loads(done.stdout)
    assert printed['flop_budget'] == 1e12
    assert printed['model']['num_layers'] == 6


@pytest.mark.parametrize(
    ('xla_flags', 'nproc', 'expected'),
    [
        ('', None, 'None'),
        ('=1', None, 'None'),
        ('=4', None, '8'),
        ('=2', None, '4'),
        ('=4', '3', '3'),
    ],
)
def test_fake_devices_get_two_threads_each(toy, xla_flags, nproc, expected):
    """NPROC is twice the number of fake devices before main, unless it was set."""
    if not nproc and 'NPROC' in os.environ:
        pytest.skip('NPROC is set here')
    environment = {'NPROC': nproc} if nproc else {}
    if xla_flags:
        environment['XLA_FLAGS'] = '--xla_force_host_platform_device_count' + xla_flags
    done = toy(BASE, **environment)
    assert done.stdout.split()[-2] == expected


def test_library_logs_are_quiet(toy):
    """Notes and warnings of libraries are dropped; ours are not, nor any with --verbosity=0."""
    assert 'quiet' not in toy(BASE, '--act=noise').stderr
    assert toy(BASE, '--act=noise').stderr.count('to be seen') == 1
    assert toy(BASE, '--act=noise', '--verbosity=0').stderr.count('quiet') == 3
