"""Splits documents into training and held-out ones by a hash of their names."""

import hashlib

Document = tuple[str, bytes]


def name_hash(name: str) -> float:
    """Map a document's name to [0, 1) by its sha256; documents below the fraction are held out.

    The side of a document thus does not depend on other documents, their order, or the text, unless
    a side would be empty (`split_documents`).
    """
    digest = hashlib.sha256(name.encode('utf-8', 'surrogateescape')).digest()
    return int.from_bytes(digest[:8], 'big') / 2**64


def split_documents(
    documents: list[Document], held_out_fraction: float, whole_characters: bool = False
) -> tuple[list[Document], list[Document]]:
    """Split (name, bytes) documents into (train, held_out), each in the given order.

    A document is held out if the hash of its name is below the fraction. If a side would be empty,
    the document nearest to the bound moves there. A single document is cut by `tail_start`.
    """
    if len(documents) == 1:
        ((name, text),) = documents
        try:
            cut = tail_start(text, held_out_fraction, whole_characters)
        except ValueError as error:
            raise ValueError(f'{name}: {error}') from None
        return [(name, text[:cut])], [(name, text[cut:])]
    hashes = [name_hash(name) for name, _ in documents]
    is_held_out = [number < held_out_fraction for number in hashes]
    if not any(is_held_out):
        is_held_out[hashes.index(min(hashes))] = True
    elif all(is_held_out):
        is_held_out[hashes.index(max(hashes))] = False
    sides = [], []
    for document, side in zip(documents, is_held_out, strict=True):
        sides[side].append(document)
    return sides


def tail_start(text: bytes, held_out_fraction: float, whole_characters: bool) -> int:
    """Return where the held-out tail of a single document begins; neither side is empty.

    With `whole_characters`, the cut is before the character at the fraction, or after the first
    character. Raises ValueError if the text is too short.
    """
    right = 'needs 2 or more, to train on and to hold out'
    if len(text) < 2:
        raise ValueError(f'1 byte; {right}')
    cut = len(text) - round(len(text) * held_out_fraction)
    cut = min(max(cut, 1), len(text) - 1)
    if not whole_characters:
        return cut
    # No character has more than 4 bytes.
    for start in (*range(cut, max(cut - 4, 0), -1), *range(cut + 1, min(cut + 4, len(text)))):
        if text[start] & 0xC0 != 0x80:
            return start
    if len(text) <= 4:
        raise ValueError(f'1 character; {right}')
    return cut
