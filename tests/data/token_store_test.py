"""A store gives back what was written to it, reads no more than is asked for, and is checked."""

import json
import os

import numpy as np
import pytest

from moddepth_jax.data import token_store
from moddepth_jax.data.token_store import StoredDocuments, StoreWriter, is_store, open_store
from moddepth_jax.data.tokenizers.tokenizer import ByteTokenizer
from moddepth_jax.data.windows import token_stream
from tests.data.prepared_text import refusal

DOCUMENTS = {'train': [b'one', b'', b'three', b'four'], 'held_out': ['fünf'.encode()]}


def _write(folder, tokenizer=None, finish=True, at_once=3):
    """DOCUMENTS, some of them at once; the Store, unless it is left unfinished."""
    tokenizer = tokenizer or ByteTokenizer()
    folder.mkdir(exist_ok=True)
    with StoreWriter(folder, tokenizer, 0.25) as writer:
        for part, texts in DOCUMENTS.items():
            for i in range(0, len(texts), at_once):
                some = texts[i : i + at_once]
                lengths = np.array([len(text) + 1 for text in some])
                stream = token_stream(some, tokenizer)
                writer.add(part, stream, lengths, sum(map(len, some)))
        if finish:
            return writer.finish(skipped={'empty': {'count': 2, 'first': ['a.txt']}})


def test_what_is_written_is_read(tmp_path):
    store = _write(tmp_path)
    assert open_store(tmp_path) == store and is_store(tmp_path)
    for part, texts in DOCUMENTS.items():
        tokens, documents = store.tokens(part), store.documents(part)
        assert np.array_equal(tokens, token_stream(texts, ByteTokenizer()))
        assert isinstance(documents, StoredDocuments) and len(documents) == len(texts)
        assert list(documents) == documents[:] == texts and documents[-1] == texts[-1]
        assert documents[::-2] == texts[::-2]
        counts = getattr(store, part)
        assert (counts['documents'], counts['tokens']) == (len(texts), len(tokens))
        assert counts['bytes'] == sum(map(len, texts))
        assert store.offsets(part)[-1] == len(tokens) and not tokens.flags.writeable
    with pytest.raises(IndexError):
        store.documents('train')[4]
    assert store.skipped == {'empty': {'count': 2, 'first': ['a.txt']}}
    assert store.tokenizer == {'name': 'bytes', 'sha256': '', 'vocab_size': 257, 'separator': 256}
    assert store.held_out_fraction == 0.25 and 'numpy' in store.versions


@pytest.mark.parametrize('change', ['cut', 'emptied', 'other bytes', 'deleted'])
def test_a_file_that_changes_while_it_is_mapped_is_refused(change, tmp_path):
    """Regression: a file that was cut ended a run by SIGBUS; one that is deleted can be read."""
    store = _write(tmp_path)
    tokens, file = store.tokens('train'), tmp_path / 'train.bin'
    before = tokens[2:5].tolist()
    os.utime(file, (1, 1))
    tokens = store.tokens('train')
    if change == 'deleted':
        file.unlink()
        assert tokens[2:5].tolist() == before and tokens[np.arange(2, 5)].tolist() == before
        return
    with open(file, 'r+b') as changed:
        changed.write(b'x') if change == 'other bytes' else changed.truncate(change == 'cut')
    for index in (slice(2, 5), 3, np.arange(2)):
        message = refusal(tokens.__getitem__, index)
        assert message.startswith(f'{file}: was changed while it was read; start again')


def test_files_are_flat_little_endian(tmp_path):
    store = _write(tmp_path / 'a')
    other = _write(tmp_path / 'b', at_once=1)
    assert store.fingerprint == other.fingerprint
    expected = [256, *'fünf'.encode()]
    content = (tmp_path / 'a/held_out.bin').read_bytes()
    assert content == b''.join(value.to_bytes(2, 'little') for value in expected)
    index = [0, 4, 5, 11, 16]
    content = (tmp_path / 'b/train.index').read_bytes()
    assert content == b''.join(value.to_bytes(8, 'little') for value in index)


def test_larger_ids_take_four_bytes(tmp_path):

    class Wide(ByteTokenizer):
        dtype = np.uint32
        sha256 = 'ab'

    class Other(Wide):
        sha256 = 'cd'

    store = _write(tmp_path / 'a', Wide())
    assert store.dtype == 'uint32' and store.tokens('train').dtype == np.uint32
    assert (tmp_path / 'a/held_out.bin').stat().st_size == 4 * 6
    found = {store.fingerprint, _write(tmp_path / 'b').fingerprint}
    assert len(found | {_write(tmp_path / 'c', Other()).fingerprint}) == 3


