"""Processes that share out work; none of them outlives the one that started them."""

import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import traceback
import typing
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import resource_tracker

_WAIT_SECONDS = 0.5


class Workers:
    """A fixed number of processes, each doing one job at a time; a context manager.

    They end with the `with`, or with the process that started them, however it ends; Ctrl-C is for
    that process alone.

    Args:
      count: how many.
      threads: that the tokenizer library may use in each.
    """

    def __init__(self, count: int, threads: int = 1):
        # Forking would take over locks of threads that the parent may have by now.
        context = multiprocessing.get_context('spawn')
        self._workers = []
        # A child that is still starting would answer Ctrl-C with a traceback; it inherits the mask.
        resource_tracker.ensure_running()  # which would lift it where it starts later
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, threads), daemon=True)
                process.start()
                theirs.close()
                self._workers.append((process, ours))
        except BaseException:
            self.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def run(
        self, function: Callable, jobs: Iterable[tuple], advance: Callable[[int], None]
    ) -> Iterator[tuple[int, typing.Any]]:
        """Calls `function(*job, advance)` in the processes.

        Args:
          function: of a module; gets an `advance` of its own, whose calls come to the one given.
          jobs: argument tuples, begun in order.
          advance: called here with what the processes advance by.

        Yields:
          (number of the job, result), as they end.

        Raises:
          ValueError: a process was lost.
          Exception: what `function` raised.
        """
        waiting = iter(enumerate(jobs))
        busy = {}

        def start(process, connection):
            for number, job in waiting:
                busy[connection] = (number, process)
                try:
                    connection.send((function, job))
                except ConnectionError:
                    raise ValueError(_lost(process)) from None
                return

        for worker in self._workers:
            start(*worker)
        while busy:
            for connection in multiprocessing.connection.wait(list(busy), _WAIT_SECONDS):
                number, process = busy[connection]
                try:
                    kind, value = connection.recv()
                except (EOFError, ConnectionError):
                    raise ValueError(_lost(process)) from None
                if kind == 'advance':
                    advance(value)
                    continue
                if kind == 'raised':
                    raise value
                del busy[connection]
                start(process, connection)
                yield number, value

    def close(self) -> None:
        """Ends the processes, whatever they are at."""
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _lost(process):
    process.join(5)
    code = process.exitcode
    how = f'was killed by signal {-code}' if code is not None and code < 0 else f'exited ({code})'
    reason = ', perhaps for want of memory' if code == -signal.SIGKILL else ''
    remedy = 'the same command goes on where it was, in less memory with --processes=1'
    return f'a process of the preparation {how}{reason}; {remedy}'


def _work(connection, threads):
    """What a process does: one job after the other, until the other end of the pipe is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ['RAYON_NUM_THREADS'] = str(threads)
    os.environ['TOKENIZERS_PARALLELISM'] = 'true' if threads > 1 else 'false'
    while True:
        try:
            function, job = connection.recv()
        except EOFError:
            return
        advance = functools.partial(_tell, connection, 'advance')
        try:
            _tell(connection, 'done', function(*job, advance))
        except (ValueError, OSError) as error:
            _tell(connection, 'raised', error)
        except MemoryError:
            problem = 'a process of the preparation ran out of memory; use fewer --processes'
            _tell(connection, 'raised', ValueError(problem))
        except Exception:
            _tell(connection, 'raised', RuntimeError(traceback.format_exc()))


def _tell(connection, kind, value):
    connection.send((kind, value))


def _end_with_parent():
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
