"""Rows are whole, valid JSON, and those of a run that was killed and resumed appear once."""

import json
import math
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from moddepth_jax.training import metrics
from moddepth_jax.training.metrics import TensorBoardWriter

ROOT = pathlib.Path(__file__).parents[2]


def write_steps(workdir, first_step, *steps):
    with metrics.MetricsWriter(workdir, first_step) as writer:
        for step in steps:
            writer.write(step, {'loss': float(step)})


def read_file(file):
    """Every event of a file, in order."""
    content, offset = file.read_bytes(), 0
    while offset < len(content):
        length = int.from_bytes(content[offset : offset + 8], 'little')
        yield event_pb2.Event.FromString(content[offset + 12 : offset + 12 + length])
        offset += 16 + length


def event_values(file):
    """(step, value) of every value of a file, in order."""
    return [(event.step, value) for event in read_file(file) for value in event.summary.value]


def read_events(workdir):
    """Every event of the run, as (session status, step, tag, value), by file and order."""
    events = []
    for file in sorted((workdir / 'tensorboard').iterdir()):
        for event in read_file(file):
            for value in event.summary.value:
                events.append((0, event.step, value.tag, value.simple_value))
            if event.HasField('session_log'):
                events.append((event.session_log.status, event.step, None, None))
    return events


def test_rows_hold_what_was_given(tmp_path):
    """Numbers of Python, NumPy and JAX, strings and lists come back as JSON's kinds, in order."""
    with metrics.MetricsWriter(tmp_path, 0) as writer:
        writer.write(
            np.int64(10),
            {
                'loss': jnp.float32(1.5),
                'routing/layer_1/selected_fraction': np.float64(0.125),
                'tokens': 2**40,
                'device': 'cpu "0"\n',
                'histogram': [1, np.float32(0.5), math.nan],
            },
        )
        writer.write(10, {'eval/loss': 2.0})
    assert metrics.read_metrics(tmp_path) == [
        {
            'step': 10,
            'loss': 1.5,
            'routing/layer_1/selected_fraction': 0.125,
            'tokens': 2**40,
            'device': 'cpu "0"\n',
            'histogram': [1, 0.5, None],
        },
        {'step': 10, 'eval/loss': 2.0},
    ]


@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf, np.float32('nan')])
def test_numbers_that_are_not_finite_are_null(tmp_path, value):
    """The file stays JSON for every reader: strict parsing finds null, not NaN."""
    with metrics.MetricsWriter(tmp_path, 0, [TensorBoardWriter(tmp_path, 0)]) as writer:
        writer.write(1, {'loss': value, 'grad_norm': 3.0})

    def refuse(name):
        pytest.fail(f'{name} is no JSON')

    (line,) = (tmp_path / 'metrics.jsonl').read_text().splitlines()
    row = json.loads(line, parse_constant=refuse)
    assert row == {'step': 1, 'loss': None, 'grad_norm': 3.0}
    assert [tag for _, _, tag, _ in read_events(tmp_path)] == ['grad_norm']


@pytest.mark.parametrize('values', [{'loss': None}, {'loss': np.zeros(2)}, {'step': 3}])
def test_other_values_are_refused_by_name(tmp_path, values):
    """What has no place in a row is refused by its name, and no part of the row is written."""
    with metrics.MetricsWriter(tmp_path, 0) as writer:
        with pytest.raises(ValueError, match=f'{next(iter(values))}=.*must be'):
            writer.write(1, values)
    assert metrics.read_metrics(tmp_path) == []


WRITE_AND_DIE = """
import os, sys
from moddepth_jax.training import metrics
writer = metrics.MetricsWriter(sys.argv[1], 0)
for step in range(3):
    writer.write(step, {'loss': 0.5})
os.kill(os.getpid(), 9)
"""


