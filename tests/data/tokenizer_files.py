"""Small tokenizers of the kinds that come in files, and texts that are hard for them."""

import functools
import io
import json
import random

from moddepth_jax.data.tokenizers.json_tokenizer import train_bpe

_WORDS = ('def ', 'return', ' the', ' of', '\n    ', 'self.', '(x)', ' = ', '12', 'é', 'word ')
_HARD = ['a', ' ', '  ', '\n', '\n\n', '\r\n', '\t', '\0', '\x1b[0m', '\x7f', '\u2028', '\ufeff']
_HARD += "😀 👩‍👩‍👧 e\u0301 ﬁ <|endoftext|> <s> </s> <unk> <0x41> 's Ġ 0".split()


@functools.cache
def plain_text(seed: int, length: int) -> bytes:
    """Words and spaces, of which there is something to learn."""
    draw = random.Random(seed)
    return ''.join(draw.choice(_WORDS) for _ in range(length)).encode()


def hard_texts(seed: int, number: int) -> list[bytes]:
    """Texts of what tokenizers trip over, the empty one first."""
    draw = random.Random(seed)

    def piece():
        code = draw.randrange(0x110000 - 0x800)
        any_character = chr(code if code < 0xD800 else code + 0x800)  # no half of a surrogate pair
        return draw.choice([*_HARD, *_WORDS, any_character, any_character])

    texts = [''.join(piece() for _ in range(draw.randrange(1, 30))) for _ in range(number - 1)]
    return [b'', *(text.replace('\u2581', '').encode() for text in texts)]


@functools.cache
def byte_level():
    """Byte-level BPE of 320 ids, trained here."""
    return train_bpe(iter([plain_text(seed, 400) for seed in range(4)]), 320)


@functools.cache
def llama_file() -> str:
    """A tokenizer.json as of Llama 2: spaces as marks, one of them put before, byte fallback."""
    special = ['<unk>', '<s>', '</s>', *(f'<0x{byte:02X}>' for byte in range(256))]
    letters = sorted(set(plain_text(0, 400).decode()) - {' ', '\n'} | {'\u2581'})
    words = ['\u2581d', 'de', '\u2581t', 'th', '\u2581th', '\u2581the', 're', 'et']
    merges = ['\u2581 d', 'd e', '\u2581 t', 't h', '\u2581t h', '\u2581th e']
    merges += ['r e', 'e t']
    vocab = {token: number for number, token in enumerate([*special, *letters, *words])}
    truncation = dict(direction='Right', max_length=5, strategy='LongestFirst', stride=0)
    before, mark = {'type': 'Prepend', 'prepend': '\u2581'}, {'String': ' '}
    template = [
        {'SpecialToken': {'id': '<s>', 'type_id': 0}},
        {'Sequence': {'id': 'A', 'type_id': 0}},
    ]
    unknown = {'unk_token': '<unk>', 'fuse_unk': True, 'byte_fallback': True}
    flags = dict.fromkeys(('single_word', 'lstrip', 'rstrip', 'normalized'), False)
    decoders = [
        {'type': 'Replace', 'pattern': {'String': '\u2581'}, 'content': ' '},
        {'type': 'ByteFallback'},
        {'type': 'Fuse'},
        {'type': 'Strip', 'content': ' ', 'start': 1, 'stop': 0},
    ]
    return json.dumps(
        {
            'version': '1.0',
            'truncation': truncation,
            'padding': None,
            'added_tokens': [
                {'id': number, 'content': token, 'special': True, **flags}
                for number, token in enumerate(special[:3])
            ],
            'normalizer': {
                'type': 'Sequence',
                'normalizers': [before, {'type': 'Replace', 'pattern': mark, 'content': '\u2581'}],
            },
            'pre_tokenizer': None,
            'post_processor': {
                'type': 'TemplateProcessing',
                'single': template,
                'pair': [*template, {'Sequence': {'id': 'B', 'type_id': 1}}],
                'special_tokens': {'<s>': {'id': '<s>', 'ids': [1], 'tokens': ['<s>']}},
            },
            'decoder': {'type': 'Sequence', 'decoders': decoders},
            'model': {'type': 'BPE', 'dropout': 0.5, **unknown, 'vocab': vocab, 'merges': merges},
        }
    )


@functools.cache
def sentence_piece_file(rule: str = 'identity') -> bytes:
    """A SentencePiece model of 400 ids with byte fallback, of that normalization rule."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(plain_text(0, 2000).decode().split('\n')),
        model_writer=model,
        vocab_size=300,
        model_type='bpe',
        byte_fallback=True,
        normalization_rule_name=rule,
        remove_extra_whitespaces=rule != 'identity',
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()
