"""Requests to stop are counted and interrupt waits; earlier handlers are restored."""

import signal
from collections.abc import Iterator

import pytest

from tokenmill.serve.stop_signals import StopRequested, StopSignals


@pytest.fixture
def hangup_ignored() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_request_interrupts_every_wait(number: int) -> None:
    with StopSignals() as signals:
        signals.wait_or_stop(0)
        signal.raise_signal(number)

        for _ in range(2):
            with pytest.raises(StopRequested):
                signals.wait_or_stop(3600)

        assert signals.count == 1


def test_a_wait_ends_with_a_signal() -> None:
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGCHLD)
        signals.wait(3600)

        assert signals.count == 0


def test_nohup_is_respected(hangup_ignored: None) -> None:
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGHUP)

        assert signals.count == 0


def test_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    with StopSignals():
        pass

    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)] == before
