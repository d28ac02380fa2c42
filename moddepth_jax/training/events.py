"""TensorBoard events of a run, written by the caller's thread: a full disk must not block it."""

import contextlib
import os
import pathlib
import socket
import time

from tensorboardX import summary
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter

EVENTS_DIRECTORY = 'tensorboard'
FLUSH_SECONDS = 30.0


class Events:
    """Appends scalars and histograms to a new file of events under `tensorboard/` of a run.

    metrics.jsonl holds the same numbers. So an event that cannot be written is dropped, and the
    rest with it: `failure` says why, in one line.

    tensorboardX's own SummaryWriter hands events to a thread, and blocks for ever once a full disk
    has ended that.

    Args:
      workdir: directory of the run.
      first_step: steps done before this start. TensorBoard hides events of later steps that an
        earlier start left.
    """

    def __init__(self, workdir: str | os.PathLike, first_step: int):
        self.failure = ''
        self._writer = None
        folder = pathlib.Path(workdir) / EVENTS_DIRECTORY
        resumed = folder.exists()
        self._flush_at = time.monotonic() + FLUSH_SECONDS
        try:
            folder.mkdir(exist_ok=True)
            name = f'events.out.tfevents.{time.time_ns()}.{socket.gethostname()}'
            self._writer = RecordWriter(str(folder / name))
        except OSError as error:
            self._give_up(error)
        self._write(Event(file_version='brain.Event:2'))
        if resumed:
            start = SessionLog(status=SessionLog.START)
            self._write(Event(step=first_step + 1, session_log=start))

    def add(self, step: int, values: dict) -> None:
        """Writes the numbers of a row; of its lists those whose name ends in `_histogram`."""
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self._write(Event(step=step, summary=summary.scalar(name, value)))
            elif name.endswith('_histogram') and None not in value:
                self._write(Event(step=step, summary=_histogram(name, value)))
        if time.monotonic() > self._flush_at:
            self._flush_at = time.monotonic() + FLUSH_SECONDS
            self._call('flush')

    def close(self) -> None:
        """Closes the file."""
        self._call('close')
        self._writer = None

    def _write(self, event):
        event.wall_time = time.time()
        self._call('write', event.SerializeToString())

    def _call(self, name, *given):
        if self._writer is not None:
            try:
                getattr(self._writer, name)(*given)
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error):
        self.failure = f'no more events for TensorBoard: {error.strerror or error}'
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError):  # of what it still held
                writer.close()


def _histogram(name, shares):
    """Shares of equal bins of [0, 1]."""
    limits = [(i + 1) / len(shares) for i in range(len(shares))]
    middles = [limit - 0.5 / len(shares) for limit in limits]
    return summary.histogram_raw(
        name,
        min=0.0,
        max=1.0,
        num=1,
        sum=sum(share * x for share, x in zip(shares, middles, strict=True)),
        sum_squares=sum(share * x * x for share, x in zip(shares, middles, strict=True)),
        bucket_limits=limits,
        bucket_counts=shares,
    )
