"""What is wrong with a start of launch.train is told in one line before anything is written."""

import concurrent.futures
import dataclasses
import os
import pathlib
import subprocess
import sys

import pytest

from configs import tiny
from moddepth_jax.hparams import from_config
from moddepth_jax.training import run_dir

ROOT = pathlib.Path(__file__).parents[2]
TINY = f'--config={ROOT}/configs/tiny.py'
ISOFLOP = f'--config={ROOT}/configs/mod_isoflop.py'
SOURCE = '--config.data.source='

# name: (arguments with {} for the folder, words of the line)
CASES = {
    'typo in a field': (['--config.model.num_layer=3'], ['num_layer', 'num_layers']),
    'typo in a value': (
        ['--config.model.norm_placement=pots'],
        ["model.norm_placement='pots'", "'post'"],
    ),
    'wrong type': (['--config.model.num_layers=many'], ['num_layers=many', 'integer']),
    'heads that do not divide': (
        ['--config.model.num_kv_heads=3'],
        ['model.num_kv_heads=3', 'model.num_heads=2'],
    ),
    'micro-batches that do not divide': (
        ['--config.training.accumulate_steps=3'],
        ['training.accumulate_steps=3', 'data.batch_size=8'],
    ),
    'capacity 0': (['--config.model.routing.capacity=0.0'], ['capacity=0.0', '(0, 1]']),
    'capacity above 1': (['--config.model.routing.capacity=1.01'], ['capacity=1.01', '(0, 1]']),
    'budget of no step': ([f'{ISOFLOP}:budget=1e3'], ['flop_budget=1000', 'step']),
    'budget that is no number': ([f'{ISOFLOP}:budget=lots'], ["budget='lots'"]),
    'glob without a match': ([SOURCE + '{}/text/*.md'], ['/text/*.md', 'no file']),
    'empty folder': ([SOURCE + '{}/nothing/**'], ['/nothing/**', 'no file']),
    'corrupt parquet': ([SOURCE + '{}/text/*.parquet'], ['bad.parquet', 'parquet']),
    'text without a byte': ([SOURCE + '{}/text/empty*.txt'], ['empty*.txt', 'no byte']),
    'text below one window': ([SOURCE + '{}/text/short.txt'], ['data.sequence_length=128']),
    'prompt beyond the context': (
        ['--config.report.prompt=' + 'x' * 64],
        ['65 tokens', 'data.sequence_length=128'],
    ),
    'workdir of another config': (
        ['--config.seed=7', '--workdir={}/taken'],
        ['/taken', 'seed is 0', 'and 7'],
    ),
    'workdir of something else': (['--workdir={}/text'], ['--workdir=', '/text', 'config.json']),
    'workdir below a file': (['--workdir={}/text/short.txt/run'], ['--workdir=', 'directory']),
    'mesh beyond the devices': (['--mesh=data=3'], ['--mesh=data=3', '1 are here']),
}


def make_folder(folder):
    """A directory with bad text, and the workdir of a run that was begun."""
    (folder / 'nothing').mkdir()
    (folder / 'text').mkdir()
    (folder / 'text' / 'empty1.txt').touch()
    (folder / 'text' / 'empty2.txt').touch()
    (folder / 'text' / 'short.txt').write_text('too short')
    (folder / 'text' / 'bad.parquet').write_bytes(b'PAR1 and then nothing of the kind')
    hparams = from_config(tiny.get_config())
    run_dir.open_workdir(folder / 'taken', dataclasses.asdict(hparams))
    (folder / 'taken' / 'metrics.jsonl').write_text('{"step": 1, "loss": 5.5}\n')
    return folder


def snapshot(folder):
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in [folder, *folder.rglob('*')]
    }


def start(folder, arguments):
    """(the finished process, what the folder held before, and after)."""
    make_folder(folder)
    before = snapshot(folder)
    config = [] if arguments[0].startswith('--config=') else [TINY]
    arguments = [argument.format(folder) for argument in config + arguments]
    # Matplotlib keeps its fonts in MPLCONFIGDIR; what we keep ourselves is in XDG_CACHE_HOME.
    caches = {'XDG_CACHE_HOME': f'{folder}/cache', 'MPLCONFIGDIR': f'{folder.parent}/fonts'}
    environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'XLA_FLAGS': '', **caches}
    command = [sys.executable, '-m', 'launch.train', *arguments]
    pipes = {'capture_output': True, 'text': True, 'timeout': 120}
    done = subprocess.run(command, cwd=folder, env=environment, **pipes)
    return done, before, snapshot(folder)


@pytest.fixture(scope='module')
def started(tmp_path_factory):
    """Every case, each in a directory of its own, two at a time."""
    folders = {name: tmp_path_factory.mktemp('start') for name in CASES}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        yield {
            name: pool.submit(start, folders[name], arguments)
            for name, (arguments, _) in CASES.items()
        }


@pytest.mark.parametrize('name', CASES)
def test_bad_input_is_one_line_and_leaves_no_trace(started, name):
    """Status 2, one line on stderr that names the culprit, nothing printed, made or changed."""
    done, before, after = started[name].result()
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith('error: ') and done.stderr.count('\n') == 1, done.stderr
    for word in CASES[name][1]:
        assert word in done.stderr
    assert done.stdout == ''
    assert after == before
