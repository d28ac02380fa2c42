"""What launch.bench runs: each benchmark is one function, and its arguments are its flags.

A benchmark is a generator of (result, tables): the result, a dict of JSON values, is kept, and its
tables are printed, as soon as they are there. Its keyword arguments, with their types, defaults and
the texts of its docstring, become flags of launch.bench. Importing this module needs no JAX.
"""

import functools
import importlib
import inspect
import re

MODULES = {  # of each function, by its name
    name: f'{__package__}.{module}'
    for name, module in {
        'step': 'steps',
        'decode': 'decoding',
        'prompts': 'prompts',
        'depth': 'depths',
        'loops': 'depths',
        'experts': 'experts',
        'attention': 'attention_report',
        'authors': 'authors',
        'paper': 'on_paper',
        'scoring': 'scoring',
        'runs': 'runs',
    }.items()
}


@functools.cache
def benchmarks() -> dict:
    """The functions by name."""
    return {name: getattr(importlib.import_module(of), name) for name, of in MODULES.items()}


def flag_texts(benchmark) -> dict[str, str]:
    """The text of each argument in the docstring of a benchmark."""
    section = inspect.getdoc(benchmark).split('Args:\n')[1]
    texts = re.findall(r'^  (\w+): (.*(?:\n    .*)*)', section, re.MULTILINE)
    return {name: ' '.join(text.split()) for name, text in texts}
