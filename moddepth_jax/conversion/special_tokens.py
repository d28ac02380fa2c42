"""The special tokens of an exported folder: ids that begin or end a text, and ids without text."""

import json
import os
import pathlib

import numpy as np

from moddepth_jax.data.directory import read_json
from moddepth_jax.data.tokenizers.tokenizer import Tokenizer, make_tokenizer

GENERATION_FILE = 'generation_config.json'
TOKENIZERS = ('tokenizer.json', 'tokenizer.model')
_NAMING_FILES = ('tokenizer_config.json', 'special_tokens_map.json')
_DAMAGED = 'remove it from the run'
_AGAIN = 'download it again'


def ids_of(config: dict) -> dict:
    """Return the ids that a config.json has for the beginning and the end of a text."""
    return {name: config[name] for name in ('bos_token_id', 'eos_token_id') if name in config}


def with_token_ids(config: dict, tokenizer: Tokenizer) -> dict:
    """Set bos_token_id, which begins documents, and add the missing stops to eos_token_id."""
    stops = _stops(config)
    missing = [stop for stop in tokenizer.stops if stop not in stops]
    ids = {'bos_token_id': tokenizer.separator}
    ids |= {'eos_token_id': [*stops, *missing]} if missing else {}
    return config | ids


def add_stops(tokenizer: Tokenizer, folder: pathlib.Path):
    """Add the ids in eos_token_id of an imported folder to the stops, as `generate` has them."""
    configs = [read_json(folder / name, _AGAIN) or {} for name in ('config.json', GENERATION_FILE)]
    ids = [stop for config in configs for stop in _stops(config) if type(stop) is int]
    known = [stop for stop in ids if stop in range(tokenizer.vocab_size)]
    tokenizer.stops = tuple(dict.fromkeys([*tokenizer.stops, *known]))


def _stops(config):
    """Return the ids of eos_token_id, which is an id, a list, null or missing."""
    stops = config.get('eos_token_id')
    return stops if isinstance(stops, list) else [] if stops is None else [stops]


def has_other_separator(folder: pathlib.Path, tokenizer: Tokenizer) -> bool:
    """Return whether the tokenizer files of `folder` name another separator, or none."""
    for file in filter(os.path.lexists, (folder / name for name in TOKENIZERS)):
        try:
            return make_tokenizer(file).separator != tokenizer.separator
        except ValueError:  # the files name none
            return True
    return True


def name_separator(folder: pathlib.Path, tokenizer: Tokenizer, replace: bool):
    """Write a tokenizer_config.json next to a tokenizer.json that has none.

    With `replace`, other files that name the tokens around a text name the separator instead.
    """
    text = dict.fromkeys(('bos_token', 'eos_token'), tokenizer.separator_text or None)
    for name in _NAMING_FILES if replace and tokenizer.separator_text else ():
        if (content := read_json(folder / name, _DAMAGED)) is not None:
            _write(folder / name, content | text, indent=2)
    if (folder / TOKENIZERS[0]).exists() and not (folder / _NAMING_FILES[0]).exists():
        named = {'tokenizer_class': 'PreTrainedTokenizerFast', 'padding_side': 'left', **text}
        named['pad_token'] = text['eos_token']  # rows are padded with it, under a mask
        _write(folder / _NAMING_FILES[0], named, indent=2)


def suppress_unknown_ids(folder: pathlib.Path, vocab_size: int, tokenizer: Tokenizer, ids: dict):
    """Write generation_config.json, so that `generate` draws only ids of text and stops.

    Other fields of an existing file are kept, as are its suppressed ids other than stops; `ids` are
    those of config.json.
    """
    existing = read_json(folder / GENERATION_FILE, _DAMAGED) or {}
    config = with_token_ids(ids | existing, tokenizer)
    config.pop('_from_model_config', None)  # transformers may replace such a config
    known = {*np.flatnonzero(tokenizer.token_bytes_V).tolist(), *_stops(config)}
    unknown = {token for token in range(vocab_size) if token not in known}
    kept = {token for token in existing.get('suppress_tokens') or () if type(token) is int}
    if suppressed := sorted(unknown | (kept - {*_stops(config)})):
        config['suppress_tokens'] = suppressed
    _write(folder / GENERATION_FILE, config)


def _write(file, content, **form):
    file.write_text(json.dumps(content, **form) + '\n', encoding='utf-8')
