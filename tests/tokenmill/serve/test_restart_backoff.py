"""When a process that exited is restarted."""

from tokenmill.serve.restart_backoff import CRASH_LOOP_EXITS, EARLY_SECONDS, SLOW_SECONDS, RestartBackoff


def after(*uptimes: float, was_ready: bool = True) -> RestartBackoff:
    backoff = RestartBackoff()
    for uptime in uptimes:
        backoff = backoff.after_exit(uptime, was_ready=was_ready)
    return backoff


def test_the_delay_grows_with_each_early_exit() -> None:
    delays = [after(*[1.0] * exits).delay for exits in range(CRASH_LOOP_EXITS + 1)]

    assert delays == sorted(delays)
    assert delays[-1] == SLOW_SECONDS


def test_three_early_exits_in_a_row_are_a_crash_loop() -> None:
    assert not after(1.0, 1.0).is_crash_loop
    assert after(1.0, 1.0, 1.0).is_crash_loop


def test_a_long_uptime_resets_the_count() -> None:
    assert after(1.0, 1.0, EARLY_SECONDS + 1) == RestartBackoff()


def test_before_the_service_was_ready_every_exit_is_early() -> None:
    """Otherwise a model that takes minutes to load and then crashes would be loaded forever."""
    assert after(600.0, 600.0, 600.0, was_ready=False).is_crash_loop
