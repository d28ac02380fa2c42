"""What a run refuses: a second run in its workdir, and resuming with another corpus."""

import dataclasses
import pathlib
import shutil

import pytest

from moddepth_jax.data.directory import lock_directory
from moddepth_jax.data.pipeline import Dataset
from moddepth_jax.training import loop

pytestmark = pytest.mark.usefixtures('compiled_once')


def tree(folder):
    """Every path below except the lock, with its bytes and the time of its last change."""
    return {
        path: (path.read_bytes(), path.stat().st_mtime_ns) if path.is_file() else None
        for path in folder.rglob('*')
        if path.name != 'lock'
    }


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


def test_a_changed_corpus_is_refused(stopped, tally):
    hparams, workdir = stopped
    path = pathlib.Path(hparams.data.source).parent / '3.txt'
    whole = path.read_text()
    path.write_text(whole.replace('be', 'bee', 1))
    try:
        refused(hparams, workdir, 'corpus_sha256')
    finally:
        path.write_text(whole)
    tally('refused on resume', 'corpus')


def test_a_second_run_in_a_workdir_is_refused(stopped):
    hparams, workdir = stopped
    with lock_directory(workdir):
        refused(hparams, workdir, f'--workdir={workdir}: in use by process ')
