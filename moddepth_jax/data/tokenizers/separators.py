"""Finds the special tokens of a tokenizer that start and end a document."""

import pathlib

from moddepth_jax.data.directory import read_json

_CONFIG = 'tokenizer_config.json'
_ENDS = {  # known tokens that start a document, and the token that then ends one
    '<|endoftext|>': None,
    '<|begin_of_text|>': '<|end_of_text|>',
    '<s>': '</s>',
    '<bos>': '<eos>',
    '</s>': None,
    '<eos>': None,
    '<|bos|>': '<|eos|>',
    '<|eos|>': None,
}
_SHOWN = 8  # special tokens in an error


def find_separator(
    file: pathlib.Path, special: dict[str, int], first: str | None, given: str | None
) -> tuple[int, tuple[int, ...]]:
    """Return the separator of a tokenizer, and its stops: the separator, perhaps an end of text.

    The separator is the first of these: `given` by the user; the bos_token of the
    tokenizer_config.json next to the file, if add_bos_token is true or the template puts it
    `first`; the eos_token there; `first`; a known name in `special`, which is {text: id}. Raises
    ValueError, one line, if there is none, or if it is not special.
    """
    config = _read(file.parent / _CONFIG)
    bos, eos = config.get('bos_token'), config.get('eos_token')
    if given is not None:
        name, where = given, 'separator'
    elif bos is not None and (config.get('add_bos_token') or first == bos):
        name, where = bos, f'bos_token of {_CONFIG}'
    elif eos is not None:
        name, where = eos, f'eos_token of {_CONFIG}'
    else:
        name = first or next((token for token in _ENDS if token in special), None)
        where = 'separator'
    if name is None:
        right = (
            f'mark one as special in the file, name it as eos_token in a {_CONFIG} next to it, or '
            'use launch.prepare with --separator=TOKEN'
        )
        problem = f'no special token is known to start a document{_some(special)}'
        raise ValueError(f'{file}: {problem}; {right}')
    if name not in special:
        right = f'must be one{_some(special)}; mark it as special in the file or name another'
        raise ValueError(f'{file}: {where} {name!r} is not a special token of it; {right}')
    end = eos if eos is not None else _ENDS.get(name)
    stops = [special[token] for token in (name, end) if token in special]
    return special[name], tuple(dict.fromkeys(stops))


def _some(special):
    names = [repr(name) for name in special]
    more = f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''
    return f' (it has {", ".join(names[:_SHOWN])}{more})' if names else ' (it has none)'


def _read(path):
    """Read the config, with tokens as text; empty if there is no file."""
    config = read_json(path, 'correct or remove it') or {}
    for name in ('bos_token', 'eos_token'):
        if isinstance(config.get(name), dict):
            config[name] = config[name].get('content')
        if not isinstance(config.get(name), str | None):
            found = f'{name} is {config[name]!r}'
            raise ValueError(f'{path}: {found}; must be the text of a token, or null')
    return config
