"""A long text has the ids that it has in one piece, whatever the length of its chunks."""

import json

import numpy as np
import pytest

from moddepth_jax.data.tokenizers import piece_tokenizer
from moddepth_jax.data.tokenizers.tokenizer import make_tokenizer
from tests.data import tokenizer_files

_WORDS = (  # of newer vocabularies: lines belong to what is before them, numbers to three digits
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r' ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp('tokenizers')
    (folder / 'llama.json').write_text(tokenizer_files.llama_file())
    newer = json.loads(tokenizer_files.byte_level()._content)
    split = {'type': 'Split', 'pattern': {'Regex': _WORDS}, 'behavior': 'Isolated', 'invert': False}
    newer['pre_tokenizer'] = {
        'type': 'Sequence',
        'pretokenizers': [split, newer['pre_tokenizer'] | {'use_regex': False}],
    }
    (folder / 'newer.json').write_text(json.dumps(newer))
    (folder / 'x.model').write_bytes(tokenizer_files.sentence_piece_file())
    files = {
        name: make_tokenizer(folder / name) for name in ('llama.json', 'newer.json', 'x.model')
    }
    return {'bpe': tokenizer_files.byte_level()} | files


@pytest.mark.parametrize('kind', ['bpe', 'newer.json', 'llama.json', 'x.model'])
def test_cut_or_whole_the_ids_are_the_same(made, kind, monkeypatch):
    tokenizer = made[kind]
    texts = tokenizer_files.hard_texts(5, 60) + [tokenizer_files.plain_text(9, 300)]
    whole, counts = [tokenizer.encode(text) for text in texts], []
    for length in (1, 7, 30):
        monkeypatch.setattr(piece_tokenizer, 'CHUNK_LENGTH', length)
        for text, ids in zip(texts, whole, strict=True):
            assert np.array_equal(tokenizer.encode(text), ids), text
        chunks = piece_tokenizer.chunk_text(texts[-1].decode(), kind == 'llama.json')
        counts.append(len(list(chunks)))
    assert counts[0] > counts[1] > counts[2] > 10


def test_text_without_a_place_to_cut_stays_whole(monkeypatch):
    monkeypatch.setattr(piece_tokenizer, 'CHUNK_LENGTH', 4)
    for text in ('x' * 50, '  ' * 50, 'a\r\n' * 20, ''):
        assert list(piece_tokenizer.chunk_text(text, False)) == [text]
    assert list(piece_tokenizer.chunk_text('ab\ncd ef gh', True)) == ['ab\ncd', 'ef gh']
    assert list(piece_tokenizer.chunk_text('ab\ncd ef gh', False)) == ['ab\ncd', ' ef gh']
