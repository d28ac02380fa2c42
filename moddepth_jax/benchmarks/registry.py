"""What launch.bench runs: each benchmark is one function, and its arguments are its flags.

A benchmark is a generator of (result, tables): the result, a dict of JSON values, is kept, and its
tables are printed, as soon as they are there. Its keyword arguments, with their types, defaults and
the texts of its docstring, become flags of launch.bench.
"""

import inspect
import re

from moddepth_jax.benchmarks.attention_report import attention
from moddepth_jax.benchmarks.authors import authors
from moddepth_jax.benchmarks.decoding import decode
from moddepth_jax.benchmarks.depths import depth, loops
from moddepth_jax.benchmarks.experts import experts
from moddepth_jax.benchmarks.names import NAMES
from moddepth_jax.benchmarks.on_paper import paper
from moddepth_jax.benchmarks.prompts import prompts
from moddepth_jax.benchmarks.runs import runs
from moddepth_jax.benchmarks.scoring import scoring
from moddepth_jax.benchmarks.steps import step

_FUNCTIONS = (
    step,
    decode,
    prompts,
    depth,
    loops,
    experts,
    attention,
    authors,
    paper,
    scoring,
    runs,
)
_BY_NAME = {f.__name__: f for f in _FUNCTIONS}
BENCHMARKS = {name: _BY_NAME[name] for name in NAMES}


def flag_texts(benchmark) -> dict[str, str]:
    """The text of each argument in the docstring of a benchmark."""
    section = inspect.getdoc(benchmark).split('Args:\n')[1]
    texts = re.findall(r'^  (\w+): (.*(?:\n    .*)*)', section, re.MULTILINE)
    return {name: ' '.join(text.split()) for name, text in texts}
