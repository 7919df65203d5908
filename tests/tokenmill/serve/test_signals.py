"""Requests to stop are counted and wake whoever waits; what was set before is set again afterwards."""

import signal
from collections.abc import Iterator

import pytest

from tokenmill.serve.signals import StopRequested, StopSignals


@pytest.fixture
def hangup_ignored() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_request_ends_every_pause(number: int) -> None:
    with StopSignals() as signals:
        signals.pause(0)
        signal.raise_signal(number)

        for _ in range(2):
            with pytest.raises(StopRequested):
                signals.pause(3600)

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


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    with StopSignals():
        pass

    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)] == before
