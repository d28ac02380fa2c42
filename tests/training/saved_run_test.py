"""A run is read as it was saved, at any moment of its life, and not changed by reading."""

import dataclasses
import functools
import json
import operator
import os
import shutil

import jax
import numpy as np
import pytest

from moddepth_jax.data.directory import lock_directory
from moddepth_jax.hparams import from_config
from moddepth_jax.training import checkpoint
from moddepth_jax.training.checkpoint import Checkpoints, state_sha256
from moddepth_jax.training.run_dir import OLDER_RUNS, open_workdir
from moddepth_jax.training.saved_run import load_run
from moddepth_jax.training.train_step import init_state

NUM_STEPS = 4
FINGERPRINT = {'corpus_sha256': 'f00d', 'seed': 0}


@pytest.fixture(scope='module')
def hparams(tiny_config):
    changes = {'model.routing.router': 'learned', 'model.routing.capacity_stages': '1:0.5'}
    return from_config(tiny_config(**changes))


@pytest.fixture(scope='module')
def state(hparams):
    """After no step, its thresholds such as training would leave."""
    state = jax.jit(lambda: init_state(hparams, NUM_STEPS))()
    return state.replace(averages=jax.tree.map(lambda leaf: leaf + 0.5, state.averages))


def save(workdir, state, steps):
    metadata = {'num_steps': NUM_STEPS, 'fingerprint': FINGERPRINT}
    with Checkpoints(workdir / 'checkpoints', keep=len(steps)) as checkpoints:
        for step in steps:
            checkpoints.save(step, state.replace(step=jax.numpy.asarray(step)), metadata)


@pytest.fixture(scope='module')
def original(hparams, state, tmp_path_factory):
    """The directory of a run of 4 steps with checkpoints 2 and 4, to be read only."""
    workdir = tmp_path_factory.mktemp('original') / 'run'
    open_workdir(workdir, dataclasses.asdict(hparams))
    save(workdir, state, [2, 4])
    return workdir


@pytest.fixture
def workdir(original, tmp_path):
    """A copy of the original."""
    return shutil.copytree(original, tmp_path / 'run')


def snapshot(folder):
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in [folder, *folder.rglob('*')]
    }


def change_config(workdir, change):
    """Rewrites the stored config by `change`, a function of the nested dict."""
    stored = json.loads((workdir / 'config.json').read_text())
    change(stored['config'])
    (workdir / 'config.json').write_text(json.dumps(stored))


def error_of(workdir):
    before = snapshot(workdir)
    with pytest.raises(ValueError) as caught:
        load_run(workdir)
    assert snapshot(workdir) == before
    assert '\n' not in str(caught.value)
    return str(caught.value)


def test_a_run_is_read_as_it_was_saved(original, hparams, state):
    """Every bit of the newest state, the resolved hyper-parameters, and nothing to note."""
    run = load_run(original)
    expected = state.replace(step=jax.numpy.asarray(4))
    assert state_sha256(run.state) == state_sha256(expected)
    assert jax.tree.structure(run.state) == jax.tree.structure(expected)
    assert (run.hparams, run.step, run.num_steps) == (hparams, 4, NUM_STEPS)
    assert run.fingerprint == FINGERPRINT and run.notes == ()


def test_reading_changes_nothing_and_needs_no_lock(workdir):
    """It can be read while its own process holds the directory."""
    with lock_directory(workdir):
        before = snapshot(workdir)
        assert load_run(workdir).step == 4
        assert snapshot(workdir) == before


def test_a_running_run_is_read_at_its_newest_finished_checkpoint(workdir):
    """An unfinished one is skipped with a reason; a note says how many steps remain."""
    (workdir / 'checkpoints' / '4' / 'manifest.json').unlink()
    run = load_run(workdir)
    assert run.step == int(run.state.step) == 2 and run.num_steps == NUM_STEPS
    skipped, remaining = run.notes
    assert 'checkpoint 4 skipped: unfinished' in skipped
    assert 'checkpoint 2 is the newest: 2 steps of the run remain' in remaining


def test_the_capacity_is_that_of_the_stage(workdir, state):
    """Half a run of two stages is evaluated as it was trained, a finished one as configured."""
    assert load_run(workdir).hparams_of_stage.model.routing.capacity == 0.125
    shutil.rmtree(workdir / 'checkpoints')
    save(workdir, state, [1])
    run = load_run(workdir)
    assert run.hparams_of_stage.model.routing.capacity == 1.0
    assert run.hparams.model.routing.capacity == 0.125


def before_the_manifest(monkeypatch, act):
    read_manifest = checkpoint.read_manifest
    monkeypatch.setattr(checkpoint, 'read_manifest', lambda path: (act(), read_manifest(path))[1])


def after_the_manifest(monkeypatch, act):
    read = Checkpoints._read
    monkeypatch.setattr(Checkpoints, '_read', lambda *args: (act(), read(*args))[1])


@pytest.mark.parametrize('moment', [before_the_manifest, after_the_manifest])
def test_if_a_checkpoint_is_removed_while_it_is_read_the_next_one_is_read(
    workdir, state, monkeypatch, moment
):
    """A running run saves a newer one and removes this one at the worst moment."""
    folder = workdir / 'checkpoints'
    shutil.rmtree(folder / '2')
    save(workdir.parent / 'newer', state, [6])

    def drop():
        if (folder / '4').exists():
            shutil.rmtree(folder / '4')
            (workdir.parent / 'newer' / 'checkpoints' / '6').rename(folder / '6')

    moment(monkeypatch, drop)
    assert load_run(workdir).step == 6 and os.listdir(folder) == ['6']


def test_an_older_run_is_read_with_what_it_has(workdir, state):
    """Later knobs have the old behavior, and are noted; so are averages it lacks."""
    shutil.rmtree(workdir / 'checkpoints')
    save(workdir, state.replace(averages={}), [4])

    def forget(config):
        del config['model']['depth']  # a group that was added later
        for name in OLDER_RUNS:
            *groups, knob = name.split('.')
            if 'depth' not in groups:
                del functools.reduce(operator.getitem, groups, config)[knob]

    change_config(workdir, forget)
    run = load_run(workdir)
    assert run.hparams.model.routing.capacity_stages == '' and run.hparams.report.top_p == 1.0
    assert set(run.state.variables) == {'params'}
    jax.tree.map(np.testing.assert_array_equal, run.state.params, state.params)
    knobs, averages = run.notes
    assert "model.routing.select_per='row'" in knobs and 'threshold' in averages


def test_no_run_and_no_checkpoint_are_one_line(tmp_path, workdir):
    """What is missing is named, and so is the command that makes it."""
    assert 'holds no config.json; must be the directory of a run' in error_of(tmp_path)
    for name in ('2', '4'):
        (workdir / 'checkpoints' / name / 'manifest.json').write_text('{"files"')
    message = error_of(workdir)
    assert 'checkpoint 4 skipped: manifest.json is damaged' in message
    shutil.rmtree(workdir / 'checkpoints')
    message = error_of(workdir)
    assert f'--workdir={workdir}: holds no finished checkpoint; train it first' in message
    assert 'python -m launch.train' in message and f'--workdir={workdir}' in message


def test_a_config_of_another_model_is_refused_by_leaf(workdir):
    """The first leaf of another shape is named with both, whether or not there are averages."""
    change_config(workdir, lambda config: config['model'].update(d_model=64))
    message = error_of(workdir)
    assert 'embedding is float32[257,32] in the checkpoint and float32[257,64]' in message
    assert 'averages' not in message
