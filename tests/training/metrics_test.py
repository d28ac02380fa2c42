"""Rows and windows are complete, valid JSON, and appear once in a run that was killed and resumed.

TensorBoard and W&B get the same numbers, and their failures never stop a run.
"""

import errno
import json
import math
import os
import sys
import types

import pytest
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import RecordWriter

from moddepth_jax.training.metrics import (
    WANDB_ID_FILE,
    MetricsWriter,
    TensorBoardWriter,
    WandbWriter,
    WindowLog,
    check_wandb,
    keep_earlier,
    read_metrics,
    read_windows,
    tensorboard_name,
)
from tests.data.prepared_text import refusal


def write_steps(workdir, first_step, *steps):
    with MetricsWriter(workdir, first_step) as writer:
        for step in steps:
            writer.write(step, {'loss': float(step)})


def with_tensorboard(workdir, first_step=0):
    return MetricsWriter(workdir, first_step, [TensorBoardWriter(workdir, first_step)])


def read_events(workdir):
    for file in sorted(workdir.glob('**/*.out.tfevents.*')):
        content, offset = file.read_bytes(), 0
        while offset < len(content):
            length = int.from_bytes(content[offset : offset + 8], 'little')
            yield event_pb2.Event.FromString(content[offset + 12 : offset + 12 + length])
            offset += 16 + length


def event_values(workdir):
    return [(event.step, value) for event in read_events(workdir) for value in event.summary.value]


def test_rows_have_the_given_values_and_are_readable_at_once(tmp_path):
    """Numbers and lists keep their order; values that are not finite are null for every reader."""
    values = {'loss': 1.5, 'tokens': 2**40, 'load': [1, 0.5, math.nan], 'grad_norm': -math.inf}
    with with_tensorboard(tmp_path) as writer:
        writer.write(10, values)
        writer.write(10, {'eval/loss': 2.0})
        lines = (tmp_path / 'metrics.jsonl').read_text().splitlines()
    expected = {'step': 10} | values | {'load': [1, 0.5, None], 'grad_norm': None}
    assert [json.loads(line, parse_constant=pytest.fail) for line in lines] == [
        expected,
        {'step': 10, 'eval/loss': 2.0},
    ]
    tags = [value.tag for _, value in event_values(tmp_path)]
    assert tags == ['train/loss', 'train/tokens', 'val/loss']


def test_names_in_tensorboard_sort_by_importance():
    """The training loss is first; training comes before held-out text; each part has a group."""
    names = ['loss', 'z_loss', 'balance_loss', 'experts/layer_01/load', 'grad_norm', 'skipped']
    names += ['routing/layer_01/recall', 'mfu', 'tokens_per_second', 'eval/bits_per_byte']
    names += ['eval/loss', 'eval/domains/a/loss', 'eval/routing/layer_01/recall']
    shown = [tensorboard_name(name) for name in names]
    assert sorted(shown, key=lambda name: name.split('/'))[0] == 'train/loss'
    groups = [name.split('/')[0] for name in shown]
    assert groups[:6] == ['train'] * 2 + ['train_experts'] * 2 + ['train_optimizer'] * 2
    assert groups[6:9] == ['train_routing', 'train_speed', 'train_speed']
    assert groups[9:] == ['val', 'val', 'val_domains', 'val_routing']


