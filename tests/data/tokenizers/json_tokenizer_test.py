"""A tokenizer.json is read as its library reads it, or refused by name; trained BPE is exact."""

import json

import pytest
import tokenizers

from moddepth_jax.data.tokenizers.json_tokenizer import train_bpe
from moddepth_jax.data.tokenizers.tokenizer import make_tokenizer
from tests.data import tokenizer_files
from tests.data.prepared_text import refusal


def content(**changes):
    return json.loads(tokenizer_files.byte_level()._content) | changes


def of(folder, file, **about):
    """The tokenizer of `file`, JSON or its text; `about` is written next to it as the config."""
    folder.mkdir(exist_ok=True)
    text = file if isinstance(file, str) else json.dumps(file)
    (folder / 'tokenizer.json').write_text(text)
    if about:
        (folder / 'tokenizer_config.json').write_text(json.dumps(about))
    return make_tokenizer(folder / 'tokenizer.json')


@pytest.mark.parametrize('kind', ['bpe', 'llama'])
def test_ids_and_text_are_the_librarys_own(tmp_path, kind):
    """Of each hard text: its ids without template, truncation and dropout, and what they decode to.

    The library is set to take spelled special tokens as text, too.
    """
    file = json.dumps(content()) if kind == 'bpe' else tokenizer_files.llama_file()
    tokenizer, library = of(tmp_path, file), tokenizers.Tokenizer.from_str(file)
    library.no_truncation()
    library.encode_special_tokens = True
    if kind == 'llama':
        library.model.dropout = None
        assert library.encode('a').tokens[0] == '<s>'  # by its template
    for text in tokenizer_files.hard_texts(4, 100):
        ids = tokenizer.encode(text).tolist()
        assert ids == library.encode(text.decode(), add_special_tokens=False).ids
        assert tokenizer.decode(ids).decode() == library.decode(ids)


def test_added_text_counts_its_bytes(tmp_path):
    """An added token that is not special is a piece of text, even of characters of other tokens."""
    flags = dict.fromkeys(('single_word', 'lstrip', 'rstrip', 'normalized'), False)
    added = content()['added_tokens']
    added += [
        {'id': 320 + i, 'content': text, 'special': False, **flags}
        for i, text in enumerate(['\n\n\n\n', 'Ġé'])
    ]
    tokenizer = of(tmp_path, content(added_tokens=added))
    text = 'x\n\n\n\nyĠéz'.encode()
    ids = tokenizer.encode(text)
    assert {320, 321} < set(ids.tolist()) and tokenizer.decode(ids) == text
    assert tokenizer.token_bytes_V[[320, 321]].tolist() == [4, 4]


def test_other_kinds_count_what_they_add_behind_a_token(tmp_path):
    """WordPiece: a word is a space and itself, a part of one itself, an unknown one nothing."""
    file = content(
        model={
            'type': 'WordPiece',
            'unk_token': '[UNK]',
            'continuing_subword_prefix': '##',
            'max_input_chars_per_word': 100,
            'vocab': {'[UNK]': 0, '<|endoftext|>': 1, 'un': 2, '##do': 3, 'it': 4, 'a': 5},
        },
        pre_tokenizer={'type': 'BertPreTokenizer'},
        decoder={'type': 'WordPiece', 'prefix': '##', 'cleanup': False},
    )
    file['added_tokens'][0]['id'] = 1
    tokenizer = of(tmp_path, file)
    ids = tokenizer.encode(b'undo it')
    assert ids.tolist() == [2, 3, 4] and tokenizer.decode(ids) == b'undo it'
    assert tokenizer.token_bytes_V[ids].tolist() == [3, 2, 3]
    ids = tokenizer.encode('it é'.encode())
    assert ids.tolist() == [4, 0] and tokenizer.token_bytes_V[ids].tolist() == [3, 0]


