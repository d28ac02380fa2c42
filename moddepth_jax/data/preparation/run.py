"""One start of a preparation: survey, tokenizer, tokens of each part, and all parts as one."""

import pathlib
import shutil

from moddepth_jax.data.preparation import encode
from moddepth_jax.data.preparation.join import join
from moddepth_jax.data.preparation.options import Preparation, arguments_of, trained_vocabulary
from moddepth_jax.data.preparation.plan import PLAN_FILE, Plan, make_tasks, survey
from moddepth_jax.data.preparation.workers import Workers
from moddepth_jax.data.token_store import TOKENIZER_DIRECTORY, Store
from moddepth_jax.data.tokenizers.tokenizer import make_tokenizer

PARTS_DIRECTORY = 'parts'
_FEWEST_TASKS = 64  # unless a span came out shorter than the next
_LEAST_SPAN = 1 << 18  # bytes
KEPT = 'finished parts are kept: the same command goes on'


def run(wanted: Preparation, paths: list[tuple[str, pathlib.Path]], phase) -> Store:
    """Prepares the files `paths`, (name, path) in order; see `prepare.prepare`.

    The caller holds the directory's lock.
    """
    parts = wanted.directory / PARTS_DIRECTORY
    parts.mkdir(exist_ok=True)
    arguments = arguments_of(wanted)
    part_bytes = wanted.options.part_bytes
    tokenizer_directory = wanted.directory / TOKENIZER_DIRECTORY
    plan = _read_plan(wanted.directory, parts)
    if plan.arguments and any(parts.glob('*.part')):
        refuse_other(wanted.directory, plan.arguments, {**arguments, 'part_bytes': part_bytes})
    elif plan.arguments != {**arguments, 'part_bytes': part_bytes}:
        plan.forget()
        shutil.rmtree(tokenizer_directory, ignore_errors=True)
    if trained_vocabulary(wanted.tokenizer) and not tokenizer_directory.exists():
        _forget_tasks(wanted, paths, plan, parts)
    plan.span_bytes = plan.span_bytes or _span_bytes(paths, part_bytes)
    with Workers(wanted.processes) as workers:
        _make_tokenizer(wanted, workers)
        inputs = _survey(wanted, paths, plan, workers, phase)
        _refuse_changed(wanted, plan.inputs, inputs)
        tasks = make_tasks(paths, inputs, plan.span_bytes, plan.starts)
        plan.write({**arguments, 'part_bytes': part_bytes}, inputs, tasks)
        _remove_others(parts, tasks)
        _refuse_skipped(wanted, tasks, parts)
        _train_tokenizer(wanted, tasks, phase)
        left = [task for task in tasks if not task.is_done(parts)]
        jobs = ((task, parts, tokenizer_directory, wanted.options) for task in left)
        total, rest = (sum(task.bytes for task in some) for some in (tasks, left))
        with phase('tokens', total, total - rest) as advance:
            for _ in workers.run(encode.encode, jobs, advance):
                pass
    if moved := {name for name, path in paths if not _is_as_surveyed(path, inputs[name])}:
        _refuse_moved(wanted, moved, tasks, parts)
    tokenizer = make_tokenizer(str(tokenizer_directory))
    found = [part for task in tasks for part in task.parts(parts)]
    with phase('joining', sum(part.num_token_bytes for part in found)) as advance:
        store = join(
            wanted.directory,
            found,
            tokenizer,
            wanted.options.held_out_fraction,
            {
                'inputs': [
                    {
                        'name': name,
                        'bytes': found.bytes,
                        'sha256': found.sha256,
                        'modified': found.modified,
                    }
                    for name, found in inputs.items()
                ],
                'arguments': arguments,
            },
            advance,
        )
    shutil.rmtree(parts)
    return store


def refuse_other(directory: pathlib.Path, stored: dict, arguments: dict) -> None:
    """Raises ValueError, one line, where a preparation was started with other arguments."""
    for name, value in arguments.items():
        if stored.get(name) != value:
            was = f'{name} was {stored.get(name)!r} when it was started and is {value!r} now'
            raise ValueError(f'--output={directory}: {was}; use another --output')


