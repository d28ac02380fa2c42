"""What all commands share: flags reach main, exit statuses, --help, --print_config, logs."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from configs import tiny
from launch import cli
from moddepth_jax.hparams import from_config
from moddepth_jax.training.run_dir import open_workdir
from tests.forked_commands import ROOT, run_commands
from tests.launch.toy_command import PRELOAD, make_toy

BASE = '--config=configs/base.py'


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('commands')
    make_toy(folder)
    return folder


@pytest.fixture(scope='module')
def toy(folder):
    """toy(*lines, **environment) runs the toy command; {} in an argument is its folder."""

    def run(*lines, **environment):
        toy = str(folder / 'toy.py')
        lines = [[toy, *(argument.format(folder) for argument in line)] for line in lines]
        return run_commands(lines, ROOT, PRELOAD, **environment)

    return run


RUNS = [
    ([BASE], 'base 6 (0,) False None'),
    (['--config', 'configs/base.py', '--config.model.num_layers', '3'], 'base 3 (0,) False'),
    ([BASE, '--config.model.num_layers=3', '--config.model.use_bias'], 'base 3 (0,) True'),
    ([BASE, '--config.model.windows=(8, 0)', '--noconfig.model.use_bias'], 'base 6 (8, 0) F'),
    ([BASE, '--config.model.windows=8', '--config.model.windows=0'], 'base 6 (8, 0) False'),
    (['--config={}/text.py:5', '--workdir', 'somewhere'], 'text 5 (0,) False'),
    (['--config={}/text.py:5', '--config.model.num_layers=7'], 'text 7 (0,) False'),
    (['--config=~/text.py:5'], 'text 5 (0,) False'),
]


def test_flags_and_overrides_reach_main(toy, folder):
    """In both forms; status 0, nothing on stderr, and JAX has not looked for devices yet."""
    found = toy(*(line for line, _ in RUNS), HOME=str(folder))
    for (line, printed), done in zip(RUNS, found, strict=True):
        assert (done.status, done.stderr) == (0, ''), line
        assert done.stdout.startswith(printed) and done.stdout.endswith('False\n'), line


LINES = {
    'status': [BASE, '--act=status'],
    'bug': [BASE, '--act=bug'],
    'buggy config': ['--config={}/buggy.py', '--traceback'],
    'bad value': [BASE, '--act=bad value', '--traceback'],
    'library': [BASE, '--act=library'],
    'no message': [BASE, '--act=no message'],
    'compiled library': [BASE, '--act=compiled library'],
    'own value': [BASE, '--act=bad value'],
    'help': ['--help'],
    'short help': ['--act=bug', '-h'],
    'help first': ['--zzz', '--help'],
    'printed': [BASE, '--print_config', '--config.flop_budget=1e12', '--act=bug'],
    'quiet': [BASE, '--act=noise'],
    'verbose': [BASE, '--act=noise', '--verbosity=0'],
}


@pytest.fixture(scope='module')
def done(toy):
    """What became of each of LINES."""
    return dict(zip(LINES, toy(*LINES.values()), strict=True))


@pytest.mark.parametrize(
    ('name', 'status', 'error'),
    [
        ('bug', 1, 'RuntimeError: a bug'),
        ('buggy config', 2, 'error: --config='),
        ('bad value', 2, 'error: /'),
    ],
)
def test_a_bug_has_its_traceback(done, name, status, error):
    """An exception that is no user's mistake has it, as any has with --traceback."""
    assert done[name].status == status and 'Traceback' in done[name].stderr
    assert done[name].stderr.splitlines()[-1].startswith(error)
    assert (done['status'].status, done['status'].stderr) == (3, '')
    assert done['library'].status == 2
    assert done['library'].stderr.endswith('; --traceback shows where\n')


def test_an_error_in_the_users_own_code_has_its_place(done, folder):
    """Regression: of an error in a router of a config, `error: boom` was all."""
    lines = (folder / 'toy.py').read_text().splitlines()
    for name, code, words in (
        ('own value', 'raise ValueError(', 'model.num_layers=0: must be 1 or more'),
        ('compiled library', 'np.random.default_rng(', 'expected non-negative integer'),
        ('no message', 'one, two =', 'too many values to unpack (expected 2); --traceback shows'),
    ):
        number = next(n for n, line in enumerate(lines, 1) if line.strip().startswith(code))
        place = f'error: {folder}/toy.py, line {number}: {words}'
        assert done[name].status == 2 and done[name].stderr.startswith(place)


