"""A stop signal ends a starting process at once, whatever it loads (sglang#16145)."""

import signal
from typing import Any

import pytest

from tests.gated_start import end, start_at_gate
from tokenmill.process.startup_signals import blocked_signals

WATCHDOG_SECONDS = 120.0
GATES = [
    # The first expensive import, and the one with which loading the model begins.
    ("worker", "redis", ()),
    ("worker", "engine.execution.build", ()),
    ("api", "flask", ()),
    ("tokenmill", "click", ("serve",)),
]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("program", "gate", "arguments"), GATES)
def test_a_signal_ends_a_starting_process(
    redis_url: str, program: str, gate: str, arguments: Any, number: int
) -> None:
    env = {"REDIS_URL": redis_url, "TOKENMILL_METRICS_PORT": "0"}
    process = start_at_gate(program, gate, arguments=arguments, env=env)

    process.send_signal(number)

    try:
        assert process.wait(WATCHDOG_SECONDS) == -number
    finally:
        end(process)


@pytest.mark.parametrize(("program", "gate", "arguments"), GATES)
def test_process_1_does_not_ignore_the_signal(
    redis_url: str, program: str, gate: str, arguments: Any
) -> None:
    """Emulated here; with real namespaces in tests/services/test_first_process.py."""
    env = {"REDIS_URL": redis_url, "TOKENMILL_METRICS_PORT": "0"}
    process = start_at_gate(program, gate, arguments=arguments, env=env, as_first=True)

    process.send_signal(signal.SIGTERM)

    try:
        assert process.wait(WATCHDOG_SECONDS) == 128 + signal.SIGTERM
    finally:
        end(process)


def test_signals_are_blocked_only_until_the_next_program_starts() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with blocked_signals():
        assert {signal.SIGTERM, signal.SIGINT} <= signal.pthread_sigmask(signal.SIG_BLOCK, ())

    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
