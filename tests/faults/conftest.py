"""Small runs for the fault tests, and the summary of all faults at the end."""

import collections
import json
import os
import random
import statistics

import pytest

from moddepth_jax.hparams import from_config
from tests.training.conftest import (  # noqa: F401  fixtures here, too
    cheap_reports,
    compiled_once,
    corpus,
    programs,
)

NUM_STEPS = 6


@pytest.fixture(scope='session')
def small_run(tiny_config, corpus):  # noqa: F811
    """small_run(**changes): hyper-parameters of 6 steps, saved after each second one.

    The vocabulary has ids that no text contains.
    """

    def make(**changes):
        sizes = {
            'data.source': corpus,
            'model.num_layers': 1,
            'model.vocab_size': 300,
            'training.num_steps': NUM_STEPS,
            'evaluation.every': 4,
            'evaluation.final_batches': 1,
        }
        return from_config(tiny_config(**sizes | changes))

    return make


@pytest.fixture
def draw(request):
    """A random generator; a failure shows its seed, and FAULTS_SEED sets it."""
    seed = int(os.environ.get('FAULTS_SEED', random.SystemRandom().randrange(10**6)))
    print(f'{request.node.name}: FAULTS_SEED={seed}')
    return random.Random(f'{seed} {request.node.name}')


@pytest.fixture
def tally(record_property):
    """tally(table, kind, value=1) counts one more of a kind for the summary at the end."""

    def add(table, kind, value=1):
        record_property('faults', [table, kind, value])

    return add


def pytest_terminal_summary(terminalreporter):
    """Print sums over all tests and processes; for seconds also number, median and maximum."""
    tables = collections.defaultdict(lambda: collections.defaultdict(list))
    for report in sum(terminalreporter.stats.values(), []):
        if getattr(report, 'when', None) == 'call':
            for name, value in report.user_properties:
                if name == 'faults':
                    tables[value[0]][value[1]].append(value[2])
    for table, kinds in tables.items():
        for kind, values in kinds.items():
            spread = [len(values), round(statistics.median(values), 2), round(max(values), 2)]
            kinds[kind] = spread if table.endswith('seconds') else sum(values)
    if tables:
        terminalreporter.section('faults')
        terminalreporter.write_line(json.dumps(tables, indent=2, sort_keys=True))
