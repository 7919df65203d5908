"""When which fault strikes: two storms at once, one over the processes and one over Redis.

Law: a seed gives the order of the faults; each strikes before any comes a second time. Faults of one storm
never overlap, those of the two do. Knows no request.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from random import Random

from tests.chaos.cluster import Cluster, until
from tests.chaos.faults import Fault

RECOVERY_SECONDS = 60.0
RUDENESS = 0.15
"""Share of the faults that do not wait until the service has recovered from the one before."""


def deck(faults: Mapping[str, Fault], chance: Random) -> Iterator[tuple[str, Fault]]:
    """All of them in some order, and again in another, for ever; nothing where there are none."""
    names = sorted(faults)
    while names:
        chance.shuffle(names)
        yield from ((name, faults[name]) for name in names)


class Storm:
    """Strikes `cluster` with `faults`.

    `is_well`: asked before each strike, so that it hits something that works. `pauses`: seconds between two,
    at least and at most. `say` gets a line for each.
    """

    def __init__(
        self,
        cluster: Cluster,
        faults: Mapping[str, Fault],
        chance: Random,
        *,
        pauses: tuple[float, float],
        is_well: Callable[[], bool] = lambda: True,
        say: Callable[[str], None],
    ) -> None:
        self.num_struck = 0
        self._cluster = cluster
        self._faults = faults
        self._chance = chance
        self._pauses = pauses
        self._is_well = is_well
        self._say = say
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, seconds: float | None) -> None:
        """For so long; None: until each fault has struck once."""
        self._thread = threading.Thread(target=self._run, args=(seconds,), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until it is over. Raises what broke the storm itself."""
        assert self._thread is not None
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self, seconds: float | None) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            for name, fault in deck(self._faults, self._chance):
                if self._is_done(deadline):
                    return
                time.sleep(self._chance.uniform(*self._pauses))
                if self._chance.random() >= RUDENESS or deadline is None:
                    until(self._is_well, RECOVERY_SECONDS, pause=0.2)
                self._say(f"fault: {name}")
                fault(self._cluster, self._chance)
                self.num_struck += 1
                self._say(f"over: {name}")
        except BaseException as error:  # noqa: BLE001 - whatever it is, the main thread raises it
            self._error = error

    def _is_done(self, deadline: float | None) -> bool:
        if deadline is None:
            return self.num_struck >= len(self._faults)
        return time.monotonic() >= deadline
