"""A run trains to its last step once, says so on disk, and goes on where it was stopped."""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import pytest

from moddepth_jax.data.pipeline import Dataset, make_dataset
from moddepth_jax.hparams import from_config
from moddepth_jax.model.flops import train_step_flops
from moddepth_jax.training import loop, trainer
from moddepth_jax.training.checkpoint import state_sha256
from moddepth_jax.training.evaluate import evaluate_causal
from moddepth_jax.training.metrics import read_metrics

NUM_STEPS = 7
TIMES = {'tokens_per_second', 'flops_per_second', 'data_wait_fraction'}
ROUTING = {'selected_fraction', 'precision', 'recall'}
pytestmark = pytest.mark.usefixtures('compiled_once')


@pytest.fixture(scope='module')
def hparams(tiny_config, corpus):
    """A routed run whose budget pays for 7 steps and a half."""
    changes = {
        'model.routing.router': 'learned',
        'model.routing.capacity': 0.25,
        'data.source': corpus,
        'data.held_out_fraction': 0.3,
        'training.num_steps': 0,
        'training.checkpoint_every': 3,
        'training.log_every': 2,
        'evaluation.every': 4,
    }
    cost = train_step_flops(from_config(tiny_config(**changes, flop_budget=1.0)))
    return from_config(tiny_config(**changes, flop_budget=(NUM_STEPS + 0.5) * cost))


@pytest.fixture(scope='module')
def finished(hparams, tmp_path_factory, compiled_once):
    """The unbroken run, to be read only."""
    return loop.train(hparams, tmp_path_factory.mktemp('finished') / 'run')


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of its workdir."""
    return shutil.copytree(finished.workdir, tmp_path / 'copied')


def without_times(rows):
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def snapshot(folder):
    files = [path for path in folder.rglob('*') if path.is_file()]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def one_line(caught, *words):
    message = str(caught.value)
    assert '\n' not in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    ('changes', 'mesh', 'words'),
    [
        ({'training.num_steps': 0, 'flop_budget': 10.0}, '', ['flop_budget=10']),
        ({'model.vocab_size': 100}, '', ['model.vocab_size=100']),
        ({'data.sequence_length': 10**6}, '', ['data.sequence_length=1000000']),
        ({}, 'data=64', ['--mesh=data=64']),
        ({'data.source': 'no/such/*.txt'}, '', ['no/such/*.txt']),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    tiny_config, corpus, tmp_path, changes, mesh, words
):
    """Each is one line that names the field, and the workdir is not even made."""
    hparams = from_config(tiny_config(**{'data.source': corpus} | changes))
    with pytest.raises(ValueError) as caught:
        loop.train(hparams, tmp_path / 'runs' / 'a', mesh)
    one_line(caught, *words)
    assert not (tmp_path / 'runs').exists()


def test_summary_has_every_promised_field(finished, hparams):
    """summary.json holds the state's digest, the honest evaluation and FLOPs within the budget."""
    summary = json.loads((finished.workdir / 'summary.json').read_text())
    promised = {
        'final_step', 'train_loss', 'eval', 'parameters', 'flops_per_step', 'flops_per_step_xla',
        'total_flops', 'flop_budget', 'seconds', 'corpus_sha256', 'state_sha256', 'versions',
        'routing',
    }  # fmt: skip
    assert promised <= set(summary)
    assert {'loss', 'loss_top_c', 'routing_gap', 'bits_per_byte'} <= set(summary['eval'])
    assert list(summary['routing']) == ['layer_01']
    assert ROUTING <= set(summary['routing']['layer_01'])
    assert summary['final_step'] == NUM_STEPS
    assert summary['state_sha256'] == state_sha256(finished.state)
    assert summary['flop_budget'] == hparams.flop_budget
    assert summary['total_flops'] == NUM_STEPS * summary['flops_per_step']
    assert 0 < hparams.flop_budget - summary['total_flops'] < summary['flops_per_step']
    assert summary['corpus_sha256'] == finished.dataset.corpus.sha256
    assert summary['parameters'] == sum(x.size for x in jax.tree.leaves(finished.state.params))
    assert 0 < summary['seconds'] < 600
    dataset = make_dataset(hparams.data, hparams.seed)
    mesh = finished.state.step.sharding.mesh
    expected = evaluate_causal(finished.state.variables, hparams, dataset, mesh, 2)
    assert summary['eval'] == {k: v for k, v in expected.items() if k != 'routing'}
    assert summary['eval']['loss'] < 5.5 and summary['train_loss'] < 5.5


