"""The plan of a preparation: its options, and its files split into tasks for several processes."""

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

_CHUNK = 1 << 20
_MAX_FILES = 4096  # of one task


@dataclasses.dataclass(frozen=True)
class Options:
    """What to prepare and how, as the flags of launch.prepare; `sources` are globs of files."""

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
        """The options that, together with the files, decide the result, as JSON values."""
        encoding = codecs.lookup(self.encoding).name
        trained = {'bpe_bytes': self.bpe_bytes} if self.vocab_size is not None else {}
        path = pathlib.Path(self.tokenizer).expanduser()
        files = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
        content = b''.join(file.read_bytes() for file in files if file.is_file())
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
            right = f'must be bpe:N, N ids in all, {MIN_BPE_IDS} or more, as in bpe:4096'
            raise ValueError(f'--tokenizer={self.tokenizer}: {right}')
        return int(size)


class FileInfo(typing.NamedTuple):
    """A file as it was surveyed; `modified` is in nanoseconds, 0 if the file does not exist."""

    bytes: int
    modified: int
    sha256: str
    spans: list[Span]

    def is_current(self, path: pathlib.Path) -> bool:
        """Whether the file has not been written to since."""
        try:
            status = path.stat()
        except OSError:
            return self.modified == 0
        return (status.st_size, status.st_mtime_ns) == (self.bytes, self.modified)


class FileSpan(typing.NamedTuple):
    """A span of a file, and about how many of its bytes that is."""

    name: str
    path: pathlib.Path
    span: Span
    bytes: int


class Task(typing.NamedTuple):
    """What one process does at a time: `spans`, about `bytes` of files; equal keys, equal parts."""

    key: str
    spans: list[FileSpan]
    bytes: int

    def path(self, directory: pathlib.Path, number: int) -> pathlib.Path:
        """Of part `number`, from 0, of this task."""
        return directory / f'{self.key}-{number:05d}.part'

    def parts(self, directory: pathlib.Path) -> list[Part]:
        """The parts that are written; a damaged one and those after it do not count."""
        found = []
        while not (found and found[-1].header['last']):
            try:
                found.append(Part(self.path(directory, len(found))))
            except (OSError, ValueError, KeyError, TypeError):
                break
        return found

    def remove_parts(self, directory: pathlib.Path, first: int) -> None:
        """Removes the parts from number `first` on; those that replace them may end elsewhere."""
        last = first + 1
        while self.path(directory, last).exists():
            last += 1
        for number in reversed(range(first, last)):  # a kill here leaves no gap
            self.path(directory, number).unlink(missing_ok=True)


def survey(
    path: pathlib.Path,
    text_field: str,
    span_bytes: int,
    skip_bad: bool,
    advance: Callable[[int], None],
) -> FileInfo:
    """Reads a file once: its sha256, and where it can be split into spans of about `span_bytes`.

    `advance` takes the bytes read since its last call. Raises BadText if the file cannot be read or
    has no such column; with `skip_bad` it is one span, which `read_rows` will report.
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
    """The work, in the order of the result: spans of large files, and small files together.

    `paths` are (name, path) of the files; `starts` (name, start) of spans that must begin a task.
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
    """What parts/plan.json holds; all is empty if nothing was started.

    `arguments` decide the result; spans and tasks have about `span_bytes`; `starts` are as
    `make_tasks` takes them, so that files which change do not move other tasks.
    """

    arguments: dict = dataclasses.field(default_factory=dict)
    inputs: dict[str, FileInfo] = dataclasses.field(default_factory=dict)
    span_bytes: int = 0
    starts: Collection[tuple[str, int]] = ()

    @classmethod
    def read(cls, file: pathlib.Path) -> 'Plan':
        """The stored plan; raises ValueError, KeyError or TypeError if it is damaged."""
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
        """Stores it."""
        stored = vars(self) | {'inputs': list(self.inputs.items()), 'starts': list(self.starts)}
        write_atomically(file, json.dumps(stored))
