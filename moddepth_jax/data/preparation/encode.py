"""What the processes of a preparation do with text: make the tokenizer, and turn text to tokens."""

import functools
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator

from moddepth_jax.data import files
from moddepth_jax.data.preparation.options import Options
from moddepth_jax.data.preparation.part import PartWriter, add_skipped
from moddepth_jax.data.preparation.plan import Task
from moddepth_jax.data.rows import BadText, Row
from moddepth_jax.data.split import place
from moddepth_jax.data.tokenizers.stretches import stretches
from moddepth_jax.data.tokenizers.tokenizer import Tokenizer, make_tokenizer

_BATCH_BYTES = 1 << 20  # of text that is encoded at once, about


def _checked(row: Row, path: pathlib.Path) -> Row:
    """`row`, or the same with a BadText where its text is not UTF-8."""
    if isinstance(row.text, BadText):
        return row
    try:
        row.text.decode()
        return row
    except UnicodeDecodeError as error:
        where = path if '#' not in row.name else f'{path}, row {row.name.rpartition("#")[2]}'
        problem = f'byte {error.start} of the text is not UTF-8'
        remedy = 'save it as UTF-8, as in iconv -f LATIN1 -t UTF-8'
        return row._replace(text=BadText(where, 'not UTF-8', problem, remedy))


def _task_rows(task: Task, text_field: str) -> Iterator[tuple[Row, int]]:
    """(row, bytes of the task up to it) of all stretches of a task."""
    before = 0
    for stretch in task.stretches:
        for row in files.rows(stretch.path, stretch.name, text_field, stretch.span):
            yield _checked(row, stretch.path), before + min(row.end, stretch.bytes)
        before += stretch.bytes


@functools.lru_cache(maxsize=1)
def _tokenizer(directory: pathlib.Path) -> Tokenizer:
    return make_tokenizer(str(directory))


class _Progress:
    """Tells how far a task is, never back."""

    def __init__(self, advance):
        self._advance, self._told = advance, 0

    def at(self, done):
        if done > self._told:
            self._advance(done - self._told)
            self._told = done


class _Batch:
    """Documents that are encoded together."""

    def __init__(self, tokenizer, most_bytes):
        self._tokenizer, self._most_bytes = tokenizer, most_bytes
        self._names, self._texts, self._bytes = [], [], 0

    def add(self, name, text):
        self._names.append(name)
        self._texts.append(text)
        self._bytes += len(text)

    @property
    def full(self):
        return self._bytes >= self._most_bytes

    def flush(self, writer):
        """Hands the documents and their tokens to the PartWriter."""
        tokens = self._tokenizer.encode_batch(self._texts)
        for name, text, ids in zip(self._names, self._texts, tokens, strict=True):
            writer.add(name, len(text), ids)
        self._names, self._texts, self._bytes = [], [], 0


def encode(
    task: Task,
    parts: pathlib.Path,
    tokenizer_directory: pathlib.Path,
    options: Options,
    advance: Callable[[int], None],
) -> None:
    """Writes those parts of an unfinished task that are not there yet.

    Args:
      task: what to read.
      parts: the directory of the parts.
      tokenizer_directory: where the tokenizer was saved.
      options: how to read and encode.
      advance: called with the bytes of the files done since the last call.

    Raises:
      BadText: a bad row, unless they are skipped; the rows before it are kept.
      OSError: the disk is full.
    """
    done = task.parts(parts)
    tokenizer = _tokenizer(tokenizer_directory)
    batch = _Batch(tokenizer, min(_BATCH_BYTES, options.part_bytes))
    progress = _Progress(advance)
    number = len(done)
    task.remove_parts(parts, number)
    rows = saved = first_new = done[-1].header['rows'] if done else 0

    def new_writer():
        return PartWriter(tokenizer.dtype, tokenizer.separator, options.held_out_fraction)

    def save(last):
        nonlocal writer, number, saved
        batch.flush(writer)
        writer.save(task.path(parts, number), rows, last)
        writer, number, saved = new_writer(), number + 1, rows

    writer = new_writer()
    for i, (row, position) in enumerate(_task_rows(task, options.text_field)):
        if i < first_new:
            continue
        if isinstance(row.text, BadText):
            if not options.skip_bad:
                if rows > saved:
                    save(last=False)
                raise row.text
            add_skipped(writer.skipped, row.text.reason, 1, [str(row.text)])
        elif not row.text:
            add_skipped(writer.skipped, 'empty', 1, [row.name])
        else:
            batch.add(row.name, row.text)
        rows = i + 1
        if batch.full:
            batch.flush(writer)
            progress.at(position)
            if writer.num_bytes >= options.part_bytes:
                save(last=False)
    save(last=True)
    progress.at(task.bytes)


def save_tokenizer(
    name: str, separator: str | None, directory: pathlib.Path, advance: Callable
) -> None:
    """Saves the tokenizer `name`, of `make_tokenizer`, to `directory`, wholly or not at all."""
    try:
        tokenizer = make_tokenizer(name, separator)
    except ValueError as error:
        raise ValueError(f'--tokenizer={name}: {error}') from None
    _save(tokenizer, directory)
    advance(0)


def train_tokenizer(
    vocab_size: int,
    sample_bytes: int,
    tasks: list[Task],
    options: Options,
    directory: pathlib.Path,
    advance: Callable[[int], None],
) -> None:
    """Trains byte-level BPE on a sample of the documents to train on; saves it to `directory`.

    Args:
      vocab_size: ids in all.
      sample_bytes: of text, about; each task gives its share of it, from its beginning.
      tasks: all of the preparation.
      options: how to read.
      directory: which must not exist; it is there as a whole or not at all.
      advance: called with the bytes of the files that the sample has passed.
    """
    from moddepth_jax.data.tokenizers.bpe_training import train_bpe

    try:
        tokenizer = train_bpe(_sample(tasks, sample_bytes, options, advance), vocab_size)
    except BadText:
        raise
    except ValueError as error:
        raise ValueError(f'--tokenizer={error}') from None
    _save(tokenizer, directory)


def _sample(tasks, sample_bytes, options, advance):
    share = min(1.0, sample_bytes / max(1, sum(task.bytes for task in tasks)))
    found = False
    # Where all documents would be held out, some of them are not in the end.
    for least in (options.held_out_fraction, 0.0):
        for task in tasks:
            wanted = share * task.bytes if share < 1 else math.inf
            for text in _texts(task, least, options):
                found = True
                yield text
                wanted -= len(text)
                if wanted <= 0:
                    break
            advance(round(share * task.bytes))
        if found:
            return


def _texts(task, least_place, options):
    for row, _ in _task_rows(task, options.text_field):
        if isinstance(row.text, BadText):
            if not options.skip_bad:
                raise row.text
        elif place(row.name) >= least_place:
            for piece in stretches(row.text.decode(), prefixed=False):  # one may be a whole corpus
                yield piece.encode()


def _save(tokenizer, directory):
    temporary = directory.with_name(directory.name + '.tmp')
    shutil.rmtree(temporary, ignore_errors=True)
    tokenizer.save(temporary)
    os.rename(temporary, directory)
