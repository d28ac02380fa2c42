"""A directory is as its manifest says, or it is refused with the reason."""

import itertools
import json
import os

import pytest

from moddepth_jax.training import manifest
from tests.data.prepared_text import refusal

CASE_BIT = 5  # of ASCII letters
CONTENT = {'step': 3, 'names': ['ä'], 'seconds': 1.0000000000000002, 'rate': 2e-05, 'loss': None}


def make_directory(path):
    (path / 'd').mkdir(parents=True)
    (path / 'd' / 'data').write_bytes(bytes(range(256)))
    (path / 'empty').touch()
    manifest.write_manifest(path, CONTENT)
    return path


def test_content_comes_back_from_an_untouched_directory(tmp_path):
    """The content is returned, and the manifest lists each file by sum and size."""
    directory = make_directory(tmp_path / 'a')
    assert manifest.read_manifest(directory) == CONTENT
    files = json.loads((directory / 'manifest.json').read_text())['files']
    assert {name: size for name, (size, _) in files.items()} == {'d/data': 256, 'empty': 0}
    assert sorted(os.listdir(directory)) == ['d', 'empty', 'manifest.json']


def test_a_flipped_bit_of_data_or_manifest_is_refused(tmp_path):
    """Whichever bit is flipped, of a file or of the manifest itself, the directory is refused.

    White space, letter case of an exponent or of an escape, and digits beyond the precision of a
    number are bits of the manifest, too.
    """
    directory = make_directory(tmp_path / 'a')
    for name in ('d/data', 'manifest.json'):
        path = directory / name
        content = path.read_bytes()
        for i, bit in itertools.product(range(len(content)), (CASE_BIT, None)):
            flipped = bytearray(content)
            flipped[i] ^= 1 << (i % 8 if bit is None else bit)
            path.write_bytes(flipped)
            with pytest.raises(ValueError, match=f'{name} is damaged'):
                manifest.read_manifest(directory)
        path.write_bytes(content)
    assert manifest.read_manifest(directory) == CONTENT


OTHERS = {
    'missing': None,
    'empty': lambda content: b'',
    'cut': lambda content: content[:-1],
    'longer': lambda content: content + b'\0',
    'zeros': lambda content: bytes(len(content)),
}


@pytest.mark.parametrize('kind', OTHERS)
def test_a_file_that_is_missing_or_has_other_bytes_is_named(kind, tmp_path):
    directory = make_directory(tmp_path / 'a')
    for name in ('d/data', 'manifest.json'):
        path = directory / name
        content = path.read_bytes()
        path.write_bytes(OTHERS[kind](content)) if OTHERS[kind] else path.unlink()
        assert name in refusal(manifest.read_manifest, directory)
        path.write_bytes(content)
