"""What a preparation is asked for, and which of it decides the result."""

import dataclasses
import hashlib
import os
import pathlib


@dataclasses.dataclass(frozen=True)
class Options:
    """How text is read and encoded.

    Attributes:
      text_field: field or column of the text.
      held_out_fraction: in (0, 1), of the documents.
      skip_bad: whether bad rows are left out and counted, and not refused.
      part_bytes: of the text of one part, about: what a kill may lose in each process.
    """

    text_field: str
    held_out_fraction: float
    skip_bad: bool
    part_bytes: int


@dataclasses.dataclass(frozen=True)
class Preparation:
    """What is asked for.

    Attributes:
      sources: globs of files.
      directory: where the store goes.
      tokenizer: 'bytes', 'bpe:N' or a file, as `make_tokenizer` takes it.
      separator: the token that starts each document, where the tokenizer's file does not tell.
      options: how to read and encode.
      bpe_bytes: of text that 'bpe:N' is trained on, about.
      processes: that share out the work; they do not change the result.
    """

    sources: tuple[str, ...]
    directory: pathlib.Path
    tokenizer: str
    separator: str | None
    options: Options
    bpe_bytes: int
    processes: int


def arguments_of(wanted: Preparation) -> dict:
    """Those that decide the result beside the files, as they are stored: JSON values."""
    trained = {'bpe_bytes': wanted.bpe_bytes} if trained_vocabulary(wanted.tokenizer) else {}
    return {
        'tokenizer': _identity(wanted.tokenizer),
        'separator': wanted.separator,
        'text_field': wanted.options.text_field,
        'held_out_fraction': wanted.options.held_out_fraction,
        **trained,
    }


def _identity(tokenizer):
    """The name of a tokenizer; of a file its own name and its content, wherever it lies."""
    path = pathlib.Path(tokenizer).expanduser()
    found = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
    digest = hashlib.sha256(b''.join(file.read_bytes() for file in found if file.is_file()))
    return f'{path.name} of sha256 {digest.hexdigest()}' if found else tokenizer


def trained_vocabulary(tokenizer: str) -> int | None:
    """N of 'bpe:N'; None of any other. Raises ValueError, one line, for another N."""
    kind, _, size = tokenizer.partition(':')
    if kind != 'bpe' or os.path.exists(tokenizer):
        return None
    if not size.isdecimal():
        raise ValueError(f'--tokenizer={tokenizer}: must be bpe:N, N ids in all, as in bpe:4096')
    return int(size)
