"""Where the time of one step went."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StepTimer:
    """Seconds of each stage of one step, by an injected clock; a stage that runs in parts is summed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.started = clock()
        self.seconds: dict[str, float] = {}
        self.num_faults = 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = self._clock()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - started

    def total(self) -> float:
        return self.since(self.started)

    def since(self, moment: float) -> float:
        """Seconds from `moment`, on the same clock, until now."""
        return self._clock() - moment
