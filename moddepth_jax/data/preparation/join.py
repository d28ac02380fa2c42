"""All parts of a preparation become one store."""

import pathlib

import numpy as np

from moddepth_jax.data.preparation.part import Part, add_skipped
from moddepth_jax.data.split import tail
from moddepth_jax.data.token_store import PARTS, Store, StoreWriter
from moddepth_jax.data.tokenizers.tokenizer import Tokenizer


def join(
    directory: pathlib.Path,
    parts: list[Part],
    tokenizer: Tokenizer,
    held_out_fraction: float,
    about: dict,
    advance,
) -> Store:
    """Writes the documents of all parts, in order, to the store in `directory`.

    Neither side stays empty, as `corpus.split` has it: the document nearest to the bound crosses,
    and a single document gives the last fraction of its bytes.

    Args:
      directory: of the store.
      parts: all of them, in order.
      tokenizer: of their tokens.
      held_out_fraction: as of the parts.
      about: `inputs` and `arguments` of the store.
      advance: called with the bytes of tokens written since the last call.

    Raises:
      ValueError: one line, where there is no document, or a single one of a single byte
        or character.
    """
    skipped = {}
    for part in parts:
        for reason, entry in part.header['skipped'].items():
            add_skipped(skipped, reason, **entry)
    counts = {side: sum(part.header[side]['documents'] for part in parts) for side in PARTS}
    if not any(counts.values()):
        left_out = sum(entry['count'] for entry in skipped.values())
        problem = f'no document with text, {left_out} rows left out'
        raise ValueError(f'--output={directory}: {problem}; give files that hold text')
    with StoreWriter(directory, tokenizer, held_out_fraction) as writer:
        if sum(counts.values()) == 1:
            _split_one(writer, parts, tokenizer, held_out_fraction)
        else:
            crossing = _crossing(parts, counts)
            for i, part in enumerate(parts):
                _write(writer, part, crossing.get(i))
                advance(part.num_token_bytes)
        return writer.finish(skipped=skipped, **about)


def _crossing(parts, counts):
    """{number of the part: (side that it leaves, its number there, its bytes)}, of one document."""
    for empty, full in (PARTS, PARTS[::-1]):
        if not counts[empty]:
            nexts = [
                (*part.header[full]['next'], i)
                for i, part in enumerate(parts)
                if part.header[full]['next']
            ]
            _, number, num_bytes, i = min(nexts, key=lambda found: (found[0], found[3]))
            return {i: (full, number, num_bytes)}
    return {}


def _write(writer, part, crossing):
    sides = part.read()
    num_bytes = {side: part.header[side]['bytes'] for side in PARTS}
    if crossing is not None:
        full, number, moved = crossing
        (empty,) = set(PARTS) - {full}
        tokens, lengths = sides[full]
        start = int(lengths[:number].sum())
        stop = start + int(lengths[number])
        sides = {
            full: (np.delete(tokens, np.s_[start:stop]), np.delete(lengths, number)),
            empty: (tokens[start:stop], lengths[number : number + 1]),
        }
        num_bytes = {full: num_bytes[full] - moved, empty: moved}
    for side in PARTS:
        writer.add(side, *sides[side], num_bytes[side])


def _split_one(writer, parts, tokenizer, held_out_fraction):
    tokens = np.concatenate([tokens for part in parts for tokens, _ in part.read().values()])
    text = tokenizer.decode(tokens[1:])
    try:
        cut = tail(text, held_out_fraction, whole_characters=tokenizer.name != 'bytes')
    except ValueError as error:
        raise ValueError(f'a single document of {error}') from None
    for side, part in zip(PARTS, (text[:cut], text[cut:]), strict=True):
        ids = np.concatenate([[tokenizer.separator], tokenizer.encode(part)])
        writer.add(side, ids, [len(ids)], len(part))
