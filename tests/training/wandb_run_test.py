"""Weights & Biases gets the rows of metrics.jsonl; what it does wrong does not end a run."""

import sys
import types

import pytest

from moddepth_jax.training.metrics import (
    ID_FILE,
    MetricsWriter,
    WandbWriter,
    check_wandb,
    read_metrics,
)


class FakeRun:
    """What wandb.init returns, as far as it is used."""

    def __init__(self):
        self.rows, self.finished, self.fails = [], False, False

    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ('*', 'step')

    def log(self, row):
        if self.fails:
            raise RuntimeError('no\nnetwork')
        self.rows.append(row)

    def finish(self):
        self.finished = True


@pytest.fixture
def fake(monkeypatch):
    """A wandb module that records; `inits` holds what each wandb.init was given."""
    module = types.ModuleType('wandb')
    module.inits, module.run, module.error = [], FakeRun(), None

    def init(**given):
        if module.error is not None:
            raise module.error
        module.inits.append(given)
        return module.run

    module.init, module.Settings = init, lambda **settings: settings
    monkeypatch.setitem(sys.modules, 'wandb', module)
    return module


def test_rows_are_those_of_the_metrics(fake, tmp_path):
    """Numbers with their step; lists and what is not finite stay away."""
    run = WandbWriter(tmp_path, 'project', {'seed': 1})
    with MetricsWriter(tmp_path, 0, [run]) as writer:
        writer.write(1, {'loss': 2.5, 'load': [1.0, 0.0], 'bad': float('nan')})
        writer.write(1, {'eval/loss': 3.0})
    assert fake.run.rows == [{'step': 1, 'loss': 2.5}, {'step': 1, 'eval/loss': 3.0}]
    assert fake.run.finished
    (given,) = fake.inits
    assert given['project'] == 'project' and given['config'] == {'seed': 1}
    assert given['name'] == tmp_path.name and given['dir'] == tmp_path


def test_a_resumed_run_goes_on_with_the_same_id(fake, tmp_path):
    for _ in range(2):
        WandbWriter(tmp_path, 'project', {}).close()
    first, second = (given['id'] for given in fake.inits)
    assert first == second == (tmp_path / ID_FILE).read_text().strip() != ''
    assert {given['resume'] for given in fake.inits} == {'allow'}
    WandbWriter(tmp_path.parent, 'project', {}).close()
    assert fake.inits[-1]['id'] != first


def test_a_failure_is_told_once_and_the_metrics_go_on(fake, tmp_path, capsys):
    run = WandbWriter(tmp_path, 'project', {})
    fake.run.fails = True
    with MetricsWriter(tmp_path, 0, [run]) as writer:
        for step in (1, 2):
            writer.write(step, {'loss': 1.0})
    assert capsys.readouterr().err == 'no more metrics for W&B: no network\n'
    assert [row['step'] for row in read_metrics(tmp_path)] == [1, 2]


def test_who_cannot_log_in_is_told_what_to_do(fake, tmp_path):
    fake.error = RuntimeError('no API key\nconfigured')
    with pytest.raises(ValueError) as caught:
        WandbWriter(tmp_path, 'mine', {})
    message = str(caught.value)
    assert message.startswith('--wandb=mine: no API key configured; ') and '\n' not in message
    assert 'WANDB_MODE=offline' in message


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, 'wandb', None)  # importing it raises ImportError
    check_wandb('')
    with pytest.raises(
        ValueError, match=r"--wandb=mine: needs pip install 'moddepth-jax\[wandb\]'"
    ):
        check_wandb('mine')
