"""A SentencePiece model is read as its library reads it; what its normalizer does, it does."""

import sys

import pytest
import sentencepiece

from moddepth_jax.data.tokenizers.tokenizer import make_tokenizer
from tests.data import tokenizer_files
from tests.data.prepared_text import refusal


def of(folder, rule='identity', separator=None):
    (folder / 'x.model').write_bytes(tokenizer_files.sentence_piece_file(rule))
    return make_tokenizer(folder / 'x.model', separator)


@pytest.mark.parametrize('rule', ['identity', 'nmt_nfkc'])
def test_ids_and_text_are_the_librarys_own(tmp_path, rule):
    tokenizer = of(tmp_path, rule)
    content = tokenizer_files.sentence_piece_file(rule)
    library = sentencepiece.SentencePieceProcessor(model_proto=content)
    texts = tokenizer_files.hard_texts(6, 60)
    for text in texts:
        ids = tokenizer.encode(text).tolist()
        assert ids == library.encode(text.decode())
        assert tokenizer.decode(ids).decode() == library.decode(ids)
    same = [tokenizer.decode(tokenizer.encode(text)) == text for text in texts]
    assert all(same) == (rule == 'identity') and any(same)
    assert tokenizer.decode(tokenizer.encode(b' a  b')) == (b' a  b' if all(same) else b'a b')


def test_separator_and_stops_are_its_control_symbols(tmp_path):
    assert (of(tmp_path).separator, of(tmp_path).stops) == (1, (1, 2))
    chosen = of(tmp_path, separator='</s>')
    assert (chosen.separator, chosen.stops) == (2, (2,))
    assert chosen.sha256 != of(tmp_path).sha256
    assert "separator 'de' is not a special token of it" in refusal(of, tmp_path, separator='de')


@pytest.mark.parametrize('content', [b'', b'garbage' * 9, tokenizer_files.llama_file().encode()])
def test_what_is_no_model_is_refused_by_name(tmp_path, content):
    (tmp_path / 'x.model').write_bytes(content)
    message = refusal(make_tokenizer, tmp_path / 'x.model')
    assert message.startswith(f'{tmp_path}/x.model: ')
    assert 'must be a SentencePiece .model' in message


def test_without_its_library_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'sentencepiece', None)
    (tmp_path / 'x.model').write_bytes(b'x')
    assert "'moddepth-jax[sentencepiece]'" in refusal(make_tokenizer, tmp_path / 'x.model')
