"""The bytes that an id of a tokenizer.json stands for within a text."""

import re

_MOST = 1 << 24  # ids; of each of them there is a piece in memory
_BYTE = re.compile('<0x([0-9A-Fa-f]{2})>')  # of byte fallback


def byte_characters() -> dict[str, int]:
    """The byte behind each of the 256 characters in which byte-level BPE writes its tokens.

    Printable characters of Latin-1 stand for their own code, the others follow from 256 on, in
    order: Radford et al. 2019, `bytes_to_unicode` of the GPT-2 code.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(code): code for code in own} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }


def json_pieces(tokenizer, content: dict, special: set[int]) -> list[bytes]:
    """The bytes of each id, from 0 to the highest; b'' for special ids and gaps.

    Byte-level tokens: the bytes behind their characters. `<0x0A>` under byte fallback: that byte.
    Tokens written with a mark for the space, as SentencePiece does: with the space. Added tokens
    that are not special: their text. Any other kind: what the file's own decoder adds for the token
    behind another one.

    Args:
      tokenizer: tokenizers.Tokenizer.
      content: its file as JSON.
      special: ids that stand for nothing.

    Raises:
      ValueError: an id of 2^24 or more.
    """
    ids = tokenizer.get_vocab(with_added_tokens=True)
    highest = max(ids.values(), default=-1)
    if highest >= _MOST:
        raise ValueError(f'id {highest}: must be below {_MOST}')
    pieces = [b''] * (highest + 1)
    to_bytes = _rule(tokenizer, content, ids)
    for token, number in ids.items():
        if number not in special:
            pieces[number] = to_bytes(token)
    for number, token in tokenizer.get_added_tokens_decoder().items():
        pieces[number] = b'' if number in special else token.content.encode()
    return pieces


def _rule(tokenizer, content, ids):
    parts = {part['type']: part for part in _parts(content.get('decoder'))}
    before = {part['type'] for part in _parts(content.get('pre_tokenizer'))}
    if 'ByteLevel' in parts or 'ByteLevel' in before:
        table = byte_characters()

        def of_characters(token):
            if all(character in table for character in token):
                return bytes(table[character] for character in token)
            return token.encode()  # the library's decoder does likewise

        return of_characters
    mark = None
    if 'Metaspace' in parts:
        mark = parts['Metaspace']['replacement']
    elif parts.get('Replace', {}).get('content') == ' ':
        mark = parts['Replace']['pattern'].get('String')
    whole = _behind_another(tokenizer, ids) if mark is None else None

    def of_text(token):
        found = _BYTE.fullmatch(token) if 'ByteFallback' in parts else None
        if found:
            return bytes.fromhex(found[1])
        return token.replace(mark, ' ').encode() if mark else whole(token)

    return of_text


def _behind_another(tokenizer, ids):
    anchor = next(iter(ids.values()), None)
    alone = tokenizer.decode([anchor], skip_special_tokens=False) if ids else ''

    def of_token(token):
        both = tokenizer.decode([anchor, ids[token]], skip_special_tokens=False)
        return both.removeprefix(alone).encode()

    return of_token


def _parts(stage):
    """A decoder or pre-tokenizer as a list of its parts, in order."""
    if not stage:
        return []
    nested = stage.get('decoders') or stage.get('pretokenizers')
    return [part for one in nested for part in _parts(one)] if nested else [stage]
