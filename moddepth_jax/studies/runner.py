"""The runs of a study: trained one after another, by several processes, on several hosts; drawn."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import jax

from launch.cli import enable_compilation_cache, progress_bar
from moddepth_jax.studies import fit, page, plots, store
from moddepth_jax.studies.study_measures import measured_runs, write_measures
from moddepth_jax.studies.study_time import rates
from moddepth_jax.training.loop import train
from moddepth_jax.training.plan import resolve_steps, run_flops
from moddepth_jax.training.progress import format_seconds
from moddepth_jax.training.run_dir import write_atomically
from moddepth_jax.training.trainer import DivergedError

LOGS = 'logs'  # in a study's directory: what each run printed
_PARENT = 'MODDEPTH_STUDY_PARENT'  # process that started this one
_POLL_SECONDS = 2.0


def is_child() -> bool:
    """Whether this process was started by `StudyRuns.spawn`."""
    return _PARENT in os.environ


class StudyRuns:
    """Trains what is missing of a study and draws it.

    Args:
      workdir: of the study.
      plan: of it.
      hparams_of: Planned -> Hparams.
      told: for study.json: kind, config, overrides.
    """

    def __init__(self, workdir: pathlib.Path, plan, hparams_of, told: dict):
        self._workdir, self._plan, self._told = workdir, plan, told
        self._hparams_of = hparams_of

    def check(self):
        """Raises ValueError, one line, before anything is written, for a run that cannot be."""
        for run in self._plan.examples():
            hparams = self._hparams_of(run)
            try:
                resolve_steps(hparams)
            except ValueError as error:
                raise ValueError(f'{run.variant} at size {run.trained}: {error}') from None
        for run in store.known_plan(self._workdir, self._plan)[0]:
            if store.final_loss(self._workdir, run.name) is not None:
                store.check_run(self._workdir, run, self._hparams_of(run))

    def announce(self, processes: int):
        """Prints what is planned, what it costs and about how long it takes."""
        plan, counts = self._plan.study, self._plan.size_of_whole()
        runs, left, whole = store.known_plan(self._workdir, self._plan)
        done = len({run.name for run in runs}) - len(left)
        print(f'study     {self._told["config"]}: {", ".join(plan.variants)}')
        print(f'sizes     {", ".join(plan.sizes)}; seeds {", ".join(map(str, plan.seeds))}')
        flops = 0.0
        for budget, count in counts.items():
            example = self._hparams_of(next(r for r in self._plan.examples() if r.budget == budget))
            each = run_flops(example, resolve_steps(example))
            flops += count * each
            print(f'budget    {budget:g} {plan.kind}: up to {count} runs of {each:.3g} FLOPs')
        count = self._count()
        print(f'in all    up to {count} runs, {flops:.3g} FLOPs; {done} runs are finished')
        if left or not whole:
            rate, besides = rates(example)
            seconds = (flops / rate + count * besides) * (1 - done / count) / processes
            print(
                f'time      about {format_seconds(seconds)}, {processes} at a time: '
                f'{rate / 1e9:.3g} GFLOP/s, {besides:.0f} s a run besides',
                flush=True,
            )

    def _count(self):
        return sum(self._plan.size_of_whole().values())

    def train(self, shard: tuple[int, int]) -> int:
        """Trains this shard's share of what is missing, waiting for others'; an exit status.

        Args:
          shard: (index, count).
        """
        if is_child():
            threading.Thread(target=_end_with_parent, daemon=True).start()
        told = None
        while True:
            runs, left, whole = store.known_plan(self._workdir, self._plan)
            names = list(dict.fromkeys(run.name for run in runs))
            mine = [run for run in left if names.index(run.name) % shard[1] == shard[0]]
            if mine:
                status = self._train_one(mine[0])
                if status:
                    return status
            elif not left:
                return 0
            else:
                if told != len(names):
                    others = f'{len(left)} runs of other shards, such as {left[0].name}'
                    print(f'waiting for {others}', flush=True)
                told = len(names)
                time.sleep(_POLL_SECONDS)

    def _train_one(self, run):
        hparams, begin = self._hparams_of(run), time.monotonic()
        directory = store.run_directory(self._workdir, run.name)
        logs = self._workdir / LOGS
        logs.mkdir(exist_ok=True)
        enable_compilation_cache(hparams)
        with open(logs / f'{run.name}.txt', 'a', encoding='utf-8') as log:
            with contextlib.redirect_stdout(log):
                try:
                    result = train(hparams, directory)
                except DivergedError as error:
                    content = json.dumps({'error': str(error)}) + '\n'
                    write_atomically(directory / store.DIVERGED_FILE, content)
                    outcome = 'diverged'
                else:
                    if result.signal is not None:
                        return 128 + signal.Signals[result.signal]
                    outcome = f'{result.summary["eval"]["bits_per_byte"]:.4f} bits/byte'
        jax.clear_caches()
        runs, left, _ = store.known_plan(self._workdir, self._plan)
        done, count = len({run.name for run in runs}) - len(left), self._count()
        took = format_seconds(time.monotonic() - begin)
        print(f'{done:4d}/{count}  {run.name:42} {outcome:18} {took}', flush=True)
        return 0

    def spawn(self, shard: tuple[int, int], processes: int) -> int:
        """`train` by so many processes of this same command; the first exit status that is not 0.

        They end with this process, and a signal to it reaches them.
        """
        environment = os.environ | {_PARENT: str(os.getpid())}
        children = []
        for child in range(processes):
            own = [f'--shard={"/".join(map(str, part_of_shard(shard, child, processes)))}']
            own += ['--processes=1']
            command = [sys.executable, '-m', 'launch.isoflop', *sys.argv[1:], *own]
            # A group of their own: Ctrl-C comes to them once, through this process.
            children.append(subprocess.Popen(command, env=environment, process_group=0))
        handlers = {
            number: signal.signal(number, lambda number, _: _signal_all(children, number))
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        }
        try:
            while any(child.poll() is None for child in children):
                failed = [child for child in children if child.poll()]
                if failed:
                    _signal_all(children, signal.SIGTERM)
                    [child.wait() for child in children]
                    return _status(failed[0])
                time.sleep(0.2)
            return next((_status(child) for child in children if child.returncode), 0)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def finish(self) -> int:
        """Writes study.json, measures.json, the figures and the page from the finished runs."""
        content = store.collect(self._workdir, self._plan, self._told, self._hparams_of)
        content['fits'] = fit.fits(content)
        text = json.dumps(content, indent=1, allow_nan=False) + '\n'
        write_atomically(self._workdir / store.STUDY_FILE, text)
        with progress_bar('measuring', len(measured_runs(content))) as advance:
            write_measures(self._workdir, content, advance)
        plots.draw(content, self._workdir)
        page.write_page(content, self._workdir)
        print(f'look      {self._workdir / "study.html"}')
        return 0


def part_of_shard(shard: tuple[int, int], child: int, processes: int) -> tuple[int, int]:
    """The part of a shard (index, count) that one of its processes trains, as a shard of its own.

    Every run is of exactly one process, however many the hosts of the other shards have.
    """
    index, count = shard
    return index + count * child, count * processes


def _status(child):
    return child.returncode if child.returncode > 0 else 128 - child.returncode


def _signal_all(children, number):
    for child in children:
        if child.poll() is None:
            child.send_signal(number)


def _end_with_parent():
    """Stops this process, after its step, once the one that started it is gone."""
    while os.getppid() == int(os.environ[_PARENT]):
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def share_threads(processes: int):
    """Gives each of so many processes its part of the CPU threads, unless NPROC is set.

    To be called before JAX's first device is asked for.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    os.environ.setdefault('NPROC', str(threads))
