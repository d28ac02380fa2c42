"""Signals are noticed, said, obeyed later, and leave no trace."""

import os
import signal
import threading

import jax
import pytest
from jax.experimental import multihost_utils

from moddepth_jax.training import preemption

NAMES = ['SIGTERM', 'SIGINT', 'SIGUSR1']


def send(name):
    os.kill(os.getpid(), getattr(signal, name))


@pytest.mark.parametrize('name', NAMES)
def test_a_signal_is_requested_and_said_in_one_line(name, capfd):
    """The run goes on after the signal, knows its name, and stderr has one line about it."""
    with preemption.PreemptionHandler() as stop:
        assert stop.requested is None
        send(name)
        assert stop.requested == name
    out, err = capfd.readouterr()
    assert out == '' and err.count('\n') == 1
    assert err.startswith(f'{name}: stopping after this step, then saving')


def test_the_second_ctrl_c_ends_at_once(capfd):
    """One Ctrl-C is patient, two are not; other signals do not count as the first one."""
    with preemption.PreemptionHandler() as stop:
        send('SIGTERM')
        send('SIGTERM')
        send('SIGINT')
        assert stop.requested == 'SIGTERM'
        with pytest.raises(KeyboardInterrupt):
            send('SIGINT')
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(':')[0] for line in lines] == ['SIGTERM', 'SIGINT']


def test_handlers_return_on_exit_and_a_second_use_starts_afresh(capfd):
    """Outside, signals do what they did before, after an exit by an error too."""
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
        assert stop.requested == 'SIGUSR1' and not caught
        send('SIGUSR1')
        assert caught == [signal.SIGUSR1]
        with stop:
            assert stop.requested is None
    finally:
        signal.signal(signal.SIGUSR1, handler)
    assert capfd.readouterr().err.count('\n') == 1


def test_in_another_thread_nothing_is_changed():
    """Python takes signals in its main thread only: elsewhere, entering does nothing."""
    before = [signal.getsignal(number) for number in preemption.SIGNALS]
    during = []

    def enter():
        with preemption.PreemptionHandler() as stop:
            during.extend(signal.getsignal(number) for number in preemption.SIGNALS)
            during.append(stop.requested)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert during == [*before, None]


def test_several_processes_ask_jax_alone(monkeypatch):
    """No handler of ours is installed, which would end JAX's own; it says after which step."""
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    monkeypatch.setattr(multihost_utils, 'reached_preemption_sync_point', lambda step: step == 7)
    before = [signal.getsignal(number) for number in preemption.SIGNALS]
    with preemption.PreemptionHandler() as stop:
        assert [signal.getsignal(number) for number in preemption.SIGNALS] == before
        assert not stop.asked(6) and stop.requested is None
        assert stop.asked(7) and stop.requested == 'SIGTERM'


def test_asked_after_a_step_it_tells_of_a_signal(capfd):
    """One process has its own handlers, and no step of JAX's to wait for."""
    with preemption.PreemptionHandler() as stop:
        assert not stop.asked(1)
        send('SIGUSR1')
        assert stop.asked(2)
    assert 'SIGUSR1' in capfd.readouterr().err
