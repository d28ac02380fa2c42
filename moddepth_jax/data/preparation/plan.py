"""The plan of a preparation: which files there are, cut into tasks that processes can share."""

import collections.abc
import hashlib
import json
import pathlib
import typing

from moddepth_jax.data import files
from moddepth_jax.data.directory import write_atomically
from moddepth_jax.data.json_lines import LineSpans
from moddepth_jax.data.preparation.part import Part
from moddepth_jax.data.rows import WHOLE, BadText, Span

PLAN_FILE = 'plan.json'
_CHUNK = 1 << 20
_MOST_FILES = 4096  # of one task


class Input(typing.NamedTuple):
    """A file as it was when it was surveyed.

    Attributes:
      bytes: its size.
      modified: when it was written last, nanoseconds.
      sha256: of its content, hexadecimal.
      spans: what it is cut into.
    """

    bytes: int
    modified: int
    sha256: str
    spans: list[Span]


class Stretch(typing.NamedTuple):
    """A span of a file: its name, its path, the span, and bytes of the file, about."""

    name: str
    path: pathlib.Path
    span: Span
    bytes: int


class Task(typing.NamedTuple):
    """What one process does in one go.

    Attributes:
      key: what it is about, by content: equal keys give equal parts.
      stretches: what it reads, in order.
      bytes: of the files, about.
    """

    key: str
    stretches: list[Stretch]
    bytes: int

    def path(self, directory: pathlib.Path, number: int) -> pathlib.Path:
        """Of the part `number`, from 0, of this task."""
        return directory / f'{self.key}-{number:05d}.part'

    def parts(self, directory: pathlib.Path) -> list[Part]:
        """Those that are written; a damaged one and what follows it do not count."""
        found = []
        while not (found and found[-1].header['last']):
            try:
                found.append(Part(self.path(directory, len(found))))
            except (OSError, ValueError, KeyError):
                break
        return found

    def remove_parts(self, directory: pathlib.Path, first: int) -> None:
        """Removes those from number `first` on, which follow one that is damaged or missing.

        What takes their places may end at other rows.
        """
        last = first + 1
        while self.path(directory, last).exists():
            last += 1
        for number in reversed(range(first, last)):  # killed here, it leaves no gap
            self.path(directory, number).unlink(missing_ok=True)

    def is_done(self, directory: pathlib.Path) -> bool:
        """Whether all of its parts are written."""
        parts = self.parts(directory)
        return bool(parts) and parts[-1].header['last']


def survey(path: pathlib.Path, text_field: str, span_bytes: int, skip_bad: bool, advance) -> Input:
    """Reads a file once: its sha256, and where it can be cut.

    Args:
      path: of the file.
      text_field: the field or column of the text.
      span_bytes: bytes, about, of one span.
      skip_bad: whether a file that cannot be read is a whole that `files.rows` will tell about.
      advance: called with the bytes read since the last call.

    Raises:
      BadText: the file cannot be read, or has no such column, unless `skip_bad`.
    """
    lines = LineSpans(span_bytes) if path.suffix.lower() == '.jsonl' else None
    digest, size, modified = hashlib.sha256(), 0, 0
    try:
        status = path.stat()
        size, modified = status.st_size, status.st_mtime_ns
        with open(path, 'rb') as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                if lines is not None:
                    lines.add(chunk)
                advance(len(chunk))
        found = lines.spans() if lines is not None else files.spans(path, text_field, span_bytes)
    except (BadText, OSError) as error:
        if not skip_bad:
            raise files.as_bad_text(path, error) from None
        found = [WHOLE]
    return Input(size, modified, digest.hexdigest(), found)


def make_tasks(
    paths: list[tuple[str, pathlib.Path]],
    inputs: dict,
    span_bytes: int,
    starts: collections.abc.Set[tuple[str, int]] = frozenset(),
) -> list[Task]:
    """The work, in the order of the result: spans of large files, and small files together.

    Args:
      paths: (name, path) of the files, in order.
      inputs: the Input of each name.
      span_bytes: bytes, about, of one task.
      starts: (name, start of the span) of stretches that begin a task, whatever stands before them.
    """
    tasks, stretches, contents, filled = [], [], [], 0

    def close():
        nonlocal stretches, contents, filled
        key = hashlib.sha256(json.dumps(contents).encode()).hexdigest()[:32]
        tasks.append(Task(key, stretches, filled))
        stretches, contents, filled = [], [], 0

    for name, path in paths:
        found = inputs[name]
        for span in found.spans:
            if stretches and (name, span.start) in starts:
                close()
            stretches.append(Stretch(name, path, span, found.bytes // len(found.spans)))
            contents.append([name, found.sha256, *span])
            filled += stretches[-1].bytes
            if filled >= span_bytes or len(stretches) >= _MOST_FILES:
                close()
    if stretches:
        close()
    return tasks


class Plan:
    """What parts/plan.json holds: the arguments and the files of a preparation that was started.

    Attributes:
      arguments: those that decide the result, JSON values by name; empty: nothing was started.
      inputs: Input by name, in order.
      span_bytes: of one span or task, about; 0: nothing was started.
      starts: of its tasks, as `make_tasks` takes them, so that files which change do not move the
        bounds of the tasks of others.
    """

    def __init__(self, directory: pathlib.Path):
        self._file = directory / PLAN_FILE
        self._clear()
        try:
            stored = json.loads(self._file.read_text(encoding='utf-8'))
        except FileNotFoundError:
            return
        self.arguments, self.span_bytes = stored['arguments'], stored['span_bytes']
        self.starts = {(name, start) for name, start in stored.get('starts', [])}
        for name, (size, modified, sha256, spans) in stored['inputs']:
            self.inputs[name] = Input(size, modified, sha256, [Span(*span) for span in spans])

    def forget(self) -> None:
        """Has nothing be planned."""
        self._file.unlink(missing_ok=True)
        self._clear()

    def _clear(self):
        self.arguments, self.inputs, self.span_bytes, self.starts = {}, {}, 0, set()

    def write(self, arguments: dict, inputs: dict, tasks: list[Task]) -> None:
        """Stores what is being prepared now."""
        self.arguments, self.inputs = arguments, inputs
        firsts = [task.stretches[0] for task in tasks]
        starts = [(stretch.name, stretch.span.start) for stretch in firsts]
        self.starts = set(starts)
        plan = {'arguments': arguments, 'span_bytes': self.span_bytes, 'starts': starts}
        write_atomically(self._file, json.dumps({**plan, 'inputs': list(inputs.items())}))