def test_metrics_have_a_row_for_each_logged_step_and_evaluation(finished):
    """Rows fall on every log_every-th step and the last, evaluations on theirs and at the end."""
    rows = read_metrics(finished.workdir)
    trained = [row for row in rows if 'loss' in row]
    evaluated = [row for row in rows if 'eval/loss' in row]
    assert len(trained) + len(evaluated) == len(rows)
    assert [row['step'] for row in trained] == [2, 4, 6, 7]
    assert [row['step'] for row in evaluated] == [4, 7]
    names = {'loss', 'learning_rate', 'grad_norm'} | TIMES
    for row in trained:
        assert names | {f'routing/layer_01/{name}' for name in ROUTING} <= set(row)
        assert row['loss'] > 0 and row['tokens_per_second'] > 0
        assert 0 <= row['data_wait_fraction'] <= 1
    for row in evaluated:
        assert {'eval/loss', 'eval/loss_top_c', 'eval/routing_gap', 'eval/bits_per_byte'} < set(row)
        assert {f'eval/routing/layer_01/{name}' for name in ROUTING} < set(row)
    assert trained[-1]['loss'] == finished.summary['train_loss']
    assert evaluated[-1]['eval/loss'] == finished.summary['eval']['loss']


def test_a_finished_run_does_not_train_again(finished, copied, hparams, monkeypatch):
    """Started again it takes no step, leaves its rows alone, and ends in the same summary."""

    def refuse(*_):
        pytest.fail('a step of a finished run')

    monkeypatch.setattr(trainer, 'train_step', refuse)
    monkeypatch.setattr(Dataset, 'train_batch', refuse)
    assert loop.train(hparams, copied).signal is None
    for name in ('summary.json', 'metrics.jsonl'):
        assert (copied / name).read_text() == (finished.workdir / name).read_text()


@pytest.mark.parametrize(('stops', 'name'), [([4], 'SIGTERM'), ([2, 5], 'SIGUSR1')])
def test_a_run_stopped_by_signals_ends_as_if_it_had_not_been(
    finished, hparams, tmp_path, signals, stops, name
):
    """It stops after the step, saved, and the same call goes on: equal state, equal rows.

    Step 4 has an evaluation, 2 a row and 5 neither: none is lost, none is doubled.
    """
    for stop in stops:
        signals[stop - 1] = name
        stopped = loop.train(hparams, tmp_path / 'broken')
        assert (stopped.summary, stopped.signal) == (None, name)
        assert stopped.state.step == stop
        assert not (tmp_path / 'broken' / 'summary.json').exists()
    resumed = loop.train(hparams, tmp_path / 'broken')
    assert resumed.signal is None
    assert resumed.summary['state_sha256'] == finished.summary['state_sha256']
    assert resumed.summary['eval'] == finished.summary['eval']
    rows = [without_times(read_metrics(run.workdir)) for run in (resumed, finished)]
    assert rows[0] == rows[1]


def test_other_data_are_refused_on_resume(hparams, corpus, tmp_path, signals):
    """A changed corpus is told by its digest in one line, nothing is touched, the old one works."""
    text = shutil.copytree(pathlib.Path(corpus).parent, tmp_path / 'text')
    data = dataclasses.replace(hparams.data, source=str(text / '*.txt'))
    hparams = dataclasses.replace(hparams, data=data)
    signals[3] = 'SIGTERM'
    loop.train(hparams, tmp_path / 'run')
    whole = (text / '3.txt').read_text()
    (text / '3.txt').write_text(whole + '!')
    before = snapshot(tmp_path / 'run')
    with pytest.raises(ValueError) as caught:
        loop.train(hparams, tmp_path / 'run')
    one_line(caught, 'corpus_sha256')
    after = snapshot(tmp_path / 'run')
    touched = {path.name for path in before | after if before.get(path) != after.get(path)}
    assert touched <= {'lock'}
    (text / '3.txt').write_text(whole)
    assert loop.train(hparams, tmp_path / 'run').summary['final_step'] == NUM_STEPS


