"""What a run refuses: NaN steps, a second run in its workdir, resuming as another run."""

import dataclasses
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.data.directory import lock_directory
from moddepth_jax.data.pipeline import Dataset
from moddepth_jax.training import loop
from moddepth_jax.training.checkpoint import Checkpoints, state_sha256
from moddepth_jax.training.manifest import read_manifest, write_manifest
from moddepth_jax.training.train_step import init_state
from tests.faults.conftest import NUM_STEPS

POISON = 299  # a token beyond the tokenizer's, whose row of the embedding is NaN
pytestmark = pytest.mark.usefixtures('compiled_once')


EVERY_STEP = {'training.checkpoint_every': 1, 'training.keep_checkpoints': NUM_STEPS}


def tree(folder):
    """Every path below except the lock, with its bytes and the time of its last change."""
    return {
        path: (path.read_bytes(), path.stat().st_mtime_ns) if path.is_file() else None
        for path in folder.rglob('*')
        if path.name != 'lock'
    }


def trained(state):
    return state_sha256({'params': state.params, 'optimizer_state': state.optimizer_state})


def saved_states(hparams, workdir):
    abstract = jax.eval_shape(lambda: init_state(hparams, NUM_STEPS))
    states = {}
    for path in workdir.glob('checkpoints/*'):
        alone = shutil.copytree(path, workdir.parent / 'alone' / path.name / path.name)
        with Checkpoints(alone.parent, keep=1) as checkpoints:
            state, step, _ = checkpoints.restore(abstract)
        states[step] = state
    return states


def poisoned(monkeypatch, steps):
    """The batches of these steps (from 0) hold a token whose embedding is NaN."""
    train_batch, make_state = Dataset.train_batch, loop.init_state

    def train_batch_with_poison(dataset, step, *rows):
        batch = train_batch(dataset, step, *rows)
        if step in steps:
            batch['tokens_BT'][1, 3] = POISON
        return batch

    def init_state_with_poison(*given):
        state = make_state(*given)
        table_VD = state.params['embedding']
        params = state.params | {'embedding': table_VD.at[POISON].set(jnp.nan)}
        return state.replace(params=params)

    monkeypatch.setattr(Dataset, 'train_batch', train_batch_with_poison)
    monkeypatch.setattr(loop, 'init_state', init_state_with_poison)


def test_a_single_nan_batch_changes_only_the_counters(
    small_run, tmp_path, monkeypatch, capsys, tally
):
    """Its step keeps every bit of parameters and optimizer, is counted and reported."""
    hparams = small_run(**EVERY_STEP)
    poisoned(monkeypatch, {3})
    run = loop.train(hparams, tmp_path / 'run')
    states = saved_states(hparams, tmp_path / 'run')
    same = [trained(states[step]) == trained(states[step + 1]) for step in range(1, NUM_STEPS)]
    assert same == [False, False, True, False, False]
    assert [int(states[step].skipped_in_a_row) for step in (3, 4, 5)] == [0, 1, 0]
    assert run.summary['skipped_steps'] == 1 and np.isfinite(run.summary['train_loss'])
    out = capsys.readouterr().out
    assert re.findall('step (.*): loss or gradient is not finite; skipped', out) == ['4']
    tally('NaN', 'single batch: skipped, nothing changed')


@pytest.fixture(scope='module')
def stopped(small_run, tmp_path_factory, compiled_once):
    """A run that was interrupted after its checkpoint of step 2, and its text."""
    folder = tmp_path_factory.mktemp('stopped')
    hparams = small_run()
    shutil.copytree(pathlib.Path(hparams.data.source).parent, folder / 'text')
    data = dataclasses.replace(hparams.data, source=str(folder / 'text' / '*.txt'))
    hparams = dataclasses.replace(hparams, data=data)
    train_batch = Dataset.train_batch

    def train_batch_and_stop(dataset, step, *rows):
        if step == 3:
            raise KeyboardInterrupt
        return train_batch(dataset, step, *rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dataset, 'train_batch', train_batch_and_stop)
        with pytest.raises(KeyboardInterrupt):
            loop.train(hparams, folder / 'run')
    return hparams, folder / 'run'


def refused(hparams, workdir, *words):
    """`train` refuses in one line with these words, and writes nothing."""
    before = tree(workdir)
    assert any(path.name == 'manifest.json' for path in before)
    with pytest.raises(ValueError) as caught:
        loop.train(hparams, workdir)
    message = str(caught.value)
    assert '\n' not in message and all(word in message for word in words), message
    assert tree(workdir) == before


FINGERPRINT = {
    'corpus_sha256': 'ab' * 32,
    'source': 'elsewhere/*.txt',
    'held_out_fraction': 0.25,
    'tokenizer': 'bpe:4096',
    'sequence_length': 64,
    'batch_size': 2,
    'seed': 5,
}


@pytest.mark.parametrize(
    'field',
    [pytest.param(f, marks=[pytest.mark.faults] * (f != 'tokenizer')) for f in FINGERPRINT],
)
def test_a_checkpoint_of_other_data_is_refused(stopped, tmp_path, field, tally):
    hparams, stopped_workdir = stopped
    workdir = shutil.copytree(stopped_workdir, tmp_path / 'run')
    newest = max(workdir.glob('checkpoints/*'), key=lambda path: int(path.name))
    content = read_manifest(newest)
    assert set(content['metadata']['fingerprint']) == set(FINGERPRINT)
    content['metadata']['fingerprint'][field] = FINGERPRINT[field]
    (newest / 'manifest.json').unlink()
    write_manifest(newest, content)
    refused(hparams, workdir, f'{field} was {FINGERPRINT[field]!r}')
    tally('refused on resume', f'fingerprint: {field}')


@pytest.mark.parametrize('changed', [{}, {'training.log_every': 2, 'evaluation.every': 3}])
def test_a_changed_corpus_is_refused(small_run, stopped, changed, tally):
    hparams, workdir = stopped
    path = pathlib.Path(hparams.data.source).parent / '3.txt'
    whole = path.read_text()
    path.write_text(whole.replace('be', 'bee', 1))
    try:
        other = small_run(**{'data.source': hparams.data.source} | changed)
        refused(other, workdir, 'corpus_sha256')
    finally:
        path.write_text(whole)
    tally('refused on resume', 'corpus')


def test_a_second_run_in_a_workdir_is_refused(stopped):
    hparams, workdir = stopped
    with lock_directory(workdir):
        refused(hparams, workdir, f'--workdir={workdir}: in use by process ')
