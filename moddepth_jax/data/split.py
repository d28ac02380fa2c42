"""Where a document falls, to train on or held out, and where a lone one is cut in two."""

import hashlib


def place(name: str) -> float:
    """A document's place in [0, 1), from the sha256 of its name alone: held out below a fraction.

    More documents, another order or other text move no document.
    """
    digest = hashlib.sha256(name.encode('utf-8', 'surrogateescape')).digest()
    return int.from_bytes(digest[:8], 'big') / 2**64


def tail(text: bytes, held_out_fraction: float, whole_characters: bool) -> int:
    """Where the tail of the only document begins, the part of it that is held out.

    Both sides have a byte at least, or with `whole_characters` a character.

    Args:
      text: of the document.
      held_out_fraction: in (0, 1), of its bytes.
      whole_characters: whether the cut moves back to where a character begins, or on where that is
        the first one. Text that is not UTF-8 may be cut anywhere.

    Raises:
      ValueError: one line, to be put behind what names the document, where it is too short.
    """
    right = 'needs 2 or more, to train on and to hold out'
    if len(text) < 2:
        raise ValueError(f'1 byte; {right}')
    cut = len(text) - round(len(text) * held_out_fraction)
    cut = min(max(cut, 1), len(text) - 1)
    if not whole_characters:
        return cut
    # No character has more than 4 bytes.
    for at in (*range(cut, max(cut - 4, 0), -1), *range(cut + 1, min(cut + 4, len(text)))):
        if text[at] & 0xC0 != 0x80:
            return at
    if len(text) <= 4:
        raise ValueError(f'1 character; {right}')
    return cut
