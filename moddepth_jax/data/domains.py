"""The domains below a folder: each file and each folder in it as held-out text of its own."""

import dataclasses
import os
import pathlib

from moddepth_jax.data import readers
from moddepth_jax.data.mixture import is_prepared
from moddepth_jax.data.pipeline import HeldOut, make_held_out
from moddepth_jax.data.sources import find_files
from moddepth_jax.data.token_store import is_store
from moddepth_jax.data.tokenizers.tokenizer import Tokenizer
from moddepth_jax.data.windows import TooShort
from moddepth_jax.hparams import DataHparams


def name_flags(message: str) -> str:
    """A message with the flags of launch.evaluate in place of the knobs that it names."""
    for knob in ('text_field', 'encoding'):
        message = message.replace(f'data.{knob}', f'--{knob}')
    return message.replace('data.source', '--data')


def find_domains(folder: str) -> dict[str, str]:
    """`data.source` of each domain by its name, sorted: every file and every folder in `folder`.

    A folder is one that launch.prepare wrote, or all files below it. Hidden ones are left out.
    Raises ValueError, one line, if `folder` is no folder, is itself prepared, or is empty.
    """
    path = pathlib.Path(os.path.expanduser(folder))
    right = 'must be a folder with one file or folder of text for each domain'
    if not path.is_dir():
        raise ValueError(f'--domains={folder}: no such folder; {right}')
    if is_store(path):
        raise ValueError(f'--domains={folder}: is one prepared text; give it to --data, or {right}')
    names = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith('.'))
    if not names:
        raise ValueError(f'--domains={folder}: is empty; {right}')
    # Joined as strings: ./stdlib is a file there, stdlib would be a source.
    return {name: os.path.join(os.path.expanduser(folder), name) for name in names}


def load_domains(
    folder: str, data: DataHparams, tokenizer: Tokenizer, trained_on
) -> tuple[dict[str, HeldOut], dict[str, str]]:
    """(datasets, skipped) by name of the domain; the latter are short or binary, and say why.

    `trained_on` is as in `make_held_out`. Raises ValueError, one line with the domain's name, for
    text that cannot be read, and if all are short.
    """
    datasets, skipped = {}, {}
    for name, source in find_domains(folder).items():
        if not (os.path.isdir(source) or readers.may_be_text(pathlib.Path(source), data.encoding)):
            skipped[name] = 'no text, but a binary file'
            continue
        try:
            if not is_prepared(source):
                right = f'must hold {readers.describe_formats()}, or launch.prepare wrote it'
                find_files(source, 'domain', right, data.encoding)
            own = dataclasses.replace(data, source=source, mixture='')
            datasets[name] = make_held_out(own, tokenizer, trained_on)
        except TooShort as error:
            skipped[name] = str(error).partition(': ')[2]
        except ValueError as error:
            text = name_flags(str(error).replace(f'data.source={source!r}: ', ''))
            raise ValueError(f'--domains={folder}: {name}: {text}') from None
    if not datasets:
        name, reason = next(iter(skipped.items()))
        raise ValueError(f'--domains={folder}: no domain is long enough; {name}: {reason}')
    return datasets, skipped
