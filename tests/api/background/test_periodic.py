"""Threads that call a function periodically."""

import pytest

from api.background import periodic


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exception_does_not_end_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(periodic, "RETRY_SECONDS", 0.0)
    calls: list[int] = []

    def run() -> float:
        calls.append(1)
        # Only SystemExit ends the thread.
        raise RuntimeError("a bug") if len(calls) == 1 else SystemExit

    thread = periodic.start_periodic("t", run)
    thread.join(60)
    assert (len(calls), thread.is_alive()) == (2, False)
