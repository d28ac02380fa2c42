"""Trains the runs of a study in one process, in several processes, or on several hosts."""

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

from moddepth_jax.data.directory import write_atomically
from moddepth_jax.host import usable_cpus
from moddepth_jax.studies import measures, page, plot_style, plots, store
from moddepth_jax.studies.plan import Plan
from moddepth_jax.training.loop import train
from moddepth_jax.training.plan import resolve_steps, run_flops
from moddepth_jax.training.progress import format_seconds
from moddepth_jax.training.trainer import DivergedError

LOGS = 'logs'  # directory of a study with the output of each run
_PARENT = 'MODDEPTH_STUDY_PARENT'  # the process that started this one
_POLL_SECONDS = 2.0


class StudyRunner:
    """Trains the missing runs of a study and writes its results.

    Args:
      workdir: directory of the study.
      plan: the runs.
      hparams_of: function from a PlannedRun to its Hparams.
      description: the first fields of plan.json and study.json.
      before_run: is called with the Hparams of each run before it trains.
      results: optional folder that also gets study.json, measures.json and the figures. Finished
        runs in it are not trained again.
      source: config file, of which each run keeps a copy.

    Raises:
      ValueError: `results` holds another study, or runs that are not in this one.
    """

    def __init__(
        self,
        workdir,
        plan: Plan,
        hparams_of,
        description: dict,
        before_run=lambda hparams: None,
        results=None,
        source: str | None = None,
    ):
        self._workdir, self._plan = pathlib.Path(workdir), plan
        self._hparams_of, self._description = hparams_of, description
        self._before_run, self._results, self._source = before_run, results, source
        self._earlier = store.read_earlier(results, description, plan)

    def run(self, shard: tuple[int, int], processes: int, dry_run=False, draw_only=False) -> int:
        """Run the share `shard` = (index, count) of the study and return an exit status."""
        self.check()
        if dry_run:
            self.announce()
            return 0
        if not draw_only:
            store.check_text(self._workdir, self._plan, self._hparams_of, self._earlier)
        elif not self._finished():
            right = 'train first, without --draw_only'
            raise ValueError(f'--workdir={self._workdir}: no finished run of this study; {right}')
        store.open_study(self._workdir, store.plan_content(self._description, self._plan.study))
        if draw_only:
            self.finish()
            return 0
        if _PARENT in os.environ:
            threading.Thread(target=_end_with_parent, daemon=True).start()
            return self.train(shard)
        self.announce()
        status = _spawn(shard, processes) if processes > 1 else self.train(shard)
        if not status and shard[0] == 0:
            self.finish()
        return status

    def check(self):
        """Raise ValueError, before anything is written, if some run is impossible."""
        for variant in self._plan.study.variants:
            plot_style.check_look(variant)
        for run in self._plan.examples():
            hparams = self._hparams_of(run)
            try:
                steps = resolve_steps(hparams)
            except ValueError as error:
                raise ValueError(f'{run.variant} at size {run.trained}: {error}') from None
            store.check_earlier(self._earlier, run, hparams, steps)
        for run in self._progress().runs:
            if store.final_loss(self._workdir, run.name) is not None:
                store.check_run(self._workdir, run, self._hparams_of(run), self._source)
                store.check_state(self._workdir, run.name, self._earlier, self._results)

    def announce(self):
        """Print the plan and its cost."""
        plan, progress = self._plan.study, self._progress()
        runs = self._plan.max_runs(progress.losses)
        print(f'study     {self._description["config"]}: {", ".join(plan.variants)}')
        print(f'sizes     {", ".join(plan.sizes)}; seeds {", ".join(map(str, plan.seeds))}')
        if unknown := sorted(store.models_without_digest(self._earlier)):
            found = f'{len(unknown)} models, such as {unknown[0]}, have no settings_sha256'
            print(f'results   {found}: only their steps, FLOPs and text are compared')
        at_most = '' if progress.complete else 'up to '
        flops, known = {budget: [] for budget in plan.budgets}, {}
        for run in runs:
            some = [run] if progress.complete else self._plan.possible_sizes(run)
            for one in some:
                if one.model_name not in known:
                    hparams = self._hparams_of(one)
                    known[one.model_name] = run_flops(hparams, resolve_steps(hparams))
            flops[run.budget].append(max(known[one.model_name] for one in some))
        for budget, each in flops.items():
            least, most = f'{min(each):.2g}', f'{max(each):.2g}'
            cost = least if least == most else f'{least} to {most}'
            print(f'budget    {budget:g} {plan.kind}: {at_most}{len(each)} runs of {cost} FLOPs')
        total = f'{at_most}{len(runs)} runs, {sum(sum(flops.values(), [])):.3g} FLOPs'
        print(f'in all    {total}; {self._finished()} runs are finished', flush=True)

    def _finished(self):
        """How many runs of this study have a loss, also those that no known loss asks for yet."""
        progress = self._progress()
        if progress.complete:
            return len(progress.losses)
        return sum(map(self._is_finished, self._plan.possible_names()))

    def _is_finished(self, name):
        return name in self._earlier.losses or store.final_loss(self._workdir, name) is not None

    def _progress(self):
        return store.progress(self._workdir, self._plan, self._earlier)

    def train(self, shard: tuple[int, int]) -> int:
        """Train a share of the missing runs, wait for the others, and return an exit status."""
        index, count = shard
        announced = None
        while (progress := self._progress()).missing:
            names = list(dict.fromkeys(run.name for run in progress.runs))
            mine = [run for run in progress.missing if names.index(run.name) % count == index]
            if mine:
                if status := self._train_one(mine[0]):
                    return status
                continue
            if announced != len(names):
                example = progress.missing[0].name
                others = f'{len(progress.missing)} runs of other shards, such as {example}'
                print(f'waiting for {others}', flush=True)
            announced = len(names)
            time.sleep(_POLL_SECONDS)
        return 0

    def _train_one(self, run):
        hparams, start = self._hparams_of(run), time.monotonic()
        directory = store.run_directory(self._workdir, run.name)
        logs = self._workdir / LOGS
        logs.mkdir(exist_ok=True)
        self._before_run(hparams)
        log = open(logs / f'{run.name}.txt', 'a', encoding='utf-8')
        try:
            with log, contextlib.redirect_stdout(log):
                result = train(hparams, directory, source=self._source)
            if result.signal is not None:
                return 128 + signal.Signals[result.signal]
            outcome = f'{result.summary["eval"]["bits_per_byte"]:.4f} bits/byte'
        except DivergedError as error:
            content = json.dumps({'error': str(error)}) + '\n'
            write_atomically(directory / store.DIVERGED_FILE, content)
            outcome = 'diverged'
        jax.clear_caches()
        losses = self._progress().losses
        done, count = len(losses), len(self._plan.max_runs(losses))
        seconds = format_seconds(time.monotonic() - start)
        print(f'{done:4d}/{count}  {run.name:42} {outcome:18} {seconds}', flush=True)
        return 0

    def finish(self):
        """Write study.json, measures.json, the figures and the page from the finished runs."""
        study = store.collect(
            self._workdir, self._plan, self._description, self._hparams_of, self._earlier
        )
        text = json.dumps(study, indent=1, allow_nan=False) + '\n'
        write_atomically(self._workdir / store.STUDY_FILE, text)
        measures.write_measures(self._workdir, study, self._earlier)
        plots.draw(study, self._workdir)
        page.write_page(study, self._workdir)
        if self._results:
            store.copy_results(self._workdir, self._results, study)
        print(f'look      {self._workdir / "study.html"}')


