"""Finds the files of a source: a path, all files in a folder, or the matches of a glob."""

import glob
import os
import pathlib
import re

from moddepth_jax.data import readers
from moddepth_jax.data.directory import read_json
from moddepth_jax.data.token_store import PLAN_FILE, PREPARED_FILE, is_started
from moddepth_jax.hparams.checks import did_you_mean

MADE = ('stdlib', 'python_environment', 'synthetic', 'recall', 'mixture')  # need no path
_RIGHT = f'must be {", ".join(MADE)}, a folder of launch.prepare, or a file, folder or glob of '
_NO_TEXTS = ('/', '/dev', '/proc', '/run', '/sys')
_FOLDERS = re.compile('(?:(?<=/)|^)[*][*](?:/+|$)')


class NoText(ValueError):
    """A source has no file of text, or no text in its files."""


def find_files(
    source: str, option: str, right: str, encoding: str = 'utf-8'
) -> tuple[pathlib.Path, list[pathlib.Path], list[pathlib.Path]]:
    """Find the files of a path, folder or glob; returns (root, files below it, files left out).

    An existing path is taken literally, even with brackets in it. Hidden files of a folder are
    ignored, and so are folders in it that launch.prepare or launch.train wrote. Of a folder and of
    a glob, files that `readers.may_be_text` refuses are left out. Links are followed, but no folder
    is searched and no file taken twice. The lists are sorted.

    Args:
      source: path, folder or glob.
      option: knob or flag that names the source, for errors.
      right: what would be right, for errors.
      encoding: encoding of the text.

    Raises:
      NoText: one line, there is no file.
      ValueError: one line, a command has written the folder.
    """
    _check_address(source, option)
    pattern = os.path.expanduser(source)
    root = pathlib.Path(pattern)
    if os.path.realpath(pattern) in _NO_TEXTS:
        raise ValueError(f'{option}={source!r}: is not a folder of texts; {right}')
    if os.path.isdir(pattern):
        _check_folder(source, option, right)
        pattern = os.path.join(glob.escape(pattern), '**', '*')
    elif os.path.lexists(pattern):
        return root.parent, [root], []
    else:
        while glob.has_magic(str(root)):
            root = root.parent
    matches = {pathlib.Path(match) for match in _expand(pattern) if not os.path.isdir(match)}
    files, left_out = [], []
    for path in distinct_files(matches, root):
        (files if readers.may_be_text(path, encoding) else left_out).append(path)
    if not files:
        note = f' ({describe_left_out(left_out)})' if left_out else ''
        found = 'holds' if os.path.isdir(os.path.expanduser(source)) else 'matches'
        raise NoText(f'{option}={source!r}: {found} no file{note}; {right}')
    return root, files, left_out


def distinct_files(paths, root) -> list[pathlib.Path]:
    """Return the paths sorted below `root`; of several of one file the one with a known format."""
    ordered = sorted(paths, key=lambda path: os.path.relpath(path, root))
    chosen = {}
    for path in sorted(ordered, key=lambda path: not readers.has_format(path)):
        chosen.setdefault(os.path.realpath(path), path)
    taken = set(chosen.values())
    return [path for path in ordered if path in taken]


def check_source(source: str):
    """Raise ValueError early, before slow imports, for a `data.source` that does not exist."""
    path, right = os.path.expanduser(source), _RIGHT + readers.describe_formats()
    if source in MADE or is_started(source):
        return
    _check_address(source, 'data.source')
    if os.path.isdir(path):
        _check_folder(source, 'data.source', right)
    elif not ('**' in path or os.path.lexists(path) or any(glob.iglob(path))):
        folder, name = os.path.split(path)
        near = os.listdir(folder or '.') if os.path.isdir(folder or '.') else []
        hint = did_you_mean(name, [*near, *([] if folder else MADE)])
        raise ValueError(f'data.source={source!r}: matches no file{hint}; {right}')


def _check_address(source, option):
    if re.match('[a-z0-9]+://', source):
        raise ValueError(f'{option}={source!r}: is a URL; download it and give the files')


def _check_folder(source, option, right):
    if kind := _kind_of_folder(pathlib.Path(os.path.expanduser(source))):
        raise ValueError(f'{option}={source!r}: is {kind}, not a folder of texts; {right}')


def _kind_of_folder(folder):
    """Return what a folder is, in words, if launch.train or another program wrote it, or ''."""
    if _is_run(folder):
        return 'a run of launch.train'
    if _has_fields(folder / 'config.json', 'model_type') and any(folder.glob('*.safetensors')):
        return 'a Hugging Face model'
    manifests = (file for depth in ('', '*/') for file in folder.glob(f'{depth}manifest.json'))
    if any(_has_fields(file, 'files', 'content', 'sha256') for file in manifests):
        return 'a folder of checkpoints'
    if any(any(folder.glob(f'{depth}study.json')) for depth in ('', '*/', '*/*/')):
        return 'a folder of results of studies'
    return ''


def _is_run(folder):
    return _has_fields(pathlib.Path(folder, 'config.json'), 'schema_version', 'config')


def _has_fields(file, *names):
    """Return whether a file is a JSON object with these fields."""
    try:
        return {*names} <= (read_json(file, '') or {}).keys()
    except ValueError:  # not JSON
        return False


def describe_left_out(paths: list[pathlib.Path]) -> str:
    """Return a note for the user on the files that `find_files` left out, or ''."""
    what = f'left out {len(paths):,} file{"s" * (len(paths) > 1)} without text'
    return f'{what}, such as {paths[0]}' if paths else ''


def _expand(pattern):
    """Return the matches of a glob; ** visits each folder once, even in a loop of links."""
    stars = _FOLDERS.search(pattern)
    if not stars:
        return glob.glob(pattern)
    tops, rest = glob.glob(pattern[: stars.start()] or '.'), pattern[stars.end() :] or '*'
    folders = (glob.escape(folder) for top in tops for folder in _folders(top))
    return [match for folder in folders for match in _expand(os.path.join(folder, rest))]


def _folders(top):
    """Yield `top` and the folders below it, each once; not hidden ones, prepared text and runs."""
    seen = set(map(str, pathlib.Path(top).resolve().parents))  # a link to these is a loop
    folders, links = [top], []
    while folders or links:
        folder = (folders or links).pop()
        names = (os.path.join(folder, name) for name in (PREPARED_FILE, PLAN_FILE))
        if (real := os.path.realpath(folder)) in seen or any(map(os.path.lexists, names)):
            continue
        if _is_run(folder):
            continue
        seen.add(real)
        yield folder
        try:
            names = sorted(os.listdir(folder))
        except OSError as error:
            right = 'make the folder readable, or name other files'
            raise ValueError(f'{folder}: {error.strerror}; {right}') from None
        for name in names:
            path = os.path.join(folder, name)
            if os.path.isdir(path) and not name.startswith('.'):
                (links if os.path.islink(path) else folders).append(path)


def load_documents(
    source: str, text_field: str, encoding: str = 'utf-8'
) -> tuple[list[tuple[str, bytes]], str]:
    """Read the files of `source` as ([(name, bytes) of each document], note on files left out).

    Raises like `find_files`, or the first BadText.
    """
    right = _RIGHT + readers.describe_formats()
    root, files, left_out = find_files(source, 'data.source', right, encoding)
    documents = []
    for path in files:
        name = path.relative_to(root).as_posix()
        for row in readers.read_rows(path, name, text_field, encoding=encoding):
            if isinstance(row.text, readers.BadText):
                raise row.text
            documents.append((row.name, row.text))
    return documents, describe_left_out(left_out)
