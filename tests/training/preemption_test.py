"""Signals are noticed and reported at once, obeyed later, and handlers are restored."""

import concurrent.futures
import os
import signal

import jax
import pytest
from jax.experimental import multihost_utils

from moddepth_jax.training import preemption


def send(name):
    os.kill(os.getpid(), getattr(signal, name))


def test_a_signal_stops_after_the_step_and_the_second_ctrl_c_at_once(capfd):
    """One Ctrl-C is patient, two are not; other signals do not count as the first one."""
    with preemption.PreemptionHandler() as stop:
        assert stop.signal_name is None and not stop.should_stop(1)
        send('SIGTERM')
        assert stop.signal_name == 'SIGTERM' and stop.should_stop(2)
        send('SIGTERM')
        send('SIGINT')
        assert stop.signal_name == 'SIGTERM'
        with pytest.raises(KeyboardInterrupt):
            send('SIGINT')
    out, err = capfd.readouterr()
    first, second = err.splitlines()
    assert first == 'SIGTERM: stopping after this step, then saving'
    assert out == '' and second.startswith('SIGINT: stopping after this step')


def test_handlers_are_restored_on_exit(capfd):
    caught = []
    handler = signal.signal(signal.SIGUSR1, lambda number, frame: caught.append(number))
    try:
        before = [signal.getsignal(number) for number in preemption.SIGNALS]
        stop = preemption.PreemptionHandler()
        with pytest.raises(RuntimeError), stop:
            assert signal.getsignal(signal.SIGUSR1) != before[2]
            send('SIGUSR1')
            raise RuntimeError
        assert [signal.getsignal(number) for number in preemption.SIGNALS] == before
        assert stop.signal_name == 'SIGUSR1' and not caught
        send('SIGUSR1')
        assert caught == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, handler)
    assert capfd.readouterr().err.count('\n') == 1


def test_in_another_thread_nothing_is_changed():
    """Python takes signals in its main thread only: elsewhere, entering does nothing."""
    before = [signal.getsignal(number) for number in preemption.SIGNALS]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        stop = pool.submit(preemption.PreemptionHandler().__enter__).result()
    assert [signal.getsignal(number) for number in preemption.SIGNALS] == before
    assert stop.signal_name is None


def test_several_processes_rely_on_jax(monkeypatch):
    """No handler of ours is installed, which would disable JAX's; JAX chooses the step."""
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    monkeypatch.setattr(multihost_utils, 'reached_preemption_sync_point', lambda step: step == 7)
    before = [signal.getsignal(number) for number in preemption.SIGNALS]
    with preemption.PreemptionHandler() as stop:
        assert [signal.getsignal(number) for number in preemption.SIGNALS] == before
        assert not stop.should_stop(6) and stop.signal_name is None
        assert stop.should_stop(7) and stop.signal_name == 'SIGTERM'
