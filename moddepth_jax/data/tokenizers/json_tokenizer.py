"""Tokenizers of a tokenizer.json, the file of the library tokenizers, and training of BPE."""

import os
import pathlib
import re
from collections.abc import Iterator

from moddepth_jax.data.directory import parse_object
from moddepth_jax.data.tokenizers.piece_tokenizer import PieceTokenizer

BPE_SEPARATOR = '<|endoftext|>'
_MAX_IDS = 1 << 24  # each id has a piece in memory
MIN_BPE_IDS = 257  # the bytes and the separator
_BYTE = re.compile('<0x([0-9A-Fa-f]{2})>')  # of byte fallback


class JsonTokenizer(PieceTokenizer):
    """A Tokenizer of a tokenizer.json; see `make_tokenizer`.

    Text that spells a special token is encoded as plain text. The template of the file is not
    applied. Byte-level BPE without a normalizer, `add_prefix_space` or added tokens that strip
    spaces restores every UTF-8 text byte for byte. A suffix that ends words, such as '</w>', counts
    as a space. Raises ValueError, one line, for a file that is not a tokenizer or has no separator.
    """

    def __init__(
        self, content: bytes, file: pathlib.Path, separator=None, metadata=None, name=None
    ):
        self._library, parsed = _load(content, file)
        added = self._library.get_added_tokens_decoder()
        special = {token.content: number for number, token in added.items() if token.special}
        self._library.encode_special_tokens = True
        pieces = _pieces(self._library, parsed, set(special.values()), file)
        if not any(pieces):
            right = 'must be the tokenizer.json of a trained tokenizer'
            raise ValueError(f'{file}: its vocabulary holds no text; {right}')
        tokens = self._library.encode('a').tokens  # with those of the file's template
        first = tokens[0] if tokens and tokens[0] in special else None
        super().__init__(
            'tokenizer.json', content, file, pieces, special, first, separator, metadata, name
        )
        self.encode(self._library.id_to_token(self.separator).encode())  # raises if ambiguous

    def _ids(self, text):
        (encoding,) = self._library.encode_batch_fast([text], add_special_tokens=False)
        return encoding.ids


def _import_library():
    """Import the library so that it does not warn in forked processes."""
    os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')
    import tokenizers

    return tokenizers


def _load(content, file):
    tokenizers = _import_library()
    right = 'must be the tokenizer.json of the library tokenizers, or a SentencePiece .model'
    try:
        parsed = parse_object(content)
    except ValueError as error:
        raise ValueError(f'{file}: not JSON ({error}); {right}') from None
    _check_affixes(parsed.get('model'), file, right)
    try:
        library = tokenizers.Tokenizer.from_str(content.decode())
        library.encode('a')  # with the file's template
    except BaseException as error:  # panics of the library are not an Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        reason = ' '.join(str(error).split())
        raise ValueError(f'{file}: no tokenizer ({reason}); {right}') from None
    library.no_truncation()
    library.no_padding()
    if getattr(library.model, 'dropout', None):
        library.model.dropout = None  # the same text must have the same ids
    return library, parsed


def _check_affixes(model, file, right):
    """Raise ValueError for affixes that no token has.

    With such a prefix the library panics, and with such a suffix it loses text.
    """
    model = model if isinstance(model, dict) and model.get('type', 'BPE') == 'BPE' else {}
    merges, vocab = model.get('merges'), model.get('vocab')
    if not (isinstance(merges, list) and isinstance(vocab, dict)):
        return
    parts = [pair.split(' ') if isinstance(pair, str) else pair for pair in merges]
    seconds = [pair[1] for pair in parts if isinstance(pair, list) and len(pair) == 2]
    prefix, suffix = (
        affix if isinstance(affix := model.get(name), str) else ''
        for name in ('continuing_subword_prefix', 'end_of_word_suffix')
    )
    if not all(str(second).startswith(prefix) for second in seconds):
        found = f'continuing_subword_prefix={prefix!r}: must begin the second part of each merge'
        raise ValueError(f'{file}: {found}; {right}')
    if not any(token.endswith(suffix) for token in vocab) and vocab:
        raise ValueError(f'{file}: end_of_word_suffix={suffix!r}: must end some token; {right}')


