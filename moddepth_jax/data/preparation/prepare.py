"""Prepares text for training: several processes encode files of any size into a token store."""

import errno
import hashlib
import os
import pathlib
import shutil

from moddepth_jax.data import readers
from moddepth_jax.data.compression import open_file
from moddepth_jax.data.directory import LOCK_FILE, lock_directory
from moddepth_jax.data.preparation import encode, parts
from moddepth_jax.data.preparation.plan import Options, Plan, Task, make_tasks, survey
from moddepth_jax.data.preparation.workers import Workers
from moddepth_jax.data.readers import BadText
from moddepth_jax.data.sources import distinct_files, find_files
from moddepth_jax.data.token_store import (
    PLAN_FILE,
    PREPARED_FILE,
    SPLITS,
    TOKENIZER_DIRECTORY,
    Store,
    open_store,
)
from moddepth_jax.data.tokenizers.tokenizer import make_tokenizer, save_atomically

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MIN_TASKS = 64  # unless the text is small
_MIN_TASK_BYTES = 1 << 18
_MAX_BPE_TASK_BYTES = 1 << 24  # of bpe:N, whose training sample depends on the tasks
_KEPT = 'finished parts are kept: the same command continues'


def prepare(options: Options, phase) -> Store:
    """Prepare text, or continue an earlier start; a complete store is only opened.

    Documents are in the order of the names of their files, then of their rows. They are split as
    `split_documents` does; empty ones are skipped. The same files and arguments give the same bytes
    and the same fingerprint, with any number of processes and after any kills. Files that change
    between two starts are read again, unless a tokenizer was trained on them.

    Args:
      options: the flags of launch.prepare.
      phase: phase(name, total, done=0) is a context manager that yields a function, which takes the
        bytes that are done since its last call.

    Raises:
      ValueError: one line with what to do, for sources as in `find_files`; a bad row (finished work
        is kept); a directory of something else, of another preparation, or in use; a full disk; or
        a lost process.
    """
    directory = options.directory
    paths, left_out = _find_files(options)
    tokenizer = _given_tokenizer(options)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        right = 'must be a directory that can be written'
        raise ValueError(f'--output={directory}: {error.strerror}; {right}') from None
    known = {LOCK_FILE, pathlib.Path(PLAN_FILE).parent.name, TOKENIZER_DIRECTORY, PREPARED_FILE}
    known |= {f'{split}.{kind}' for split in SPLITS for kind in ('bin', 'index')}
    others = {path.name for path in directory.iterdir() if path.suffix != '.tmp'} - known
    if others:
        found = f'holds {min(others)!r}, so it is not a directory of launch.prepare'
        raise ValueError(f'--output={directory}: {found}; use another --output')
    with lock_directory(directory, '--output'):
        preparation = _Preparation(options, paths, left_out, phase, tokenizer)
        try:
            if (directory / PREPARED_FILE).exists():
                return preparation.open_finished()
            return preparation.run()
        except BadText as error:
            kept = _KEPT
            if preparation.is_trained():
                because = f'{options.tokenizer} was trained on the current text'
                kept = f'to correct it, start again (rm -r {directory}): {because}'
            raise ValueError(f'{error}; or --skip_bad leaves it out; {kept}') from None
        except OSError as error:
            if error.errno not in _DISK_ERRORS:
                raise
            right = f'free some space, about twice the size of the tokens; {_KEPT}'
            raise ValueError(f'--output={directory}: {error.strerror}; {right}') from None


def _find_files(options):
    """Return (name, path) of each file of the sources, sorted, and the files without text."""
    right = f'must be a file, folder or glob of {readers.describe_formats()}'
    if not options.sources:
        raise ValueError(f'--input=: names no file; {right}')
    found = [find_files(source, '--input', right, options.encoding) for source in options.sources]
    # Names are relative to a common folder, so that files of several sources differ in name.
    root = os.path.commonpath([os.path.abspath(root) for root, *_ in found])
    output = os.path.join(os.path.realpath(options.directory), '')  # may lie in a source

    def without_output(paths):
        return [path for path in paths if not os.path.realpath(path).startswith(output)]

    paths = {os.path.abspath(p): p for _, files, _ in found for p in without_output(files)}
    paths = {os.path.abspath(p): p for p in distinct_files(paths.values(), root)}
    left_out = {p for *_, others in found for p in without_output(others)} - set(paths.values())
    names = {pathlib.Path(os.path.relpath(place, root)).as_posix(): p for place, p in paths.items()}
    return sorted(names.items()), sorted(left_out)


