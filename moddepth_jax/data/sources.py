"""The files that a source names: one by its path, those in a folder, or those that match a glob."""

import glob
import os
import pathlib
import re
import typing

from moddepth_jax.data import readers

_FOLDERS = re.compile('(?:(?<=/)|^)[*][*](?:/+|$)')


class Files(typing.NamedTuple):
    """Files to read, by their paths below `root`, and those that were found and are not text."""

    root: pathlib.Path
    files: list[pathlib.Path]
    left_out: list[pathlib.Path]

    def note(self) -> str:
        """What was left out, for the user, or nothing."""
        count = len(self.left_out)
        what = f'left out {count:,} file{"s" * (count > 1)} without text, such as'
        return f'{what} {self.left_out[0]}' if count else ''


def find_files(source: str, option: str, right: str, encoding: str = 'utf-8') -> Files:
    """The Files of a path, of a folder with all that are not hidden, or of a glob.

    An existing path is taken literally, even with brackets in it. In a folder, and for a wildcard,
    files of unknown suffix are left out unless they hold text. Links are followed, but no folder
    is searched twice. Raises ValueError, one line with the `option` and what would be `right`,
    without a file of text.
    """
    pattern = os.path.expanduser(source)
    root = pathlib.Path(pattern)
    if os.path.isdir(pattern):
        pattern = os.path.join(glob.escape(pattern), '**', '*')
    elif os.path.lexists(pattern):
        return Files(root.parent, [root], [])
    else:
        while glob.has_magic(str(root)):
            root = root.parent
    matches = {pathlib.Path(match) for match in _expand(pattern) if not os.path.isdir(match)}
    found = Files(root, [], [])
    for path in sorted(matches, key=lambda path: path.relative_to(root).as_posix()):
        found[1 if readers.may_be_text(path, encoding) else 2].append(path)
    if not found.files:
        note = f' ({found.note()})' if found.left_out else ''
        raise ValueError(f'{option}={source!r}: matches no file{note}; {right}')
    return found


def _expand(pattern):
    """Matches of a glob in which ** stands for each folder once: a loop of links has an end."""
    stars = _FOLDERS.search(pattern)
    if not stars:
        return glob.glob(pattern)
    tops, rest = glob.glob(pattern[: stars.start()] or '.'), pattern[stars.end() :] or '*'
    folders = (glob.escape(folder) for top in tops for folder in _folders(top))
    return [match for folder in folders for match in _expand(os.path.join(folder, rest))]


def _folders(top):
    """`top` and the folders below it that are not hidden; no link leads to one a second time."""
    above = pathlib.Path(top).resolve().parents  # a link to these is a loop, too
    seen, folders, links = set(map(_identity, above)), [top], []
    while folders or links:
        folder = (folders or links).pop()
        if (identity := _identity(folder)) in seen:
            continue
        seen.add(identity)
        yield folder
        for name in sorted(os.listdir(folder)):
            path = os.path.join(folder, name)
            if os.path.isdir(path) and not name.startswith('.'):
                (links if os.path.islink(path) else folders).append(path)


def _identity(folder):
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def load_documents(
    source: str, text_field: str, encoding: str = 'utf-8'
) -> tuple[list[tuple[str, bytes]], str]:
    """([(name, bytes) of each document], note of what was left out) of the files of `source`.

    Raises as `find_files`, and BadText.
    """
    right = (
        'must be stdlib, python_environment, synthetic, recall, mixture, a folder of '
        f'launch.prepare, or a file, folder or glob of {readers.describe_formats()}'
    )
    found = find_files(source, 'data.source', right, encoding)
    documents = [
        document
        for path in found.files
        for document in readers.read_documents(
            path, path.relative_to(found.root).as_posix(), text_field, encoding
        )
    ]
    return documents, found.note()
