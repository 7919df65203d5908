"""When a child that died is started again. Pure: it is told how long the child had lived.

Law: three early deaths in a row mean that something is wrong which a restart does not mend. Before the
service was ever ready that ends it, as nobody waits for it yet; afterwards it is tried on, but slowly.
"""

from dataclasses import dataclass

EARLY_SECONDS = 30.0
EARLY_LIMIT = 3
SLOW_SECONDS = 30.0
_FIRST_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class RestartHistory:
    """What is remembered of one child: its early deaths in a row."""

    early_deaths: int = 0

    def after_death(self, lived: float, *, was_ready: bool) -> "RestartHistory":
        """The child died after `lived` seconds; `was_ready`: the service has been ready once in this run."""
        is_early = lived < EARLY_SECONDS or not was_ready
        return RestartHistory(self.early_deaths + 1 if is_early else 0)

    @property
    def is_hopeless(self) -> bool:
        """It does not stay alive."""
        return self.early_deaths >= EARLY_LIMIT

    @property
    def delay(self) -> float:
        """Seconds until the next start."""
        return SLOW_SECONDS if self.is_hopeless else _FIRST_SECONDS * 2**self.early_deaths
