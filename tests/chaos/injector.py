"""Injects faults in an order that follows from a seed. Each fault comes once before any comes again.

Two injectors run concurrently, one for processes and one for Redis. Faults of one injector never overlap.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from random import Random

from tests.chaos.cluster import Cluster, until
from tests.chaos.faults import Fault

RECOVERY_SECONDS = 60.0
IMPATIENCE = 0.15
"""Share of the faults that are injected before the service has recovered from the previous one."""


def fault_order(faults: Mapping[str, Fault], chance: Random) -> Iterator[tuple[str, Fault]]:
    """All faults in random order, repeatedly. Empty if there are none."""
    names = sorted(faults)
    while names:
        chance.shuffle(names)
        yield from ((name, faults[name]) for name in names)


class FaultInjector:
    """Injects `faults` into `cluster`.

    `is_healthy`: awaited before each fault. `pauses`: minimum and maximum seconds between faults. `say`
    receives a line for each.
    """

    def __init__(
        self,
        cluster: Cluster,
        faults: Mapping[str, Fault],
        chance: Random,
        *,
        pauses: tuple[float, float],
        is_healthy: Callable[[], bool] = lambda: True,
        say: Callable[[str], None],
    ) -> None:
        self.num_injected = 0
        self._cluster = cluster
        self._faults = faults
        self._chance = chance
        self._pauses = pauses
        self._is_well = is_healthy
        self._say = say
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, seconds: float | None) -> None:
        """Inject for `seconds`; None: each fault once."""
        self._thread = threading.Thread(target=self._run, args=(seconds,), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the end. Raises the error of a fault, if any."""
        assert self._thread is not None
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self, seconds: float | None) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            for name, fault in fault_order(self._faults, self._chance):
                if self._is_done(deadline):
                    return
                time.sleep(self._chance.uniform(*self._pauses))
                if self._chance.random() >= IMPATIENCE or deadline is None:
                    until(self._is_well, RECOVERY_SECONDS, pause=0.2)
                self._say(f"fault: {name}")
                fault(self._cluster, self._chance)
                self.num_injected += 1
                self._say(f"over: {name}")
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self._error = error

    def _is_done(self, deadline: float | None) -> bool:
        if deadline is None:
            return self.num_injected >= len(self._faults)
        return time.monotonic() >= deadline