def _span_bytes(paths, part_bytes):
    """Of one task: of little text less than of a part, so that all processes get some of it.

    Whatever their number: the next start may have another.
    """
    total = sum(path.stat().st_size for _, path in paths if path.exists())
    return min(part_bytes, max(total // _FEWEST_TASKS, _LEAST_SPAN))


def _read_plan(directory, parts):
    try:
        return Plan(parts)
    except (ValueError, KeyError, TypeError) as error:
        problem = f'{parts / PLAN_FILE} is unreadable ({type(error).__name__})'
        raise ValueError(f'--output={directory}: {problem}; {_start_again(directory)}') from None


def _start_again(directory):
    return f'to start again: rm -r {directory}'


def _is_as_surveyed(path, found):
    try:
        status = path.stat()
    except OSError:
        return found.modified == 0
    return (status.st_size, status.st_mtime_ns) == (found.bytes, found.modified)


def _survey(wanted, paths, plan, workers, phase):
    """Input by name: as the plan has it, where nobody has written to the file since."""
    known = plan.inputs
    new = [
        (name, path)
        for name, path in paths
        if not (name in known and _is_as_surveyed(path, known[name]))
    ]
    found = {}
    options = wanted.options
    jobs = ((path, options.text_field, plan.span_bytes, options.skip_bad) for _, path in new)
    sizes = (path.stat().st_size for _, path in new if path.exists())
    with phase('survey', sum(sizes)) as advance:
        for i, result in workers.run(survey, jobs, advance):
            found[new[i][0]] = result
    return {name: found.get(name) or known[name] for name, _ in paths}


def is_trained(wanted: Preparation) -> bool:
    """Whether the tokenizer was trained on the text already, which then has to stay as it is."""
    directory = wanted.directory / TOKENIZER_DIRECTORY
    return trained_vocabulary(wanted.tokenizer) is not None and directory.exists()


def _forget_tasks(wanted, paths, plan, parts):
    """Has the text be cut as at a first start: what the tokenizer is trained on hangs on that."""
    _remove_others(parts, [])  # of a tokenizer that is gone
    plan.starts = set()
    if plan.span_bytes != _span_bytes(paths, wanted.options.part_bytes):
        plan.forget()


def _refuse_changed(wanted, before, inputs):
    """Raises ValueError where a tokenizer was trained on a file as it no longer is.

    What else was made of it has keys of its old content, and is made anew.
    """
    changed = {
        name
        for name in before.keys() | inputs.keys()
        if name not in before or name not in inputs or before[name].sha256 != inputs[name].sha256
    }
    if before and changed and is_trained(wanted):
        _refuse_other_text(wanted, min(changed))


def _refuse_other_text(wanted, name):
    problem = f'{name} is not what it was when {wanted.tokenizer} was trained'
    right = _start_again(wanted.directory)
    raise ValueError(f'--output={wanted.directory}: {problem}; {right}')


def _refuse_moved(wanted, moved, tasks, parts):
    """Raises ValueError for files that were written to since their survey."""
    for task in tasks:  # they may have their old content again at the next start
        if moved & {stretch.name for stretch in task.stretches}:
            task.remove_parts(parts, 0)
    if is_trained(wanted):
        _refuse_other_text(wanted, min(moved))
    problem = f'{min(moved)} was written to while it was read'
    raise ValueError(f'--output={wanted.directory}: {problem}; {KEPT}')


def _refuse_skipped(wanted, tasks, parts):
    if wanted.options.skip_bad:
        return
    for task in tasks:
        for part in task.parts(parts):
            for reason, entry in part.header['skipped'].items():
                if reason != 'empty':
                    was = f'was started with --skip_bad, which left out {entry["first"][0]!r}'
                    right = f'add --skip_bad; {_start_again(wanted.directory)}'
                    raise ValueError(f'--output={wanted.directory}: {was}; {right}')


def _remove_others(parts, tasks):
    """Removes what a kill left half written, and parts of files as they were before."""
    keys = {task.key for task in tasks}
    for path in parts.iterdir():
        if path.name != PLAN_FILE and (path.suffix != '.part' or path.stem[:-6] not in keys):
            path.unlink()


def _make_tokenizer(wanted, workers):
    """Saves a tokenizer that is there; this comes first, since it needs none of the text."""
    directory = wanted.directory / TOKENIZER_DIRECTORY
    if trained_vocabulary(wanted.tokenizer) is None and not directory.exists():
        job = (wanted.tokenizer, wanted.separator, directory)
        for _ in workers.run(encode.save_tokenizer, [job], lambda _: None):
            pass


def _train_tokenizer(wanted, tasks, phase):
    directory = wanted.directory / TOKENIZER_DIRECTORY
    if directory.exists():
        return
    # A process of its own: the library keeps the number of threads that it began with.
    with Workers(1, threads=wanted.processes) as worker:
        vocab_size = trained_vocabulary(wanted.tokenizer)
        job = (vocab_size, wanted.bpe_bytes, tasks, wanted.options, directory)
        total = min(wanted.bpe_bytes, sum(task.bytes for task in tasks))
        with phase('tokenizer', total) as advance:
            for _ in worker.run(encode.train_tokenizer, [job], advance):
                pass
