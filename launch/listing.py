"""The output of --list: the configs, and the knobs with their defaults and comments."""

import ast
import inspect
import pathlib
import re

from configs import base
from launch import cli, config_file
from moddepth_jax.hparams.checks import did_you_mean


def configs() -> dict[str, str]:
    """Return the docstrings of the files in configs/ that have a get_config, by name."""
    found = {}
    for path in sorted(pathlib.Path(base.__file__).parent.glob('*.py')):
        module = ast.parse(path.read_text(encoding='utf-8'))
        if any(getattr(node, 'name', '') == 'get_config' for node in module.body):
            found[path.stem] = ast.get_docstring(module)
    return found


def knobs() -> dict[str, tuple[str, str]]:
    """Return the default and the comment of each knob in configs/base.py, by dotted name."""
    prefixes, above, found = {'config': ''}, [], {}
    for line in inspect.getsource(base).splitlines():
        if comment := re.fullmatch(r' +# (.*)', line):  # lists values of the next knob
            above.append(comment[1])
        elif group := re.match(r' +(\w+) = (\w+)[.](\w+) = ConfigDict', line):
            prefixes[group[1]] = f'{prefixes[group[2]]}{group[3]}.'
        elif knob := re.match(r' +(\w+)[.](\w+) = (.*?)  # (.*)', line):
            text = ': '.join(filter(None, (knob[4], ' '.join(above))))
            found[prefixes[knob[1]] + knob[2]] = knob[3].strip("'"), text
            above = []
    return found


def describe(text: str = '') -> str:
    """List all configs and knobs, or describe those that match `text`.

    `text` is the name of a config, part of the name of a knob, or else a word of its comment.
    Raises ValueError if nothing matches.
    """
    files, values = configs(), knobs()
    if text in files:
        return f'configs/{text}.py: {files[text]}'
    if text:
        chosen = {name: value for name, value in values.items() if text in name or text == 'all'}
        chosen = chosen or {name: value for name, value in values.items() if text in value[1]}
        if not chosen:
            words = dict.fromkeys(word for name in values for word in name.split('.'))
            hint = did_you_mean(text, [*files, *words])
            if not hint:  # abbreviations, and names in other projects
                near = config_file.nearest(f'config.{text}', [f'config.{name}' for name in values])
                hint = f'; {near}' if near.startswith('did you mean') else ''
            right = 'must be a config, or part of the name or comment of a knob'
            raise ValueError(f'--list={text}: {right}{hint}')
        rows = {f'{name}={value}': comment for name, (value, comment) in chosen.items()}
        return '\n'.join(['--config.NAME=VALUE sets a knob. Defaults:', *cli.columns(rows)])
    groups = {}
    for name in values:
        group, _, knob = name.rpartition('.')
        groups.setdefault(group or '(no group)', []).append(knob)
    lines = ['configs: --config=configs/NAME.py; --list=NAME describes one']
    lines += cli.columns({name: doc.splitlines()[0] for name, doc in files.items()}, max_lines=1)
    lines += ['', 'knobs: --config.GROUP.KNOB=VALUE; --list=GROUP, part of a name or all: details']
    lines += cli.columns({group: ', '.join(names) for group, names in groups.items()})
    return '\n'.join(lines)