@pytest.mark.parametrize(
    ('platform', 'raised'),
    [
        ('cuda', 'assert False'),
        ('gpu', """raise RuntimeError("Unable to initialize backend 'rocm': it is not known")"""),
    ],
)
def test_a_missing_platform_is_one_line(platform, raised, monkeypatch):
    """JAX raises an assertion or another error for it; other assertions are bugs."""
    monkeypatch.setenv('JAX_PLATFORMS', platform)
    for file, words in (('jax/_src/xla_bridge.py', f'JAX_PLATFORMS={platform}: is not'), ('x', '')):
        with pytest.raises((AssertionError, RuntimeError)) as found:
            exec(compile(raised, file, 'exec'))
        assert cli._one_line(found.value).startswith(words)
    assert isinstance(found.value, RuntimeError) or not cli._one_line(found.value)


def test_an_earlier_result_stays_until_there_is_a_new_one(tmp_path):
    """Regression: --json was emptied before the measurement, which may fail or be interrupted."""
    path = tmp_path / 'result.json'
    path.write_text('{"earlier": "longer than the next"}')
    before = path.read_text()
    with cli.open_json(str(path)) as file:
        assert path.read_text() == before
        for report in ({'first': 1}, {}):
            cli.write_json(report, file)
            assert json.loads(path.read_text()) == report
    with cli.open_json('-') as none, cli.open_json(None) as other:
        assert none is other is None


def test_commands_start_as_modules():
    """A file of launch/ says so; without a name, all commands are listed without JAX."""
    refused = [sys.executable, ROOT / 'launch' / 'train.py', BASE]
    done = subprocess.run(refused, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count('\n')) == (2, '', 1)
    assert done.stderr.startswith('error: start commands as modules')
    listed = [sys.executable, '-X', 'importtime', '-m', 'launch']
    done = subprocess.run(listed, capture_output=True, text=True, cwd=ROOT)
    names = [line.split()[0] for line in done.stdout.splitlines()[1:]]
    assert {'train', 'bench', 'local'} <= set(names) and 'cli' not in names
    assert done.returncode == 0 and ' jax' not in done.stderr
    done = subprocess.run(
        [*listed[:1], *listed[3:], 'trian'], capture_output=True, text=True, cwd=ROOT
    )
    right = 'no such command; did you mean python -m launch.train?'
    assert (done.returncode, done.stderr) == (2, f'error: trian: {right}\n')


TINY = 'train --config=configs/tiny.py'
STUDY = 'isoflop --config=configs/study.py --sizes=2x64'
EARLY = {
    f'{TINY} --mesh=data=two': '--mesh=data=two: must be AXIS=SIZE',
    f'{TINY} --profile=20': '--profile=20: must be START:STOP',
    'evaluate --workdir=': '--workdir=: is empty',
    'evaluate --workdir=nope': '--workdir=nope: holds no config.json',
    'evaluate --workdir=~/nope': f'--workdir={os.path.expanduser("~")}/nope: holds no config.json',
    'evaluate --workdir=nope --json=/dev/null': '--json=/dev/null: must be a regular file',
    'generate --workdir=nope': '--workdir=nope: holds no config.json',
    'generate --workdir=nope --top_p=95': 'top_p=95.0: must lie in (0, 1]',
    'generate --workdir=nope --temperature=-1': 'temperature=-1.0: must be 0',
    'inspect --workdir=nope --text=a --out=no': '--workdir=nope: holds no config.json',
    'bench dekode --size=2x64': 'dekode: must be one of step, decode',
    'evaluate --workdir={}/run --routing=topc': "routing='topc': must be top_c, predictor",
    'evaluate --workdir={}/run --routing=aux_loss': 'trained for predictor) has no such rule',
    'generate --workdir={}/run --routing=top_c': "routing='top_c': looks at later tokens",
    'inspect --workdir={}/run --text=a --out=no --step=3': '--step=3: no checkpoint of',
    'lm_eval --workdir={}/run --tasks=moda --step=0': 'steps kept: none',
    'lm_eval --workdir=nope --tasks=moda': '--workdir=nope: holds no config.json',
    'compare': 'RUN: missing',
    'compare nope': 'nope: holds no config.json',
    'compare {}/run': 'run: has not finished (no summary.json); finish it: python -m launch.train',
    f'{STUDY} --budgets=1e9 --workdir=configs': 'but no plan.json, so it is not a study',
    f'{STUDY.replace("study", "tiny")} --budgets=1e9': 'a study needs a config that takes size=',
    f'{STUDY} --budgets=few': '--budgets=few: must be numbers',
    f'{STUDY} --budgets=1e9 --shard=3': '--shard=3: must be I/N',
    'claims --workdir=configs': 'no study.json in it',
    'convert --from_hf=gpt2 --workdir=no': 'hf download ORGANISATION/gpt2',
}