@pytest.mark.parametrize('torn', ['', '{"step": 7, "lo', '\x00\x00'])
def test_resume_drops_later_rows_and_a_torn_last_line(tmp_path, torn):
    write_steps(tmp_path, 0, 1, 2, 3, 4, 5, 6)
    with open(tmp_path / 'metrics.jsonl', 'a') as file:
        file.write(torn)
    assert [row['step'] for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    write_steps(tmp_path, 4, 5, 6, 7)
    rows = read_metrics(tmp_path)
    assert [row['step'] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert all(row['loss'] == row['step'] for row in rows)
    assert len((tmp_path / 'metrics.jsonl').read_text().splitlines()) == 7
    assert os.listdir(tmp_path) == ['metrics.jsonl']


BROKEN = [  # lines
    'x',
    '[1]',
    '{"step": "1"}',
    '{"step": Infinity}',
    '{"step": 1, "loss": "low"}',
    '{"step": 1, "loss": [[1]]}',
    '{"step": 1, "loss": 1%s}' % ('0' * 400),
    '{"step": 1, "loss": ' + '[' * 10**5,
]


@pytest.mark.parametrize('line', BROKEN, ids=lambda line: line[:30])
def test_a_broken_line_inside_the_file_is_an_error(tmp_path, line):
    """A kill can truncate only the last line; another broken line is damage and is reported."""
    with pytest.raises(ValueError, match='holds no metrics.jsonl'):
        read_metrics(tmp_path)
    write_steps(tmp_path, 0, 1, 2)
    path = tmp_path / 'metrics.jsonl'
    text = f'{line}\n{path.read_text()}'
    path.write_text(text)
    with pytest.raises(ValueError, match='line 1 is .*must be a JSON object with a step'):
        read_metrics(tmp_path)


DAMAGE = {
    'deleted': (lambda path: path.unlink(), 'has 0 of 3 rows up to step 3: rows lost'),
    'emptied': (lambda path: path.write_text(''), 'has 0 of 3 rows'),
    'cut': (lambda path: path.write_text(path.read_text()[:-5]), 'has 2 of 3 rows'),
    'a digit': (
        lambda path: path.write_text(path.read_text().replace('2.0', '2.5')),
        'were changed',
    ),
    'no JSON': (lambda path: path.write_text('x' + path.read_text()), 'has 2 of 3 rows'),
    'infinite': (
        lambda path: path.write_text(path.read_text().replace('2', '1e999')),
        'has 2 of 3',
    ),
    'deep': (lambda path: path.write_text('[' * 100_000 + '\n' + path.read_text()), 'were changed'),
    'none': (lambda path: None, ''),
}


@pytest.mark.parametrize('kind', DAMAGE)
def test_rows_that_changed_since_the_checkpoint_are_reported(tmp_path, kind):
    """Only rows up to its step count, not an evaluation after it or rows of later steps."""
    with MetricsWriter(tmp_path, 0) as writer:
        for step in (1, 2, 3):
            writer.write(step, {'loss': float(step)})
        saved = writer.digest()
        writer.write(3, {'eval/loss': 4.0})
        writer.write(4, {'loss': 4.0})
    damage, words = DAMAGE[kind]
    if words:
        path = tmp_path / 'metrics.jsonl'
        path.write_text(''.join(path.read_text().splitlines(True)[:3]))
        damage(path)
    with MetricsWriter(tmp_path, 3, saved=saved) as writer:
        assert words in writer.problem and bool(words) == bool(writer.problem)
        saved = writer.digest()
    with MetricsWriter(tmp_path, 3, saved=saved) as writer:
        assert not writer.problem


def test_files_of_a_run_without_checkpoints_are_kept(tmp_path):
    """Rows after step 0 and the summary get a new name each time."""
    (tmp_path / 'metrics.jsonl').write_text('{"step": 0, "eval/loss": 5.0}\n')
    assert keep_earlier(tmp_path, 'summary.json') == ''
    for end in ('', '-2'):
        write_steps(tmp_path, 0, 1, 2)
        rows = (tmp_path / 'metrics.jsonl').read_bytes()
        (tmp_path / 'summary.json').write_text('{}')
        kept = f'2 rows of metrics in metrics.jsonl.before{end} and the summary in '
        assert keep_earlier(tmp_path, 'summary.json') == f'{kept}summary.json.before{end}'
        assert (tmp_path / f'metrics.jsonl.before{end}').read_bytes() == rows
        assert (tmp_path / f'summary.json.before{end}').read_text() == '{}'
    assert not {'metrics.jsonl', 'summary.json'} & set(os.listdir(tmp_path))


def test_remaining_rows_of_a_file_that_changed_during_a_run_are_kept(tmp_path, capsys):
    path = tmp_path / 'metrics.jsonl'
    with MetricsWriter(tmp_path, 0) as writer:
        for step in (1, 2, 3):
            writer.write(step, {'loss': 2.0})
        path.write_text(''.join(path.read_text().splitlines(True)[1:]))
        writer.write(4, {'loss': 2.0})
        assert writer.digest()['rows'] == 3
    assert [row['step'] for row in read_metrics(tmp_path)] == [2, 3, 4]
    assert capsys.readouterr().err.endswith('2 of 3 rows remain\n')


def test_events_mirror_the_numbers_and_purge_on_resume(tmp_path):
    """A list named histogram is one of [0, 1], others are not sent; a resume repeats step 2."""
    shares = [0.25, 0.0, 0.5, 0.25]
    with with_tensorboard(tmp_path) as writer:
        writer.write(1, {'loss': 1.0, 'list': [1.0], 'routing/sigmoid_histogram': shares})
        writer.write(2, {'loss': 2.0, 'routing/sigmoid_histogram': [math.nan] * 4})
    with with_tensorboard(tmp_path, first_step=1) as writer:
        writer.write(2, {'loss': 2.5})
    (_, first), (_, sent), *others = event_values(tmp_path)
    found = [(step, value.tag, value.simple_value) for step, value in others]
    assert (first.tag, first.simple_value) == ('train/loss', 1.0)
    assert found == [(2, 'train/loss', 2.0), (2, 'train/loss', 2.5)]
    (start,) = [event for event in read_events(tmp_path) if event.HasField('session_log')]
    assert (start.step, start.session_log.status) == (2, event_pb2.SessionLog.START)
    buckets = dict(zip(sent.histo.bucket_limit, sent.histo.bucket, strict=True))
    assert [buckets[limit] for limit in (0.25, 0.5, 0.75, 1.0)] == shares
    assert (sent.histo.min, sent.histo.max, sum(buckets.values())) == (0, 1, 1)
    assert sent.histo.sum == pytest.approx(0.25 * 0.125 + 0.5 * 0.625 + 0.25 * 0.875)


class FakeRun:
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
    module = types.ModuleType('wandb')
    module.inits, module.run, module.error = [], FakeRun(), None

    def init(**arguments):
        if module.error is not None:
            raise module.error
        module.inits.append(arguments)
        return module.run

    module.init, module.Settings = init, lambda **settings: settings
    monkeypatch.setitem(sys.modules, 'wandb', module)
    return module


def test_wandb_gets_the_numbers_of_the_rows_under_one_id(fake, tmp_path):
    """Rows have their step, but no lists or non-finite values. A resumed run keeps its id."""
    for first_step in (0, 1):
        sink = WandbWriter(tmp_path, 'project', {'seed': 1})
        with MetricsWriter(tmp_path, first_step, [sink]) as writer:
            writer.write(1, {'loss': 2.5, 'load': [1.0, 0.0], 'bad': float('nan')})
        assert fake.run.rows.pop() == {'step': 1, 'loss': 2.5} and fake.run.finished
    first, second = fake.inits
    assert first['id'] == second['id'] == (tmp_path / WANDB_ID_FILE).read_text().strip() != ''
    assert first['project'] == 'project' and first['config'] == {'seed': 1}
    assert (first['name'], first['dir'], first['resume']) == (tmp_path.name, tmp_path, 'allow')


def test_failures_of_sinks_are_reported_once_and_the_metrics_continue(
    fake, tmp_path, capsys, monkeypatch
):
    """Regression: on a full disk tensorboardX's own writer blocked the train loop forever."""
    written = []

    def write(writer, event):
        written.append(event)
        if len(written) == 3:
            raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(RecordWriter, 'write', write)
    sinks = [TensorBoardWriter(tmp_path, 0), WandbWriter(tmp_path, 'project', {})]
    fake.run.fails = True
    with MetricsWriter(tmp_path, 0, sinks) as writer:
        for step in range(1, 10):
            writer.write(step, {'loss': 1.0})
    assert sorted(capsys.readouterr().err.splitlines()) == [
        'no more metrics for TensorBoard: No space left on device',
        'no more metrics for W&B: no network',
    ]
    assert len(written) == 3
    assert [row['step'] for row in read_metrics(tmp_path)] == list(range(1, 10))


def test_wandb_without_login_or_package_is_one_line(fake, tmp_path, monkeypatch):
    fake.error = RuntimeError('no API key\nconfigured')
    message = refusal(WandbWriter, tmp_path, 'mine', {})
    assert message.startswith('--wandb=mine: no API key configured; ')
    assert 'WANDB_MODE=offline' in message
    monkeypatch.setitem(sys.modules, 'wandb', None)  # importing it raises ImportError
    check_wandb('')
    assert "--wandb=mine: needs pip install 'moddepth-jax[wandb]'" in refusal(check_wandb, 'mine')


def log(workdir, first_step, process, steps):
    with WindowLog(workdir, first_step, process) as windows:
        for step in steps:
            windows.write(step, [10 * step + process])


def test_a_full_disk_names_the_file_of_windows(tmp_path):
    with pytest.raises(OSError, match="No space left on device: '.*windows-0.jsonl'$"):
        with WindowLog(tmp_path, 0, 0) as windows, open('/dev/full', 'w') as full:
            os.dup2(full.fileno(), windows._file.fileno())
            windows.write(1, [3])


@pytest.mark.parametrize('torn', ['{"step": 4, "windows": [4', '{"step": 4, "windows": [41]'])
def test_a_resume_drops_later_windows_of_all_processes(tmp_path, torn):
    log(tmp_path, 0, 1, [1, 2, 3])
    with open(tmp_path / 'windows-1.jsonl', 'a') as file:
        file.write(torn)
    assert list(read_windows(tmp_path)) == [1, 2, 3]
    (tmp_path / 'windows-x.jsonl').write_text('no log')
    log(tmp_path, 2, 0, [3, 4])
    assert read_windows(tmp_path) == {1: [11], 2: [21], 3: [30], 4: [40]}
    rows = (tmp_path / 'windows-1.jsonl').read_text().splitlines()
    assert [json.loads(row)['step'] for row in rows] == [1, 2]
    log(tmp_path, 9, 2, [4])
    assert read_windows(tmp_path)[4] == [40, 42]
