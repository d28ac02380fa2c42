"""Worker processes, which never outlive the process that started them, and CPUs for them."""

import contextlib
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable
from multiprocessing import resource_tracker


class Workers(contextlib.ExitStack):
    """`count` processes, each of which does one job at a time; a context manager.

    They end with the `with` block, or with the process that started them; only that process reacts
    to Ctrl-C. The tokenizer library may use `threads` threads in each.
    """

    def __init__(self, count: int, threads: int = 1):
        super().__init__()
        # Not by fork, which copies locks that threads of the parent may hold.
        context = multiprocessing.get_context('spawn')
        self._workers = []
        # A starting child would print a traceback on Ctrl-C, so it inherits a mask.
        resource_tracker.ensure_running()  # starting it later would lift the mask
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, threads), daemon=True)
                process.start()
                theirs.close()
                self._workers.append((process, ours))
                for end in (ours.close, process.join, process.kill):
                    self.callback(end)
        except BaseException:
            self.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def run(
        self, function: Callable, jobs: Iterable[tuple], advance: Callable[[int], None]
    ) -> list:
        """Return `function(*job, advance)` of each job; jobs start in order.

        `advance` is called in this process. Raises the errors of `function`, and ValueError if a
        process is lost.
        """
        waiting, busy, results = iter(enumerate(jobs)), {}, {}

        def start(process, connection):
            for number, job in itertools.islice(waiting, 1):
                busy[connection] = (number, process)
                try:
                    connection.send((function, job))
                except ConnectionError:
                    raise ValueError(_lost(process)) from None

        for worker in self._workers:
            start(*worker)
        while busy:
            for connection in multiprocessing.connection.wait(list(busy)):
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
                results[number] = value
                start(process, connection)
        return [results[number] for number in sorted(results)]


def _lost(process):
    process.join(5)
    code = process.exitcode
    how = f'was killed by signal {-code}' if code is not None and code < 0 else f'exited ({code})'
    reason = ', perhaps for lack of memory' if code == -signal.SIGKILL else ''
    remedy = 'the same command continues, in less memory with --processes=1'
    return f'a process of the preparation {how}{reason}; {remedy}'


def _work(connection, threads):
    """Do one job after another until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ['RAYON_NUM_THREADS'] = str(threads)
    os.environ['TOKENIZERS_PARALLELISM'] = 'true' if threads > 1 else 'false'
    while True:
        try:
            function, job = connection.recv()
        except EOFError:
            return
        try:
            result = function(*job, lambda count: connection.send(('advance', count)))
            connection.send(('done', result))
        except (ValueError, OSError) as error:
            connection.send(('raised', error))
        except MemoryError:
            problem = 'a process of the preparation ran out of memory; use fewer --processes'
            connection.send(('raised', ValueError(problem)))
        except Exception:
            connection.send(('raised', RuntimeError(traceback.format_exc())))


def _end_with_parent():
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