def _given_tokenizer(options):
    """Return the tokenizer; None if it will be trained, or an earlier start has stored it."""
    if options.vocab_size is not None or (options.directory / TOKENIZER_DIRECTORY).exists():
        return None
    try:
        return make_tokenizer(options.tokenizer, options.separator)
    except ValueError as error:
        raise ValueError(f'--tokenizer={options.tokenizer}: {error}') from None


class _Preparation:
    def __init__(self, options, paths, left_out, phase, tokenizer):
        self._options, self._paths, self._phase = options, paths, phase
        self._left_out, self._tokenizer = left_out, tokenizer
        self._directory = options.directory
        self._plan_file = options.directory / PLAN_FILE
        self._parts = self._plan_file.parent
        self._tokenizer_directory = options.directory / TOKENIZER_DIRECTORY
        # As long as there are parts, their size must not change.
        self._arguments = options.arguments()
        self._plan_arguments = {**self._arguments, 'part_bytes': options.part_bytes}

    def is_trained(self):
        """Return whether the tokenizer was trained on the text, which then must not change."""
        return self._options.vocab_size is not None and self._tokenizer_directory.exists()

    def run(self) -> Store:
        """Do the missing steps: survey, tokenizer, tokens of each part, join."""
        options = self._options
        self._parts.mkdir(exist_ok=True)
        plan = self._read_plan()
        self._save_tokenizer()
        with Workers(options.processes) as workers:
            before, plan.inputs = plan.inputs, self._survey(plan, workers)
            was, now = ({(n, i.sha256) for n, i in d.items()} for d in (before, plan.inputs))
            if was and was != now and self.is_trained():
                raise self._changed_since_training(min(was ^ now)[0])
            tasks = make_tasks(self._paths, plan.inputs, plan.span_bytes, plan.starts)
            plan.arguments = self._plan_arguments
            plan.starts = [(task.spans[0].name, task.spans[0].span.start) for task in tasks]
            plan.write(self._plan_file)
            self._remove_other_parts(tasks)
            self._check_skipped(tasks)
            self._train_tokenizer(tasks)
            unfinished = [
                task for task in tasks if not any(p.header['last'] for p in task.parts(self._parts))
            ]
            jobs = ((task, self._parts, self._tokenizer_directory, options) for task in unfinished)
            total, missing = (sum(task.bytes for task in some) for some in (tasks, unfinished))
            with self._phase('tokens', total, total - missing) as advance:
                workers.run(encode.encode, jobs, advance)
        self._check_unmodified(plan.inputs, tasks)
        found = [part for task in tasks for part in task.parts(self._parts)]
        with self._phase('joining', sum(part.num_token_bytes for part in found)) as advance:
            store = parts.join(
                self._directory,
                found,
                make_tokenizer(self._tokenizer_directory),
                options.held_out_fraction,
                advance,
                self._left_out,
                inputs=[
                    {'name': name, 'bytes': i.bytes, 'sha256': i.sha256, 'modified': i.modified}
                    for name, i in plan.inputs.items()
                ],
                arguments=self._arguments,
            )
        shutil.rmtree(self._parts)
        return store

    def open_finished(self) -> Store:
        """Open the finished store, if it has the files and arguments that are asked for."""
        store = open_store(self._directory)
        self._check_arguments(store.arguments, self._arguments)
        stored, now = {entry['name']: entry for entry in store.inputs}, dict(self._paths)
        for name in sorted(stored.keys() | now.keys()):
            if name not in stored:
                raise self._refusal(f'{name} was not there when this text was prepared')
            if name not in now:
                raise self._refusal(f'{name} was there when this text was prepared, but is not now')
            if not _is_stored_file(now[name], stored[name]):
                raise self._refusal(f'{name} is not what it was when this text was prepared')
        shutil.rmtree(self._parts, ignore_errors=True)
        return store

    def _check_arguments(self, stored, arguments):
        for name in {**arguments, **stored}:
            was, now = (side.get(name) for side in (stored, arguments))
            if was != now:
                found = f'{name} was {was!r} when it was started and is {now!r} now'
                raise self._refusal(found)

    def _refusal(self, problem, right='use another --output'):
        return ValueError(f'--output={self._directory}: {problem}; {right}')

    def _start_again(self, problem):
        return self._refusal(problem, f'to start again: rm -r {self._directory}')

    def _changed_since_training(self, name):
        problem = f'{name} is not what it was when {self._options.tokenizer} was trained'
        return self._start_again(problem)

    def _read_plan(self):
        """Read the Plan; it is empty if this start cannot use any earlier work."""
        try:
            plan = Plan.read(self._plan_file)
        except (ValueError, KeyError, TypeError) as error:
            problem = f'{self._plan_file} is unreadable ({type(error).__name__})'
            raise self._start_again(problem) from None
        if plan.arguments and any(self._parts.glob('*.part')):
            self._check_arguments(plan.arguments, self._plan_arguments)
        elif plan.arguments != self._plan_arguments:
            plan = Plan()
            self._plan_file.unlink(missing_ok=True)
            shutil.rmtree(self._tokenizer_directory, ignore_errors=True)
        # For a small text, tasks are smaller than a part, so that all processes get some. Their
        # size does not depend on the number of processes, which the next start may change.
        total = sum(path.stat().st_size for _, path in self._paths if path.exists())
        trains = self._options.vocab_size is not None
        most = _MAX_BPE_TASK_BYTES if trains else self._options.part_bytes
        span_bytes = min(most, max(total // _MIN_TASKS, _MIN_TASK_BYTES))
        if trains and not self._tokenizer_directory.exists():
            # The training sample of a tokenizer depends on the tasks: make the tasks of a first
            # start.
            self._remove_other_parts([])
            plan = plan if plan.span_bytes == span_bytes else Plan()
            plan.starts = ()
        plan.span_bytes = plan.span_bytes or span_bytes
        return plan

    def _survey(self, plan, workers):
        """Return FileInfo by name, from the plan for files that have not changed since."""
        options, found = self._options, dict(plan.inputs)
        new = {n: p for n, p in self._paths if not (n in found and found[n].is_current(p))}
        jobs = ((p, options.text_field, plan.span_bytes, options.skip_bad) for p in new.values())
        total = sum(path.stat().st_size for path in new.values() if path.exists())
        with self._phase('survey', total) as advance:
            found |= zip(new, workers.run(survey, jobs, advance), strict=True)
        return {name: found[name] for name, _ in self._paths}

    def _check_unmodified(self, inputs, tasks):
        modified = {name for name, path in self._paths if not inputs[name].is_current(path)}
        if not modified:
            return
        for task in tasks:  # the old content may be back at the next start
            if modified & {span.name for span in task.spans}:
                task.remove_parts(self._parts, 0)
        if self.is_trained():
            raise self._changed_since_training(min(modified))
        raise self._refusal(f'{min(modified)} was written to while it was read', _KEPT)

    def _check_skipped(self, tasks):
        """Raise ValueError if an earlier start skipped bad rows and this one may not."""
        for task in tasks if not self._options.skip_bad else ():
            for part in task.parts(self._parts):
                if bad := part.header['skipped'].keys() - {'empty'}:
                    row = part.header['skipped'][min(bad)]['first'][0]
                    was = f'was started with --skip_bad, which left out {row!r}'
                    raise self._start_again(f'{was}; add --skip_bad')

    def _remove_other_parts(self, tasks: list[Task]):
        """Remove half-written files of a killed start, and parts of files that have changed."""
        keys = {task.key for task in tasks}
        for path in self._parts.iterdir():
            if path != self._plan_file and (path.suffix != '.part' or path.stem[:-6] not in keys):
                path.unlink()

    def _save_tokenizer(self):
        """Save a tokenizer that is given; this comes first, because it needs no text."""
        if tokenizer := self._tokenizer or _given_tokenizer(self._options):
            if not self._tokenizer_directory.exists():
                save_atomically(tokenizer, self._tokenizer_directory)

    def _train_tokenizer(self, tasks):
        options, directory = self._options, self._tokenizer_directory
        if directory.exists():
            return
        # In another process, because the library cannot change its number of threads later.
        with Workers(1, threads=options.processes) as worker:
            total = min(options.bpe_bytes, sum(task.bytes for task in tasks))
            with self._phase('tokenizer', total) as advance:
                worker.run(encode.train_tokenizer, [(tasks, options, directory)], advance)


def _is_stored_file(path, entry):
    """Return whether a file is as it was prepared; it is read if its time has changed."""
    try:
        status = path.stat()
        if status.st_size != entry['bytes']:
            return False
        if status.st_mtime_ns == entry['modified']:
            return True
        with open_file(path) as file:
            return hashlib.file_digest(file, 'sha256').hexdigest() == entry['sha256']
    except OSError:
        return entry['modified'] == 0  # --skip_bad skipped a missing file