def part_of_shard(shard: tuple[int, int], child: int, processes: int) -> tuple[int, int]:
    """Return the shard (index, count) that one of several processes of a shard trains."""
    index, count = shard
    return index + count * child, count * processes


def _spawn(shard, processes):
    """Run this command in child processes, forward signals, and return the first nonzero status."""
    environment = os.environ | {_PARENT: str(os.getpid())}
    children = []
    for child in range(processes):
        part = '/'.join(map(str, part_of_shard(shard, child, processes)))
        command = [sys.executable, '-m', 'launch.isoflop', *sys.argv[1:]]
        command += [f'--shard={part}', '--processes=1']
        # Each child has its own process group, so that Ctrl-C reaches it only through this process.
        children.append(subprocess.Popen(command, env=environment, process_group=0))

    def signal_all(number, _=None):
        for child in children:
            child.send_signal(number)

    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    handlers = {number: signal.signal(number, signal_all) for number in signals}
    try:
        while None in (statuses := [child.poll() for child in children]) and not any(statuses):
            time.sleep(0.2)
        signal_all(signal.SIGTERM)  # stop the others if one failed
        for child in children:
            child.wait()
        failed = next(filter(None, statuses), 0)
        return failed if failed >= 0 else 128 - failed
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _end_with_parent():
    """Stop this process after its current step when its parent process is gone."""
    while os.getppid() == int(os.environ[_PARENT]):
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def share_threads(processes: int):
    """Give each process its share of CPU threads, unless NPROC is set. Call before JAX starts."""
    threads = max(1, usable_cpus() // processes)
    os.environ.setdefault('NPROC', str(threads))