def test_what_is_not_whole_is_refused(tmp_path):
    assert not is_store(tmp_path / 'no')
    assert 'must be a directory of launch.prepare' in refusal(open_store, tmp_path / 'no')
    _write(tmp_path, finish=False)
    assert not is_store(tmp_path)
    (tmp_path / 'parts').mkdir()
    assert 'unfinished: run the same launch.prepare again' in refusal(open_store, tmp_path)
    (tmp_path / 'prepared.json').write_text('{"schema_version": 9}')
    assert 'schema_version=9; must be 1' in refusal(open_store, tmp_path)


def _about(**changes):
    """Change fields of prepared.json; None removes one."""

    def change(content):
        about = json.loads(content)
        for name, value in changes.items():
            group, _, key = name.rpartition('__')
            (about[group] if group else about)[key] = value
        return json.dumps({name: value for name, value in about.items() if value is not None})

    return change


DAMAGES = {  # of a store whose index has 5 and 2 entries: (file, change, words of the message)
    'a flipped byte': ('train.bin', lambda c: b'p' + c[1:], 'was changed'),
    'zeros': ('train.bin', lambda c: bytes(len(c)), 'was changed'),
    'cut': ('train.bin', lambda c: c[:-1], '31 bytes; must be 32, as in prepared.json'),
    'missing': ('held_out.bin', None, 'No such file or directory'),
    'an index reversed': ('train.index', lambda c: c[::-1], 'was changed'),
    'another index': ('train.index', lambda c: c[:8] + b'\5' + c[9:], 'was changed'),
    'an empty index': ('held_out.index', lambda c: b'', '0 bytes; must be 16, as in prepared.json'),
    'the tokenizer': ('tokenizer/tokenizer_about.json', lambda c: c + b' ', 'was changed'),
    'no JSON': ('prepared.json', lambda c: '{', 'cannot be read (Expecting'),
    'nested JSON': ('prepared.json', lambda c: '[' * 10**5, 'cannot be read (nested more than'),
    'a list for a dtype': ('prepared.json', _about(dtype=[[]]), 'dtype=[[]]; must be text'),
    'a float dtype': ('prepared.json', _about(dtype='float16'), 'was changed'),
    'another dtype': ('prepared.json', _about(dtype='uint32'), 'was changed'),
    'no dtype': ('prepared.json', _about(dtype=None), "holds no 'dtype'; must be text"),
    'null tokens': ('prepared.json', _about(train__tokens=None), 'tokens=None; must be an integer'),
    'a list of tokens': ('prepared.json', _about(train__tokens=[1]), 'tokens=[1]; must be an int'),
    'no bytes': ('prepared.json', _about(held_out__bytes=0), 'was changed'),
    'a fingerprint': ('prepared.json', _about(fingerprint='0' * 64), 'was changed'),
    'a separator': ('prepared.json', _about(tokenizer__separator=10), 'was changed'),
    'a fraction': ('prepared.json', _about(held_out_fraction=0.5), 'was changed'),
    'no digest': ('prepared.json', _about(sha256=None), "holds no 'sha256'; must be text"),
    'no files of the tokenizer': (
        'prepared.json',
        _about(tokenizer_files=None),
        "holds no 'tokenizer_files'; must be an object",
    ),
    'inputs': ('prepared.json', _about(inputs=[3]), 'inputs: 0=3; must be an object'),
}


@pytest.mark.parametrize('damage', DAMAGES)
def test_what_is_not_as_it_was_written_is_refused(tmp_path, damage):
    _write(tmp_path)
    name, change, words = DAMAGES[damage]
    file = tmp_path / name
    if change is None:
        file.unlink()
    else:
        changed = change(file.read_bytes())
        file.write_bytes(changed if isinstance(changed, bytes) else changed.encode())
    message = refusal(open_store, tmp_path)
    assert message.startswith(f'{file}: ') and words in message, message
    assert message.endswith(f'remove {tmp_path} and prepare again')


def test_a_large_store_is_verified_once_until_a_file_is_written_to(tmp_path, monkeypatch):
    """Again if the cache is damaged, and each time if it cannot be written."""
    store, cache = _write(tmp_path / 'store'), tmp_path / 'cache'
    calls, verify = [], token_store._verify
    monkeypatch.setenv('XDG_CACHE_HOME', str(cache))
    monkeypatch.setattr(token_store, '_SMALL', 0)
    monkeypatch.setattr(token_store, '_verify', lambda *args: calls.append(verify(*args)))

    def times_verified():
        calls.clear()
        assert open_store(store.directory) == store
        return len(calls)

    assert [times_verified(), times_verified()] == [1, 0]
    content, status = (file := store.directory / 'train.bin').read_bytes(), file.stat()
    file.write_bytes(content[::-1])
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert 'train.bin: was changed' in refusal(open_store, store.directory)
    file.write_bytes(content)
    assert [times_verified(), times_verified()] == [1, 0]
    for path in cache.rglob('*.json'):
        path.write_text('{"a": [')
    assert [times_verified(), times_verified()] == [1, 0]
    monkeypatch.setenv('XDG_CACHE_HOME', str(file))  # cannot be a folder
    assert [times_verified(), times_verified()] == [1, 1]
