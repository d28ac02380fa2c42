"""A run is read as it was saved, at any moment, and reading does not change it."""

import dataclasses
import json
import os
import shutil

import jax
import numpy as np
import pytest
from flax import traverse_util

from launch import cli
from moddepth_jax.data.directory import lock_directory
from moddepth_jax.hparams import from_config
from moddepth_jax.model.transformer import Transformer
from moddepth_jax.training import checkpoint
from moddepth_jax.training.checkpoint import Checkpoints, state_sha256
from moddepth_jax.training.run_dir import open_workdir
from moddepth_jax.training.saved_run import SavedRun, load_run
from moddepth_jax.training.train_step import init_state
from tests.data.prepared_text import refusal
from tests.launch.bad_inputs import snapshot

NUM_STEPS = 4
FINGERPRINT = {'corpus_sha256': 'f00d', 'seed': 0}


@pytest.fixture(scope='module')
def hparams(tiny_config):
    """Hyper-parameters of a run that uses Muon, whose state has the most kinds of leaves."""
    changes = {'model.num_layers': 1, 'model.routing.router': 'learned'}
    changes |= {'model.routing.layers': '0', 'model.routing.capacity_stages': '1:0.5'}
    changes |= {'optimizer.name': 'muon', 'optimizer.trainable': ('*/router/*', '*/mlp/*')}
    return from_config(tiny_config(**changes))


@pytest.fixture(scope='module')
def state(hparams):
    """The state before the first step, with thresholds as after training."""
    state = jax.jit(lambda: init_state(hparams, NUM_STEPS))()
    return state.replace(averages=jax.tree.map(lambda leaf: leaf + 0.5, state.averages))


def save(workdir, state, steps):
    metadata = {'num_steps': NUM_STEPS, 'fingerprint': FINGERPRINT}
    with Checkpoints(workdir / 'checkpoints', keep=len(steps)) as checkpoints:
        for step in steps:
            checkpoints.save(step, state.replace(step=jax.numpy.asarray(step)), metadata)


@pytest.fixture(scope='module')
def original(hparams, state, tmp_path_factory):
    """The directory of a run of 4 steps with checkpoints 2 and 4; tests only read it."""
    workdir = tmp_path_factory.mktemp('original') / 'run'
    open_workdir(workdir, dataclasses.asdict(hparams))
    save(workdir, state, [2, 4])
    return workdir


@pytest.fixture
def workdir(original, tmp_path):
    return shutil.copytree(original, tmp_path / 'run')


def test_a_run_is_read_as_it_was_saved(original, hparams, state):
    run = load_run(original)
    expected = state.replace(step=jax.numpy.asarray(4))
    assert state_sha256(run.state) == state_sha256(expected)
    assert jax.tree.structure(run.state) == jax.tree.structure(expected)
    assert (run.hparams, run.step, run.num_steps) == (hparams, 4, NUM_STEPS)
    assert run.fingerprint == FINGERPRINT and run.notes == ()


def test_a_running_run_is_read_at_its_newest_finished_checkpoint(workdir, capsys):
    """Its process holds the lock. A skipped checkpoint and the remaining steps are printed."""
    (workdir / 'checkpoints' / '4' / 'manifest.json').unlink()
    with lock_directory(workdir):
        before = snapshot(workdir)
        run = cli.load_saved_run(workdir)
        assert snapshot(workdir) == before
    assert run.step == int(run.state.step) == 2 and run.num_steps == NUM_STEPS
    cli._print_notes()
    skipped, remaining = capsys.readouterr().err.splitlines()
    assert 'checkpoint 4 skipped: unfinished' in skipped and run.notes == (skipped,)
    assert remaining == 'checkpoint 2 is the newest: 2 steps of the run remain'


def test_an_earlier_checkpoint_is_read_by_its_step(original):
    run = load_run(original, at=2)
    assert run.step == int(run.state.step) == 2 and not run.notes
    with pytest.raises(ValueError, match='--step=3: no checkpoint of .*; steps kept: 2, 4'):
        load_run(original, at=3)


def test_the_capacity_is_that_of_the_stage(workdir, state):
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
    shutil.rmtree(workdir / 'checkpoints')
    save(workdir, state.replace(averages={}), [4])
    stored = json.loads((workdir / 'config.json').read_text())
    del stored['config']['model']['depth']  # a group that was added later
    (workdir / 'config.json').write_text(json.dumps(stored))
    run = load_run(workdir)
    assert set(run.state.variables) == {'params'}
    jax.tree.map(np.testing.assert_array_equal, run.state.params, state.params)
    knobs, averages = run.notes
    assert 'model.depth.stream=' in knobs and 'threshold' in averages


