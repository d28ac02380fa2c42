"""The domains of a folder: each file or folder in it is one held-out text."""

import dataclasses
import os
import pathlib

from moddepth_jax.data import readers
from moddepth_jax.data.mixture import is_prepared
from moddepth_jax.data.pipeline import HeldOut, make_held_out
from moddepth_jax.data.sources import NoText, find_files
from moddepth_jax.data.token_store import is_store
from moddepth_jax.data.tokenizers.tokenizer import Tokenizer
from moddepth_jax.data.windows import TooShort
from moddepth_jax.hparams import DataHparams


def name_flags(message: str) -> str:
    """Replace the knobs in a message by the flags of launch.evaluate."""
    for knob in ('text_field', 'encoding'):
        message = message.replace(f'data.{knob}', f'--{knob}')
    return message.replace('data.source', '--data').replace(', mixture', '')  # no mixtures there


def load_domains(
    folder: str, data: DataHparams, tokenizer: Tokenizer, trained_on
) -> tuple[dict[str, HeldOut], dict[str, str]]:
    """Load the domains of `folder` as ({name: HeldOut}, {name: why it was skipped}).

    A domain is a file in `folder`, or a folder in it: prepared text, or all text below it. Hidden
    entries are ignored; domains that are too short, empty or binary are skipped. `trained_on` is as
    in `make_held_out`. Raises ValueError, one line, if `folder` is missing, empty or itself
    prepared text, if a domain cannot be read, or if all domains are skipped.
    """
    path, option = pathlib.Path(os.path.expanduser(folder)), f'--domains={folder}'
    right = 'must be a folder with one file or folder of text for each domain'
    if not path.is_dir():
        raise ValueError(f'{option}: no such folder; {right}')
    if is_store(path):
        raise ValueError(f'{option}: is a prepared text; give it to --data, or {right}')
    names = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith('.'))
    if not names:
        raise ValueError(f'{option}: is empty; {right}')
    datasets, skipped = {}, {}
    for name in names:
        # Joined as strings, since pathlib would make ./stdlib, a file, into stdlib, a source.
        source = os.path.join(os.path.expanduser(folder), name)
        if not (os.path.isdir(source) or readers.may_be_text(path / name, data.encoding)):
            skipped[name] = 'a binary file, not text'
            continue
        try:
            if not is_prepared(source):
                right = f'must hold {readers.describe_formats()}, or launch.prepare wrote it'
                find_files(source, 'domain', right, data.encoding)
            own = dataclasses.replace(data, source=source, mixture='')
            datasets[name] = make_held_out(own, tokenizer, trained_on)
        except (TooShort, NoText) as error:
            skipped[name] = str(error).partition(': ')[2]
        except ValueError as error:
            text = name_flags(str(error).replace(f'data.source={source!r}: ', ''))
            raise ValueError(f'{option}: {name}: {text}') from None
    if not datasets:
        name, reason = next(iter(skipped.items()))
        raise ValueError(f'{option}: no domain has enough text; {name}: {reason}')
    return datasets, skipped
