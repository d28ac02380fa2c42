"""Cases with every possible outcome, for the tests of the runner."""

import os
import sys
import time

from moddepth_jax.benchmarks.runner import Case
from moddepth_jax.benchmarks.worker import SkippedError, WrongError, redirect_output, serve


def fine():
    print('fine')
    return {'number': 0}


def wrong():
    raise WrongError('o is off by 3')


def unable():
    raise SkippedError('compute capability 8.0 must be 9.x')


def failing():
    raise OSError('disk on fire')


def missing():
    import no_such_module  # noqa: F401


def crash():
    print('about to crash', flush=True)
    os.abort()


def hang():
    time.sleep(600)


def slow():
    time.sleep(1.5)
    return {}


def case(name, expected=0.1, limit=30.0, needs=()):
    """A case of one of these functions, such as fine0 or fine1."""
    run = f'tests.benchmarks.fake_cases:{name[:-1]}'
    return Case(name, 'g', expected, limit, run, needs=needs, in_process=False)


NAMES = ('fine', 'wrong', 'unable', 'failing', 'missing', 'crash', 'hang', 'slow')
CASES = {f'{name}{n}': case(f'{name}{n}') for name in NAMES for n in range(4)}


def serve_broken(connection, log):
    """A process that ends before it answers."""
    redirect_output(log)
    sys.exit('no such device')


def serve_lost(connection, log):
    """A process whose GPU is gone."""
    serve(connection, log, {'fine0': CASES['fine0']._replace(in_process=True)}, on_gpu=True)
