"""An outage is logged once when it begins and once when it ends."""

import pytest
import structlog

from tokenmill.process import redis_outages
from tokenmill.process.redis_outages import OutageLog

logger = structlog.get_logger("redis_outages")


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_many_failed_calls_log_two_lines(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: 5,800 warnings in 13 s."""
    log = OutageLog(logger, "API", clock)
    log.worked()
    for number in range(5800):
        clock.now = number / 500
        log.failed(ConnectionError("gone"))
        # Some calls succeed, as reads do while a full disk prevents writes.
        log.worked()
    assert len(caplog.records) == 1
    clock.now += redis_outages.QUIET_SECONDS + 1
    for _ in range(100):
        log.worked()
    assert len(caplog.records) == 2
    assert "'failed_calls': 5800" in caplog.text


def test_the_next_outage_is_logged_again(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    log = OutageLog(logger, "API", clock)
    for _ in range(3):
        log.failed(ConnectionError("gone"))
        clock.now += redis_outages.QUIET_SECONDS + 1
        log.worked()
    assert len(caplog.records) == 6
