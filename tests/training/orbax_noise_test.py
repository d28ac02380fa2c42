"""Late errors of TensorStore's callbacks stay off stderr; every other unraisable error is told."""

import logging
import sys
import types

import pytest

from moddepth_jax.training.checkpoint import silence_orbax


@pytest.fixture
def told(monkeypatch):
    """What reaches the hook that was there before `silence`, called twice."""
    told = []
    monkeypatch.setattr(sys, 'unraisablehook', told.append)
    silence_orbax()
    silence_orbax()
    return told


def test_only_the_late_errors_of_callbacks_are_dropped(told):
    """The same error of a Python object, and other errors of callbacks, reach the hook once."""

    def meet(error, blamed=None):
        found = {'exc_type': type(error), 'exc_value': error, 'object': blamed}
        sys.unraisablehook(types.SimpleNamespace(**found))
        return error, blamed

    meet(RuntimeError('Event loop is closed'))
    passed = [
        meet(RuntimeError('Event loop is closed'), blamed=print),
        meet(RuntimeError('Event loop stopped')),
        meet(ValueError('Event loop is closed')),
    ]
    assert [(found.exc_value, found.object) for found in told] == passed


def test_records_of_orbax_alone_are_dropped(told):
    logger, kept = logging.getLogger('absl'), []
    for path in ('/lib/orbax/checkpoint/save.py', '/lib/elsewhere.py'):
        record = logger.makeRecord('absl', logging.ERROR, path, 1, 'text', (), None)
        kept += [path] if logger.filter(record) else []
    assert kept == ['/lib/elsewhere.py']


def test_errors_of_a_save_that_nobody_asks_for_are_dropped(told):
    logger, never = logging.getLogger('asyncio'), 'Future exception was never retrieved\nfuture: '
    texts = [f"{never}ValueError('in OCDBT database')", f"{never}ValueError('other')", 'OCDBT']
    records = [logger.makeRecord('asyncio', logging.ERROR, '', 1, text, (), None) for text in texts]
    assert [bool(logger.filter(record)) for record in records] == [False, True, True]
