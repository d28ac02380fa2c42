"""No kind of tokenizer loses a byte, and its table of bytes is exact."""

import json

import numpy as np
import pytest

from moddepth_jax.data.tokenizers import piece_tokenizer
from moddepth_jax.data.tokenizers.tokenizer import TokenStream, make_tokenizer, tokenizer_of
from tests.data import tokenizer_files
from tests.data.prepared_text import data_hparams, refusal

KINDS = ('bytes', 'bpe', 'newer', 'llama', 'sentence piece')
_WORDS = (  # of newer vocabularies: lines belong to what is before them, numbers to three digits
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r' ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp('tokenizers')
    (folder / 'tokenizer.json').write_text(tokenizer_files.llama_file())
    (folder / 'x.model').write_bytes(tokenizer_files.sentence_piece_file())
    newer = json.loads(tokenizer_files.byte_level()._content)
    split = {'type': 'Split', 'pattern': {'Regex': _WORDS}, 'behavior': 'Isolated', 'invert': False}
    levels = [split, newer['pre_tokenizer'] | {'use_regex': False}]
    newer['pre_tokenizer'] = {'type': 'Sequence', 'pretokenizers': levels}
    (folder / 'newer.json').write_text(json.dumps(newer))
    return {
        'bytes': make_tokenizer('bytes'),
        'bpe': tokenizer_files.byte_level(),
        'newer': make_tokenizer(folder / 'newer.json'),
        'llama': make_tokenizer(folder / 'tokenizer.json'),
        'sentence piece': make_tokenizer(folder / 'x.model'),
    }


@pytest.mark.parametrize('kind', KINDS)
def test_every_text_comes_back_byte_for_byte(made, kind):
    """Emoji, control characters, CRLF, spaces at either end, text that spells special tokens.

    No special id is among those of a text, its pieces are the text in order, and the table counts
    them: one byte more a document where a space is put before it.
    """
    tokenizer = made[kind]
    more = int(kind in ('llama', 'sentence piece'))
    texts = tokenizer_files.hard_texts(1, 120)
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids.dtype == tokenizer.dtype == np.uint16
        assert tokenizer.decode(ids) == text
        assert b''.join(tokenizer.pieces(ids)) == text and len(tokenizer.pieces(ids)) == len(ids)
        assert not set(ids.tolist()) & {tokenizer.separator, *tokenizer.stops}
        assert tokenizer.token_bytes_V[ids].sum() == len(text) + more * bool(text)


@pytest.mark.parametrize('kind', KINDS)
def test_a_stream_adds_the_bytes_of_each_token(made, kind, monkeypatch):
    """After prompts of any length; its time is linear.

    Regression: each new token of launch.generate decoded all tokens before it again.
    """
    tokenizer = made[kind]
    texts = (tokenizer.encode(text).tolist() for text in tokenizer_files.hard_texts(2, 20))
    ids = [token for text in texts for token in (tokenizer.separator, *text)]
    for prompt in (0, 1, 2, 30):
        stream, text = TokenStream(tokenizer, ids[:prompt]), tokenizer.decode(ids[:prompt])
        for number, token in enumerate(ids[prompt:], prompt + 1):
            text += stream.add(token)
            assert number % 7 or text == tokenizer.decode(ids[:number])
        assert text == tokenizer.decode(ids)
    decoded, decode = [], tokenizer.decode
    monkeypatch.setattr(tokenizer, 'decode', lambda ids: decoded.append(len(ids)) or decode(ids))
    stream = TokenStream(tokenizer, ids)
    for token in ids:
        stream.add(token)
    assert sum(decoded) < 20 * len(ids)


@pytest.mark.parametrize('kind', KINDS)
def test_documents_are_read_one_after_another(made, kind, monkeypatch):
    """Also in blocks, of which some begin with a document."""
    tokenizer = made[kind]
    texts = tokenizer_files.hard_texts(2, 9)
    stream = [i for text in texts for i in (tokenizer.separator, *tokenizer.encode(text))]
    assert tokenizer.decode(np.array(stream).reshape(1, -1)) == b''.join(texts)
    assert tokenizer.pieces(stream)[0] == b''
    for length in (1, 2, 7):
        monkeypatch.setattr(piece_tokenizer, 'BLOCK_LENGTH', length)
        assert tokenizer.decode(stream) == b''.join(texts)


@pytest.mark.parametrize('kind', KINDS)
def test_a_growing_row_only_adds_bytes(made, kind):
    """What is shown of a row while it is written stays as it is, whatever ids follow."""
    tokenizer = made[kind]
    ids = np.random.default_rng(0).integers(0, tokenizer.vocab_size, 60).tolist()
    texts = [tokenizer.decode(ids[:stop]) for stop in range(61)]
    assert all(after.startswith(text) for text, after in zip(texts, texts[1:], strict=False))
    assert len(texts[-1]) > 50


@pytest.mark.parametrize('kind', KINDS)
def test_a_saved_tokenizer_is_the_same(made, kind, tmp_path):
    tokenizer = made[kind]
    tokenizer.save(tmp_path / 'one' / 'deep')
    again = make_tokenizer(tmp_path / 'one' / 'deep')
    for name in ('name', 'sha256', 'vocab_size', 'separator', 'stops', 'dtype'):
        assert getattr(again, name) == getattr(tokenizer, name), name
    assert again.token_bytes_V.tolist() == tokenizer.token_bytes_V.tolist()
    if kind == 'llama':
        other = make_tokenizer(tmp_path / 'one' / 'deep', '</s>')
        assert other.separator_text == '</s>' and other.sha256 != tokenizer.sha256
    text = tokenizer_files.hard_texts(3, 2)[1]
    assert again.encode(text).tolist() == tokenizer.encode(text).tolist()
    again.save(tmp_path / 'two')
    for file in (tmp_path / 'one' / 'deep').iterdir():
        assert (tmp_path / 'two' / file.name).read_bytes() == file.read_bytes()


def test_bytes_are_their_own_ids():
    tokenizer = make_tokenizer('bytes')
    every = bytes(range(256))
    assert tokenizer.encode(every).tolist() == list(every)
    assert tokenizer.decode(list(every)) == every
    assert (tokenizer.vocab_size, tokenizer.separator, tokenizer.stops) == (257, 256, (256,))
    assert (tokenizer.name, tokenizer.sha256) == ('bytes', '')
    assert tokenizer.decode([256, 97, 256, 256, 98, 256]) == b'ab'
    assert tokenizer.token_bytes_V.tolist() == [1] * 256 + [0]
    assert "separator='x': leave it out" in refusal(make_tokenizer, 'bytes', 'x')


@pytest.mark.parametrize('ids', [[320], [97, -1], [-100]])
@pytest.mark.parametrize('method', ['decode', 'pieces'])
def test_what_is_no_id_is_refused(made, ids, method):
    with pytest.raises(ValueError, match=rf'token id {ids[-1]}: must lie in \[0, 320\)'):
        getattr(made['bpe'], method)(ids)


@pytest.mark.parametrize('kind', KINDS[1:])
def test_text_that_is_not_utf8_is_refused_with_its_place(made, kind):
    for text, place in ((b'\xff', 0), ('é'.encode() + b'a\xe9b', 3), (b'ab\xed\xa0\x80', 2)):
        with pytest.raises(ValueError, match=rf'^byte {place} of the text .*UTF-8.*=bytes$'):
            made[kind].encode(text)
        assert made['bytes'].decode(made['bytes'].encode(text)) == text


def test_large_vocabularies_take_wider_ids(tmp_path):
    content = json.loads(tokenizer_files.llama_file())
    for highest, dtype in ((65535, np.uint16), (65536, np.uint32)):
        content['model']['vocab']['zz'] = highest
        file = tmp_path / 'tokenizer.json'
        file.write_text(json.dumps(content))
        tokenizer = make_tokenizer(file)
        assert (tokenizer.vocab_size, tokenizer.dtype) == (highest + 1, dtype)
        assert tokenizer.encode(b'def').dtype == dtype
        assert tokenizer.pieces([highest - 1, highest]) == [b'', b'zz']


@pytest.mark.parametrize(
    ('name', 'words'),
    [
        ('byte', 'byte: no such tokenizer; must be bytes, a tokenizer.json'),
        ('empty', 'empty: no tokenizer in this folder; must hold tokenizer.json'),
        ('torn', 'torn/tokenizer_about.json: cannot be read'),
        ('deep', 'deep/tokenizer.json: not JSON (nested more than 64 deep); must be'),
        ('bare', "bare/tokenizer_about.json: holds no 'kind'"),
        ('other', 'other/tokenizer.json: is not the file that tokenizer_about.json next to it'),
        ('below/tokenizer.json', 'cannot be read (Not a directory)'),
    ],
)
def test_what_is_no_tokenizer_is_refused_by_name(tmp_path, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    for folder in ('empty', 'torn', 'deep', 'bare'):
        (tmp_path / folder).mkdir()
    (tmp_path / 'torn' / 'tokenizer_about.json').write_text('{"kind": ')
    (tmp_path / 'deep' / 'tokenizer.json').write_text('{"a":' * 10**5)
    (tmp_path / 'bare' / 'tokenizer_about.json').write_text('{}')
    (tmp_path / 'below').write_text('')
    tokenizer_files.byte_level().save('other')
    (tmp_path / 'other' / 'tokenizer.json').write_text(tokenizer_files.llama_file())
    assert words in refusal(make_tokenizer, name)


def data(tokenizer, source='synthetic'):
    return data_hparams(source, tokenizer=str(tokenizer))


def test_the_tokenizer_of_a_run_precedes_that_of_the_config(made, tmp_path):
    made['bpe'].save(tmp_path / 'run' / 'tokenizer')
    made['llama'].save(tmp_path / 'file')
    (tmp_path / 'new').mkdir()
    wanted = data(tmp_path / 'file')
    assert tokenizer_of(wanted, tmp_path / 'run').sha256 == made['bpe'].sha256
    assert tokenizer_of(data('/nowhere/x.json'), tmp_path / 'run').sha256 == made['bpe'].sha256
    for workdir in (None, tmp_path / 'new', tmp_path / 'not there'):
        assert tokenizer_of(wanted, workdir).sha256 == made['llama'].sha256
    assert tokenizer_of(data('bytes'), tmp_path / 'run').name == 'bytes'
    message = refusal(tokenizer_of, data('/nowhere/x.json'), tmp_path / 'new')
    assert "data.tokenizer='/nowhere/x.json': " in message and 'no such tokenizer' in message


def test_prepared_text_brings_its_tokenizer(made, tmp_path):
    made['bpe'].save(tmp_path / 'text' / 'tokenizer')
    made['bytes'].save(tmp_path / 'as bytes' / 'tokenizer')
    assert tokenizer_of(data('prepared', tmp_path / 'text')).sha256 == made['bpe'].sha256
    assert tokenizer_of(data('prepared', tmp_path / 'as bytes')).name == 'bytes'
    message = refusal(tokenizer_of, data('prepared', 'stdlib'))
    assert message.startswith("data.tokenizer='prepared': data.source='stdlib' must")


# Long texts are encoded in chunks.


@pytest.mark.parametrize('kind', KINDS[1:])
def test_cut_or_whole_the_ids_are_the_same(made, kind, monkeypatch):
    tokenizer = made[kind]
    texts = tokenizer_files.hard_texts(5, 60) + [tokenizer_files.plain_text(9, 300)]
    whole, counts = [tokenizer.encode(text) for text in texts], []
    for length in (1, 7, 30):
        monkeypatch.setattr(piece_tokenizer, 'CHUNK_LENGTH', length)
        for text, ids in zip(texts, whole, strict=True):
            assert np.array_equal(tokenizer.encode(text), ids), text
        chunks = piece_tokenizer.chunk_text(texts[-1].decode(), kind == 'llama')
        counts.append(len(list(chunks)))
    assert counts[0] > counts[1] > counts[2] > 10


def test_text_without_a_place_to_cut_stays_whole(monkeypatch):
    monkeypatch.setattr(piece_tokenizer, 'CHUNK_LENGTH', 4)
    for text in ('x' * 50, '  ' * 50, 'a\r\n' * 20, ''):
        assert list(piece_tokenizer.chunk_text(text, False)) == [text]
    assert list(piece_tokenizer.chunk_text('ab\ncd ef gh', True)) == ['ab\ncd', 'ef gh']
    assert list(piece_tokenizer.chunk_text('ab\ncd ef gh', False)) == ['ab\ncd', ' ef gh']
