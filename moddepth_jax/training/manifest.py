"""The manifest of a directory, written last: every file with its size and sha256."""

import hashlib
import json
import os
import pathlib

from moddepth_jax.data.compression import read_small
from moddepth_jax.data.directory import parse_object, write_atomically

MANIFEST_FILE = 'manifest.json'


def write_manifest(directory: pathlib.Path, content: dict) -> None:
    """Flushes all files under `directory` to disk, then writes its manifest with JSON `content`."""
    paths = sorted(directory.rglob('*'))
    files = {
        path.relative_to(directory).as_posix(): _size_and_sha256(path, flush=True)
        for path in paths
        if path.is_file()
    }
    for path in (directory, *paths):
        if path.is_dir():
            _flush_directory(path)
    manifest = {'files': files, 'content': content}
    manifest['sha256'] = _own_sha256(manifest)
    write_atomically(directory / MANIFEST_FILE, _text(manifest))
    _flush_directory(directory)


def read_manifest(directory: pathlib.Path) -> dict:
    """Verify every file and return the content of the manifest.

    Raises ValueError, one line, if there is no manifest, or if it or a file has changed. Raises
    OSError if a file cannot be read.
    """
    path = directory / MANIFEST_FILE
    if not path.exists():
        raise ValueError(f'unfinished, it has no {MANIFEST_FILE}')
    text = read_small(path)
    try:
        manifest = parse_object(text)
        # The digest is over parsed values. Comparing the text finds other spaces, or 1.0 for 1.
        canonical = text == _text(manifest).encode()
        intact = canonical and manifest.pop('sha256') == _own_sha256(manifest)
    except (ValueError, KeyError):
        intact = False
    if not intact:
        raise ValueError(f'{MANIFEST_FILE} is damaged')
    for name, (size, sha256) in manifest['files'].items():
        if not (directory / name).is_file():
            raise ValueError(f'{name} is missing')
        found_size = (directory / name).stat().st_size
        if found_size != size:
            raise ValueError(f'{name} has {found_size} bytes instead of {size}')
        if _size_and_sha256(directory / name)[1] != sha256:
            raise ValueError(f'{name} is damaged: its sha256 differs from {MANIFEST_FILE}')
    return manifest['content']


def _size_and_sha256(path, flush=False):
    with open(path, 'rb') as file:
        sha256 = hashlib.file_digest(file, 'sha256').hexdigest()
        if flush:
            os.fsync(file.fileno())
        return [file.tell(), sha256]


def _flush_directory(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _text(manifest):
    return json.dumps(manifest, indent=1) + '\n'


def _own_sha256(manifest):
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
