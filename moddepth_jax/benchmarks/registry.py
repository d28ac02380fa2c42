"""The benchmarks of launch.bench. Each is a function whose keyword arguments become flags.

A benchmark is a generator of (result, tables): a dict of JSON values that is written to --json, and
tables that are printed. The types, defaults and docstring texts of its arguments define the flags.
Importing this module does not import JAX.
"""

import functools
import importlib
import inspect
import re

MODULES = {  # module of each benchmark, by name
    name: f'{__package__}.{module}'
    for name, module in {
        'step': 'steps',
        'decode': 'decoding',
        'prompts': 'prompts',
        'pytorch': 'pytorch',
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
    """Return the benchmark functions by name."""
    return {name: getattr(importlib.import_module(of), name) for name, of in MODULES.items()}


def flag_texts(benchmark) -> dict[str, str]:
    """Return the text of each argument in the docstring of a benchmark."""
    section = inspect.getdoc(benchmark).split('Args:\n')[1]
    texts = re.findall(r'^  (\w+): (.*(?:\n    .*)*)', section, re.MULTILINE)
    return {name: ' '.join(text.split()) for name, text in texts}
