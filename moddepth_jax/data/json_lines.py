"""Documents of .jsonl: one JSON object a line, in UTF-8; blank lines are skipped."""

import pathlib
from collections.abc import Iterator

from moddepth_jax.data.compression import SUFFIXES, open_plain
from moddepth_jax.data.rows import Row, Span, object_text

_BYTE_ORDER_MARK = b'\xef\xbb\xbf'


def rows(path: pathlib.Path, name: str, text_field: str, span: Span) -> Iterator[Row]:
    """The rows of the lines that begin in `span`; see `files.rows`."""
    with open_plain(path) as (stream, tell):
        position = span.start
        if position:
            stream.seek(position)
        compressed = path.suffix.lower() in SUFFIXES
        for number, line in enumerate(stream, span.first_row):
            position += len(line)
            if number == 1:
                line = line.removeprefix(_BYTE_ORDER_MARK)
            if line.strip():
                text = object_text(f'{path}, line {number}', line, text_field, 'line')
                yield Row(f'{name}#{number}', text, tell() if compressed else position - span.start)
            if span.stop is not None and position >= span.stop:
                return


class LineSpans:
    """Cuts a file that passes by, chunk after chunk, into spans of whole lines.

    Args:
      size: bytes, about, of one span.
    """

    def __init__(self, size: int):
        self._size, self._cuts = size, [(0, 1)]
        self._position, self._lines = 0, 0

    def add(self, chunk: bytes) -> None:
        """The next bytes of the file."""
        begin = 0
        while (end := chunk.find(b'\n', max(begin, self._wanted()))) >= 0:
            self._lines += chunk.count(b'\n', begin, end + 1)
            self._cuts.append((self._position + end + 1, self._lines + 1))
            begin = end + 1
        self._lines += chunk.count(b'\n', begin)
        self._position += len(chunk)

    def _wanted(self):
        """Where in the chunk the span is long enough."""
        return self._cuts[-1][0] + self._size - self._position - 1

    def spans(self) -> list[Span]:
        """The spans, in order; they cover the file."""
        starts = [cut for cut in self._cuts if cut[0] < self._position] or self._cuts[:1]
        # A line that is written behind the end by now is in none of them.
        stops = [start for start, _ in starts[1:]] + [self._position]
        return [Span(start, stop, row) for (start, row), stop in zip(starts, stops, strict=True)]
