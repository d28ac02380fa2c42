"""Events never stop a run: what cannot be written is dropped, and said once."""

import errno

from tensorboardX.record_writer import RecordWriter

from moddepth_jax.training.metrics import MetricsWriter, TensorBoardWriter, read_metrics


def test_a_full_disk_ends_the_events_alone(tmp_path, monkeypatch, capsys):
    """tensorboardX's own writer blocked the train loop for ever here; metrics.jsonl goes on."""
    written = []

    def write(writer, event):
        written.append(event)
        if len(written) == 3:
            raise OSError(errno.ENOSPC, 'No space left on device')

    with MetricsWriter(tmp_path, 0, [TensorBoardWriter(tmp_path, 0)]) as writer:
        monkeypatch.setattr(RecordWriter, 'write', write)
        for step in range(1, 30):
            writer.write(step, {'loss': 1.0, 'histogram': 'a'})
    assert [row['step'] for row in read_metrics(tmp_path)] == list(range(1, 30))
    assert len(written) == 3
    error = capsys.readouterr().err
    assert error == 'no more events for TensorBoard: No space left on device\n'


def test_a_directory_that_cannot_be_made_is_said(tmp_path):
    """A file is in its place: the reason is there, and writing does nothing."""
    (tmp_path / 'tensorboard').touch()
    events = TensorBoardWriter(tmp_path, 0)
    assert 'File exists' in events.failure
    events.add(1, {'loss': 1.0})
    events.close()