@pytest.mark.parametrize('kind', ['BPEDecoder', 'ByteLevel'])
def test_the_suffix_of_a_word_is_a_space(tmp_path, kind):
    """Regression: whether it was, depended on the random order of the library's vocabulary."""
    vocab = {token: i for i, token in enumerate(['<|endoftext|>', *'hibye', 'i</w>', 'e</w>'])}
    vocab |= {'hi</w>': 8, 'by': 9, 'bye</w>': 10}
    merges = ['h i</w>', 'b y', 'by e</w>']
    file = content(
        model={'type': 'BPE', 'end_of_word_suffix': '</w>', 'vocab': vocab, 'merges': merges},
        pre_tokenizer={'type': 'BertPreTokenizer'},
        decoder=content()['decoder'] | {'type': kind, 'suffix': '</w>'},
    )
    file['added_tokens'][0]['id'] = 0
    for _ in range(20):
        tokenizer = of(tmp_path, file)
        ids = tokenizer.encode(b'byhi bye')
        assert tokenizer.decode(ids) == b'byhi bye '
        assert tokenizer.token_bytes_V[ids].tolist() == [2, 3, 4]


def test_a_tokenizer_that_cannot_tell_its_separator_is_refused(tmp_path):
    """A tokenizer of words takes '<s>' in a text for the token: such text would end a document."""
    file = content(
        model={
            'type': 'WordLevel',
            'unk_token': 'a',
            'vocab': {'<|endoftext|>': 0, 'a': 1, 'b': 2},
        },
        pre_tokenizer={'type': 'WhitespaceSplit'},
    )
    assert 'encodes a text to its separator, id 0' in refusal(of, tmp_path, file)


EMPTY = {'type': 'BPE', 'vocab': {}, 'merges': []}


@pytest.mark.parametrize(
    ('file', 'words'),
    [
        (json.dumps(content())[:500], 'not JSON'),
        ('[' * 100_000, 'not JSON'),
        ('{}', 'no tokenizer (Model missing'),
        (content(model=EMPTY), 'its vocabulary holds no text'),
        (content(model=EMPTY | {'vocab': {'a': 1 << 30}}), 'id 1073741824: must be below'),
        (
            content(model=content()['model'] | {'continuing_subword_prefix': 'Ġ'}),
            "continuing_subword_prefix='Ġ': must begin the second part of each merge",
        ),
        (content(model=content()['model'] | {'end_of_word_suffix': '#<'}), "end_of_word_suffix='#"),
        (content(added_tokens=[]), 'no special token is known to start a document (it has none)'),
    ],
)
def test_what_is_no_tokenizer_is_refused(tmp_path, file, words):
    assert refusal(of, tmp_path, file).startswith(f'{tmp_path}/tokenizer.json: {words}')


# Training.


def bpe_documents(number=4):
    return [tokenizer_files.plain_text(seed, 400) for seed in range(number)]


@pytest.mark.parametrize('vocab_size', [257, 300, 320])
def test_the_size_counts_bytes_merges_and_the_separator(vocab_size):
    tokenizer = train_bpe(iter(bpe_documents()), vocab_size)
    assert (tokenizer.vocab_size, tokenizer.name) == (vocab_size, f'bpe:{vocab_size}')
    assert tokenizer.stops == (tokenizer.separator,)
    lengths = tokenizer.token_bytes_V.tolist()
    assert lengths.count(0) == 1 and lengths.count(1) == 256
    text = bpe_documents()[0]
    assert len(tokenizer.encode(text)) < (0.6 if vocab_size == 320 else 1.01) * len(text)


def test_neither_threads_nor_the_order_of_documents_matter(monkeypatch):
    one = train_bpe(iter(bpe_documents()), 310).sha256
    monkeypatch.setenv('TOKENIZERS_PARALLELISM', 'true')
    assert train_bpe(iter(bpe_documents()), 310).sha256 == one
    assert train_bpe(iter(bpe_documents()[::-1]), 310).sha256 == one
    other = [text.replace(b'return', b'retreat') for text in bpe_documents()]
    assert train_bpe(iter(other), 310).sha256 != one


@pytest.mark.parametrize(
    ('texts', 'vocab_size', 'words'),
    [
        ([b'abc'], 256, 'bpe:256: must be 257 ids or more'),
        ([b'a b'], 300, 'bpe:300: the text has pieces for 257 ids only; use bpe:257'),
        ([], 258, 'bpe:258: the text has pieces for 257 ids only'),
    ],
)
def test_what_cannot_be_trained_is_refused(texts, vocab_size, words):
    assert refusal(train_bpe, iter(texts), vocab_size).startswith(words)
