"""The domains below a folder: each file and each folder in it as held-out text of its own."""

import dataclasses
import glob
import os
import pathlib

from moddepth_jax.data import readers
from moddepth_jax.data.mixture import is_prepared
from moddepth_jax.data.pipeline import HeldOut, make_held_out
from moddepth_jax.data.token_store import is_store
from moddepth_jax.data.tokenizers.tokenizer import Tokenizer
from moddepth_jax.data.windows import TooShort
from moddepth_jax.hparams import DataHparams


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
    sources = {}
    for name in names:
        # Joined as strings: ./stdlib is a file there, stdlib would be a source.
        source = os.path.join(os.path.expanduser(folder), name)
        is_raw_folder = os.path.isdir(source) and not is_prepared(source)
        sources[name] = f'{glob.escape(source)}/**/*' if is_raw_folder else source
    return sources


def load_domains(
    folder: str, data: DataHparams, tokenizer: Tokenizer, trained_on
) -> tuple[dict[str, HeldOut], dict[str, str]]:
    """(datasets, skipped) by name of the domain; the latter are too short, and say why.

    `trained_on` is as in `make_held_out`. Raises ValueError, one line with the domain's name, for
    text that cannot be read, and if all are short.
    """
    datasets, skipped = {}, {}
    for name, source in find_domains(folder).items():
        try:
            if not is_prepared(source):
                right = f'must hold {readers.describe_formats()}, or launch.prepare wrote it'
                readers.find_files(source, 'domain', right)
            own = dataclasses.replace(data, source=source, mixture='')
            datasets[name] = make_held_out(own, tokenizer, trained_on)
        except TooShort as error:
            skipped[name] = str(error).partition(': ')[2]
        except ValueError as error:
            text = str(error).replace(f'data.source={source!r}: ', '')
            text = text.replace('data.source', '--data').replace('data.text_field', '--text_field')
            raise ValueError(f'--domains={folder}: {name}: {text}') from None
    if not datasets:
        name, reason = next(iter(skipped.items()))
        raise ValueError(f'--domains={folder}: no domain is long enough; {name}: {reason}')
    return datasets, skipped