LOOPED = {'model.looped_layers': 'all', 'model.loops': 2, 'model.routing.router': 'learned'}
LOOPED_FORMS = {
    'blocks': {},
    'threshold': {'model.routing.causal_rule': 'threshold'},
    'recursions': {'model.routing.layers': 'loops'},
    'mudd': {'model.routing.router': 'none', 'model.depth.stream': 'mudd'},
    'own norms': {'model.routing.router': 'none', 'model.loop_norms': 'own'},
    'not looped': {'model.looped_layers': 'none', 'model.loops': 1},
}


def run_of(hparams, state=None):
    """Make the SavedRun of a state, by default without arrays."""
    return SavedRun(hparams, state, NUM_STEPS, NUM_STEPS, FINGERPRINT, ())


def test_a_looped_run_is_read_with_other_loops(tiny_config):
    """It keeps the weights, but not the averages, which belong to loops."""
    hparams = from_config(tiny_config(**LOOPED))
    shapes = jax.eval_shape(lambda: init_state(hparams, NUM_STEPS))
    state = jax.tree.map(lambda leaf: jax.numpy.ones(leaf.shape, leaf.dtype), shapes)
    run = run_of(hparams, state)
    more = run.with_loops(5)
    assert run.with_loops(2) is run
    assert (run.hparams.model.num_blocks, more.hparams.model.num_blocks) == (4, 10)
    assert more.state.params is run.state.params and run.state.averages and not more.state.averages
    apply = jax.jit(Transformer(more.hparams_of_stage).apply, static_argnames='routing')
    logits_BTV, records = apply(more.state.variables, np.ones((1, 32), int), routing='predictor')
    assert np.isfinite(logits_BTV).all() and records.routing.selected_BT.shape[0] == 5


@pytest.mark.parametrize(
    ('form', 'change', 'line'),
    [
        ('threshold', {'loops': 3}, '--loops=3: must be 2: each loop has its own thresholds'),
        ('mudd', {'loops': 3}, '--loops=3: must be 2: the mudd stream has weights for each'),
        ('recursions', {'loops': 3}, '--loops=3: must be 2: each loop has its own router'),
        ('own norms', {'loops': 3}, '--loops=3: must be at most 2: each loop has its own norms'),
        ('not looped', {'loops': 3}, '--loops=3: no block of this run is looped'),
        ('not looped', {'threshold': 0.5}, '--exit_threshold=0.5: no block of this run is looped'),
        ('mudd', {'threshold': 0.5}, "--exit_threshold=0.5: model.depth.stream='mudd': must be"),
        (
            'recursions',
            {'threshold': 0.5},
            "--exit_threshold=0.5: model.routing.router='learned': must be",
        ),
        ('own norms', {'threshold': float('nan')}, '--exit_threshold=nan: must be 0 or more'),
    ],
)
def test_loops_that_do_not_fit_are_refused(form, change, line, tiny_config):
    """That is, if each loop has thresholds or weights, or if no block is looped."""
    run = run_of(from_config(tiny_config(**LOOPED | LOOPED_FORMS[form])))
    method = run.with_loops if 'loops' in change else run.with_exits
    assert refusal(method, **change).startswith(line)


def test_fewer_loops_and_exits_need_no_more_weights(tiny_config):
    hparams = from_config(tiny_config(**LOOPED | LOOPED_FORMS['own norms']))
    run = run_of(hparams, jax.eval_shape(lambda: init_state(hparams, NUM_STEPS)))
    assert run.with_loops(1).hparams.model.loops == 1
    assert run.with_exits(0.5).hparams.model.loop_exit_threshold == 0.5


def test_a_merged_run_has_the_logits_of_its_adapters(tiny_config):
    """To 1e-5, in a model without adapters. A run without adapters is unchanged."""
    knobs = {'model.adapters.rank': 2, 'model.adapters.params': ('*/query/*', '*/mlp/*')}
    knobs |= {'model.num_layers': 1}
    hparams = from_config(tiny_config(**knobs))
    state = jax.jit(lambda: init_state(hparams, NUM_STEPS))()
    params = traverse_util.path_aware_map(
        lambda path, leaf: leaf + 0.1 * (path[-1] == 'b'), state.params
    )
    run = run_of(hparams, state.replace(params=params))
    merged, tokens_BT = run.merged, np.arange(12)[None]
    assert merged.hparams == from_config(tiny_config(**knobs | {'model.adapters.rank': 0}))
    before_BTV, after_BTV = (
        jax.jit(Transformer(of.hparams).apply)(of.state.variables, tokens_BT)[0]
        for of in (run, merged)
    )
    np.testing.assert_allclose(before_BTV, after_BTV, atol=1e-5)
    assert merged.merged is merged