def test_only_knobs_without_influence_may_change_on_resume(finished, copied, hparams):
    """Another logging interval resumes the run; another learning rate is another run, by name."""
    training = dataclasses.replace(hparams.training, log_every=1)
    again = loop.train(dataclasses.replace(hparams, training=training), copied)
    assert again.summary['state_sha256'] == finished.summary['state_sha256']
    optimizer = dataclasses.replace(hparams.optimizer, learning_rate=0.5)
    with pytest.raises(ValueError) as caught:
        loop.train(dataclasses.replace(hparams, optimizer=optimizer), copied)
    one_line(caught, 'optimizer.learning_rate', '0.003', '0.5')


def test_a_run_without_its_last_checkpoint_is_trained_to_the_same_end(finished, copied, hparams):
    """It resumes from the checkpoint before, and gets the same bits and the same rows."""
    shutil.rmtree(copied / 'checkpoints' / str(NUM_STEPS))
    again = loop.train(hparams, copied)
    assert again.summary['state_sha256'] == finished.summary['state_sha256']
    rows = [without_times(read_metrics(folder)) for folder in (copied, finished.workdir)]
    assert rows[0] == rows[1]


def skipping(bad_steps):
    """A train step that only counts: its loss is NaN at `bad_steps`."""

    def step(state, batch, stage):
        del stage
        bad = jnp.isin(state.step, jnp.array(bad_steps))
        in_a_row = jnp.where(bad, state.skipped_in_a_row + 1, 0)
        skipped = state.skipped + bad
        state = state.replace(step=state.step + 1, skipped=skipped, skipped_in_a_row=in_a_row)
        loss = jnp.where(bad, jnp.nan, 2.0) + 0 * jnp.sum(batch['tokens_BT'])
        return state, {'loss': loss, 'skipped': skipped, 'skipped_in_a_row': in_a_row}

    return step


def test_steps_that_are_not_finite_end_the_run_after_so_many(
    hparams, tmp_path, monkeypatch, capsys
):
    """max_nan_steps of them in a row end it in one line; the checkpoint before them is kept."""
    training = dataclasses.replace(hparams.training, max_nan_steps=2)
    hparams = dataclasses.replace(hparams, training=training)
    monkeypatch.setattr(trainer, 'train_step', skipping([1, 3, 4, 5]))
    with pytest.raises(ValueError) as caught:
        loop.train(hparams, tmp_path / 'run')
    one_line(caught, 'training.max_nan_steps=2', 'optimizer.learning_rate')
    out = capsys.readouterr().out
    assert [f'step {step}: loss' in out for step in range(1, 7)] == [0, 1, 0, 1, 1, 0]
    assert [path.name for path in (tmp_path / 'run' / 'checkpoints').iterdir()] == ['3']
    assert not (tmp_path / 'run' / 'summary.json').exists()
    rows = read_metrics(tmp_path / 'run')
    assert [(row['step'], row['loss']) for row in rows if 'loss' in row] == [(2, None), (4, None)]


def test_a_few_skipped_steps_do_not_end_the_run(hparams, tmp_path, monkeypatch):
    """Below the limit the run finishes and the summary says how many were skipped."""
    training = dataclasses.replace(hparams.training, max_nan_steps=2)
    hparams = dataclasses.replace(hparams, training=training)
    monkeypatch.setattr(trainer, 'train_step', skipping([0, 2, 4]))
    run = loop.train(hparams, tmp_path / 'run')
    assert (run.summary['final_step'], run.summary['skipped_steps']) == (NUM_STEPS, 3)
