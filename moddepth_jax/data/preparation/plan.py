"""The plan of a preparation: its options, its files, and tasks for several processes."""

import codecs
import collections
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import typing
from collections.abc import Callable, Collection

from moddepth_jax.data import readers
from moddepth_jax.data.compression import open_file
from moddepth_jax.data.directory import read_json, write_atomically
from moddepth_jax.data.preparation.parts import Part
from moddepth_jax.data.readers import WHOLE_FILE, BadText, Span
from moddepth_jax.data.tokenizers.json_tokenizer import MIN_BPE_IDS
from moddepth_jax.data.tokenizers.tokenizer import FILES

_CHUNK = 1 << 20
_MAX_FILES = 4096  # of one task


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of launch.prepare; `sources` are files, folders or globs."""

    sources: tuple[str, ...]
    directory: pathlib.Path
    tokenizer: str
    separator: str | None
    text_field: str
    encoding: str
    held_out_fraction: float
    skip_bad: bool
    part_bytes: int
    bpe_bytes: int
    processes: int

    def arguments(self) -> dict:
        """Return the options that, with the files, determine the result, as JSON values."""
        encoding = codecs.lookup(self.encoding).name
        trained = {'bpe_bytes': self.bpe_bytes} if self.vocab_size is not None else {}
        path = pathlib.Path(self.tokenizer).expanduser()
        files = [path / name for name in FILES] if path.is_dir() else [path]
        files = [file for file in files if file.is_file() and self.tokenizer != 'bytes']
        content = b''.join(file.read_bytes() for file in files)
        identity = f'{path.name} of sha256 {hashlib.sha256(content).hexdigest()}'
        return {
            'tokenizer': identity if files else self.tokenizer,
            'separator': self.separator,
            'text_field': self.text_field,
            'held_out_fraction': self.held_out_fraction,
            **trained,
            **({} if encoding == 'utf-8' else {'encoding': encoding}),  # as in earlier stores
        }

    @property
    def vocab_size(self) -> int | None:
        """N of 'bpe:N'; None for another tokenizer. Raises ValueError, one line, for a wrong N."""
        kind, _, size = self.tokenizer.partition(':')
        if kind != 'bpe' or os.path.exists(self.tokenizer):
            return None
        if not size.isdecimal() or int(size) < MIN_BPE_IDS:
            right = f'must be bpe:N with N ids, {MIN_BPE_IDS} or more, such as bpe:4096'
            raise ValueError(f'--tokenizer={self.tokenizer}: {right}')
        return int(size)


class FileInfo(typing.NamedTuple):
    """The result of `survey`; `modified` is in nanoseconds, 0 if the file does not exist."""

    bytes: int
    modified: int
    sha256: str
    spans: list[Span]

    def is_current(self, path: pathlib.Path) -> bool:
        """Return whether the file has not changed since."""
        try:
            status = path.stat()
        except OSError:
            return self.modified == 0
        return (status.st_size, status.st_mtime_ns) == (self.bytes, self.modified)


class FileSpan(typing.NamedTuple):
    """A span of a file, and its approximate size in bytes."""

    name: str
    path: pathlib.Path
    span: Span
    bytes: int


class Task(typing.NamedTuple):
    """The work of a process at a time: some spans of files; tasks with equal keys are equal."""

    key: str
    spans: list[FileSpan]
    bytes: int

    def path(self, directory: pathlib.Path, number: int) -> pathlib.Path:
        """Return the path of part `number`, counted from 0."""
        return directory / f'{self.key}-{number:05d}.part'

    def parts(self, directory: pathlib.Path) -> list[Part]:
        """Open the parts that are written, up to the first one that is missing or damaged."""
        found = []
        while not (found and found[-1].header['last']):
            try:
                found.append(Part(self.path(directory, len(found))))
            except (OSError, ValueError, KeyError, TypeError):
                break
        return found

    def remove_parts(self, directory: pathlib.Path, first: int) -> None:
        """Remove the parts from number `first` on; new ones may end at other rows."""
        last = first + 1
        while self.path(directory, last).exists():
            last += 1
        for number in reversed(range(first, last)):  # last first, so that a kill leaves no gap
            self.path(directory, number).unlink(missing_ok=True)


def survey(
    path: pathlib.Path,
    text_field: str,
    span_bytes: int,
    skip_bad: bool,
    advance: Callable[[int], None],
) -> FileInfo:
    """Read a file once, for its sha256 and its spans of about `span_bytes`.

    `advance` takes the bytes that are read since its last call. Raises BadText if the file cannot
    be read or has no such column. With `skip_bad` the file is then one span, and `read_rows`
    reports it.
    """
    digest, size, modified, spans = hashlib.sha256(), 0, 0, [WHOLE_FILE]

    def chunks(file):
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            advance(len(chunk))
            yield chunk

    try:
        status = path.stat()
        size, modified = status.st_size, status.st_mtime_ns
        with open_file(path) as file:
            unread = chunks(file)
            try:
                spans = readers.find_spans(path, text_field, span_bytes, unread)
            finally:
                collections.deque(unread, maxlen=0)  # the digest is that of the whole file
    except (BadText, OSError) as error:
        if not skip_bad:
            raise readers.as_bad_text(path, error) from None
    return FileInfo(size, modified, digest.hexdigest(), spans)


def make_tasks(
    paths: list[tuple[str, pathlib.Path]],
    inputs: dict[str, FileInfo],
    task_bytes: int,
    starts: Collection[tuple[str, int]] = (),
) -> list[Task]:
    """Group the spans of files into tasks, in the order of the result.

    `paths` are (name, path) of the files. `starts` are (name, start) of spans that must begin a
    task.
    """
    groups, filled = [], math.inf
    for name, path in paths:
        info = inputs[name]
        for span in info.spans:
            full = filled >= task_bytes or len(groups[-1]) >= _MAX_FILES
            if full or (name, span.start) in starts:
                groups.append([])
                filled = 0
            groups[-1].append(FileSpan(name, path, span, info.bytes // len(info.spans)))
            filled += groups[-1][-1].bytes
    tasks = []
    for spans in groups:
        contents = [[span.name, inputs[span.name].sha256, *span.span] for span in spans]
        key = hashlib.sha256(json.dumps(contents).encode()).hexdigest()[:32]
        tasks.append(Task(key, spans, sum(span.bytes for span in spans)))
    return tasks


@dataclasses.dataclass
class Plan:
    """The content of parts/plan.json; all fields are empty if nothing was started.

    Attributes:
      arguments: options that determine the result.
      inputs: FileInfo by name of the file.
      span_bytes: approximate size of spans and tasks.
      starts: as in `make_tasks`; files that change thus do not move other tasks.
    """

    arguments: dict = dataclasses.field(default_factory=dict)
    inputs: dict[str, FileInfo] = dataclasses.field(default_factory=dict)
    span_bytes: int = 0
    starts: Collection[tuple[str, int]] = ()

    @classmethod
    def read(cls, file: pathlib.Path) -> 'Plan':
        """Read the stored plan; raises ValueError, KeyError or TypeError if it is damaged."""
        stored = read_json(file, '', {'arguments': dict, 'span_bytes': int}, 1 << 30)
        if stored is None:
            return cls()
        inputs = {
            name: FileInfo(size, modified, sha256, [Span(*span) for span in spans])
            for name, (size, modified, sha256, spans) in stored['inputs']
        }
        starts = {(name, start) for name, start in stored.get('starts', [])}
        return cls(stored['arguments'], inputs, stored['span_bytes'], starts)

    def write(self, file: pathlib.Path) -> None:
        """Write the plan."""
        stored = vars(self) | {'inputs': list(self.inputs.items()), 'starts': list(self.starts)}
        write_atomically(file, json.dumps(stored))