def test_errors_are_found_before_jax_is_imported(tmp_path):
    """The line comes in under a second; a run on several processes checks its folder later."""
    open_workdir(tmp_path / 'run', dataclasses.asdict(from_config(tiny.get_config())))
    few = 'launch.cli', 'launch.config_file'  # these import no JAX, as tests/hparams has it
    lines = [line.format(tmp_path).split() for line in EARLY]
    imports = {'PYTHONPROFILEIMPORTTIME': '1', 'JAX_COORDINATOR_ADDRESS': '', 'SLURM_PROCID': ''}
    for done, line in zip(run_commands(lines, ROOT, few, **imports), EARLY, strict=True):
        (error,) = re.findall('^error: (.*)', done.stderr, re.MULTILINE)
        assert done.status == 2 and EARLY[line] in error, line
        assert not re.search(r'\| +(jax|flax)$', done.stderr, re.MULTILINE), line


def test_interrupt_is_one_line(folder):
    line = [sys.executable, folder / 'toy.py', BASE, '--act=wait']
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True, 'cwd': ROOT}
    # If the tests themselves ignore SIGINT, as background jobs of a shell do, a child would too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(line, env=os.environ | {'PYTHONPATH': str(ROOT)}, **pipes) as process:
        signal.signal(signal.SIGINT, before)
        assert process.stdout.readline() == 'waiting\n'
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[1] == 'interrupted\n'
    assert process.returncode == 130


@pytest.mark.parametrize('name', ['help', 'short help', 'help first'])
def test_help_shows_the_docstring_and_own_flags(done, name):
    """The exit status is 0, and flags of libraries are not shown."""
    status, shown, stderr = done[name]
    assert (status, stderr) == (0, '')
    assert shown.startswith('A toy command.\n')
    assert 'python -m launch.toy --config=configs/base.py' in shown
    named = [line.split()[0] for line in shown.splitlines() if line.startswith('  --')]
    assert {'--config', '--[no]print_config', '--workdir', '--routing'} <= set(named)
    assert len(named) == 8


def test_help_shows_defaults_as_they_are_typed():
    """Lists are joined by commas, an empty list is left out, and absl's added lines are dropped."""
    lines = ['isoflop', '--help'], ['generate', '--help']
    found = run_commands(lines, ROOT, ('launch.cli',))
    study, text = (' '.join(done.stdout.split()) for done in found)  # at any width of the terminal
    assert 'Default: dense,shallow,mod,random.' in study and 'Default: [' not in study
    assert re.search(r'--prompt Start of the text; may be given repeatedly\. --', text)


def test_print_config_is_the_resolved_config(done):
    status, shown, stderr = done['printed']
    assert (status, stderr) == (0, '')
    printed = json.loads(shown)
    assert (printed['flop_budget'], printed['model']['num_layers']) == (1e12, 6)


@pytest.mark.parametrize(('nproc', 'expected'), [('', '8'), ('3', '3')])
def test_fake_devices_get_two_threads_each(toy, nproc, expected, monkeypatch):
    monkeypatch.delenv('NPROC', raising=False)
    environment = {'NPROC': nproc} if nproc else {}
    (done,) = toy([BASE], XLA_FLAGS='--xla_force_host_platform_device_count=4', **environment)
    assert done.stdout.split()[-2] == expected


def test_logs_of_libraries_are_quiet(done):
    """Their notes and warnings are dropped, but not ours; --verbosity=0 shows all of them."""
    quiet, verbose = done['quiet'].stderr, done['verbose'].stderr
    assert 'quiet' not in quiet and quiet.count('to be seen') == 1
    assert verbose.count('quiet') == 3