def test_rows_written_survive_a_kill(tmp_path):
    """Each row is on its way to disk when write returns."""
    environment = os.environ | {'PYTHONPATH': str(ROOT)}
    command = [sys.executable, '-c', WRITE_AND_DIE, str(tmp_path)]
    assert subprocess.run(command, env=environment).returncode == -9
    assert [row['step'] for row in metrics.read_metrics(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize('torn', ['', '{"step": 7, "lo', '{"step"', '\x00\x00'])
def test_resume_drops_later_rows_and_a_torn_last_line(tmp_path, torn):
    """After a resume each step is there once, in order, whatever the kill left at the end."""
    write_steps(tmp_path, 0, 1, 2, 3, 4, 5, 6)
    with open(tmp_path / 'metrics.jsonl', 'a') as file:
        file.write(torn)
    assert [row['step'] for row in metrics.read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    write_steps(tmp_path, 4, 5, 6, 7)
    rows = metrics.read_metrics(tmp_path)
    assert [row['step'] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert all(row['loss'] == row['step'] for row in rows)
    assert len((tmp_path / 'metrics.jsonl').read_text().splitlines()) == 7
    assert os.listdir(tmp_path) == ['metrics.jsonl']


def test_a_broken_line_amid_the_file_is_an_error(tmp_path):
    """Only a last line can be cut short by a kill; another is damage, and is named, not dropped."""
    write_steps(tmp_path, 0, 1, 2)
    path = tmp_path / 'metrics.jsonl'
    text = 'x' + path.read_text()
    path.write_text(text)
    with pytest.raises(ValueError, match='line 1 is .*must be a JSON object with a step'):
        metrics.read_metrics(tmp_path)
    with pytest.raises(ValueError, match='line 1 is '):
        metrics.MetricsWriter(tmp_path, 1)
    assert path.read_text() == text


def test_no_rows_file_is_an_error(tmp_path):
    """Reading the metrics of what is no run is one line that names the directory."""
    with pytest.raises(ValueError, match='holds no metrics.jsonl'):
        metrics.read_metrics(tmp_path)


def test_events_mirror_the_numbers_and_purge_on_resume(tmp_path):
    """TensorBoard gets the scalars, and is told to forget the steps that a resume repeats."""
    with metrics.MetricsWriter(tmp_path, 0, [TensorBoardWriter(tmp_path, 0)]) as writer:
        writer.write(1, {'loss': 1.0, 'device': 'cpu', 'list': [1.0]})
        writer.write(2, {'loss': 2.0})
    assert read_events(tmp_path) == [(0, 1, 'loss', 1.0), (0, 2, 'loss', 2.0)]
    with metrics.MetricsWriter(tmp_path, 1, [TensorBoardWriter(tmp_path, 1)]) as writer:
        writer.write(2, {'loss': 2.5})
    start = event_pb2.SessionLog.START
    assert sorted(read_events(tmp_path), key=str)[-1] == (start, 2, None, None)
    assert (0, 2, 'loss', 2.5) in read_events(tmp_path)


def test_a_list_named_histogram_is_one_for_tensorboard(tmp_path):
    """Shares of equal bins of [0, 1] come back as buckets of that range; other lists do not.

    One that holds a NaN, of a block without tokens, is a row with null and no event.
    """
    shares = [0.25, 0.0, 0.5, 0.25]
    with metrics.MetricsWriter(tmp_path, 0, [TensorBoardWriter(tmp_path, 0)]) as writer:
        writer.write(1, {'routing/sigmoid_histogram': shares, 'other': shares})
        writer.write(2, {'routing/sigmoid_histogram': [math.nan] * 4})
    (file,) = (tmp_path / 'tensorboard').iterdir()
    found = [value for _, value in event_values(file) if value.HasField('histo')]
    assert [value.tag for value in found] == ['routing/sigmoid_histogram']
    histogram = found[0].histo
    limits, counts = list(histogram.bucket_limit), list(histogram.bucket)
    places = dict(zip(limits, counts, strict=True))
    assert {limit: places[limit] for limit in (0.25, 0.5, 0.75, 1.0)} == dict(
        zip((0.25, 0.5, 0.75, 1.0), shares, strict=True)
    )
    assert sum(counts) == 1 and (histogram.min, histogram.max) == (0, 1)
    assert histogram.sum == 0.25 * 0.125 + 0.5 * 0.625 + 0.25 * 0.875
    assert metrics.read_metrics(tmp_path)[1]['routing/sigmoid_histogram'] == [None] * 4


def test_a_row_of_an_earlier_start_is_replaced(tmp_path):
    """The last evaluation of a finished run, made again by a rerun, stays one row, the new one."""
    with metrics.MetricsWriter(tmp_path, 0) as writer:
        writer.write(4, {'loss': 1.0})
        writer.write(4, {'eval/loss': 2.0})
    with metrics.MetricsWriter(tmp_path, 4) as writer:
        assert writer.has(4, 'eval/loss') and not writer.has(4, 'eval/gap')
        writer.write(4, {'eval/loss': 3.0})
        writer.write(5, {'loss': 0.5})
    rows = [{'step': 4, 'loss': 1.0}, {'step': 4, 'eval/loss': 3.0}, {'step': 5, 'loss': 0.5}]
    assert metrics.read_metrics(tmp_path) == rows