def byte_characters() -> dict[str, int]:
    """Return {character: byte} of byte-level BPE: `bytes_to_unicode` of Radford et al. 2019."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(code): code for code in own} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }


def _pieces(library, parsed, special, file):
    """Return the bytes of each id, from 0 to the highest; b'' for special ids, unknown and gaps."""
    ids = library.get_vocab(with_added_tokens=True)
    highest = max(ids.values(), default=-1)
    if highest >= _MAX_IDS:
        raise ValueError(f'{file}: id {highest}: must be below {_MAX_IDS}')
    pieces = [b''] * (highest + 1)
    model = parsed['model']
    unknown = ids.get(model.get('unk_token'), model.get('unk_id'))
    suffix = model.get('end_of_word_suffix') or ''
    to_bytes = _bytes_of_token(library, parsed, ids, suffix)
    for token, number in ids.items():
        if number not in special and number != unknown:
            word = token.removesuffix(suffix)
            pieces[number] = to_bytes(word) + b' ' * (word != token)
    for number, token in library.get_added_tokens_decoder().items():
        pieces[number] = b'' if number in special else token.content.encode()
    return pieces


def _bytes_of_token(library, parsed, ids, suffix):
    decoders = {part['type']: part for part in _parts(parsed.get('decoder'))}
    splitters = {part['type'] for part in _parts(parsed.get('pre_tokenizer'))}
    if 'ByteLevel' in decoders or 'ByteLevel' in splitters:
        table = byte_characters()

        def byte_level(token):
            known = all(character in table for character in token)
            # Otherwise like the library's decoder.
            return bytes(table[c] for c in token) if known else token.encode()

        return byte_level
    if suffix:
        return str.encode
    mark = None
    if 'Metaspace' in decoders:
        mark = decoders['Metaspace']['replacement']
    elif decoders.get('Replace', {}).get('content') == ' ':
        mark = decoders['Replace']['pattern'].get('String')
    anchor = min(ids.values(), default=None)  # the order of `ids` is random
    alone = library.decode([anchor], skip_special_tokens=False) if ids else ''

    def plain(token):
        found = _BYTE.fullmatch(token) if 'ByteFallback' in decoders else None
        if found:
            return bytes.fromhex(found[1])
        if mark:
            return token.replace(mark, ' ').encode()
        # The text that the file's decoder adds for the token after another one.
        both = library.decode([anchor, ids[token]], skip_special_tokens=False)
        return both.removeprefix(alone).encode()

    return plain


def _parts(stage):
    if not isinstance(stage, dict) or not isinstance(stage.get('type'), str):
        return []
    nested = stage.get('decoders') or stage.get('pretokenizers')
    return [part for one in nested for part in _parts(one)] if nested else [stage]


def train_bpe(documents: Iterator[bytes], vocab_size: int) -> JsonTokenizer:
    """Train a byte-level BPE tokenizer of `vocab_size` ids, including the bytes and the separator.

    BPE (Sennrich et al. 2016, arXiv 1508.07909) on bytes, with the word pattern of GPT-2. The
    result does not depend on the order of the UTF-8 documents or the number of threads. Raises
    ValueError, one line, if the size is too small, or if too few pieces occur twice in the text.
    """
    name = f'bpe:{vocab_size}'
    if vocab_size < MIN_BPE_IDS:
        raise ValueError(f'{name}: must be {MIN_BPE_IDS} ids or more: 256 bytes and a separator')
    tokenizers = _import_library()
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    library.pre_tokenizer = byte_level(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[BPE_SEPARATOR],
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator(map(bytes.decode, documents), trainer)
    found = library.get_vocab_size()
    if found < vocab_size:
        right = f'use bpe:{found} or give more text'
        raise ValueError(f'{name}: the text has pieces for {found} ids only; {right}')
    content = library.to_str().encode()
    return JsonTokenizer(content, pathlib.Path(name), BPE_SEPARATOR, name=name)
