"""A store gives back what was written to it, reads no more than is asked for, and is checked."""

import json

import numpy as np
import pytest

from moddepth_jax.data.pipeline import token_stream
from moddepth_jax.data.token_store import StoredDocuments, StoreWriter, is_store, open_store
from moddepth_jax.data.tokenizers.tokenizer import ByteTokenizer
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
    _write(tmp_path)
    file = tmp_path / 'prepared.json'
    about = json.loads(file.read_text())
    for changed, part in (
        (json.dumps(about | {'schema_version': 9}), 'schema_version=9; must be 1'),
        (json.dumps({k: v for k, v in about.items() if k != 'dtype'}), "holds no 'dtype'; remove"),
        ('{', 'unreadable (JSONDecodeError)'),
    ):
        file.write_text(changed)
        message = refusal(open_store, tmp_path)
        assert part in message and str(file) in message
    file.write_text(json.dumps(about))
    bad = tmp_path / 'train.bin'
    bad.write_bytes(bad.read_bytes()[:-1])
    assert 'train.bin: 31 bytes, and prepared.json says 32' in refusal(open_store, tmp_path)
    bad.unlink()
    assert 'train.bin: No such file or directory; remove' in refusal(open_store, tmp_path)
