"""A run trains to its last step once, writes all promised files, and resumes where it stopped."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.data.pipeline import Dataset, make_dataset
from moddepth_jax.data.tokenizers.tokenizer import ByteTokenizer
from moddepth_jax.hparams import from_config
from moddepth_jax.hparams.registry import ROUTERS
from moddepth_jax.model.flops import train_step_flops
from moddepth_jax.training import loop, trainer
from moddepth_jax.training.checkpoint import state_sha256
from moddepth_jax.training.evaluate import evaluate_causal
from moddepth_jax.training.metrics import read_metrics
from moddepth_jax.training.plan import loops_at, run_flops
from moddepth_jax.training.run_dir import read_finished
from moddepth_jax.training.saved_run import load_run
from moddepth_jax.training.summary import describe
from tests.data.prepared_text import prepare, refusal, write_texts
from tests.faults.runs import TIMES, rows_of
from tests.training.conftest import NUM_STEPS

ROUTING = {'selected_fraction', 'precision', 'recall'}
STAGED = {
    'model.routing.router': 'learned',
    'model.routing.capacity': 0.25,
    'model.routing.capacity_stages': '1:0.4',
    'model.routing.train_rule': 'threshold',
    'model.routing.threshold_warmup': 0.4,
}
LOOPED = {'model.looped_layers': 'all', 'model.loops': 2, 'training.loops': (1, 3), 'seed': 2}
DROPPING = {'choice': 'token', 'num_noop': 2, 'row_capacity': 4}
pytestmark = pytest.mark.usefixtures('compiled_once')


def changed(hparams, group, **knobs):
    group_of = dataclasses.replace(getattr(hparams, group), **knobs)
    return dataclasses.replace(hparams, **{group: group_of})


def test_summary_has_every_promised_field(finished, run_hparams):
    summary = json.loads((finished.workdir / 'summary.json').read_text())
    promised = {
        'final_step', 'train_loss', 'eval', 'parameters', 'flops_per_step', 'flops_per_step_xla',
        'total_flops', 'flop_budget', 'seconds', 'corpus_sha256', 'state_sha256', 'versions',
        'routing',
    }  # fmt: skip
    assert promised <= set(summary)
    assert list(summary['routing']) == ['layer_00']
    assert ROUTING <= set(summary['routing']['layer_00'])
    assert summary['final_step'] == NUM_STEPS
    assert summary['state_sha256'] == state_sha256(finished.state)
    assert summary['flop_budget'] == run_hparams.flop_budget
    assert summary['total_flops'] == NUM_STEPS * summary['flops_per_step']
    assert 0 < run_hparams.flop_budget - summary['total_flops'] < summary['flops_per_step']
    assert summary['corpus_sha256'] == finished.dataset.corpus.sha256
    assert summary['parameters'] == sum(x.size for x in jax.tree.leaves(finished.state.params))
    assert 0 < summary['seconds'] < 600
    dataset = make_dataset(run_hparams.data, run_hparams.seed)
    mesh = finished.state.step.sharding.mesh
    expected = evaluate_causal(finished.state.variables, run_hparams, dataset, mesh, 2)
    assert {'loss', 'loss_top_c', 'routing_gap', 'bits_per_byte'} <= set(summary['eval'])
    assert summary['eval'] == {k: v for k, v in expected.items() if k != 'routing'}
    assert summary['eval']['loss'] < 5.5 and summary['train_loss'] < 5.5


def test_metrics_have_a_row_for_each_logged_step_and_evaluation(finished):
    rows = read_metrics(finished.workdir)
    trained = [row for row in rows if 'loss' in row]
    evaluated = [row for row in rows if 'eval/loss' in row]
    assert len(trained) + len(evaluated) == len(rows)
    assert [row['step'] for row in trained] == [2, 4, 6, 7]
    assert [row['step'] for row in evaluated] == [4, 7]
    names = {'loss', 'learning_rate', 'grad_norm'} | TIMES
    for row in trained:
        assert names | {f'routing/layer_00/{name}' for name in ROUTING} <= set(row)
        assert row['loss'] > 0 and row['tokens_per_second'] > 0
        assert 0 <= row['data_wait_fraction'] <= 1
    for row in evaluated:
        assert {'eval/loss', 'eval/loss_top_c', 'eval/routing_gap', 'eval/bits_per_byte'} < set(row)
        assert {f'eval/routing/layer_00/{name}' for name in ROUTING} < set(row)
    assert trained[-1]['loss'] == finished.summary['train_loss']
    assert evaluated[-1]['eval/loss'] == finished.summary['eval']['loss']


def test_a_run_whose_checkpoints_are_gone_keeps_its_metrics(copied, run_hparams, signals, capsys):
    """Regression: they were dropped first. A converted run is refused: its start is gone too."""
    before = (copied / 'metrics.jsonl').read_bytes()
    shutil.rmtree(copied / 'checkpoints')
    (copied / 'convert.json').write_text('{}')
    words = 'convert.json says that it began from converted parameters, and it has no good'
    assert words in refusal(loop.train, run_hparams, copied)
    assert (copied / 'metrics.jsonl').read_bytes() == before
    (copied / 'convert.json').unlink()
    signals[0] = 'SIGTERM'
    assert loop.train(run_hparams, copied).signal == 'SIGTERM'
    assert 'starts there; kept: 6 rows of metrics in metrics' in capsys.readouterr().out
    assert (copied / 'metrics.jsonl.before').read_bytes() == before


def test_a_run_is_not_extended_after_a_damaged_checkpoint(copied, run_hparams):
    """Regression: it began again at step 0, under the schedule of an extension."""
    for manifest in copied.glob('checkpoints/*/manifest.json'):
        manifest.write_text('{')
    before = {path: path.read_bytes() for path in copied.rglob('*') if path.is_file()}
    longer = dataclasses.replace(run_hparams, flop_budget=2 * run_hparams.flop_budget)
    message = refusal(loop.train, longer, copied)
    assert f'was changed from {NUM_STEPS}, and no checkpoint is good (checkpoint ' in message
    assert before == {path: path.read_bytes() for path in copied.rglob('*') if path.is_file()}


def test_a_run_without_a_teacher_gets_none_on_resume(copied, run_hparams, finished):
    taught = changed(run_hparams, 'training', distill_from=str(finished.workdir))
    assert "training.distill_from is '' in its config.json" in refusal(loop.train, taught, copied)


def test_other_code_of_its_own_router_does_not_replace_a_run(copied, run_hparams, tmp_path):
    """Regression: results and weights of the old code were overwritten without a word."""
    router = run_hparams.model.routing.router_class

    @ROUTERS.register('of_loop_test')
    class _(router):
        pass

    routing = dataclasses.replace(run_hparams.model.routing, router='of_loop_test')
    hparams = changed(run_hparams, 'model', routing=routing)
    stored = json.loads((copied / 'config.json').read_text())
    stored['config']['model']['routing']['router'] = 'of_loop_test'
    (copied / 'config.json').write_text(json.dumps(stored))
    (copied / 'config.py').write_text('score = 1')
    (tmp_path / 'mine.py').write_text('score = -1')
    before = {path: path.read_bytes() for path in copied.rglob('*') if path.is_file()}
    with pytest.raises(ValueError, match="mine.py differs .*router='of_loop_test' anew; --config="):
        loop.train(hparams, copied, source=tmp_path / 'mine.py')
    after = {path: path.read_bytes() for path in copied.rglob('*') if path.is_file()}
    assert after == before


def test_a_finished_run_does_not_train_again(finished, copied, run_hparams, monkeypatch):

    def refuse(*_):
        pytest.fail('a step of a finished run')

    monkeypatch.setattr(trainer, 'train_step', refuse)
    monkeypatch.setattr(Dataset, 'train_batch', refuse)
    # The peak of the process, in which other tests have run since.
    monkeypatch.setattr(
        'moddepth_jax.training.summary.log_lines', lambda: finished.summary['attention']
    )
    assert loop.train(run_hparams, copied).signal is None
    for name in ('summary.json', 'metrics.jsonl'):
        assert (copied / name).read_text() == (finished.workdir / name).read_text()
    again = loop.train(changed(run_hparams, 'training', log_every=1), copied)
    assert again.summary['state_sha256'] == finished.summary['state_sha256']
    (copied / 'metrics.jsonl').unlink()
    (line,) = loop.train(run_hparams, copied).summary['metrics_problems']
    assert 'has 0 of 5 rows up to step 7: rows lost' in line


def test_a_run_stopped_by_signals_ends_like_an_unbroken_one(
    finished, run_hparams, tmp_path, signals
):
    # Regression: the last step was followed by the evaluation, as if there was no signal.
    for stop, name in ((2, 'SIGUSR1'), (4, 'SIGTERM'), (NUM_STEPS, 'SIGTERM')):
        signals[stop - 1] = name
        stopped = loop.train(run_hparams, tmp_path / 'broken')
        assert (stopped.summary, stopped.signal) == (None, name)
        assert stopped.state.step == stop
        assert not (tmp_path / 'broken' / 'summary.json').exists()
    resumed = loop.train(run_hparams, tmp_path / 'broken')
    assert resumed.signal is None
    assert resumed.summary['state_sha256'] == finished.summary['state_sha256']
    assert resumed.summary['eval'] == finished.summary['eval']
    assert rows_of(resumed.workdir) == rows_of(finished.workdir)


KINDS = {
    'muon': {'optimizer.name': 'muon', 'optimizer.schedule': 'wsd'},
    'lion': {'optimizer.name': 'lion', 'optimizer.schedule': 'wsd'},
    'a part by muon': {
        'optimizer.name': 'muon',
        'optimizer.trainable': ('*/router/*', '*/mlp/*'),
        'model.routing.router': 'learned',
    },
    'hyper-connections': {'model.depth.stream': 'hyper_connections'},
    'mhc': {'model.depth.stream': 'hyper_connections', 'model.depth.hyper_form': 'constrained'},
    'attention residual': {'model.depth.stream': 'attention_residual'},
    'mudd': {'model.depth.stream': 'mudd'},
    'value residual': {'model.depth.stream': 'value_residual'},
    'stages': STAGED,
    'drawn loops': LOOPED,
    'experts': {f'model.experts.{name}': value for name, value in DROPPING.items()},
    'experts that choose': {'model.experts.choice': 'expert'},
}


# A fast test of the same: saved_run_test.py, which restores a state with Muon to the bit.
@pytest.mark.slow
@pytest.mark.parametrize('name', KINDS)
def test_every_kind_of_run_resumes_to_the_bit(name, tiny_config, tmp_path, signals):
    hparams = from_config(tiny_config(**KINDS[name]))
    signals[2] = 'SIGTERM'
    assert loop.train(hparams, tmp_path / 'broken').state.step == 3
    resumed = loop.train(hparams, tmp_path / 'broken')
    whole = loop.train(hparams, tmp_path / 'whole')
    assert resumed.summary['state_sha256'] == whole.summary['state_sha256']


def test_an_extended_run_goes_on_under_the_new_schedule(
    finished, copied, run_hparams, tmp_path, signals, capsys
):
    """If it stops in between, it ends with the same bits. The extension is recorded everywhere."""
    budget = run_hparams.flop_budget / (NUM_STEPS + 0.5) * 10.5
    longer = dataclasses.replace(run_hparams, flop_budget=budget)
    broken = shutil.copytree(finished.workdir, tmp_path / 'bro[k]en \\ %?')

    def broken_report(state, dataset):  # a program that cannot be compiled only gives a note
        return {'compiling a picture': lambda: state.parms}

    whole = loop.train(longer, copied, report_programs=broken_report)
    out = capsys.readouterr().out
    assert 'extended from step 7 to 10: the learning rate at step 7 is ' in out
    assert out.index('compiling the train step of ') < out.index('compiled  the train step of ')
    assert "compiling a picture ahead of its use failed: 'TrainState' object has no attr" in out
    signals[8] = 'SIGTERM'
    assert loop.train(longer, broken).state.step == 9
    # Regression: an unfinished extension still counted as finished, with the result of step 7.
    assert 'kept: the summary in summary.json.before' in capsys.readouterr().out
    with pytest.raises(ValueError, match='has not finished'):
        read_finished(broken)
    resumed = loop.train(longer, broken)
    assert 'extended from' not in capsys.readouterr().out.rpartition('resuming')[2]
    assert resumed.summary['state_sha256'] == whole.summary['state_sha256']
    assert rows_of(broken) == rows_of(copied)
    assert resumed.summary['total_flops'] == run_flops(resumed.hparams, 10) <= budget
    stored = json.loads((broken / 'config.json').read_text())
    assert stored['extended'] == resumed.summary['extended'] == [{'step': 7, 'num_steps': 10}]
    assert stored['config']['training']['extended_from'] == NUM_STEPS
    plain = load_run(shutil.copytree(broken, tmp_path / 'plain'))
    assert state_sha256(plain.state) == whole.summary['state_sha256']
    with pytest.raises(ValueError, match='pays for 7 steps: the run in --workdir has 10 steps'):
        loop.train(run_hparams, broken)
    assert json.loads((broken / 'config.json').read_text()) == stored


@pytest.mark.slow
@pytest.mark.parametrize(
    ('stop', 'knobs'),
    [
        (4, {'optimizer.schedule': 'constant', 'optimizer.warmup_fraction': 0.0}),
        (3, {'optimizer.schedule': 'wsd'} | STAGED),
    ],
)
def test_an_extension_before_any_decay_is_the_longer_run(
    stop, knobs, tiny_config, corpus, tmp_path, signals
):
    """Under constant, or wsd in its stable phase, it has the same warm-up, stages and bits."""
    changes = {'data.source': corpus, 'data.held_out_fraction': 0.3, 'evaluation.every': 0} | knobs

    def hparams(num_steps, extended_from=0):
        steps = {'training.num_steps': num_steps, 'training.extended_from': extended_from}
        return from_config(tiny_config(**changes, **steps))

    signals[stop - 1] = 'SIGTERM'
    loop.train(hparams(4), tmp_path / 'run')
    signals.clear()
    extended = loop.train(hparams(7), tmp_path / 'run')
    at_once = loop.train(hparams(7, 0 if stop == 4 else 4), tmp_path / 'at_once')
    assert extended.summary['state_sha256'] == at_once.summary['state_sha256']
    assert extended.summary['total_flops'] == at_once.summary['total_flops']
    assert extended.summary['stages'] == at_once.summary['stages']


def skipping(bad_steps):
    """A fake train step that only counts; its loss is NaN at `bad_steps`."""

    def step(state, batch, stage, loops, teacher):
        del stage
        bad = jnp.isin(state.step, jnp.array(bad_steps))
        in_a_row = jnp.where(bad, state.skipped_in_a_row + 1, 0)
        skipped = state.skipped + bad
        state = state.replace(step=state.step + 1, skipped=skipped, skipped_in_a_row=in_a_row)
        loss = jnp.where(bad, jnp.nan, 2.0) + 0 * jnp.sum(batch['tokens_BT'])
        counts = {'skipped': skipped, 'skipped_in_a_row': in_a_row}
        return state, {'loss': loss, 'learning_rate': 0.1} | counts

    return step


def test_a_run_that_ends_before_its_last_stage_has_the_capacity_of_its_last_step(
    tiny_config, tmp_path, signals, monkeypatch, capsys
):
    """Regression: its report drew and sampled a model of a capacity that it never had.

    Its peak memory is that of all its starts.
    """
    monkeypatch.setattr(trainer, 'train_step', skipping([]))
    monkeypatch.setattr(trainer.devices, 'peak_memory', lambda: (9, 'the host'))

    def hparams(num_steps):
        knobs = STAGED | {'model.routing.capacity_stages': '1:0.75', 'evaluation.every': 0}
        knobs |= {'model.routing.train_rule': 'top_c', 'training.num_steps': num_steps}
        return from_config(tiny_config(**knobs))

    signals[1] = 'SIGTERM'
    assert loop.train(hparams(8), tmp_path / 'run').signal == 'SIGTERM'
    monkeypatch.setattr(trainer.devices, 'peak_memory', lambda: (7, 'the host'))
    capsys.readouterr()
    run = loop.train(hparams(4), tmp_path / 'run')
    assert run.hparams.model.routing.capacity == 1
    assert 'routed (learned), 32 of 32 tokens by top_c' in ' '.join(capsys.readouterr().out.split())
    assert run.summary['peak_memory'] == (9, 'the host')


def test_an_extension_that_cannot_start_leaves_the_run_finished(run_hparams, copied, monkeypatch):
    """Regression: the summary was set aside before W&B failed to start."""

    def fail(*_):
        raise ConnectionError('no W&B')

    names = ('config.json', 'summary.json')
    before = [(copied / name).read_bytes() for name in names]
    monkeypatch.setattr(loop, 'check_wandb', lambda project: None)
    monkeypatch.setattr(loop, 'WandbWriter', fail)
    budget = run_hparams.flop_budget / (NUM_STEPS + 0.5) * 10.5
    with pytest.raises(ConnectionError, match='no W&B'):
        loop.train(dataclasses.replace(run_hparams, flop_budget=budget), copied, wandb='project')
    assert [(copied / name).read_bytes() for name in names] == before


def test_too_many_nonfinite_steps_in_a_row_end_the_run(run_hparams, tmp_path, monkeypatch, capsys):
    hparams = changed(run_hparams, 'training', max_nan_steps=2)
    monkeypatch.setattr(trainer, 'train_step', skipping([1, 3, 4, 5]))
    with pytest.raises(trainer.DivergedError) as caught:
        loop.train(hparams, tmp_path / 'run')
    message = str(caught.value)
    assert 'training.max_nan_steps=2' in message and 'optimizer.learning_rate' in message
    out = capsys.readouterr().out
    assert [f'step {step}: loss' in out for step in range(1, 7)] == [0, 1, 0, 1, 1, 0]
    assert [path.name for path in (tmp_path / 'run' / 'checkpoints').iterdir()] == ['3']
    assert not (tmp_path / 'run' / 'summary.json').exists()
    rows = read_metrics(tmp_path / 'run')
    assert [(row['step'], row['loss']) for row in rows if 'loss' in row] == [(2, None), (4, None)]
    monkeypatch.setattr(trainer, 'train_step', skipping([0, 2, 4]))
    run = loop.train(hparams, tmp_path / 'other')
    assert (run.summary['final_step'], run.summary['skipped_steps']) == (NUM_STEPS, 3)


@pytest.fixture(scope='module')
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp('mixture')
    letters = {'web': b'abcd', 'code': b'()+='}
    for seed, name in enumerate(letters):
        documents = write_texts(folder / 'text' / name, letters[name], seed, number=15)
        prepare(folder / name, documents, ByteTokenizer(), 0.3)
    return folder


@pytest.fixture(scope='module')
def mixture_hparams(tiny_config, texts):
    changes = {
        'model.num_layers': 1,
        'data.source': 'mixture',
        'data.mixture': f'{texts}/web:3,{texts}/code:1',
        'data.tokenizer': 'prepared',
        'data.held_out_fraction': 0.3,
        'training.num_steps': 5,
        'training.checkpoint_every': 2,
        'evaluation.every': 0,
        'evaluation.num_batches': 2,
        'evaluation.final_batches': 3,
    }
    return from_config(tiny_config(**changes))


@pytest.fixture(scope='module')
def mixture_run(mixture_hparams, tmp_path_factory, compiled_once):
    return loop.train(mixture_hparams, tmp_path_factory.mktemp('mixture') / 'run')


def test_each_domain_of_a_mixture_is_reported_and_weighted_by_its_share(
    mixture_run, mixture_hparams, texts
):
    """summary.json and the last row have the loss of each domain, equal to that of its folder."""
    found = json.loads((mixture_run.workdir / 'summary.json').read_text())
    domains = found['domains']
    assert {name: domains[name]['share'] for name in domains} == {'web': 0.75, 'code': 0.25}
    mesh = mixture_run.state.step.sharding.mesh
    for name, batches, rows in (('web', 2, 15), ('code', 1, 5)):
        data = dataclasses.replace(mixture_hparams.data, source=str(texts / name), mixture='')
        alone = make_dataset(data, 0)
        with jax.set_mesh(mesh):
            expected = evaluate_causal(
                mixture_run.state.variables, mixture_hparams, alone, mesh, batches
            )
        assert domains[name]['loss'] == pytest.approx(expected['loss'], rel=1e-6)
        assert domains[name]['epochs'] == rows / alone.num_train_windows
    assert 'domains' not in found['eval']
    last = read_metrics(mixture_run.workdir)[-1]
    assert all(last[f'eval/domains/{name}/loss'] == domains[name]['loss'] for name in domains)
    lines = describe(mixture_hparams, 100, {}, mixture_run.dataset)
    epochs = mixture_run.dataset.domain_epochs(100)
    assert f'mixture   web: 75.0% of the rows, {epochs["web"]:.2f} epochs' in lines


def test_a_mixture_resumes_from_moved_folders(
    mixture_run, mixture_hparams, texts, tmp_path, signals
):
    signals[3] = 'SIGTERM'
    workdir = tmp_path / 'run'
    assert loop.train(mixture_hparams, workdir).signal == 'SIGTERM'
    shutil.copytree(texts / 'web', tmp_path / 'moved')
    before = (workdir / 'config.json').read_text()
    other = changed(mixture_hparams, 'data', mixture=f'{texts}/web:4,{texts}/code:1')
    with pytest.raises(ValueError, match="share_1 was '3/4' and is '4/5'"):
        loop.train(other, workdir)
    assert (workdir / 'config.json').read_text() == before
    mixture = f'{tmp_path}/moved:0.75,{texts}/code:0.25'
    resumed = loop.train(changed(mixture_hparams, 'data', mixture=mixture), workdir)
    assert resumed.summary['state_sha256'] == mixture_run.summary['state_sha256']
    assert resumed.summary['domains']['moved'] == mixture_run.summary['domains']['web']
    assert json.loads((workdir / 'config.json').read_text())['config']['data']['mixture'] == mixture


@pytest.mark.slow
def test_each_step_trains_by_its_stage(tiny_config, corpus, tmp_path):
    """It takes two steps at capacity 1 by top-C, then three at 1/4 by the threshold."""
    changes = STAGED | {
        'data.source': corpus,
        'data.held_out_fraction': 0.3,
        'training.num_steps': 5,
        'evaluation.every': 0,
    }
    hparams = from_config(tiny_config(**changes))
    run = loop.train(hparams, tmp_path / 'run')
    rows = [row for row in read_metrics(run.workdir) if 'loss' in row]
    fractions = [row['routing/layer_01/selected_fraction'] for row in rows]
    assert fractions[:2] == [1.0] * 2
    assert all(fraction <= 12 / 32 for fraction in fractions[2:])
    summary = json.loads((run.workdir / 'summary.json').read_text())
    stages = [(s['first_step'], s['capacity'], s['routing']) for s in summary['stages']]
    assert stages == [(0, 1.0, 'top_c'), (2, 0.25, 'threshold')]
    costs = [stage['flops_per_step'] for stage in summary['stages']]
    assert costs[0] > costs[1] == summary['flops_per_step']
    assert summary['total_flops'] == run_flops(hparams, 5) == 2 * costs[0] + 3 * costs[1]


@pytest.mark.slow
def test_each_step_trains_by_the_loops_that_it_draws(tiny_config, corpus, tmp_path):
    """Evaluation uses the loops of the model, and the FLOPs of each step are counted."""
    changes = LOOPED | {'data.source': corpus, 'data.held_out_fraction': 0.3, 'evaluation.every': 0}
    hparams = from_config(tiny_config(**changes))
    drawn = [loops_at(hparams, 4, step) for step in range(4)]
    assert set(drawn) == {1, 3}
    run = loop.train(hparams, tmp_path / 'run')
    assert run.summary['total_flops'] == sum(train_step_flops(hparams, loops=n) for n in drawn)
    assert run.summary['flops_per_step'] == train_step_flops(hparams, loops=2)
    fixed = from_config(tiny_config(**changes | {'training.loops': ()}))
    other = loop.train(fixed, tmp_path / 'fixed')
    assert other.summary['state_sha256'] != run.summary['state_sha256']


@pytest.mark.slow
@pytest.mark.parametrize(
    'changes',
    [
        KINDS['experts'],
        KINDS['experts that choose'],
        {
            'model.experts.choice': 'token',
            'model.routing.router': 'learned',
            'model.routing.causal_rule': 'dense',
        },
    ],
)
def test_a_run_with_experts_reports_their_loads(tiny_config, tmp_path, changes):
    hparams = from_config(tiny_config(**changes))
    run = loop.train(hparams, tmp_path / 'run')
    for layer in ('layer_00', 'layer_01'):
        values = run.summary['experts'][layer]
        assert np.sum(values['load']) == pytest.approx(1)
        for row in read_metrics(run.workdir):
            prefix = 'eval/' if 'eval/loss' in row else ''
            assert {f'{prefix}experts/{layer}/{name}' for name in values} <= row.keys()
    assert ('routing_gap' in run.summary['eval']) == hparams.model.looks_ahead
