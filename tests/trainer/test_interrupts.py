"""Signals that end a run: once, however often they come, and the handlers before come back."""

import signal
import threading

import pytest

from dataproto_audit.trainer import interrupts
from dataproto_audit.trainer.interrupts import Interrupts


@pytest.fixture
def clock(monkeypatch):
    at = [100.0]
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: at[0])
    return at


@pytest.mark.parametrize("number", interrupts.SIGNALS)
def test_a_signal_raises_once_and_a_late_one_again(clock, number):
    before = [signal.getsignal(known) for known in interrupts.SIGNALS]
    with Interrupts():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        clock[0] += 1.9
        for again in interrupts.SIGNALS:
            signal.raise_signal(again)
        clock[0] += 0.2
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert [signal.getsignal(known) for known in interrupts.SIGNALS] == before


def test_a_library_s_handler_is_replaced_and_the_one_before_comes_back():
    def of_a_library(*_):
        raise AssertionError

    before = signal.getsignal(signal.SIGTERM)
    with Interrupts() as taken:
        signal.signal(signal.SIGTERM, of_a_library)
        taken.take()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_caller_s_own_way_with_ctrl_c_is_left_to_it():
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    try:
        with Interrupts():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [1]


def test_other_threads_change_nothing():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work():
        with Interrupts():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
