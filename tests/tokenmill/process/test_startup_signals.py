"""A request to stop ends a process that still starts, at once, whatever it loads (sglang#16145)."""

import signal
from typing import Any

import pytest

from tests.gated_start import end, start_at_gate
from tokenmill.process.startup_signals import blocked_signals

WATCHDOG_SECONDS = 120.0
GATES = [
    # The first import that is not light, and the one with which loading the model begins.
    ("worker", "redis", ()),
    ("worker", "engine.execution.build", ()),
    ("api", "flask", ()),
    ("tokenmill", "click", ("serve",)),
]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("room", "gate", "arguments"), GATES)
def test_a_process_that_starts_ends_by_the_signal(
    redis_url: str, room: str, gate: str, arguments: Any, number: int
) -> None:
    env = {"REDIS_URL": redis_url, "TOKENMILL_METRICS_PORT": "0"}
    process = start_at_gate(room, gate, arguments=arguments, env=env)

    process.send_signal(number)

    try:
        assert process.wait(WATCHDOG_SECONDS) == -number
    finally:
        end(process)


@pytest.mark.parametrize(("room", "gate", "arguments"), GATES)
def test_process_1_does_not_lose_the_signal(redis_url: str, room: str, gate: str, arguments: Any) -> None:
    """Emulated where namespaces are not allowed; with real ones in tests/services/test_first_process.py."""
    env = {"REDIS_URL": redis_url, "TOKENMILL_METRICS_PORT": "0"}
    process = start_at_gate(room, gate, arguments=arguments, env=env, as_first=True)

    process.send_signal(signal.SIGTERM)

    try:
        assert process.wait(WATCHDOG_SECONDS) == 128 + signal.SIGTERM
    finally:
        end(process)


def test_signals_are_held_for_the_next_program_only() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with blocked_signals():
        assert {signal.SIGTERM, signal.SIGINT} <= signal.pthread_sigmask(signal.SIG_BLOCK, ())

    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
