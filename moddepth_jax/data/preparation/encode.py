"""The work of a preparation's processes: to train the tokenizer, and to encode text."""

import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator

from moddepth_jax.data import readers
from moddepth_jax.data.preparation.parts import PartWriter
from moddepth_jax.data.preparation.plan import Options, Task
from moddepth_jax.data.readers import BadText, Row
from moddepth_jax.data.split import name_hash
from moddepth_jax.data.tokenizers.piece_tokenizer import chunk_text
from moddepth_jax.data.tokenizers.tokenizer import Tokenizer, make_tokenizer, save_atomically

_PROGRESS_BYTES = 1 << 18  # between two reports of progress
_MOST_EXCESS = 0.1  # of a sample; the last text of each task is complete


def _task_rows(task: Task, options: Options) -> Iterator[tuple[Row, int]]:
    """Yield (row, bytes of the task up to its end) of all spans of a task."""
    before = 0
    for part in task.spans:
        for row in readers.read_rows(
            part.path, part.name, options.text_field, part.span, options.encoding
        ):
            yield row, before + min(row.end, part.bytes)
        before += part.bytes


@functools.lru_cache(maxsize=1)
def _tokenizer(directory: pathlib.Path) -> Tokenizer:
    return make_tokenizer(directory)


def encode(
    task: Task,
    parts: pathlib.Path,
    tokenizer_directory: pathlib.Path,
    options: Options,
    advance: Callable[[int], None],
) -> None:
    """Write the missing parts of an unfinished task into the directory `parts`.

    `advance` takes the bytes that are done since its last call. Raises BadText for a bad row unless
    `options.skip_bad`; the rows before it are kept.
    """
    done, reported = task.parts(parts), 0
    task.remove_parts(parts, len(done))
    paths = (task.path(parts, number) for number in itertools.count(len(done)))
    rows = saved = done[-1].header['rows'] if done else 0
    tokenizer, fraction = _tokenizer(tokenizer_directory), options.held_out_fraction
    writer = PartWriter(tokenizer, fraction)
    for row, position in itertools.islice(_task_rows(task, options), rows, None):
        if isinstance(row.text, BadText):
            if not options.skip_bad:
                if rows > saved:
                    writer.save(next(paths), rows, last=False)
                raise row.text
            writer.skip(row.text.reason, str(row.text))
        elif not row.text:
            writer.skip('empty', row.name)
        else:
            writer.add(row.name, row.text)
        rows += 1
        if position - reported >= _PROGRESS_BYTES:
            advance(position - reported)
            reported = position
        if writer.num_bytes >= options.part_bytes:
            writer.save(next(paths), rows, last=False)
            writer, saved = PartWriter(tokenizer, fraction), rows
    writer.save(next(paths), rows, last=True)
    advance(task.bytes - reported)


def train_tokenizer(
    tasks: list[Task], options: Options, directory: pathlib.Path, advance: Callable[[int], None]
) -> None:
    """Train byte-level BPE on the start of each task, without held-out documents, and save it."""
    from moddepth_jax.data.tokenizers.json_tokenizer import train_bpe

    try:
        tokenizer = train_bpe(_sample(tasks, options, advance), options.vocab_size)
    except BadText:
        raise
    except ValueError as error:
        raise ValueError(f'--tokenizer={error}') from None
    save_atomically(tokenizer, directory)


def _sample(tasks, options, advance):
    share = options.bpe_bytes / max(1, sum(task.bytes for task in tasks))
    least_hash = _least_training_hash(tasks, options)
    most, taken = _MOST_EXCESS * options.bpe_bytes, 0
    for task in tasks:
        wanted = share * task.bytes  # also above 1: the files may be compressed
        most += wanted
        for text in _texts(task, least_hash, options) if taken < most else ():
            yield text
            taken += len(text)
            wanted -= len(text)
            if wanted <= 0:
                break
        advance(round(min(1.0, share) * task.bytes))


def _least_training_hash(tasks, options):
    """Return the least hash of a document to train on, as `split_documents` splits them.

    It reads up to the first held-out document: all text only if there is none, or nothing else. A
    single document, which is cut, counts as one to train on.
    """
    rows = (row for task in tasks for row, _ in _task_rows(task, options))
    found = []  # the least, the second and the greatest hash, if there are as many
    for row in rows:
        if isinstance(row.text, BadText) or not row.text:
            continue
        found = sorted([*found, name_hash(row.name)])
        found = found[:2] + found[2:][-1:]
        if found[0] < options.held_out_fraction <= found[-1]:
            return options.held_out_fraction
    if not found:
        return 0.0
    return found[:2][-1] if found[0] >= options.held_out_fraction else found[-1]


def _texts(task, least_hash, options):
    for row, _ in _task_rows(task, options):
        if isinstance(row.text, BadText):
            if not options.skip_bad:
                raise row.text
        elif name_hash(row.name) >= least_hash:
            for chunk in chunk_text(row.text.decode(), prefixed=False):  # may be a full corpus
                yield chunk.encode()
