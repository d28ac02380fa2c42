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


def load_domains(
    folder: str, data: DataHparams, tokenizer: Tokenizer, trained_on
) -> tuple[dict[str, HeldOut], dict[str, str]]:
    """(datasets, skipped) by name of the domain; the latter are short or binary, and say why.

    A domain is a file in `folder`, or a folder in it: one that launch.prepare wrote, or all text
    below it. Hidden ones are not read. `trained_on` is as in `make_held_out`. Raises ValueError,
    one line, if `folder` is no folder, is itself prepared or empty; with the domain's name, for
    text that cannot be read; and if all are short.
    """
    path, option = pathlib.Path(os.path.expanduser(folder)), f'--domains={folder}'
    right = 'must be a folder with one file or folder of text for each domain'
    if not path.is_dir():
        raise ValueError(f'{option}: no such folder; {right}')
    if is_store(path):
        raise ValueError(f'{option}: is one prepared text; give it to --data, or {right}')
    names = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith('.'))
    if not names:
        raise ValueError(f'{option}: is empty; {right}')
    datasets, skipped = {}, {}
    for name in names:
        # Joined as strings: ./stdlib is a file there, stdlib would be a source.
        source = os.path.join(os.path.expanduser(folder), name)
        if not (os.path.isdir(source) or readers.may_be_text(path / name, data.encoding)):
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
            raise ValueError(f'{option}: {name}: {text}') from None
    if not datasets:
        name, reason = next(iter(skipped.items()))
        raise ValueError(f'{option}: no domain is long enough; {name}: {reason}')
    return datasets, skipped
