"""When a child is started again."""

from tokenmill.serve.restarts import EARLY_LIMIT, EARLY_SECONDS, SLOW_SECONDS, RestartHistory


def after(*lives: float, was_ready: bool = True) -> RestartHistory:
    history = RestartHistory()
    for lived in lives:
        history = history.after_death(lived, was_ready=was_ready)
    return history


def test_early_deaths_in_a_row_wait_longer_and_longer() -> None:
    delays = [after(*[1.0] * deaths).delay for deaths in range(EARLY_LIMIT + 1)]

    assert delays == sorted(delays)
    assert delays[-1] == SLOW_SECONDS


def test_three_early_deaths_in_a_row_are_hopeless() -> None:
    assert not after(1.0, 1.0).is_hopeless
    assert after(1.0, 1.0, 1.0).is_hopeless


def test_a_long_life_is_forgiven() -> None:
    assert after(1.0, 1.0, EARLY_SECONDS + 1) == RestartHistory()


def test_before_the_service_was_ready_every_death_is_early() -> None:
    """A model that takes minutes to load and then dies would be loaded for ever."""
    assert after(600.0, 600.0, 600.0, was_ready=False).is_hopeless
