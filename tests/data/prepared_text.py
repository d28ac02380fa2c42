"""Small texts as files, prepared text, knobs of data, and the message of a refusal."""

import os
import random
import socket

import numpy as np
import pytest

from moddepth_jax.data.split import split_documents
from moddepth_jax.data.token_store import PLAN_FILE, StoreWriter
from moddepth_jax.hparams import DataHparams


def data_hparams(source, **changes) -> DataHparams:
    """Return the knobs of a source: batches of two rows of 8 bytes, with `changes`."""
    knobs = {'mixture': '', 'text_field': 'text', 'tokenizer': 'bytes', 'sequence_length': 8}
    knobs |= {'batch_size': 2, 'held_out_fraction': 0.25, 'log_windows': False, 'encoding': 'utf-8'}
    return DataHparams(str(source), **knobs | changes)


def write_texts(folder, letters: bytes, seed: int, number: int = 30) -> list[tuple[str, bytes]]:
    """`number` .txt files of 20 to 60 of these letters; returns (name, bytes) in order of names."""
    draw = random.Random(seed)
    folder.mkdir(parents=True)
    documents = []
    for i in range(number):
        name, length = f'{i:03d}.txt', draw.randrange(20, 60) * (30 // number)
        documents.append((name, bytes(draw.choice(letters) for _ in range(length))))
        (folder / name).write_bytes(documents[-1][1])
    return documents


def prepare(folder, documents, tokenizer, held_out_fraction):
    folder.mkdir(parents=True, exist_ok=True)
    with StoreWriter(folder, tokenizer, held_out_fraction) as writer:
        sides = split_documents(documents, held_out_fraction)
        for split, side in zip(('train', 'held_out'), sides, strict=True):
            for _, text in side:
                tokens_N = np.array([tokenizer.separator, *tokenizer.encode(text)])
                writer.add(split, tokens_N, np.array([len(tokens_N)]), len(text))
        return writer.finish()


def begin(folder):
    """Make a folder that launch.prepare has not finished."""
    (folder / PLAN_FILE).parent.mkdir(parents=True)
    (folder / PLAN_FILE).write_text('{}')


def make_special(path, kind):
    """Make a special file, or one that is too large."""
    if kind == 'pipe':
        os.mkfifo(path)
    elif kind == 'socket':
        here, _ = os.getcwd(), os.chdir(path.parent)  # the path of a socket must be short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
        os.chdir(here)
    elif kind == 'directory':
        path.mkdir()
    elif kind == 'large':
        path.touch()
        os.truncate(path, 1 << 40)
    else:
        path.symlink_to('/dev/zero' if kind == 'device' else path)


def refusal(call, *args, **named) -> str:
    """Return the message of the ValueError that the call raises, which must be one line."""
    with pytest.raises(ValueError) as caught:
        call(*args, **named)
    assert '\n' not in str(caught.value)
    return str(caught.value)
